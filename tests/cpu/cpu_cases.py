"""What the tests of the compiled CPU code share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from linearize_kernels.cpu_ops import build
from torch import Tensor


def _no_compiler() -> str:
    """Why there is no compiler; empty where there is one: a build that fails then must fail the tests."""
    try:
        build.compiler()
    except build.Unavailable as error:
        return str(error)
    return ""


needs_library = pytest.mark.skipif(bool(_no_compiler()), reason=f"no compiled CPU code: {_no_compiler()}")

# Gradients against the largest value of the tensor, or against 1: those that vanish are differences of terms of that
# size. 16-bit ones also hold the rounding of `out`, which the gradient of the denominator is made of.
GRAD_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def guarded(x: Tensor | None) -> Tensor | None:
    """The same values inside a larger tensor of NaN: whatever reads past a row, a head or the end gets NaN."""
    if x is None or not x.is_floating_point():
        return x
    around = torch.full([n + 2 for n in x.shape], torch.nan, dtype=x.dtype)
    inside = around[tuple(slice(1, n + 1) for n in x.shape)]
    inside.copy_(x)
    return inside


def assert_grads(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert set(got) == set(want)
    for name, grad in got.items():
        assert grad.shape == want[name].shape
        if not grad.numel():
            continue
        error = (grad.double() - want[name]).abs().max() / want[name].abs().max().clamp_min(1)
        assert error <= GRAD_TOLERANCE[dtype], f"gradient of {name}: {error:.1e}"


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
