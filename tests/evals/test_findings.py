"""What is concluded from the figures of a run: each conclusion where they show it, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from linearize_evals.compare import compare
from linearize_evals.diagnosis import choice_histogram, findings

from tests.evals.results_example import answer, example_results
from tests.evals.test_compare import TASK, TEXT, asked, text_answers

PHRASES = (
    "Recall is gone",
    "just what left the window",
    "isn't a matter of memory",
    "too few to tell whether only what left",
    "the facts lie outside the window",
    "recall reaches past the window",
    "recalls too little to measure",
    "No teacher was run",
    "Nothing was lost that these tasks can see",
    "Few documents",
    "the linear branch does nothing",
    "lowers the loss, but mends no answer",
    "lowers the loss of the answers",
    "raises the loss of the answers",
    "doesn't need the linear branch",
    "can't be told from so few answers",
    "the linear branch does harm",
    "recall comes from the window",
    "Perplexity hides the loss",
    "Recall, more than the language",
    "Recall and the language both suffered",
    "The language itself suffered",
    "This text is too short",
    "generation isn't",
    "accuracy hasn't moved",
    "answers collapsed: 93 % are choice A, which is right in 25 %",
    "answers collapsed, but so do the teacher's",
)
WINDOW = {"window": 64, "full_attention_layers": 0}
HYBRID = {"window": 64, "full_attention_layers": 2}
NO_WINDOW = {"window": None, "full_attention_layers": None}


def results(teacher=None, student=(), model=WINDOW, **more):
    models = {"teacher": None if teacher is None else {}, "student": model}
    base = {"models": models, "ablations": None, "lm_eval": {}}
    return base | compare(teacher, student) | more


def spread(near: float, far: float, n: int = 100, m: int = 100, **fields: Any):
    """n answers within a window of 64 and m beyond it."""
    places = [(8 + i % 50, i < near * n) for i in range(n)] + [(200 + i % 300, i < far * m) for i in range(m)]
    return [answer(i, correct=right, distance=distance, **fields) for i, (distance, right) in enumerate(places)]


def ablation(full: float, without: float, low: float, high: float, nll: tuple[float, ...] = (0, -0.01, 0.01)):
    """nll: rise in loss without the branch, with its interval."""
    more = {"nll_full": 1.0, "nll_without": 1 + nll[0], "nll_low": nll[1], "nll_high": nll[2]}
    return {TASK: {"n": 500, "full": full, "without": without, "low": low, "high": high, **more}}


def linear(*figures: Any):
    return results(ablations={"linear": ablation(*figures)})


NOTHING = ablation(0.5, 0.5, -0.02, 0.02)
HARM = ablation(0.4, 0.6, -0.25, -0.15)
ALL = ablation(0.5, 0.02, 0.44, 0.52)
PERFECT = spread(1, 1)
LOUD = [answer(i, distance=a.distance, logprob=-0.15) for i, a in enumerate(PERFECT)]
JUST = "just what left the window"
NO_LOSS = {"accuracy hasn't moved", "Nothing was lost that these tasks can see", "recall reaches past the window"}


def both(linear_run: Any, *sides: Any, **more: Any):
    return results(*sides, ablations={"linear": linear_run, "window": ALL}, **more)


def text(share: float, low: float, high: float, hits: float = 0.22):
    hit = {"tokens": 1000 * hits, "gap_share": {"value": share, "low": low, "high": high}}
    found = {"tokens": 1000, "documents": 20, "ratio": None, "by_label": {"hit": hit}}
    return results(text={TEXT: found})


def collapsed(**sides: list[int]):
    histogram = {side: {"choices": choices, "gold": [25, 25, 25, 25]} for side, choices in sides.items()}
    return results(lm_eval={"arc": {"histogram": histogram}})


CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "window": (results(PERFECT, spread(1, 0.05)), {JUST}),
    "few within, but all right": (results(spread(1, 1, 9, 36), spread(1, 0.03, 9, 36)), {JUST}),
    "few within, some wrong": (
        results(spread(1, 1, 5), spread(0.8, 0.6, 5)),
        {"too few to tell whether only what left"},
    ),
    "few within, all wrong": (results(spread(1, 1, 5), spread(0, 0.5, 5)), {"isn't a matter of memory"}),
    "within": (results(PERFECT, spread(0.5, 0.05)), {"isn't a matter of memory"}),
    "beyond, a little, of few": (results(spread(1, 1, 50, 20), spread(1, 0.9, 50, 20)), {"accuracy hasn't moved"}),
    "far only": (results(PERFECT[100:], spread(1, 0)[100:]), {"the facts lie outside the window"}),
    "gone": (results(PERFECT, spread(0.03, 0)), {"Recall is gone"}),
    "gone, of few": (results(spread(1, 1, 9, 36), spread(0, 0, 9, 36)), {"Recall is gone"}),
    "gone, but one answer within": (
        results(spread(1, 1, 1, 60), spread(0, 0, 1, 60)),
        {"too few to tell whether only what left"},
    ),
    "gone without a window": (results(PERFECT, spread(0.03, 0), NO_WINDOW), {"Recall is gone"}),
    "hybrid": (results(PERFECT, spread(1, 0.05), HYBRID), set()),
    "past": (results(PERFECT, spread(1, 0.97)), NO_LOSS),
    "weak teacher": (results(spread(0.5, 0.5), spread(0.5, 0.5)), {"recalls too little to measure"}),
    "weak teacher within": (results(spread(0.5, 1, 20, 200), spread(0.5, 0, 20, 200)), set()),
    "no teacher": (results(None, PERFECT), {"No teacher was run"}),
    "kept": (
        results(PERFECT, PERFECT),
        {"Nothing was lost that these tasks can see", "recall reaches past the window"},
    ),
    "few": (results(PERFECT[:4], PERFECT[:4]), {"Few documents"}),
    "linear: nothing": (linear(0.4, 0.4, -0.02, 0.02), {"the linear branch does nothing"}),
    "linear: loss lower": (
        linear(0.4, 0.4, -0.02, 0.02, (0.3, 0.2, 0.4)),
        {"lowers the loss, but mends no answer"},
    ),
    "linear: loss not for certain": (
        linear(0.4, 0.4, -0.02, 0.02, (0.3, -0.1, 0.7)),
        {"the linear branch does nothing"},
    ),
    "linear: easy task": (linear(0.95, 0.95, -0.02, 0.02), {"doesn't need the linear branch"}),
    "linear: few": (linear(0.4, 0.4, -0.2, 0.2, (0.0, -0.3, 0.3)), {"can't be told from so few answers"}),
    "linear: few, of infinite loss": (
        linear(0.4, 0.4, -0.2, 0.2, (0.0, None, None)),
        {"can't be told from so few answers"},
    ),
    "linear: few, loss lower": (linear(0.4, 0.4, -0.2, 0.2, (0.3, 0.2, 0.4)), {"lowers the loss of the answers"}),
    "linear: few, loss higher": (
        linear(0.0, 0.2, -0.47, 0.0, (-1.0, -1.5, -0.5)),
        {"raises the loss of the answers"},
    ),
    "linear: harm": (results(ablations={"linear": HARM}), {"the linear branch does harm"}),
    "linear: use": (linear(0.6, 0.4, 0.1, 0.3, (0.3, 0.2, 0.4)), set()),
    "window alone": (
        both(NOTHING, PERFECT, spread(1, 0.02)),
        {"recall comes from the window", "the linear branch does nothing", JUST},
    ),
    "window without the linear ablation": (
        results(PERFECT, spread(1, 0.02), ablations={"window": ALL}),
        {JUST},
    ),
    "window beside a linear branch at work": (
        both(HARM, PERFECT, spread(1, 0.02)),
        {"the linear branch does harm", JUST},
    ),
    "window, and recall beyond it": (
        both(NOTHING, PERFECT, spread(1, 0.4)),
        {"the linear branch does nothing", JUST},
    ),
    "window and softmax layers": (
        both(NOTHING, PERFECT, spread(1, 0.02), model=HYBRID),
        {"the linear branch does nothing"},
    ),
    "perplexity": (
        results(
            PERFECT + text_answers({"hit": 0.0, "other": 0.0})[0],
            spread(0.4, 0.1) + text_answers({"hit": 0.02, "other": 0.02})[1],
        ),
        {
            "Perplexity hides the loss",
            "isn't a matter of memory",
            "Recall and the language both suffered",
            "Few documents",
        },
    ),
    "text: recall": (text(0.75, 0.6, 0.9), {"Recall, more than the language"}),
    "text: recall, of a text that is mostly hits": (
        text(0.65, 0.55, 0.75, hits=0.7),
        {"Recall and the language both suffered"},
    ),
    "text: language": (text(0.2, 0.18, 0.21), {"The language itself suffered"}),
    "text: as its tokens": (text(0.23, 0.221, 0.24), {"Recall and the language both suffered"}),
    "text: more than its tokens": (text(0.38, 0.28, 0.57), {"Recall and the language both suffered"}),
    "text: anything": (text(0.5, 0.05, 0.95), {"This text is too short"}),
    "generation": (
        results(asked([True] * 50, generated=True), [answer(i, generated=i < 30) for i in range(50)]),
        {"generation isn't"},
    ),
    "loss": (
        results(PERFECT, LOUD),
        NO_LOSS,
    ),
    "loss, of few": (results(PERFECT[:12], LOUD[:12]), set()),
    "choices": (collapsed(student=[93, 7, 0, 0], teacher=[30, 25, 25, 20]), {PHRASES[-2]}),
    "choices without a teacher": (collapsed(student=[93, 7, 0, 0]), {PHRASES[-2]}),
    "choices of both": (collapsed(student=[93, 7, 0, 0], teacher=[5, 90, 5, 0]), {PHRASES[-1]}),
    "choices of the teacher": (collapsed(student=[30, 25, 25, 20], teacher=[93, 7, 0, 0]), set()),
    "choices of few": (collapsed(student=[18, 1, 0, 0]), set()),
    "nothing": (results([], []), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_figures_show_is_said_and_nothing_else(name):
    figures, wanted = CASES[name]
    said = findings(figures)
    assert {words for words in PHRASES if any(words in sentence for sentence in said)} == wanted, said
    assert len(said) == len(wanted), said


def test_every_phrase_has_a_case():
    assert set(PHRASES) == {words for _, wanted in CASES.values() for words in wanted}


def test_a_student_that_lost_all_is_told_so_in_one_sentence():
    other = {"task": "linearize_passkey", "chance": 0.05}
    two = [PERFECT + spread(1, 1, **other), spread(0, 0) + spread(0.04, 0, **other)]
    (said,) = findings(results(*two))
    assert "within the window of 64 tokens as well as beyond it: " in said
    assert "passkey 2 % (teacher 100 %, chance 5 %; within the window 4 % of 100 answers)" in said
    assert "expected of a conversion without training" in said


def test_the_window_is_named_only_where_nothing_else_holds_the_past():
    said = findings(linear(0.4, 0.4, -0.02, 0.02))
    assert "comes from the window: train" in said[0]
    hybrid = findings(results(model=HYBRID, ablations={"linear": NOTHING}))
    assert "comes from the window or from layers without one: train" in hybrid[0]


def test_advice_on_an_ablation_is_not_to_raise_the_samples():
    said = " ".join(findings(linear(0.4, 0.4, -0.2, 0.2, (0.0, -0.3, 0.3))))
    assert "loss 1.00 and 1.00 nats a token" in said
    assert "samples" not in said


def test_no_finding_without_data():
    assert findings({"tasks": {}, "text": {}}) == []


def test_the_example_says_what_it_was_made_to_show():
    said = " ".join(example_results()["findings"])
    for words in ("teacher is too weak", "left the window", "of the rise in loss", "does nothing", "collapsed"):
        assert words in said


def test_findings_leave_the_results_alone():
    made = example_results()
    before = copy.deepcopy(made)
    findings(made)
    assert made == before


def choice(scores: list[float], target: object):
    return {"resps": [[(score, False)] for score in scores], "target": target}


def test_a_histogram_counts_the_most_likely_choices():
    logged = [choice([-1.0, -2.0, -3.0], 2), choice([-1.0, -5.0, -3.0], "1"), choice([-9.0, -2.0], 1)]
    assert choice_histogram(logged) == {"choices": [2, 1, 0], "gold": [0, 2, 1]}


@pytest.mark.parametrize(
    "logged",
    [
        [],
        [choice([-1.0], 0)],
        [choice([-1.0, -2.0], "the cat")],
        [choice([-1.0, -2.0], 5)],
        [{"resps": [["generated text"]], "target": 0}],
        [{"resps": [[{"spans": []}], [{"spans": []}]], "target": 0}],
    ],
)
def test_other_tasks_have_no_histogram(logged):
    assert choice_histogram(logged) is None
