"""Made-up answers of a teacher near its ceiling and of a student with a window, and the results drawn from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from linearize_evals.answers import Answer
from linearize_evals.compare import compare
from linearize_evals.diagnosis import findings

WINDOW = 64
LENGTHS = (256, 512, 1024, 2048)


def answer(document: int | str = 0, span: int = 0, correct: bool = True, **fields: Any) -> Answer:
    """An answer with everything that a test doesn't care about filled in."""
    defaults: dict[str, Any] = {
        "task": "linearize_niah_single",
        "document": str(document),
        "index": document if isinstance(document, int) else 0,
        "span": span,
        "length": 256,
        "depth": None,
        "pairs": None,
        "position": 200,
        "distance": None,
        "chance": 0.0,
        "label": "query",
        "correct": correct,
        "logprob": -0.1 if correct else -3.0,
        "tokens": 1,
    }
    return Answer(**(defaults | fields))


def example_answers(seed: int = 0) -> tuple[list[Answer], list[Answer]]:
    """(teacher's, student's): the student recalls what is within its window, and a little of the rest."""
    draw = random.Random(seed)
    pairs = [*_needles(draw), *_lists(draw), *_text(draw)]
    return [teacher for teacher, _ in pairs], [student for _, student in pairs]


def _asked(draw: random.Random, right: float, kept: float, **fields: Any) -> tuple[Answer, Answer]:
    teacher = draw.random() < right
    student = draw.random() < (kept if teacher else kept / 4)
    logprob = -draw.expovariate(8) if student else -3 - draw.expovariate(0.5)
    return answer(correct=teacher, **fields), answer(correct=student, logprob=logprob, **fields)


def _needles(draw: random.Random) -> Iterator[tuple[Answer, Answer]]:
    for task, ceiling in (("linearize_niah_single", 1.0), ("linearize_niah_multivalue", 0.55)):
        for length in LENGTHS:
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
                distance = max(round((length - 30) * (1 - depth)), 20)
                right = ceiling if length < 2048 or depth != 0.25 else ceiling * 0.75
                kept = 0.97 if distance <= WINDOW else 0.35 * 256 / length
                for index in range(12):
                    fields = {"task": task, "document": f"{length}/{depth}/{index}", "length": length, "depth": depth}
                    teacher, student = _asked(draw, right, kept, distance=distance, position=length - 8, **fields)
                    yield replace(teacher, generated=teacher.correct), replace(student, generated=student.correct)


def _lists(draw: random.Random) -> Iterator[tuple[Answer, Answer]]:
    for pairs, length in ((8, 187), (16, 370), (32, 659), (64, 1152), (128, 2153)):
        for index in range(25):
            for span in range(min(pairs, 16)):
                distance = draw.randrange(8, length // 2)
                kept = 0.96 if distance <= WINDOW else max(0.1, 0.7 - pairs / 160)
                fields = {"task": "linearize_mqar_lines", "document": f"{pairs}/{index}", "span": span, "pairs": pairs}
                more = {"length": length, "distance": distance, "chance": 1 / pairs, "position": length // 2 + span}
                teacher, student = _asked(draw, 0.985, kept, **fields, **more)
                if span < 4:
                    teacher = replace(teacher, generated=teacher.correct)
                    student = replace(student, generated=student.correct and draw.random() < 0.8)
                yield teacher, student


def _text(draw: random.Random) -> Iterator[tuple[Answer, Answer]]:
    for index in range(20):
        style = draw.gauss(0, 0.15)  # documents differ
        for position in range(16, 1024, 4):
            hit = draw.random() < 0.3
            loss = max(0.02, (0.6 if hit else 2.8) + style + draw.gauss(0, 0.4) + 8 / position)
            rise = draw.gauss(0.5 if hit and position > WINDOW else 0.04, 0.05)
            fields = {"task": "linearize_ar_text", "document": str(index), "index": index, "span": position}
            fields |= {"length": 1024, "position": position, "label": "hit" if hit else "other"}
            right = draw.random() < (0.88 if hit else 0.43)
            teacher = answer(correct=right, logprob=-loss, **fields)
            yield teacher, replace(teacher, logprob=-max(0.01, loss + rise), correct=right and draw.random() < 0.8)


def example_results(teacher: bool = True) -> dict[str, Any]:
    """The content of a results.json with everything in it, or that of a run without a teacher."""
    theirs, ours = example_answers()
    tokens = (256, 1024, 4096, 16384)
    results = {
        "schema": 1,
        "created": "2026-01-31T12:00:00+00:00",
        "versions": {"linearize": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "lm_eval": "0.4.13"},
        "settings": {"seed": 0, "lengths": list(LENGTHS), "batch_size": "auto", "generate": True, "text": None},
        "models": {
            "teacher": {
                "name": "HuggingFaceTB/SmolLM2-135M-Instruct",
                "fingerprint": "4f1c0e5a9b7d2c38",
                "dtype": "bfloat16",
                "cache": [{"tokens": n, "bytes": 23040 * n} for n in tokens],
            },
            "student": {
                "name": "smollm2-window64-favor",
                "fingerprint": "a0b1c2d3e4f50617",
                "dtype": "bfloat16",
                "cache": [{"tokens": n, "bytes": 7_900_000} for n in tokens],
                "window": WINDOW,
                "full_attention_layers": 0,
                "mixers": "30 x window 64 + favor",
            },
        },
        **compare(theirs if teacher else None, ours),
        "ablations": {
            "linear": {"linearize_mqar_lines": _ablation(0.55, 0.54, -0.01, 0.03)},
            "window": {"linearize_mqar_lines": _ablation(0.55, 0.02, 0.49, 0.57)},
        },
        "lm_eval": {
            "arc_easy": {
                "teacher": {"acc": 0.61, "acc_norm": 0.58},
                "student": {"acc": 0.27, "acc_norm": 0.28},
                "stderr": {"teacher": {"acc": 0.01}, "student": {"acc": 0.009}},
                "histogram": {
                    "teacher": {"choices": [60, 48, 47, 45], "gold": [51, 49, 50, 50]},
                    "student": {"choices": [186, 6, 5, 3], "gold": [51, 49, 50, 50]},
                },
            }
        },
        "seconds": {"teacher": 182.4, "student": 201.7, "total": 391.2},
    }
    if not teacher:
        results["models"]["teacher"] = None
    results["findings"] = findings(results)
    return results


def _ablation(full: float, without: float, low: float, high: float) -> dict[str, float]:
    return {
        "n": 1800,
        "full": full,
        "without": without,
        "low": low,
        "high": high,
        "nll_full": 1.42,
        "nll_without": 1.43,
        "nll_low": -0.01,
        "nll_high": 0.03,
    }
