"""Intervals against scipy, published values, and simulations whose truth is known."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from linearize_evals import intervals
from linearize_evals.intervals import (
    accuracy,
    bootstrap,
    design_effect,
    difference,
    mcnemar,
    newcombe,
    retention,
    wilson,
)
from scipy.stats import binomtest


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 30), (30, 30), (17, 30), (203, 210), (1, 2000)])
def test_wilson_is_scipy_s(right, n):
    found = binomtest(right, n).proportion_ci(method="wilson")
    assert wilson(right, n) == pytest.approx((found.low, found.high), abs=1e-12)


def test_wilson_of_no_answers_is_everything():
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 7), (5, 5), (12, 3), (400, 351)])
def test_mcnemar_is_the_exact_binomial_test(lost, gained):
    wanted = binomtest(lost, lost + gained, 0.5).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(wanted, rel=1e-9)


def test_newcombe_gives_the_published_interval():
    # Newcombe 1998 (Statistics in Medicine 17, 2635), table II, first example, method 10.
    low, high = newcombe(36, 12, 2, 0)
    assert (-high, -low) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_newcombe_of_no_change_is_not_0():
    low, high = newcombe(127, 0, 0, 113)
    assert low < -0.005
    assert high > 0.005


def simulate(seed: int, documents: int, answers: int = 16, spread: float = 8.0):
    """(n, teacher, student, lost), each [D]: documents differ in how much the student recalls (truth: .95 and .5)."""
    draw = np.random.default_rng(seed)
    hard_D = draw.beta(0.5 * spread, 0.5 * spread, documents)
    teacher = draw.random((documents, answers)) < 0.95
    student = draw.random((documents, answers)) < hard_D[:, None]
    n_D = np.full(documents, float(answers))
    return n_D, teacher.sum(1).astype(float), student.sum(1).astype(float), (teacher & ~student).sum(1).astype(float)


def covers(found, truth: float) -> bool:
    return found["low"] <= truth <= found["high"]


@pytest.mark.parametrize("documents", [5, 40])
def test_intervals_of_clustered_answers_hold_the_truth(documents):
    hits = {"difference": 0, "retention": 0, "accuracy": 0, "as if independent": 0}
    rounds = 400
    for seed in range(rounds):
        n_D, teacher_D, student_D, lost_D = simulate(seed, documents)
        missed = difference(n_D, teacher_D, student_D, lost_D)
        kept = retention(n_D, teacher_D, student_D, 0.25 * n_D, missed)
        low, high = wilson(student_D.sum(), n_D.sum())
        hits["difference"] += covers(missed, 0.5 - 0.95)
        hits["retention"] += covers(kept, (0.5 - 0.25) / (0.95 - 0.25))
        hits["accuracy"] += covers(accuracy(student_D, n_D), 0.5)
        hits["as if independent"] += low <= 0.5 <= high
    rates = {name: count / rounds for name, count in hits.items()}
    assert rates.pop("as if independent") < 0.87  # so the data do have a design effect
    least = 0.9 if documents < 10 else 0.93  # plain percentiles come to 0.86 and 0.88 on 5 documents
    assert all(least <= rate <= 0.985 for rate in rates.values()), rates
    assert rates["accuracy"] >= 0.93, rates


def test_the_design_effect_of_independent_answers_is_1_and_of_repeated_ones_their_number():
    draw = np.random.default_rng(0)
    once_D = (draw.random(2000) < 0.7).astype(float)
    assert design_effect(8 * once_D, np.full(2000, 8.0)) == pytest.approx(8, rel=0.01)
    independent_D = (draw.random((2000, 8)) < 0.7).sum(1).astype(float)
    assert design_effect(independent_D, np.full(2000, 8.0)) == pytest.approx(1, abs=0.1)


def test_all_right_leaves_the_rule_of_three():
    n_D = np.full(10, 10.0)
    assert accuracy(n_D, n_D) == {"accuracy": 1.0, "low": wilson(100, 100)[0], "high": 1.0}
    same = difference(n_D, n_D, n_D, 0 * n_D)
    assert same["value"] == 0
    assert -0.04 < same["low"] < -0.02
    assert 0.02 < same["high"] < 0.04
    kept = retention(n_D, n_D, n_D, 0.5 * n_D, same)
    assert kept["value"] == 1
    assert kept["low"] == pytest.approx(1 + same["low"] / 0.5)


def test_one_document_has_an_interval_of_its_answers():
    n_D, teacher_D, student_D, lost_D = (np.array([value]) for value in (20.0, 20.0, 10.0, 10.0))
    missed = difference(n_D, teacher_D, student_D, lost_D)
    assert missed["value"] == -0.5
    assert missed["low"] < -0.6
    assert -0.4 < missed["high"] < 0
    assert retention(n_D, teacher_D, student_D, 0 * n_D, missed)["low"] < 0.4


def test_no_document_has_no_value():
    empty = np.zeros(0)
    assert accuracy(empty, empty) == {"accuracy": None, "low": 0.0, "high": 1.0}
    assert difference(empty, empty, empty, empty) == {"value": None, "low": None, "high": None}


def test_a_teacher_at_chance_has_no_retention_and_the_reason_is_given():
    n_D, right_D = np.full(5, 4.0), np.full(5, 2.0)
    kept = retention(n_D, right_D, right_D, 0.5 * n_D, difference(n_D, right_D, right_D, 0 * n_D))
    assert kept == {"value": None, "low": None, "high": None, "reason": "the teacher is no better than chance"}


def test_a_teacher_near_chance_has_no_interval_rather_than_a_wrong_one():
    n_D = np.full(6, 10.0)
    teacher_D = np.array([9.0, 2, 8, 3, 7, 2])
    kept = retention(n_D, teacher_D, teacher_D, 0.5 * n_D, {"value": 0.0, "low": -0.1, "high": 0.1})
    assert kept["value"] == 1
    assert kept["low"] is None
    assert "close to chance" in kept["reason"]


def test_one_infinite_resample_is_enough_for_no_interval():
    sums_DK = np.array([[1.0, number < 5] for number in range(20)])
    with np.errstate(divide="ignore"):
        found = bootstrap(sums_DK, lambda s: s[..., 0] / s[..., 1])
    assert found == {"value": 4.0, "low": None, "high": None}


def test_a_bootstrap_is_reproducible_and_quick():
    sums_DK = np.random.default_rng(0).random((500, 3))
    started = time.perf_counter()
    found = [bootstrap(sums_DK, lambda s: s[..., 0] / s[..., 1]) for _ in range(40)]
    assert time.perf_counter() - started < 2
    assert all(other == found[0] for other in found)


def test_a_bootstrap_of_many_documents_takes_little_memory_and_the_same_draws(monkeypatch):
    sums_DK = np.random.default_rng(0).random((3000, 2))
    tracemalloc.start()
    found = bootstrap(sums_DK, lambda s: s[..., 0] / s[..., 1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20  # all weights at once: 46 MiB, and twice that to make them
    monkeypatch.setattr(intervals, "BLOCK", 1 << 30)
    at_once = bootstrap(sums_DK, lambda s: s[..., 0] / s[..., 1])
    assert found == pytest.approx(at_once, rel=1e-9)
    intervals._all_weights.cache_clear()
