"""Every tolerance of the numeric tests, with its reason.

Errors are taken per token: the largest absolute error of a row over the largest reference value in that row
(or over a thousandth of the largest in the tensor, or 1e-3, if that is more), so that one wrong row can't
hide in an average. Gradients are differences of large terms that may cancel in a row: their largest error
counts against the largest value of the tensor, with tolerances as much smaller.
"""

from __future__ import annotations

import torch

TOLERANCES: dict[str, tuple[float, str]] = {
    "float64": (1e-11, "the same formula in another order of summation; 2e-15 seen"),
    "float32": (3e-5, "float32 sums of up to 300 terms against float64; more where a row nearly cancels"),
    "bfloat16": (5e-3, "float32 sums, rounded to 8 bits at the end: 2^-8 at most"),
    "float16": (7e-4, "float32 sums, rounded to 11 bits at the end: 2^-11 at most"),
    "bfloat16 features grad": (1e-2, "features saved in 8 bits, and gradients rounded to 8 bits"),
    "float64 grad": (1e-11, "as float64"),
    "float32 grad": (2e-5, "two sums and a division by the squared denominator, in float32"),
    "float32 split": (3e-5, "other chunk borders, so another order of float32 summation"),
    "float32 delta": (2e-4, "as float32, of differences: with one head dim a row is one number, which may cancel"),
    "float32 oracle": (3e-5, "as float32, but on both sides, each in its own order"),
    "float32 oracle grad": (2e-5, "as float32 grad, on both sides"),
    "float32 logs": (
        3e-4,
        "log scales near 1000 are held to 6e-5 in float32; exp makes that a relative error",
    ),
}


def tolerance(name: str | torch.dtype) -> float:
    """The tolerance of a row of the table, or of outputs of a dtype."""
    return TOLERANCES[str(name).removeprefix("torch.")][0]


def row_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 1e-3) -> float:
    """The largest error relative to its row's size, rows along the last dim; NaN if there is any NaN."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    size = expected.abs().amax(-1, keepdim=True)
    size = size.maximum(expected.abs().max() * floor).clamp_min(1e-3)
    return ((actual - expected).abs() / size).max().item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str | torch.dtype, what: str = "output") -> None:
    """`actual` equals `expected` to the tolerance `name`; NaN never passes."""
    error = row_error(actual, expected, 1.0 if str(name).endswith("grad") else 1e-3)
    assert error <= tolerance(name), f"{what}: error {error:.2e} > {tolerance(name):.0e} ({name})"
