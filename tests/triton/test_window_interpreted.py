"""The Triton kernels of window attention, interpreted, against the float64 definition: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linearize_kernels.triton_ops import window as kernels
from torch import Tensor

from tests.triton.window_cases import Call, check, make_call, prepared

SMALL = {"B": 1, "H": 2, "Hk": 1, "D": 16, "F": 24}
LENGTHS = [  # T, window, sinks, tokens before the call, spread of the log scales
    (1, 1, 0, 0, None), (1, 16, 2, 20, None), (1, 5, 2, 7, 3.0), (15, 5, 0, 0, 3.0), (15, 200, 4, 3, None),
    (63, 16, 4, 0, 3.0), (64, 64, 2, 70, 3.0), (65, 1, 2, 0, None), (65, 64, 0, 9, None), (129, 5, 2, 40, 3.0),
    (129, 64, 4, 0, None), (129, 200, 0, 0, 3.0),
]  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "groups of 8": {"H": 8, "Hk": 1, "T": 50},
    "groups of 4, logs": {"H": 8, "Hk": 2, "T": 40, "logs": 2.0},
    "padding": {"B": 2, "padded": True, "sinks": 2},
    "padding, continued": {"B": 2, "padded": True, "sinks": 2, "past": 50},
    "padding, logs": {"B": 2, "padded": True, "sinks": 2, "logs": 2.0, "past": 30},
    "softcap": {"softcap": 2.0, "sinks": 2},
    "more sinks than a tile": {"sinks": 18, "T": 50},
    "odd dims": {"D": 48, "Dv": 40, "F": 100},
}


@pytest.mark.parametrize(("T", "window", "sinks", "past", "logs"), LENGTHS)
def test_lengths(T: int, window: int, sinks: int, past: int, logs: float | None) -> None:
    check(kernels, make_call(T, window, sinks, past=past, logs=logs, **SMALL))


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    check(kernels, make_call(**{"T": 70, "window": 20} | SMALL | CASES[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logs", [None, 1.0])
def test_half_inputs(dtype: torch.dtype, logs: float | None) -> None:
    check(kernels, make_call(100, 33, 2, past=10, logs=logs, dtype=dtype, **SMALL), dtype, dtype)


def test_equal_largest_scores_share_the_gradient() -> None:
    call = make_call(50, 9, 2, **SMALL)
    call.inputs["k"][:, 10:] = call.inputs["k"][:, 10:11]
    check(kernels, call)


def test_floor() -> None:
    """Head 0 has no exact part, and features so small that eps is the denominator."""
    call = make_call(70, 5, **SMALL)
    call.inputs["gamma"][0] = 0
    call.inputs["phi_q"][:, :, 0] *= 1e-8
    check(kernels, call)


def test_large_logs() -> None:
    """Scales far beyond exp's range, up and down."""
    tensors, numbers = prepared_logs(300.0)
    found = kernels.forward(*tensors, *numbers)
    assert all(x.isfinite().all() for x in found[:5])
    grads = kernels.backward(found[0], *(torch.ones_like(x) for x in found[3:5]), *tensors, *found[:3], *numbers)
    assert all(x.isfinite().all() for x in grads if x is not None)


@pytest.mark.parametrize("logs", [None, 1.0])
def test_reads_nothing_outside(logs: float | None) -> None:
    """NaN around every buffer, strides of views, gradients that are expanded: the same bits as dense tensors."""
    tensors, numbers = prepared_logs(logs)
    expected = kernels.forward(*tensors, *numbers)
    dense = [torch.ones_like(x) for x in (expected[0], *expected[3:5])]
    gradients = kernels.backward(*dense, *tensors, *expected[:3], *numbers)
    viewed = [None if x is None else guarded(x) for x in tensors]
    actual = kernels.forward(*viewed, *numbers)
    expanded = [torch.ones(()).expand(x.shape) for x in dense]
    again = kernels.backward(*expanded, *viewed, *(guarded(x) for x in expected[:3]), *numbers)
    for a, e in zip((*actual, *again), (*expected, *gradients), strict=True):
        assert (a is None and e is None) or torch.equal(a, e)
    for x, grad in zip((*tensors[:3], *tensors[4:10], *tensors[11:14]), gradients, strict=True):
        assert x is None or (x.shape == grad.shape and x.dtype == grad.dtype)


def prepared_logs(logs: float | None) -> tuple[list[Any], list[Any]]:
    call: Call = make_call(70, 20, 2, past=25, logs=logs, B=2, H=2, Hk=1, D=20, Dv=24, F=18)
    return prepared(call, call.leaves(), call.state, torch.float32)


def guarded(x: Tensor) -> Tensor:
    """x between other memory: NaN, or values that count. Dim 1 is strided as heads first (B, H, T, D) would be."""
    order = [0, 2, 1, 3] if x.dim() == 4 and x.shape[1] > 8 else list(range(x.dim()))
    dense = x.permute(order)
    buffer = torch.full((x.numel() + 200,), float("nan") if x.is_floating_point() else 1).to(x.dtype)
    held = buffer[100 : 100 + x.numel()].view(dense.shape)
    held.copy_(dense)
    return held.permute(order)
