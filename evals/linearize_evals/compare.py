"""What a student lost, measured on the very answers that its teacher was asked for.

D documents of a group (of a text: windows, see `Answer.cluster`); a group is a task, a cell of its grid, or a bin.
Sides: "teacher" and "student".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from linearize.errors import UsageError
from linearize_evals.answers import Answer
from linearize_evals.catalogue import FAMILIES
from linearize_evals.intervals import accuracy, bootstrap, difference, finite, mcnemar, retention

GATE = 0.9  # below this accuracy of the teacher, what the student lacks can't be told from what the teacher lacks
OK, TOO_WEAK, NO_TEACHER = "ok", "teacher too weak", "no teacher"
MOST_POSITION_BINS = 32

SAME = "Run both models with the same tasks of the same version, the same seed, limit and tokenizer"


@dataclass(frozen=True)
class Rows:
    """Answers of a group, in the order of `student`; `teacher` is empty where no teacher was run."""

    teacher: Sequence[Answer]
    student: Sequence[Answer]

    def sides(self) -> dict[str, Sequence[Answer]]:
        return {"teacher": self.teacher, "student": self.student}

    def split(self, key: Callable[[Answer], Hashable | None]) -> dict[Any, Rows]:
        """Groups by a key of the answers, in the order of the keys; answers whose key is None are left out."""
        at: dict[Any, list[int]] = defaultdict(list)
        for number, answer in enumerate(self.student):
            if (value := key(answer)) is not None:
                at[value].append(number)
        return {value: self.pick(at[value]) for value in sorted(at)}

    def pick(self, numbers: list[int]) -> Rows:
        return Rows([self.teacher[i] for i in numbers] if self.teacher else [], [self.student[i] for i in numbers])

    @cached_property
    def document(self) -> np.ndarray:
        """The number, from 0, of each answer's document."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(answer.cluster for answer in self.student))}
        return np.array([numbers[answer.cluster] for answer in self.student])

    def sums(self, values: Iterable[float]) -> np.ndarray:
        """[D] sums over each document's answers of values in their order."""
        return np.bincount(self.document, weights=np.fromiter(values, float))


def compare(teacher: Iterable[Answer] | None, student: Iterable[Answer]) -> dict[str, Any]:
    """Every statistic of `results.json` that comes from answers.

    Args:
        teacher: its answers; None where no teacher was run.

    Returns:
        {"tasks": {name: ...}, "text": {name: ...}}, fit for JSON; docs/results.md lists the fields.

    Raises:
        UsageError: teacher and student didn't answer the same spans of the same documents.
    """
    rows = _join(teacher, student)
    found: dict[str, Any] = {"tasks": {}, "text": {}}
    for task, group in rows.split(lambda answer: answer.task).items():
        if FAMILIES[task].kind == "text":
            found["text"][task] = _text(group)
        else:
            found["tasks"][task] = _recall(group)
    return found


def _join(teacher: Iterable[Answer] | None, student: Iterable[Answer]) -> Rows:
    ours = _by_key("student", student)
    order = sorted(ours)
    if teacher is None:
        return Rows([], [ours[key] for key in order])
    theirs = _by_key("teacher", teacher)
    if odd := sorted(ours.keys() ^ theirs.keys()):
        task = odd[0][0]
        only = [sum(key in side for key in odd if key[0] == task) for side in (theirs, ours)]
        raise UsageError(
            f"teacher and student weren't asked the same: of task '{task}', {only[0]} answers are the teacher's alone "
            f"and {only[1]} the student's alone",
            SAME,
        )
    return Rows([theirs[key] for key in order], [ours[key] for key in order])


def _by_key(side: str, answers: Iterable[Answer]) -> dict[tuple[str, str, int], Answer]:
    found: dict[tuple[str, str, int], Answer] = {}
    for answer in answers:
        key = (answer.task, answer.document, answer.span)
        if key in found:
            raise UsageError(
                f"task '{answer.task}' holds document {answer.document[:12]} of the {side} twice",
                "Give each sample once",
            )
        found[key] = answer
    return found


