"""What each branch of a converted model's mixers contributes: its scores with the branch's output at zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linearize_evals.answers import Answer
from linearize_evals.intervals import bootstrap, difference, finite

BRANCHES = ("linear", "window")


def contribution(full: Sequence[Answer], without: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """By task: accuracy and loss as the model is and without a branch, on the documents that both were asked.

    Args:
        full: answers of the whole model, of these documents and maybe more.
        without: answers without the branch.

    Returns:
        {task: {"n", "full", "without", "low", "high" (of full - without), "nll_full", "nll_without" (nats a token),
        "nll_low", "nll_high" (of nll_without - nll_full)}}: in both intervals a branch that helps is above 0
    """
    whole = {(answer.task, answer.document, answer.span): answer for answer in full}
    return {
        task: _measured([(whole[a.task, a.document, a.span], a) for a in without if a.task == task])
        for task in dict.fromkeys(answer.task for answer in without)
    }


def _measured(pairs: Sequence[tuple[Answer, Answer]]) -> dict[str, Any]:
    names = {name: number for number, name in enumerate(dict.fromkeys(a.cluster for a, _ in pairs))}
    place = np.array([names[a.cluster] for a, _ in pairs])

    def sums(values: Sequence[float]) -> np.ndarray:
        return np.bincount(place, weights=np.array(values, float))

    n = sums([1.0] * len(pairs))
    full, without = sums([a.correct for a, _ in pairs]), sums([b.correct for _, b in pairs])
    lost = sums([a.correct and not b.correct for a, b in pairs])
    found = difference(n, full, without, lost)
    tokens, whole, rest = (sums(v) for v in zip(*((a.tokens, -a.logprob, -b.logprob) for a, b in pairs), strict=True))
    rise = bootstrap(np.stack([tokens, whole, rest], 1), lambda s: (s[..., 2] - s[..., 1]) / s[..., 0])
    return {
        "n": len(pairs),
        "full": float(full.sum() / n.sum()),
        "without": float(without.sum() / n.sum()),
        "low": None if found["high"] is None else -found["high"],
        "high": None if found["low"] is None else -found["low"],
        "nll_full": finite(whole.sum() / tokens.sum()),
        "nll_without": finite(rest.sum() / tokens.sum()),
        "nll_low": rise["low"],
        "nll_high": rise["high"],
    }
