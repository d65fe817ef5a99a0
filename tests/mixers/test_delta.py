"""DeltaNet, Gated DeltaNet and KDA against their papers' recurrence, a token at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linearize.mixers import build_mixer
from tests.mixers.specs import inputs_of, mixer_of, run, shape_of


def delta_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """(B, T, H, Dv) = q_t S_t with S_t = (I - beta_t k_t k_t^T) Diag(decay_t) S_{t-1} + beta_t k_t v_t^T."""
    batch, length, heads, dim = q.shape
    out = torch.zeros(batch, length, heads, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h * k.shape[2] // heads
            S = torch.zeros(dim, v.shape[3], dtype=torch.float64)
            for t in range(length):
                key, write = k[b, t, kv], beta[b, t, kv]
                erase = torch.eye(dim, dtype=torch.float64) - write * torch.outer(key, key)
                S = erase @ torch.diag(decay[b, t, kv]) @ S + write * torch.outer(key, v[b, t, kv])
                out[b, t, h] = q[b, t, h] @ S
    return out


def written_out(name: str, p: dict[str, Tensor], x) -> Tensor:
    q, k, v, hidden = x
    q, k = q / (q**2).sum(-1, keepdim=True).sqrt(), k / (k**2).sum(-1, keepdim=True).sqrt()
    beta = 1 / (1 + torch.exp(-(hidden @ p["beta.project.weight"].T + p["beta.bias"])))
    decay = torch.ones_like(k)
    if name == "gated_deltanet":
        step = torch.log1p(torch.exp(hidden @ p["decay.project.weight"].T + p["decay.bias"]))
        decay = torch.exp(-torch.exp(p["decay.A_log"]) * step)[..., None].expand_as(k)
    if name == "kda":
        inner = (hidden @ p["decay.project.down"].T @ p["decay.project.up"].T).view_as(k) + p["decay.bias"]
        decay = torch.exp(-torch.exp(p["decay.A_log"])[:, None] * torch.log1p(torch.exp(inner)))
    out = delta_loop(q, k, v, beta, decay)
    out = out / ((out**2).mean(-1, keepdim=True) + 1e-6).sqrt() * p["out_scale"]
    gate = 2 / (1 + torch.exp(-(hidden @ p["gate.project.down"].T @ p["gate.project.up"].T)))
    return out * gate.view_as(out)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
def test_a_delta_mixer_is_its_papers_recurrence(name, heads):
    shape = shape_of(*heads, dim=6, v_dim=5)
    mixer, x = mixer_of({"name": name, "output_gate": True}, shape), inputs_of(shape, 21)
    expected = written_out(name, mixer.state_dict(), x)
    torch.testing.assert_close(run(mixer, x)[0], expected, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
def test_half_of_what_a_key_holds_is_replaced_at_the_start(name):
    shape = shape_of(1, 1, dim=4)
    mixer, x = build_mixer({"name": name}, shape, layer=0, seed=0).double(), inputs_of(shape, 1, batch=1)
    _, state = run(mixer, x, return_state=True)
    unit = x.k[0, 0, 0] / x.k[0, 0, 0].norm()
    torch.testing.assert_close(unit @ state["S"][0, 0], x.v[0, 0, 0] / 2, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
def test_keys_of_zeros_have_finite_gradients(name):
    shape = shape_of()
    mixer, x = mixer_of({"name": name}, shape), inputs_of(shape, 8)
    x.q[:, 2], x.k[:, 3] = 0, 0
    x = type(x)(*(t.requires_grad_() for t in x))
    run(mixer, x)[0].sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in x)
