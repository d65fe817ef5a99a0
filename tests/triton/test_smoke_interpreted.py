"""Traps of Triton's interpreter, said clearly: each would otherwise look like a wrong kernel."""

from __future__ import annotations

import numpy
import torch
import triton
import triton.language as tl
from linearize_kernels.triton_ops import launch
from linearize_kernels.triton_ops.launch import dot, jit, load, store


def version(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(".")[:2])


def test_the_interpreter_is_on() -> None:
    assert launch.INTERPRETED, (
        "set TRITON_INTERPRET=1 before anything imports the kernels: it is read when they are defined"
    )


def test_versions_that_fit() -> None:
    fits = version(triton.__version__) >= (3, 8) or version(numpy.__version__) < (2, 4)
    assert fits, (
        f"Triton {triton.__version__} interpreted with NumPy {numpy.__version__} fails at every range() over a number "
        "from memory ('only 0-dimensional arrays can be converted'): take Triton >= 3.8 or NumPy < 2.4"
    )


@jit
def _count(ends, out):
    total = 0
    for i in range(tl.load(ends), tl.load(ends + 1)):
        total += i
    tl.store(out, total)


@jit
def _sums(a, b, raw, through):
    i = tl.arange(0, 16)
    tile = i[:, None] * 16 + i[None, :]
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(raw + i, (x + y).to(tl.float32))
    x, y = load(a + tile, (i < 16)[:, None]), load(b + tile, (i < 16)[:, None])
    store(through + tile, dot(x, y, None, "ieee", tl.bfloat16), (i < 16)[:, None])


def test_ranges_over_numbers_from_memory() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    _count[(1,)](torch.tensor([2, 5]), out)
    assert out.item() == 9


def test_bfloat16_is_computed_in_float32() -> None:
    """The interpreter adds the bit patterns of bf16; `load`, `dot` and `store` go around it, and round to nearest."""
    a, b = (torch.rand(16, 16).to(torch.bfloat16) for _ in range(2))
    raw, through = torch.zeros(16), torch.zeros(16, 16, dtype=torch.bfloat16)
    _sums[(1,)](a, b, raw, through)
    if torch.allclose(raw, a[0].float() + b[0].float(), rtol=1e-2):
        print("this interpreter adds bf16 rightly: UPCAST is no longer needed")
    assert torch.equal(through, (a.float() @ b.float()).to(torch.bfloat16))
