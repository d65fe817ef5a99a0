"""The compiled CPU code of one token: step after step equals the loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linearize_kernels import LinearState, WindowState, cpu_ops, reference
from linearize_kernels.state import empty_linear_state, empty_window_state

from tests.cpu.cpu_cases import guarded, needs_library, on_threads
from tests.numerics.kernel_cases import linear_inputs, random_mask, window_inputs
from tests.numerics.tolerances import assert_close

pytestmark = needs_library
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("kind", ["none", "logs", "decay", "decays"])
@pytest.mark.parametrize(("dtype", "F", "Dv"), [(F32, 12, 20), (F32, 1, 100), (BF16, 64, 8)])
@pytest.mark.parametrize("normalize", [True, False])
def test_linear_steps(kind: str, dtype: torch.dtype, F: int, Dv: int, normalize: bool) -> None:
    T = 9
    x: dict[str, Any] = linear_inputs(2, T, 6, 2, F, Dv, dtype=dtype)
    g = torch.Generator().manual_seed(1)
    x["log_k"] = torch.randn(2, T, 2, generator=g) if kind == "logs" else None
    shape = {"decay": (2, T, 2), "decays": (2, T, 2, F)}.get(kind)
    x["log_decay"] = None if shape is None else -3 * torch.rand(shape, generator=g)
    leaves = {n: None if t is None else t.double() for n, t in x.items()}
    want, end = reference.linear_attention(**leaves, normalize=normalize, scale=0.7, return_state=True)
    sizes = {"logs": kind == "logs", "dtype": F32, "device": x["q"].device}
    state = empty_linear_state(2, 2, F, Dv, **sizes)
    for t in range(T):
        token = {n: None if y is None else guarded(y[:, t]) for n, y in x.items()}
        out = cpu_ops.linear.step(**token, **state._asdict(), scale=0.7, normalize=normalize, eps=1e-6)
        assert_close(out, want[:, t], dtype)
    for field in LinearState._fields:
        assert_close(getattr(state, field), getattr(end, field), "float32", field)


@pytest.mark.parametrize("kind", ["none", "decay", "decays"])
@pytest.mark.parametrize(("dtype", "F", "Dv"), [(F32, 12, 20), (F32, 1, 100), (BF16, 64, 8)])
def test_delta_steps(kind: str, dtype: torch.dtype, F: int, Dv: int) -> None:
    T = 9
    x: dict[str, Any] = linear_inputs(2, T, 6, 2, F, Dv, dtype=dtype)
    g = torch.Generator().manual_seed(1)
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(dtype)
    x["beta"] = torch.rand(2, T, 2, generator=g)
    shape = {"decay": (2, T, 2), "decays": (2, T, 2, F)}.get(kind)
    x["log_decay"] = None if shape is None else -3 * torch.rand(shape, generator=g)
    leaves = {n: None if t is None else t.double() for n, t in x.items()}
    want, end = reference.delta_rule(**leaves, scale=0.7, return_state=True)
    S = torch.zeros(2, 2, F, Dv)
    for t in range(T):
        token = {n: None if y is None else guarded(y[:, t]) for n, y in x.items()}
        out = cpu_ops.delta.step(**token, S=S, scale=0.7)
        assert_close(out, want[:, t], dtype)
    assert_close(S, end.S, "float32")


@pytest.mark.parametrize("logs", [None, 1.0])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 2), (5, 3), (16, 20)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_window_steps(logs: float | None, window: int, sinks: int, dtype: torch.dtype) -> None:
    T = 30
    x = window_inputs(2, T, 4, 2, 12, 20, 6, dtype=dtype, logs=logs)
    mask = random_mask(2, T, 0.7)
    softcap = 2.0 if window == 5 else None
    options = {"window": window, "sinks": sinks, "scale": 0.3, "softcap": softcap, "mask": mask}
    leaves = {n: t.double() for n, t in x.items()}
    want, end = reference.window_attention(**leaves, return_state=True, **options)
    sizes = {"rows": 2, "features": 6, "window": window, "sinks": sinks, "logs": logs is not None, "dtype": F32}
    state = empty_window_state(x["k"], x["v"], **sizes)
    with on_threads(2):
        for t in range(T):
            valid, old = mask[:, t], max(t - window, 0)
            q, k, v, phi_q = (guarded(x[n][:, t] * valid[:, None, None]) for n in ("q", "k", "v", "phi_q"))
            log_q, log_k = (None, None) if logs is None else (x["log_q"][:, t], x["log_k"][:, old])
            new = (q, k, v, valid, phi_q, guarded(x["phi_k"][:, old]), log_q, log_k, x["gamma"].float())
            S, z, m, ring_k, ring_v, ring_valid, sink_k, sink_v, age, start = state
            rings = (ring_k, ring_v, ring_valid, sink_k, sink_v, age, start)
            out = cpu_ops.window.step(*new, S, z, m, *rings, 0.3, softcap or 0.0, 1e-6)
            assert_close(out[valid], want[:, t][valid], dtype, f"token {t}")
    for field in ("S", "z", "m", "sink_k", "sink_v"):
        assert_close(getattr(state, field), getattr(end, field), "float32", field)
    assert torch.equal(state.sink_age, end.sink_age)
    for field in ("k", "v", "valid"):
        ours, theirs = (WindowState.ring(s, getattr(s, field)) for s in (state, end))
        assert torch.equal(ours.double(), theirs.double())
