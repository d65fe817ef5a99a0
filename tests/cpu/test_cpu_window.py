"""The compiled CPU code of window_attention against the loop over tokens in float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linearize_kernels import WindowState, cpu_ops, reference, window_attention
from linearize_kernels.state import NOTHING_SEEN
from torch import Tensor

from tests.cpu.cpu_cases import assert_grads, guarded, needs_library, on_threads
from tests.numerics.kernel_cases import random_like, random_mask, window_inputs
from tests.numerics.tolerances import assert_close

pytestmark = needs_library
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
STATE = ("S", "z", "k", "v", "sink_k", "sink_v")


def sinks_of(k: Tensor, v: Tensor, valid: Tensor, state: WindowState | None, sinks: int) -> tuple[Tensor, ...]:
    """The sinks at the call's end and their positions from the call's first token on; 2**62 where there is none."""
    B, _, Hk, D = k.shape
    sink_k, sink_v = k.new_zeros(B, sinks, Hk, D), v.new_zeros(B, sinks, Hk, v.shape[3])
    position = torch.full((B, sinks), 2**62)
    for b in range(B):
        found = 0
        for i in range(sinks):
            if state is not None and state.sink_age[b, i] > 0:
                sink_k[b, i], sink_v[b, i] = state.sink_k[b, i], state.sink_v[b, i]
                position[b, i] = -state.sink_age[b, i]
                found += 1
        for t in torch.nonzero(valid[b])[: sinks - found, 0].tolist():
            sink_k[b, found], sink_v[b, found], position[b, found] = k[b, t], v[b, t], t
            found += 1
    return sink_k, sink_v, position


def prepared(x: dict[str, Any], mask: Tensor | None, state: WindowState | None, window: int, sinks: int) -> dict:
    """The arguments of the backend's forward: what the public op makes of its own, differentiably."""
    q, k, v, phi_q, phi_k = (x[n] for n in ("q", "k", "v", "phi_q", "phi_k"))
    log_q, log_k = x.get("log_q"), x.get("log_k")
    B, T, Hk, _ = k.shape
    valid = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
    q, k, v, phi_q = (t * valid[..., None, None] for t in (q, k, v, phi_q))
    before = 0 if state is None else window
    all_valid, keys, values = valid, k, v
    if state is not None:
        keys, values = torch.cat([state.k, k], 1), torch.cat([state.v, v], 1)
        all_valid = torch.cat([state.valid, valid], 1)
    sink_k, sink_v, position = sinks_of(k, v, valid, state, sinks)
    index = torch.arange(keys.shape[1]) - before
    counts = all_valid & ~(position[:, None] == index[None, :, None]).any(-1)
    counts = counts[:, : phi_k.shape[1]]
    phi_k = phi_k.masked_fill(~counts[..., None, None], 0)
    if log_k is not None:
        log_k = log_k.float().masked_fill(~counts[..., None], NOTHING_SEEN)
        log_q = log_q.masked_fill(~valid[..., None], 0)
    if state is None:
        S = torch.zeros(B, Hk, phi_q.shape[3], v.shape[3])
        z, m = torch.zeros(B, Hk, phi_q.shape[3]), torch.zeros(B, Hk) if log_k is None else torch.full((B, Hk), -1e30)
    else:
        S, z, m = state.S, state.z, state.m
    names = ("q", "keys", "values", "valid", "phi_q", "phi_k", "log_q", "log_k", "sink_k", "sink_v", "sink_position")
    given = (q, keys, values, all_valid, phi_q, phi_k, log_q, log_k, sink_k, sink_v, position)
    return dict(zip(names, given, strict=True)) | {"gamma": x["gamma"], "S": S, "z": z, "m": m}


