"""Comparing answers of two models: figures worked out by hand, and refusals."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from linearize_evals.ablation import contribution
from linearize_evals.answers import answers
from linearize_evals.compare import compare
from linearize_evals.document import Document, Span

from linearize.errors import UsageError
from tests.evals.results_example import answer, example_answers

TASK = "linearize_niah_single"
TEXT = "linearize_ar_text"


def asked(right: list[bool], per_document: int = 1, **fields):
    return [
        answer(number // per_document, number % per_document, correct, **fields) for number, correct in enumerate(right)
    ]


def sample(document: Document, *responses):
    return {"doc": document.to_dict(), "doc_hash": "d0", "doc_id": 0, "resps": [[response] for response in responses]}


def test_answers_are_read_from_logged_samples():
    spans = (Span(2, 4, chance=0.5, distance=3), Span(5, 6, label="hit"))
    document = Document((1, 2, 3, 4, 5, 6), spans, length=8, depth=0.5, pairs=2, index=3)
    scores = [{"logprob": -1.5, "greedy": True, "argmax": [3, 4]}, {"logprob": -2.0, "greedy": False, "argmax": [9]}]
    first, second = answers({"t": [sample(document, {"spans": scores}, {"spans": [[3, 5]]})]})
    wanted: dict[str, Any] = {"task": "t", "document": "d0", "index": 3, "length": 8, "depth": 0.5, "pairs": 2}
    assert first == answer(
        span=0, correct=True, **wanted, position=2, distance=3, chance=0.5, logprob=-1.5, tokens=2, generated=False
    )
    assert (second.span, second.label, second.correct, second.generated) == (1, "hit", False, None)


def test_samples_of_other_kinds_are_refused():
    document = Document((1, 2, 3), (Span(1, 2), Span(2, 3)), length=3)
    with pytest.raises(UsageError, match="a document at a time"):
        answers({"t": [sample(document, (-1.0, True), (-2.0, False))]})
    with pytest.raises(UsageError, match="1 scores for the 2 answers"):
        answers({"t": [sample(document, {"spans": [{"logprob": 0.0, "greedy": True}]})]})


def test_the_figures_of_a_task():
    teacher = asked([True] * 19 + [False], 4, chance=0.25)
    student = asked([True] * 8 + [False] * 11 + [True], 4, chance=0.25)
    task = compare(teacher, student)["tasks"][TASK]
    assert (task["documents"], task["answers"], task["gate"]) == (5, 20, "ok")
    assert (task["lost"], task["gained"]) == (11, 1)
    assert task["mcnemar"] == pytest.approx(2 * (1 + 12) / 2**12)
    assert task["difference"]["value"] == pytest.approx(0.45 - 0.95)
    assert task["retention"]["value"] == pytest.approx((0.45 - 0.25) / (0.95 - 0.25))
    assert task["retention"]["low"] < task["retention"]["value"] < task["retention"]["high"]
    assert task["teacher"]["nll"] == pytest.approx((19 * 0.1 + 3) / 20)
    (cell,) = task["cells"]
    assert (cell["length"], cell["depth"], cell["pairs"], cell["answers"]) == (256, None, None, 20)
    assert cell["difference"] == task["difference"]


def test_the_order_of_answers_is_of_no_account():
    teacher, student = example_answers()
    wanted = compare(teacher, student)
    random.Random(1).shuffle(teacher)
    random.Random(2).shuffle(student)
    assert compare(teacher, student) == wanted


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_answers_to_other_questions_are_refused(side):
    sides = {"teacher": asked([True] * 4), "student": asked([True] * 4)}
    sides[side] = sides[side][:-1]
    with pytest.raises(
        UsageError, match=r"weren't asked the same: of task 'linearize_niah_single'.*same seed"
    ) as error:
        compare(**sides)
    assert error.value.exit_code == 2


def test_a_sample_given_twice_is_refused():
    with pytest.raises(UsageError, match="twice"):
        compare(None, asked([True]) * 2)


def test_a_weak_teacher_gets_no_difference_and_no_retention():
    teacher = asked([True] * 10, length=256) + [
        answer(f"long{i}", correct=i < 8, length=512, depth=0.5) for i in range(10)
    ]
    student = [copy.copy(a) for a in teacher]
    task = compare(teacher, student)["tasks"][TASK]
    assert task["gate"] == "ok"
    assert [(cell["length"], cell["gate"]) for cell in task["cells"]] == [(256, "ok"), (512, "teacher too weak")]
    assert task["cells"][1]["difference"] is None
    weak = compare(teacher[10:], student[10:])["tasks"][TASK]
    assert (weak["gate"], weak["difference"], weak["retention"]) == ("teacher too weak", None, None)


def test_retention_is_given_as_it_is_below_0_and_above_1():
    perfect, teacher = asked([True] * 20, chance=0.5), asked([True] * 19 + [False], chance=0.5)
    above = compare(teacher, perfect)["tasks"][TASK]["retention"]
    below = compare(teacher, asked([False] * 20, chance=0.5))["tasks"][TASK]["retention"]
    assert above["value"] == pytest.approx(0.5 / 0.45)
    assert below["value"] == pytest.approx(-0.5 / 0.45)


@pytest.mark.parametrize(("distance", "up_to"), [(1, 1), (2, 2), (3, 4), (63, 64), (64, 64), (65, 128), (128, 128)])
def test_the_window_sizes_are_edges_of_the_distance_bins(distance, up_to):
    rows = asked([True], distance=distance)
    (found,) = compare(rows, rows)["tasks"][TASK]["by_distance"]
    assert (found["over"], found["up_to"]) == (up_to // 2, up_to)


def test_generation_stands_beside_the_scoring_of_the_same_answers():
    teacher = [*asked([True] * 4, generated=True), answer("rest", correct=False)]
    student = [answer(i, correct=i < 3, generated=i < 1) for i in range(4)] + [answer("rest", correct=False)]
    made = compare(teacher, student)["tasks"][TASK]["generation"]
    assert (made["answers"], made["teacher"]["accuracy"]) == (4, 1.0)
    assert (made["student"]["accuracy"], made["student"]["scored"]) == (0.25, 0.75)
    assert made["student"]["difference"]["value"] == -0.5
    assert compare(asked([True]), asked([True]))["tasks"][TASK]["generation"] is None


def text_answers(rise: dict[str, float]):
    fields = {"task": TEXT, "length": 128, "tokens": 2}
    teacher = [
        answer(d, s, True, label=label, logprob=-1 - d, position=60 * s + 1, **fields)
        for d in range(3)
        for s, label in enumerate(("hit", "other", "other"))
    ]
    return teacher, [
        answer(a.index, a.span, True, label=a.label, logprob=a.logprob - rise[a.label], position=a.position, **fields)
        for a in teacher
    ]


def test_the_figures_of_a_text():
    text = compare(*text_answers({"hit": 0.6, "other": 0.1}))["text"][TEXT]
    assert (text["documents"], text["spans"], text["tokens"]) == (3, 9, 18)
    assert text["teacher"]["perplexity"] == pytest.approx(math.exp((1 + 2 + 3) * 3 / 18))
    assert text["ratio"]["value"] == pytest.approx(math.exp(3 * (0.6 + 0.2) / 18))
    assert text["by_label"]["hit"]["ratio"]["value"] == pytest.approx(math.exp(0.3))
    assert text["by_label"]["hit"]["gap_share"]["value"] == pytest.approx(0.75)
    assert text["by_label"]["hit"]["accuracy"]["student"]["accuracy"] == 1
    assert [(b["from"], b["to"], b["spans"]) for b in text["by_position"]] == [(0, 64, 6), (64, 128, 3)]
    assert [b["length"] for b in text["by_length"]] == [128]


def test_windows_of_a_text_that_lie_in_each_other_count_once():
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        teacher, student = [], []
        for index, rise in enumerate(draw.normal(0.1, 0.1, 8)):
            for length in (512, 1024, 2048):
                fields = {"task": TEXT, "label": "position", "index": index, "length": length, "tokens": length}
                teacher.append(answer(f"{index}/{length}", logprob=-1000.0, **fields))
                student.append(answer(f"{index}/{length}", logprob=-1000.0 - rise * length, **fields))
        text = compare(teacher, student)["text"][TEXT]
        held += text["ratio"]["low"] <= math.exp(0.1) <= text["ratio"]["high"]
        assert (text["documents"], text["spans"]) == (8, 24)
        assert [group["documents"] for group in text["by_length"]] == [8, 8, 8]
    assert held >= 90  # 77 as if all were independent


def test_documents_of_recall_are_independent_whatever_their_number():
    rows = [answer(f"{length}", index=0, length=length) for length in (256, 512)]
    assert compare(rows, rows)["tasks"][TASK]["documents"] == 2


def test_the_bins_of_distance_count_what_was_lost_and_gained():
    teacher = [answer(i, correct=i < 6, distance=10 + 10 * (i % 2)) for i in range(8)]
    student = [answer(i, correct=i > 1, distance=10 + 10 * (i % 2)) for i in range(8)]
    bins = compare(teacher, student)["tasks"][TASK]["by_distance"]
    assert [(b["up_to"], b["answers"], b["lost"], b["gained"]) for b in bins] == [(16, 4, 1, 1), (32, 4, 1, 1)]
    (alone,) = compare(None, student[:1])["tasks"][TASK]["by_distance"]
    assert (alone["lost"], alone["gained"]) == (None, None)


def test_the_figures_of_an_ablation():
    full = [answer(i, correct=i < 6, logprob=-1.0, tokens=2) for i in range(8)]
    without = [answer(i, correct=i < 2, logprob=-1.0 - 0.1 * i, tokens=2) for i in range(8)]
    run = contribution([*full, answer("more")], without)[TASK]
    assert (run["n"], run["full"], run["without"]) == (8, 0.75, 0.25)
    assert 0 < run["low"] < 0.5 < run["high"]
    assert (run["nll_full"], run["nll_without"]) == pytest.approx((0.5, 0.5 + 0.1 * 28 / 16))
    assert 0 < run["nll_low"] < 0.1 * 28 / 16 < run["nll_high"]
    broken = contribution(full, [answer(i, correct=False, logprob=-math.inf) for i in range(8)])
    assert json.dumps(broken, allow_nan=False)
    assert broken[TASK]["nll_low"] is None


def test_no_share_of_a_rise_that_there_isn_t():
    text = compare(*text_answers({"hit": -0.6, "other": 0.1}))["text"][TEXT]
    assert text["by_label"]["hit"]["gap_share"] is None


def test_without_a_teacher_there_are_the_student_s_figures():
    _, student = example_answers()
    found = compare(None, student)
    for task in found["tasks"].values():
        assert (task["teacher"], task["gate"], task["difference"], task["lost"]) == (None, "no teacher", None, None)
        assert task["student"]["accuracy"] > 0
    assert found["text"][TEXT]["teacher"] is None
    assert found["text"][TEXT]["ratio"] is None


def test_nothing_is_nothing():
    assert compare([], []) == {"tasks": {}, "text": {}}


def test_infinite_losses_are_null_in_json():
    teacher, student = text_answers({"hit": math.inf, "other": 0.0})
    found = compare(teacher + asked([True] * 3), student + asked([False] * 3, logprob=-math.inf))
    json.dumps(found, allow_nan=False)
    assert found["tasks"][TASK]["student"]["nll"] is None
    assert found["text"][TEXT]["student"]["perplexity"] is None
