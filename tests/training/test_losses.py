"""Losses on attention outputs, and schedules of learning rates, against what their papers write."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from linearize.training.losses import LOSSES, attention_loss
from linearize.training.schedule import factor

B, T, H, D = 2, 5, 3, 4


def written_out(name: str, s: np.ndarray, t: np.ndarray) -> float:
    """The loss of one token; s and t are (H, D)."""
    if name == "mse":
        return 1000 * sum((s[h, d] - t[h, d]) ** 2 for h in range(H) for d in range(D)) / (H * D)
    if name == "normalized_l2":
        return math.sqrt(sum((s[h, d] - t[h, d]) ** 2 for h in range(H) for d in range(D))) / math.sqrt(H * D)
    angles = [1 - s[h] @ t[h] / (np.linalg.norm(s[h]) * np.linalg.norm(t[h])) for h in range(H)]
    return sum(angles) / H


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_means_of_their_formulas_over_real_tokens(name, masked, dtype):
    torch.manual_seed(0)
    student, teacher = (torch.randn(B, T, H, D).to(dtype) for _ in range(2))
    mask = torch.tensor([[False, False, True, True, True], [True] * 5]) if masked else None
    s, t = student.double().numpy(), teacher.double().numpy()
    real = [(b, i) for b in range(B) for i in range(T) if mask is None or mask[b, i]]
    expected = sum(written_out(name, s[b, i], t[b, i]) for b, i in real) / len(real)
    found = attention_loss(name, student, teacher, mask)
    assert found.dtype == torch.float32
    torch.testing.assert_close(float(found), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_equal_or_empty_outputs_have_finite_gradients(name):
    """|x|/|x|^2 at 0: a norm has no gradient there, and training would begin with NaN."""
    for value in (0.0, 1.0):
        teacher = torch.full((B, T, H, D), value)
        student = teacher.clone().requires_grad_(True)
        loss = attention_loss(name, student, teacher)
        loss.backward()
        assert bool(loss.isfinite())
        assert bool(student.grad.isfinite().all())
    assert float(attention_loss(name, teacher, teacher, torch.zeros(B, T, dtype=torch.bool))) == 0


def rates(schedule: str, steps: int, **changes: float) -> list[float]:
    settings = {"warmup": 0.0, "decay": 0.2, "least": 0.1} | changes
    return [factor(schedule, step, steps, **settings) for step in range(steps)]


def test_a_cosine_goes_from_its_height_to_its_least_value():
    assert rates("cosine", 5) == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 4)) for i in range(5)])
    assert rates("cosine", 4, warmup=0.5) == pytest.approx([0.5, 1, 1, 0.1])
    assert rates("cosine", 40, warmup=0.1)[:4] == pytest.approx([0.25, 0.5, 0.75, 1])


def test_wsd_warms_up_stays_and_decays():
    assert rates("wsd", 10, warmup=0.2) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1, 0.55, 0.1])
    assert rates("wsd", 4, decay=1.0) == pytest.approx([1, 0.7, 0.4, 0.1])
    assert rates("wsd", 4, warmup=0.5, decay=0.5) == pytest.approx([0.5, 1, 0.55, 0.1])
    assert rates("wsd", 6, decay=0.0) == [1.0] * 6


def test_a_constant_rate_is_one_after_its_warmup():
    assert rates("constant", 4, warmup=0.5) == [0.5, 1, 1, 1]
    assert rates("constant", 3) == [1, 1, 1]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_every_step_trains(schedule):
    """One or few steps, all of them warm-up, shares that aren't whole numbers of steps: no rate is 0 or above 1."""
    for steps in (1, 2, 3, 7):
        for warmup in (0.0, 0.05, 0.5, 1.0):
            found = rates(schedule, steps, warmup=warmup, decay=min(0.2, 1 - warmup), least=0.0)
            assert all(0 < rate <= 1 for rate in found[:-1] or found), (steps, warmup, found)
            assert max(found) > 0.4


def test_a_share_is_rounded_up_to_steps_but_not_past_the_rounding_of_floats():
    """0.07 x 100 is a hair more than 7 in floats."""
    assert 0.07 * 100 > 7
    assert rates("constant", 100, warmup=0.07)[6] == 1
    assert rates("constant", 100, warmup=0.07)[5] == pytest.approx(6 / 7)
    assert rates("constant", 100, warmup=0.071)[6:8] == pytest.approx([7 / 8, 1])
    assert rates("wsd", 100, decay=0.07)[92:94] == pytest.approx([1, 1 - 0.9 / 7])