class Op(torch.autograd.Function):
    """The backend's forward and backward, as the public op joins them."""

    @staticmethod
    def forward(ctx: Any, options: tuple, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        ctx.inputs = [guarded(t) for t in tensors]
        ctx.options = options
        out, ctx.den, ctx.top, S, z, _ = cpu_ops.window.forward(*ctx.inputs, *options)
        ctx.out = out
        return out, S, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = [guarded(g) for g in grads]
        dq, dk, dv, dphi_q, dphi_k, dlog_q, dlog_k, dsink_k, dsink_v, dgamma, dS, dz = cpu_ops.window.backward(
            *given, *ctx.inputs, ctx.out, ctx.den, ctx.top, *ctx.options
        )
        exact = (dq, dk, dv, None, dphi_q, dphi_k, dlog_q, dlog_k, dsink_k, dsink_v, None)
        return None, *exact, dgamma, dS, dz, None


def compiled(
    x: dict, mask: Tensor | None, state: WindowState | None, window: int, sinks: int, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    given = prepared(x, mask, state, window, sinks)
    given["gamma"] = given["gamma"].float()
    out, S, z = Op.apply((window, scale, softcap, 1e-6), *given.values())
    return (out if mask is None else out * mask[..., None, None]), S, z


def a_state(x: dict[str, Any], window: int, sinks: int, dtype: torch.dtype) -> WindowState:
    """The state after 2 window tokens, the first of them padding."""
    T = 2 * window
    B, _, Hk, D = x["k"].shape
    sizes = {"Hk": Hk, "D": D, "Dv": x["v"].shape[3], "F": x["phi_q"].shape[3]}
    before = window_inputs(B, T, x["q"].shape[2], logs=None if "log_k" not in x else 1.0, seed=9, **sizes)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, : window // 2 + 1] = False
    _, state = reference.window_attention(**before, window=window, sinks=sinks, mask=mask, return_state=True)
    sums, rest = (t.float() for t in state[:3]), (t.to(dtype) if t.is_floating_point() else t for t in state[3:])
    return WindowState(*sums, *rest)


def check(
    x: dict[str, Any], window: int, sinks: int = 0, *, mask: Tensor | None = None, continued: bool = False,
    scale: float = 0.4, softcap: float | None = None, name: str = "float32",
) -> None:  # fmt: skip
    dtype = x["v"].dtype
    state = a_state(x, window, sinks, dtype) if continued else None
    # A gamma near 0 makes the gradients of the first tokens differences of huge terms.
    used = x | {"gamma": x["gamma"] + 0.1}
    folded = max(x["q"].shape[1] - (0 if continued else window), 0)
    for n in ("phi_k", "log_k"):
        if n in used:
            used[n] = used[n][:, : max(folded, 1)]
    grads = []
    results = []
    for exact in (True, False):
        leaves = {n: (t.double() if exact else t).detach().clone().requires_grad_() for n, t in used.items()}
        start = state
        if state is not None:
            held = {n: getattr(state, n).detach().clone() for n in STATE}
            held = {n: (t.double() if exact else t).requires_grad_() for n, t in held.items()}
            start = state._replace(**held, m=state.m.double() if exact else state.m)
            leaves |= {f"state.{n}": t for n, t in held.items()}
        if exact:
            options = {"window": window, "sinks": sinks, "scale": scale, "softcap": softcap, "mask": mask}
            inputs = {n: leaves[n] for n in used}
            out, end = reference.window_attention(**inputs, initial_state=start, return_state=True, **options)
            shift = (end.m - end.m.detach()).exp()  # m is a scale, not differentiated
            outputs = (out, end.S * shift[..., None, None], end.z * shift[..., None])
        else:
            inputs = {n: leaves[n] for n in used}
            outputs = compiled(inputs, mask, start, window, sinks, scale, softcap or 0.0)
        weights = random_like([out, end.S, end.z], seed=3)
        weights[0] = weights[0].to(dtype)
        loss = sum((a.double() * w.double()).sum() for a, w in zip(outputs, weights, strict=True))
        found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        grads.append(dict(zip(leaves, found, strict=True)))
        results.append(outputs)
    for got, want, what in zip(results[1], results[0], ("out", "S", "z"), strict=True):
        assert_close(got, want, dtype if what == "out" and dtype != F32 else name, what)
    assert_grads(grads[1], grads[0], dtype)


LOGS = [None, 1.0]


@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 129])
@pytest.mark.parametrize("logs", LOGS)
@pytest.mark.parametrize("continued", [False, True])
def test_equals_the_loop_for_any_length(T: int, logs: float | None, continued: bool) -> None:
    check(window_inputs(2, T, 4, 2, 8, 12, 6, dtype=F32, logs=logs), 20, 3, continued=continued)


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 100])
@pytest.mark.parametrize("logs", LOGS)
def test_equals_the_loop_for_any_window(window: int, logs: float | None) -> None:
    check(window_inputs(1, 140, 2, 1, 8, 8, 6, dtype=F32, logs=logs), window, 2, continued=window % 2 == 0)


