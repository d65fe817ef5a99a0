"""The Triton kernels of window attention on a GPU, against the float64 definition: outputs, gradients, steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.triton.test_window_interpreted import CASES as SHAPES
from tests.triton.test_window_interpreted import LENGTHS, SMALL
from tests.triton.test_window_step_interpreted import CASES as STEPS
from tests.triton.test_window_step_interpreted import check_steps
from tests.triton.window_cases import check, make_call

pytestmark = pytest.mark.gpu
BIG: dict[str, dict[str, Any]] = {
    "64": {"D": 64, "F": 128},
    "128": {"D": 128, "F": 256, "logs": 2.0},
    "256": {"D": 256, "F": 512, "sinks": 0},
    "uneven": {"D": 80, "Dv": 96, "F": 200, "padded": True},
    "groups": {"H": 8, "Hk": 2, "D": 64, "F": 64, "softcap": 30.0},
}


@pytest.fixture
def kernels() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from linearize_kernels.triton_ops import window

    return window


@pytest.mark.parametrize(("T", "window", "sinks", "past", "logs"), LENGTHS)
def test_lengths(kernels: Any, T: int, window: int, sinks: int, past: int, logs: float | None) -> None:
    check(kernels, make_call(T, window, sinks, past=past, logs=logs, **SMALL), device="cuda")


@pytest.mark.parametrize("name", SHAPES)
def test_cases(kernels: Any, name: str) -> None:
    check(kernels, make_call(**{"T": 70, "window": 20} | SMALL | SHAPES[name]), device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BIG)
def test_head_dims(kernels: Any, name: str, dtype: torch.dtype) -> None:
    options = {"T": 200, "window": 64, "sinks": 2, "past": 70, "B": 1, "H": 2, "Hk": 1} | BIG[name]
    check(kernels, make_call(**options, dtype=dtype), dtype, dtype, "cuda")


@pytest.mark.parametrize("name", STEPS)
def test_steps(kernels: Any, name: str) -> None:
    check_steps(name, "cuda")
