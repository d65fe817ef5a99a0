"""Intervals and tests for accuracies that were measured on documents with several answers each.

D documents, K statistics. All intervals are 95 %. Answers of one document share its noise, so whatever is resampled
is a document. The Wilson interval is widened by the design effect for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.stats import binom, norm, t

ALPHA = 0.05
FEWEST = 5  # documents; how they spread can't be told from fewer
RESAMPLES = 2000
SEED = 0
BLOCK = 1 << 20  # numbers drawn at a time: 8 MiB

Interval = dict[str, Any]  # {"value", "low", "high"}, each a float, or None where it isn't finite


def finite(value: float | None) -> float | None:
    """`value` as JSON can hold it: None for NaN and the infinities."""
    return float(value) if value is not None and np.isfinite(value) else None


def interval(value: float, low: float | None, high: float | None) -> Interval:
    return {"value": finite(value), "low": finite(low), "high": finite(high)}


def wilson(right: float, n: float) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927). No answers: all of [0, 1]. n may be an effective, broken number."""
    if n <= 0:
        return 0.0, 1.0
    z = norm.ppf(1 - ALPHA / 2)
    p = right / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if right <= 0 else max(0.0, centre - half)
    high = 1.0 if right >= n else min(1.0, centre + half)
    return float(low), float(high)


def design_effect(right_D: np.ndarray, n_D: np.ndarray) -> float:
    """How many times larger the variance of the accuracy is than that of independent answers; at least 1.

    The variance of a ratio estimator over documents (Kish 1965), against p (1 - p) / n. 1 where it can't be known:
    one document, or all answers alike. At most the mean number of answers in a document. Few documents know it
    badly, so an effect above 1 is raised by Student's t, as in Korn & Graubard 1998.
    """
    documents, n = len(n_D), n_D.sum()
    p = right_D.sum() / n if n else 0.0
    if documents < 2 or not 0 < p < 1:
        return 1.0
    residual_D = right_D - p * n_D
    variance = documents / (documents - 1) * (residual_D**2).sum() / n**2
    effect = variance / (p * (1 - p) / n)
    if effect > 1:
        effect *= (t.ppf(ALPHA / 2, documents - 1) / norm.ppf(ALPHA / 2)) ** 2
    return float(np.clip(effect, 1.0, max(1.0, n / documents)))


def accuracy(right_D: np.ndarray, n_D: np.ndarray) -> dict[str, float | None]:
    """{"accuracy", "low", "high"}: the Wilson interval with n / design effect answers."""
    n = n_D.sum()
    effect = design_effect(right_D, n_D)
    low, high = wilson(right_D.sum() / effect, n / effect)
    return {"accuracy": finite(right_D.sum() / n) if n else None, "low": low, "high": high}


def _weights(documents: int) -> Iterator[np.ndarray]:
    """[resamples, D] a block at a time: how often each document is drawn; the same draws for every statistic."""
    if RESAMPLES * documents <= BLOCK:
        yield _all_weights(documents)
        return
    draw = np.random.default_rng(SEED)
    size = max(1, BLOCK // documents)
    for start in range(0, RESAMPLES, size):
        yield _drawn(draw, min(size, RESAMPLES - start), documents)


@lru_cache(maxsize=8)
def _all_weights(documents: int) -> np.ndarray:
    return _drawn(np.random.default_rng(SEED), RESAMPLES, documents)


def _drawn(draw: np.random.Generator, resamples: int, documents: int) -> np.ndarray:
    drawn = draw.integers(0, documents, (resamples, documents))
    drawn += np.arange(resamples)[:, None] * documents
    return np.bincount(drawn.ravel(), minlength=resamples * documents).reshape(resamples, documents).astype(float)


def bootstrap(sums_DK: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Interval:
    """Percentile bootstrap by document of a statistic of sums.

    The percentiles are the expanded ones of Hesterberg 2015 (arXiv:1411.5279, section 5.3), which use Student's t and
    D / (D - 1): plain percentiles are too narrow for few documents.

    Args:
        sums_DK: sufficient statistics of each document.
        statistic: from sums [..., K] to [...].

    Returns:
        The interval; low and high are None for one document, and where the statistic of any resample isn't finite.
    """
    documents = len(sums_DK)
    if not documents:
        return interval(np.nan, None, None)
    with np.errstate(all="ignore"):
        value = float(statistic(sums_DK.sum(0)))
        if documents == 1:
            return interval(value, None, None)
        values = np.concatenate([statistic(weights_RD @ sums_DK) for weights_RD in _weights(documents)])
    if not np.isfinite(values).all():
        return interval(value, None, None)
    tail = norm.cdf(t.ppf(ALPHA / 2, documents - 1) * np.sqrt(documents / (documents - 1)))
    low, high = np.quantile(values, [tail, 1 - tail])
    return interval(value, low, high)


def newcombe(both: float, lost: float, gained: float, neither: float) -> tuple[float, float]:
    """Interval of the difference of paired proportions, second minus first (Newcombe 1998, method 10).

    Args:
        both: right twice. lost: right the first time only. gained: right the second time only. neither: wrong twice.
    """
    n = both + lost + gained + neither
    if n <= 0:
        return -1.0, 1.0
    first, second = (both + lost) / n, (both + gained) / n
    low1, high1 = wilson(both + lost, n)
    low2, high2 = wilson(both + gained, n)
    spread = np.sqrt((both + lost) * (gained + neither) * (both + gained) * (lost + neither))
    agreement = both * neither - lost * gained
    if agreement > 0:  # the method's continuity correction, of a positive correlation only
        agreement = max(agreement - n / 2, 0.0)
    phi = agreement / spread if spread else 0.0

    def half(a: float, b: float) -> float:
        return float(np.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b)))

    difference = second - first
    return difference - half(second - low2, high1 - first), difference + half(high2 - second, first - low1)