@pytest.mark.parametrize(("D", "Dv", "F"), [(1, 8, 8), (8, 2, 100), (48, 64, 2), (100, 100, 64)])
def test_equals_the_loop_for_any_dim(D: int, Dv: int, F: int) -> None:
    check(window_inputs(1, 70, 2, 1, D, Dv, F, dtype=F32), 24, 1, scale=D**-0.5)


@pytest.mark.parametrize(("H", "Hk"), [(8, 1), (8, 2), (9, 3), (20, 1)])
@pytest.mark.parametrize("logs", LOGS)
def test_query_heads_share_key_heads(H: int, Hk: int, logs: float | None) -> None:
    check(window_inputs(1, 50, H, Hk, 8, 8, 4, dtype=F32, logs=logs), 16, 2)


@pytest.mark.parametrize("sinks", [0, 1, 20, 70])
@pytest.mark.parametrize("continued", [False, True])
def test_sinks(sinks: int, continued: bool) -> None:
    check(window_inputs(2, 150, 2, 1, 8, 8, 4, dtype=F32), 30, sinks, continued=continued)


@pytest.mark.parametrize("logs", LOGS)
def test_softcap(logs: float | None) -> None:
    x = window_inputs(1, 90, 4, 2, 8, 8, 4, dtype=F32, logs=logs)
    check(x, 32, 2, softcap=1.5)
    check(x, 32, 2, softcap=0.3, scale=3.0, name="float32 grad")


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("logs", LOGS)
def test_padding(continued: bool, logs: float | None) -> None:
    mask = random_mask(2, 100, 0.6)
    mask[0, :40] = False
    check(window_inputs(2, 100, 4, 2, 8, 8, 4, dtype=F32, logs=logs), 16, 3, mask=mask, continued=continued)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("logs", LOGS)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, logs: float | None) -> None:
    check(window_inputs(1, 130, 4, 2, 16, 24, 8, dtype=dtype, logs=logs), 40, 2)


@pytest.mark.parametrize("logs", LOGS)
@pytest.mark.parametrize("eps", [1e-6, 2.0])  # 2 is a floor that holds for many tokens
def test_the_features_alone_get_the_gradients_of_a_full_backward(logs: float | None, eps: float) -> None:
    x = window_inputs(2, 150, 4, 2, 8, 24, 12, dtype=F32, logs=logs)
    x["gamma"] += 0.1
    weight = random_like([x["q"].new_zeros(2, 150, 4, 24)])[0]
    grads = []
    for trained in (set(x), set(x) - {"q", "k", "v"}):
        leaves = {n: t.clone().requires_grad_(n in trained) for n, t in x.items()}
        out = window_attention(**leaves, window=40, sinks=2, eps=eps, mask=random_mask(2, 150, 0.8), backend="cpu")
        wanted = {n: t for n, t in leaves.items() if t.requires_grad}
        grads.append(dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), weight), strict=True)))
    full = {n: t.double() for n, t in grads[0].items() if n in grads[1]}
    assert_grads(grads[1], full, F32)


def test_equal_keys_share_the_gradient_of_the_largest_score() -> None:
    x = window_inputs(1, 60, 2, 1, 8, 8, 4, dtype=F32)
    x["k"][:, 10:30] = x["k"][:, 10:11]
    x["k"][:, 40:] = 0
    check(x, 24, 2)
    x["k"][:] = x["k"][:, :1]
    check(x, 24, 2)


def test_log_scales_far_apart() -> None:
    x = window_inputs(1, 140, 2, 1, 6, 6, 4, dtype=F32, logs=1.0)
    x["log_k"][:, 20:60] += 300
    x["log_q"] -= 300
    check(x, 16, name="float32 logs")


@pytest.mark.parametrize("logs", LOGS)
def test_sequences_cut_for_threads(logs: float | None) -> None:
    x = window_inputs(1, 1300, 3, 3, 4, 4, 4, dtype=F32, logs=logs)
    with on_threads(2):
        check(x, 70, 2)
        given = prepared(x, None, None, 70, 2)
        first, again = (cpu_ops.window.forward(*given.values(), 70, 0.4, 0.0, 1e-6)[0] for _ in range(2))
    assert torch.equal(first, again)
