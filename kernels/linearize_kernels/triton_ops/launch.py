"""What every Triton kernel here is launched and written with. Importing it imports triton.

Host side
    INTERPRETED         whether TRITON_INTERPRET was set when this was imported; UPCAST: the same as a constexpr.
    arch_of(x)          "sm_80" ... "gfx942": which rows of `configs` x's device takes (interpreter: "sm_90").
    dtype_name(dtype)   "bf16" | "fp16" | "fp32"; tl_dtype(either) is Triton's dtype.
    precision(arch)     PRECISION for `dot` below.
    block(n, most=128)  the block for a dim of n: a power of two, 16 <= block <= most.
    next_power_of_2(n), cdiv(n, m)
    rows(x)             x if its last dim is contiguous, else a contiguous copy; None stays None. Kernels take the
                        strides of the other dims alone: `*strides(x, 3)`, zeros for None.
    on(x)               context manager: launches go to x's device.

    jit                 triton.jit for the type checker's peace: use it as `@jit`.

Kernel side (jit functions, called from kernels by these names)
    load(pointers, mask)     masked, other = 0; float32 under the interpreter, whose bf16 arithmetic is garbage
    load32(pointers, mask)   the same in float32 everywhere
    store(pointers, x, mask) casts to the pointers' dtype
    dot(a, b, acc, PRECISION, DTYPE)  acc + a b in float32 (acc may be None), of inputs or of float32 terms: see there

Offsets: begin a kernel with `pid = tl.program_id(0).to(tl.int64)`, so that heads, rows and tokens derived from it
are 64-bit. Loop variables are Python ints in the interpreter: `tl.cast(i, tl.int64)`, never `i.to`.
Everything goes on grid axis 0: the others end at 65535. Head dims are constexpr: masks that are known to hold go
away, and with them the spills and the narrow loads (linear_states at D = 64: 264 bytes spilled and no 16-byte access
with the dims as arguments; none and 38 with constexpr).

The registry of kernels, which `linearize_kernels.aot` compiles ahead of time. After a kernel's definition:

    def _cases(arch: str, dtype: str, dim: int) -> list[Case]:
        '''dtype: "bf16" | "fp16" | "fp32"; dim: every head dim (D = Dv = F = dim).'''
        row = configs.find("linear_out", arch, dtype, dim)
        types = {"q": dtype, "out": dtype, "den": "fp32", "cu": "i64"}  # pointers: the element type, by argument name
        values = {"MODE": 0, "DTYPE": tl_dtype(dtype), **row.blocks}    # every constexpr
        return [Case("no decay", types, values, row)]                   # one for each variant worth holding

    register("linear_out", linear_out_kernel, _cases)

An argument of the kernel in neither `types` nor `values` is a number: float if its name is in FLOATS, else an i32,
divisible by 16 if its name starts with "stride" and isn't in the kernel's do_not_specialize. `types` may name more than
the kernel has. An argument that is None in this variant belongs in `values` with None.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Row, dtype_name, nearest_arch

__all__ = ["FLOATS", "INTERPRETED", "KERNELS", "LEAST_DECAY", "LENGTHS", "LOWEST_SCORE", "UPCAST", "Case", "Kernel"]
__all__ += [
    "arch_of",
    "block",
    "cdiv",
    "dot",
    "dtype_name",
    "jit",
    "load",
    "load32",
    "next_power_of_2",
    "on",
    "precision",
    "register",
    "rows",
    "store",
]
__all__ += ["strides", "tl_dtype"]

# A factor of exp(-64) can't be seen in float32, while larger gates would cost the sums of gates their precision.
LEAST_DECAY = tl.constexpr(-64.0)
# The largest score or logit of a row before any is seen: finite, so that exp(-inf - it) is 0 and not NaN.
LOWEST_SCORE = tl.constexpr(-3.4028234663852886e38)

# Arguments that change from call to call: not compiled anew for values of 1 and multiples of 16. stride_bb is beta's
# from row to row, T Hk. Such strides of tiles stay: they are multiples of 16 with the head dim, and 16-byte loads need
# to know; and so does that of g and of log_decay, which may be a tile.
LENGTHS = ("T", "each", "total", "tokens", "count", "tiles", "stride_bb")

FLOATS = ("scale", "eps", "softcap")

# triton.jit, but without a type: what a kernel is called with isn't what its signature says (blocks of pointers,
# numbers for constexprs), and type checkers can't know.
jit: Any = triton.jit


@jit
def load32(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


INTERPRETED = not isinstance(load32, triton.JITFunction)
UPCAST = tl.constexpr(INTERPRETED)


@jit
def load(pointers, mask):
    x = tl.load(pointers, mask=mask, other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@jit
def store(pointers, x, mask):
    if UPCAST and pointers.dtype.element_ty == tl.bfloat16:
        # The interpreter cuts bits off where cards round to nearest.
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@jit
def dot(a, b, acc, precision: tl.constexpr, dtype: tl.constexpr):
    """acc + a b, float32, where the op's inputs have `dtype` and a, b are inputs or float32 terms.

    bf16: float32 terms are rounded to bf16. fp16: a float32 term can lie above fp16's largest number (a sum of
    many keys does), so the product is taken in tf32, which has fp16's precision and float32's range. fp32:
    `precision` decides.
    """
    if UPCAST:
        out = tl.dot(a, b, acc)
    elif dtype == tl.bfloat16:
        out = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif dtype == tl.float16:
        if a.dtype == tl.float16 and b.dtype == tl.float16:
            out = tl.dot(a, b, acc)
        elif precision == "ieee":
            out = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
        else:
            out = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32")
    else:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=precision)
    return out


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(n: int, m: int) -> int:
    return -(-n // m)


def block(n: int, most: int = 128) -> int:
    return max(16, min(most, next_power_of_2(n)))


def arch_of(x: Tensor) -> str:
    if x.device.type != "cuda":  # the interpreter
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    return nearest_arch(*torch.cuda.get_device_capability(x.device))


def precision(arch: str) -> str:
    """How float32 inputs are multiplied: float32's precision on tensor cores where Triton has it (three tf32
    products), plain float32 on AMD. One tf32 product would keep 11 bits, fewer than the inputs have."""
    return "ieee" if arch.startswith("gfx") else "tf32x3"


def tl_dtype(dtype: Any) -> tl.dtype:
    return {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype_name(dtype)]


def rows(x: Any) -> Any:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def strides(x: Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if x is None else x.stride()[:dims]


def on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


class Case(NamedTuple):
    """One specialization of a kernel: see the top of this file."""

    label: str
    types: dict[str, str]
    values: dict[str, Any]
    row: Row


class Kernel(NamedTuple):
    fn: Any  # the JITFunction
    cases: Callable[[str, str, int], list[Case]]


KERNELS: dict[str, Kernel] = {}


def register(name: str, fn: Any, cases: Callable[[str, str, int], list[Case]]) -> None:
    KERNELS[name] = Kernel(fn, cases)
