"""Block sizes, warps and pipeline stages of every kernel, looked up by card, dtype and head dims.

A table, not autotuning: a first call never times dozens of variants, and `python -m linearize_kernels.aot`
can compile each row without a GPU and hold what it costs. Each kernel module adds its kernels' rows with
`add`, next to the kernel they belong to:

    configs.add("linear_out", [
        Row({"BF": 64, "BV": 64}, num_warps=4, num_stages=2, arch=("sm_80", "sm_86"), dtype=("bf16", "fp16"), most=64),
        Row({"BF": 32, "BV": 32}),                       # the last row fits everything
    ])
    row = configs.find("linear_out", arch, dtype, F, Dv)  # the first row that fits; dims: the largest one counts

`arch` is what `launch.arch_of(tensor)` gives: the nearest of ARCHS; the interpreter takes sm_90's rows.
`dtype` is a torch dtype, or "bf16", "fp16", "fp32" (`dtype_name`).
"""

from __future__ import annotations

from typing import NamedTuple

# What the ahead-of-time tool compiles for; other cards take the rows of the nearest of these.
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")

# Shared memory a thread block can have, in bytes: NVIDIA's opt-in limits (227, 99 KiB ...), AMD's LDS.
SHARED_MEMORY = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


class Row(NamedTuple):
    """Block sizes by the names of the kernel's constexprs, and where they hold; () means everywhere."""

    blocks: dict[str, int]
    num_warps: int = 4
    num_stages: int = 2
    arch: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    most: int = 1 << 30  # the largest head dim

    @property
    def options(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return {**self.blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


TABLE: dict[str, list[Row]] = {}


def add(kernel: str, rows: list[Row]) -> None:
    """The rows of a kernel, tried in this order."""
    TABLE[kernel] = rows


def find(kernel: str, arch: str, dtype: object, *dims: int) -> Row:
    """The first row of `kernel` that holds for a card, a dtype and the largest of the head dims."""
    name, size = dtype_name(dtype), max(dims, default=0)
    for row in TABLE[kernel]:
        if (not row.arch or arch in row.arch) and (not row.dtype or name in row.dtype) and size <= row.most:
            return row
    raise LookupError(
        f"no configuration of {kernel} for {arch}, {name}, dims {dims}: end its table with a Row({{...}})"
    )


def dtype_name(dtype: object) -> str:
    """ "bf16", "fp16" or "fp32", as Triton's signatures spell them."""
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    return names.get(str(dtype), str(dtype))


def nearest_arch(major: int, minor: int) -> str:
    """The row of the table for an NVIDIA card of compute capability major.minor."""
    if major >= 12 or (major == 8 and minor in (6, 9)):
        return "sm_86"  # 99 KiB of shared memory, no wgmma: workstation and gaming cards
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80"