def difference(n_D: np.ndarray, teacher_D: np.ndarray, student_D: np.ndarray, lost_D: np.ndarray) -> Interval:
    """Student's accuracy minus the teacher's, with its interval.

    Where the documents don't differ (none lost anything), or are fewer than `FEWEST`, resampling them says nothing:
    Newcombe's interval of independent answers stands in.

    Args:
        n_D: answers of each document; teacher_D, student_D: right ones; lost_D: those that only the teacher has right.
    """
    found = bootstrap(np.stack([n_D, teacher_D, student_D], 1), lambda s: (s[..., 2] - s[..., 1]) / s[..., 0])
    if found["value"] is None or not _no_spread(found, n_D):
        return found
    teacher, student, lost = teacher_D.sum(), student_D.sum(), lost_D.sum()
    gained = student - (teacher - lost)
    low, high = newcombe(teacher - lost, lost, gained, n_D.sum() - teacher - gained)
    return interval(found["value"], low, high)


def retention(
    n_D: np.ndarray, teacher_D: np.ndarray, student_D: np.ndarray, chance_D: np.ndarray, missed: Interval
) -> dict[str, Any]:
    """(student - chance) / (teacher - chance), with its interval; under 0 and above 1 it is given as it is.

    Args:
        n_D, teacher_D, student_D: as in `difference`; chance_D: sum of the chances of a document's answers.
        missed: what `difference` gave: it stands in where the documents don't differ.

    Returns:
        An interval with "reason": why value or interval is None, else None.
    """
    above = float((teacher_D.sum() - chance_D.sum()) / n_D.sum()) if n_D.sum() else 0.0
    if above <= 1e-12:
        return interval(np.nan, None, None) | {"reason": "the teacher is no better than chance"}
    sums_DK = np.stack([teacher_D, student_D, chance_D], 1)

    def kept(s: np.ndarray) -> np.ndarray:
        above_chance = s[..., 0] - s[..., 2]
        return np.where(above_chance > 1e-9, (s[..., 1] - s[..., 2]) / above_chance, np.nan)

    found = bootstrap(sums_DK, kept)
    if len(n_D) >= FEWEST and found["low"] is None:
        return found | {"reason": "the teacher is too close to chance for an interval"}
    if _no_spread(found, n_D):
        found = interval(found["value"], 1 + missed["low"] / above, 1 + missed["high"] / above)
    return found | {"reason": None}


def _no_spread(found: Interval, n_D: np.ndarray) -> bool:
    """Whether the documents don't differ, or are too few to tell how they do."""
    return len(n_D) < FEWEST or found["low"] is None or found["high"] - found["low"] < 1e-12


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p-value that losing and gaining an answer are equally likely (McNemar 1947, binomial form)."""
    return float(min(1.0, 2 * binom.cdf(min(lost, gained), lost + gained, 0.5)))