def _right(answers: Iterable[Answer]) -> list[float]:
    return [float(answer.correct) for answer in answers]


def _made(answers: Iterable[Answer]) -> list[float]:
    return [float(bool(answer.generated)) for answer in answers]


def _loss_of(answers: Iterable[Answer]) -> list[float]:
    return [-answer.logprob for answer in answers]


def _only(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Where the first is right and the second isn't."""
    return [a * (1 - b) for a, b in zip(first, second, strict=True)]


def _documents(rows: Rows) -> int:
    return int(rows.document.max()) + 1


def _answers(rows: Rows) -> np.ndarray:
    """[D] answers of each document."""
    return np.bincount(rows.document).astype(float)


def _accuracies(rows: Rows, right: Callable[[Sequence[Answer]], list[float]] = _right) -> dict[str, Any]:
    n_D = _answers(rows)
    return {
        side: accuracy(rows.sums(right(answers)), n_D) if answers else None for side, answers in rows.sides().items()
    }


def _nll(answers: Sequence[Answer]) -> float | None:
    """Nats per token."""
    return finite(-sum(answer.logprob for answer in answers) / sum(answer.tokens for answer in answers))


def _measure(rows: Rows) -> dict[str, Any]:
    """What a task and a cell have in common."""
    sides: dict[str, Any] = _accuracies(rows)
    for side, answers in rows.sides().items():
        if answers:
            sides[side]["nll"] = _nll(answers)
    gate = OK
    if not rows.teacher:
        gate = NO_TEACHER
    elif sides["teacher"]["accuracy"] < GATE:
        gate = TOO_WEAK
    return {
        "documents": _documents(rows),
        "answers": len(rows.student),
        "chance": float(np.mean([answer.chance for answer in rows.student])),
        **sides,
        "difference": _difference(rows, _right(rows.teacher), _right(rows.student)) if gate == OK else None,
        "gate": gate,
    }


def _difference(rows: Rows, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    lost_D = rows.sums(_only(before, after))
    return difference(_answers(rows), rows.sums(before), rows.sums(after), lost_D)


def _recall(rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = _measure(rows) | {"retention": None, "mcnemar": None} | _moved(rows)
    if rows.teacher:
        found["mcnemar"] = mcnemar(found["lost"], found["gained"])
    if found["difference"]:
        before, after = _right(rows.teacher), _right(rows.student)
        chance_D = rows.sums(answer.chance for answer in rows.student)
        found["retention"] = retention(
            _answers(rows), rows.sums(before), rows.sums(after), chance_D, found["difference"]
        )
    cells = rows.split(lambda a: (a.length, -1.0 if a.depth is None else a.depth, -1 if a.pairs is None else a.pairs))
    found["cells"] = [_axes(cell.student[0]) | _measure(cell) for cell in cells.values()]
    found["by_distance"] = _by_distance(rows)
    found["generation"] = _generation(rows)
    return found


def _moved(rows: Rows) -> dict[str, Any]:
    """How many answers only the teacher and only the student has right."""
    if not rows.teacher:
        return {"lost": None, "gained": None}
    before, after = _right(rows.teacher), _right(rows.student)
    return {"lost": int(sum(_only(before, after))), "gained": int(sum(_only(after, before)))}


def _axes(answer: Answer) -> dict[str, Any]:
    return {"length": answer.length, "depth": answer.depth, "pairs": answer.pairs}


def _by_distance(rows: Rows) -> list[dict[str, Any]]:
    """Bins (up_to / 2, up_to] at powers of 2: a window of w tokens sees the whole of a fact at distances up to w."""
    bins = rows.split(lambda a: None if a.distance is None else 1 << max(a.distance - 1, 0).bit_length())
    return [
        {"over": up_to // 2, "up_to": up_to, "documents": _documents(group), "answers": len(group.student)}
        | _accuracies(group)
        | _moved(group)
        for up_to, group in bins.items()
    ]


def _generation(rows: Rows) -> dict[str, Any] | None:
    """Greedy generation beside the scoring of the same answers; "difference" is generated minus scored."""
    asked = [
        number
        for number, answers in enumerate(zip(*(side for side in rows.sides().values() if side), strict=True))
        if all(answer.generated is not None for answer in answers)
    ]
    if not asked:
        return None
    group = rows.pick(asked)
    found: dict[str, Any] = {"documents": _documents(group), "answers": len(group.student)}
    scored, made = _accuracies(group), _accuracies(group, _made)
    for side, answers in group.sides().items():
        found[side] = None
        if answers:
            change = _difference(group, _right(answers), _made(answers))
            found[side] = {**made[side], "scored": scored[side]["accuracy"], "difference": change}
    return found


def _text(rows: Rows) -> dict[str, Any]:
    longest = max(answer.position for answer in rows.student) + 1
    width = 64
    while longest > width * MOST_POSITION_BINS:
        width *= 2
    return {
        **_loss(rows),
        "by_label": {
            label: _loss(group) | {"gap_share": _gap_share(rows, label)} | _label_accuracies(label, group)
            for label, group in rows.split(lambda answer: answer.label).items()
        },
        "by_length": [
            {"length": length} | _loss(group) for length, group in rows.split(lambda answer: answer.length).items()
        ],
        "by_position": [
            {"from": number * width, "to": (number + 1) * width} | _loss(group)
            for number, group in rows.split(lambda answer: answer.position // width).items()
        ],
    }


def _label_accuracies(label: str, rows: Rows) -> dict[str, Any]:
    """Chunks of text have no accuracy worth the name: nobody expects a model to guess all of a chunk."""
    return {} if label == "position" else {"accuracy": _accuracies(rows)}


def _sums_of_loss(rows: Rows) -> np.ndarray:
    """[D, 3]: tokens, the teacher's loss (0 without one) and the student's, in nats."""
    tokens_D, student_D = rows.sums(answer.tokens for answer in rows.student), rows.sums(_loss_of(rows.student))
    teacher_D = rows.sums(_loss_of(rows.teacher)) if rows.teacher else np.zeros_like(student_D)
    return np.stack([tokens_D, teacher_D, student_D], 1)


def _loss(rows: Rows) -> dict[str, Any]:
    sums_D3 = _sums_of_loss(rows)
    found: dict[str, Any] = {"documents": len(sums_D3), "spans": len(rows.student), "tokens": int(sums_D3[:, 0].sum())}
    for column, (side, answers) in enumerate(rows.sides().items(), start=1):
        found[side] = None
        if answers:
            perplexity = bootstrap(sums_D3, lambda s, column=column: np.exp(s[..., column] / s[..., 0]))
            found[side] = {
                "perplexity": perplexity["value"],
                "low": perplexity["low"],
                "high": perplexity["high"],
                "nll": _nll(answers),
            }
    ratio = bootstrap(sums_D3, lambda s: np.exp((s[..., 2] - s[..., 1]) / s[..., 0])) if rows.teacher else None
    return found | {"ratio": ratio}


def _gap_share(rows: Rows, label: str) -> dict[str, Any] | None:
    """Share of the rise in loss that falls on a label; None where it can't be told that the loss rose at all."""
    if not rows.teacher:
        return None
    total_D3 = _sums_of_loss(rows)
    rise = bootstrap(total_D3, lambda s: (s[..., 2] - s[..., 1]) / s[..., 0])
    if rise["low"] is None or rise["low"] <= 0:
        return None
    gap_D = rows.sums(
        (a.logprob - b.logprob) * (b.label == label) for a, b in zip(rows.teacher, rows.student, strict=True)
    )
    return bootstrap(np.stack([gap_D, total_D3[:, 2] - total_D3[:, 1]], 1), lambda s: s[..., 0] / s[..., 1])
