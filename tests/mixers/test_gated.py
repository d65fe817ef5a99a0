"""RetNet, GLA, Mamba-2 and Mamba against their papers' recurrences, a token at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from linearize.errors import UsageError
from linearize.mixers import build_mixer, state_bytes
from tests.mixers.specs import inputs_of, mixer_of, run, shape_of

GATED = ("retnet", "gla", "mamba2", "mamba")
DECAYING = (*GATED, "gated_deltanet", "kda")
HEADS = pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])


def low_rank(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.project.down"].T @ p[f"{name}.project.up"].T


def output_gate(p: dict[str, Tensor], x: Tensor, like: Tensor) -> Tensor:
    return (2 / (1 + torch.exp(-low_rank(p, "gate", x)))).view_as(like)


def normed(out: Tensor) -> Tensor:
    return out / ((out**2).mean(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float) -> Tensor:
    """(B, T, H, Dv) = scale q_t S_t with S_t = decay_t S_{t-1} + k_t v_t^T, decay (B, T, Hk, 1 or D)."""
    batch, length, heads, dim = q.shape
    out = torch.zeros(batch, length, heads, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h * k.shape[2] // heads
            S = torch.zeros(dim, v.shape[3], dtype=torch.float64)
            for t in range(length):
                S = decay[b, t, kv][:, None] * S + torch.outer(k[b, t, kv], v[b, t, kv])
                out[b, t, h] = scale * (q[b, t, h] @ S)
    return out


def written_out(name: str, p: dict[str, Tensor], x, scale: float) -> Tensor:
    q, k, v, hidden = x
    kv_heads = k.shape[2]
    if name == "retnet":
        decay = torch.exp(-torch.exp(p["decay.rate_log"])).view(kv_heads, 1).expand(*k.shape[:3], 1)
        out = normed(recurrence(q, k, v, decay, scale)) * p["out_scale"]
        return out * output_gate(p, hidden, out)
    if name == "gla":
        logit = low_rank(p, "decay", hidden).view_as(k) + p["decay.bias"]
        out = normed(recurrence(q, k, v, (1 / (1 + torch.exp(-logit))) ** (1 / 16), scale)) * p["out_scale"]
        return out * output_gate(p, hidden, out)
    step = torch.log1p(torch.exp(hidden @ p["decay.project.weight"].T + p["decay.bias"]))[..., None]
    A = -torch.exp(p["decay.A_log"]).view(kv_heads, -1)
    skipped = p["skip"][:, None] * v.repeat_interleave(q.shape[2] // kv_heads, 2)
    out = recurrence(q, step * k, v, torch.exp(step * A), scale) + skipped
    gate = output_gate(p, hidden, out)
    return normed(out * gate) * p["out_scale"] if name == "mamba2" else out * p["out_scale"] * gate


@HEADS
@pytest.mark.parametrize("name", GATED)
def test_a_gated_mixer_is_its_papers_recurrence(name, heads):
    shape = shape_of(*heads, dim=6, v_dim=5)
    mixer, x = mixer_of({"name": name}, shape), inputs_of(shape, 21)
    expected = written_out(name, mixer.state_dict(), x, shape.scaling)
    torch.testing.assert_close(run(mixer, x)[0], expected, atol=1e-11, rtol=1e-9)


def held_after_one_write(mixer, shape, tokens: int) -> Tensor:
    """(Hk, D): what is left of each key dim of a single write after that many tokens, whose keys are 0."""
    x = inputs_of(shape, tokens + 1, batch=1)
    x.k[:, 1:] = 0
    states = [run(mixer, x.part(slice(None), slice(0, n)), return_state=True)[1]["S"][0] for n in (1, tokens + 1)]
    return (states[1] / states[0]).mean(-1)


@pytest.mark.parametrize("name", DECAYING)
def test_a_distance_is_the_half_life(name):
    """Of the mean over the query heads of each group, and at least a token."""
    shape = shape_of(6, 3, dim=4)
    mixer = build_mixer({"name": name}, shape, layer=0, seed=0).double()
    mixer.start(torch.tensor([10.0, 30.0, 40.0, 40.0, 0.0, 0.5]))
    for tokens, half_lives in ((20, [1, 0.5, 20]), (40, [2, 1, 40]), (1, [1 / 20, 1 / 40, 1])):
        left = torch.tensor([0.5**n for n in half_lives], dtype=torch.float64)[:, None].expand(3, 4)
        torch.testing.assert_close(held_after_one_write(mixer, shape, tokens), left, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", DECAYING)
def test_until_then_decays_are_retnets(name):
    """For as many heads as the paper has, and over the same range for others; no head forgets at once."""
    for heads in (8, 1, 3):
        shape = shape_of(heads, heads, dim=4)
        mixer = build_mixer({"name": name}, shape, layer=0, seed=0).double()
        h = {8: [0, 1, 2, 3, 4, 5, 6, 7], 1: [3.5], 3: [0, 3.5, 7]}[heads]
        left = torch.tensor([1 - 2 ** (-5 - one) for one in h], dtype=torch.float64)[:, None].expand(heads, 4)
        torch.testing.assert_close(held_after_one_write(mixer, shape, 1), left, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", DECAYING)
def test_a_decay_is_finite_whatever_the_distance(name):
    shape = shape_of(4, 4, dim=4)
    mixer = build_mixer({"name": name}, shape, layer=0, seed=0)
    mixer.start(torch.tensor([0.0, 1e-9, 1e9, math.inf]))
    assert all(parameter.isfinite().all() for parameter in mixer.parameters())
    left = held_after_one_write(mixer.double(), shape, 1)
    assert (left < 1).all()
    assert (left > 0.49).all()


@pytest.mark.parametrize("name", [*DECAYING, "deltanet"])
def test_gates_start_without_effect(name):
    shape = shape_of()
    x = inputs_of(shape, 30)
    with_gate, without = (
        build_mixer({"name": name, "output_gate": gate}, shape, layer=0, seed=0).double() for gate in (True, False)
    )
    torch.testing.assert_close(run(with_gate, x)[0], run(without, x)[0], atol=1e-12, rtol=0)
    other = x._replace(hidden_states=-3 * x.hidden_states)
    torch.testing.assert_close(run(with_gate, other)[0], run(with_gate, x)[0], atol=0, rtol=0)


def test_what_a_mixer_lacks_is_said():
    shape = shape_of()
    x = inputs_of(shape, 3)
    for name in (*DECAYING, "deltanet"):
        with pytest.raises(ValueError, match="pass hidden_states"):
            build_mixer({"name": name}, shape, layer=0, seed=0).double()(x.q, x.k, x.v)
    retnet = build_mixer({"name": "retnet", "output_gate": False}, shape, layer=0, seed=0).double()
    assert retnet(x.q, x.k, x.v)[0].isfinite().all()
    with pytest.raises(UsageError, match="rank=0"):
        build_mixer({"name": "gla", "rank": 0}, shape, layer=0, seed=0)


@pytest.mark.parametrize("name", [*DECAYING, "deltanet"])
def test_the_state_takes_the_bytes_that_the_documentation_says(name):
    heads, dim, v_dim = 2, 24, 40
    expected = 4 * heads * (dim * v_dim + (dim + 1 if name in GATED else 0))
    for dtype in (torch.bfloat16, torch.float32):
        assert state_bytes({"name": name}, shape_of(8, heads, dim, v_dim), dtype=dtype) == expected
