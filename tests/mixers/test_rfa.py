"""Random feature attention against its paper (Peng et al. 2021), token by token, and against what it estimates."""

from __future__ import annotations

import math

import pytest
import torch

from linearize.errors import UsageError
from linearize.mixers import build_mixer
from tests.mixers.specs import inputs_of, mixer_of, run, shape_of


def phi(mixer, x, tau):
    """Features of one vector, by the paper's equation 4."""
    wx = mixer.omega.double() @ (x / x.norm() * tau**0.5)
    return torch.cat([wx.sin(), wx.cos()]) / math.sqrt(len(mixer.omega))


@pytest.mark.parametrize("gate", [False, True])
def test_every_token_is_the_formula(gate):
    shape = shape_of(heads=4, kv_heads=2)
    mixer = mixer_of({"name": "rfa", "features": 32, "gate": gate, "guard": 0.2}, shape)
    with torch.no_grad():
        mixer.log_tau.copy_(torch.tensor([0.3, 1.1]))
        if gate:
            mixer.gate_bias.copy_(torch.tensor([1.0, 3.0]))
    x, floored = inputs_of(shape, 30, batch=1), 0
    out = run(mixer, x)[0]
    for head in range(4):
        pair = head // 2
        tau = mixer.log_tau[pair].exp()
        numerator, denominator, keys = torch.zeros(24), 0.0, 0.0
        S, z = torch.zeros(32, 24, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
        for t in range(30):
            k, v = phi(mixer, x.k[0, t, pair], tau), x.v[0, t, pair]
            g = 1.0
            if gate:
                g = torch.sigmoid(mixer.gate.weight[pair] @ x.hidden_states[0, t] + mixer.gate_bias[pair])
            write = 1 - g if gate else 1.0
            S, z, keys = g * S + write * torch.outer(k, v), g * z + write * k, g * keys + write
            q = phi(mixer, x.q[0, t, head], tau)
            numerator, denominator = q @ S, q @ z
            floored += bool(denominator < 0.2 * keys)
            expected = numerator / max(denominator, 0.2 * keys)
            torch.testing.assert_close(out[0, t, head], expected, atol=1e-10, rtol=1e-10)
    assert 0 < floored < 100  # both branches of the guard


@pytest.mark.parametrize("orthogonal", [True, False])
def test_the_kernel_is_estimated_without_bias(orthogonal):
    """E[phi(q).phi(k)] = exp(tau q.k) exp(-tau) for q and k of length 1. 400 draws of 64 features."""
    shape, tau = shape_of(heads=1, kv_heads=1), 3.0
    x = inputs_of(shape, 12, batch=1, seed=4)
    found = []
    for seed in range(400):
        mixer = build_mixer({"name": "rfa", "features": 64, "orthogonal": orthogonal}, shape, layer=0, seed=seed)
        log_tau = torch.full((1,), math.log(tau), dtype=torch.float64)
        q, k = mixer.features(x.q, log_tau)[0, :, 0], mixer.features(x.k, log_tau)[0, :, 0]
        found.append(q @ k.T)
    estimates = torch.stack(found)
    unit_q, unit_k = (y[0, :, 0] / y[0, :, 0].norm(dim=-1, keepdim=True) for y in (x.q, x.k))
    exact = (tau * unit_q @ unit_k.T - tau).exp()
    assert ((estimates.mean(0) - exact).abs() < 4.5 * estimates.std(0) / math.sqrt(400)).all()
    assert (estimates < 0).any(), "a single estimate can be negative, which is what the guard is for"


@pytest.mark.parametrize("gate", [False, True])
def test_nothing_but_padding_or_zeros_gives_no_nan(gate):
    shape = shape_of()
    mixer = mixer_of({"name": "rfa", "features": 2, "gate": gate}, shape, torch.float32)
    x = inputs_of(shape, 40, dtype=torch.float32)
    x = type(x)(*(t.requires_grad_() for t in x))
    mask = torch.arange(40).repeat(2, 1) >= torch.tensor([[40], [7]])
    out, _ = run(mixer, x, mask=mask)
    assert (out[0] == 0).all()
    assert out.isfinite().all()
    out.sum().backward()
    assert all(t.grad is None or t.grad.isfinite().all() for t in (*x, *mixer.parameters()))
    assert run(mixer, type(x)(*(0 * t for t in x)))[0].isfinite().all()


def test_the_guard_bounds_what_a_denominator_near_zero_can_do():
    """Two features leave a denominator that is often near 0: the output is then at most 1 / guard times the values."""
    shape = shape_of()
    x = inputs_of(shape, 200)
    values = x.v.abs().amax()
    for guard in (0.01, 0.5):
        mixer = build_mixer({"name": "rfa", "features": 2, "guard": guard}, shape, layer=0, seed=0).double()
        out = run(mixer, x)[0].abs().amax()
        assert out <= values / guard
    assert out < 2 * values


def test_a_gate_starts_near_one_and_at_the_measured_distance():
    shape = shape_of()
    mixer = build_mixer({"name": "rfa", "gate": True}, shape, layer=0, seed=0)
    assert (torch.sigmoid(mixer.gate_bias) > 0.999).all()
    mixer.start(torch.tensor([10.0, 30.0, 7.0, 7.0]))
    torch.testing.assert_close(torch.sigmoid(mixer.gate_bias) ** torch.tensor([20.0, 7.0]), torch.full((2,), 0.5))
    build_mixer({"name": "rfa"}, shape, layer=0, seed=0).start(torch.ones(4))  # nothing to set


def test_any_seed_is_a_draw():
    draws = [build_mixer({"name": "rfa"}, shape_of(), layer=layer, seed=10**30).omega for layer in (0, 1)]
    assert not torch.equal(*draws)


def test_drawn_again_omega_is_another_draw_of_the_same_kind():
    shape = shape_of()
    mixer = build_mixer({"name": "rfa", "features": 64}, shape, layer=0, seed=0)
    first, place = mixer.omega.clone(), mixer.omega.data_ptr()
    mixer.redraw(torch.Generator().manual_seed(1))
    assert (mixer.omega != first).all()
    assert mixer.omega.data_ptr() == place
    rows = torch.nn.functional.normalize(mixer.omega[:16], dim=1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(16), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"features": 7}, {"features": 0}, {"guard": 0.0}, {"guard": 1.5}])
def test_options_that_make_no_sense_are_named(options):
    (name,) = options
    with pytest.raises(UsageError, match=f"'rfa' can't have {name}="):
        build_mixer({"name": "rfa", **options}, shape_of(), layer=0, seed=0)
