"""The variants of the delta rule's kernels that `linearize_kernels.aot` compiles."""

from __future__ import annotations

from typing import Any

from . import configs
from .launch import Case, block, precision, tl_dtype

DECAYS = ("no decay", "scalar decay", "decay by feature")


BUFFERS: tuple[str, ...] = ("c", "pairs", "U", "dU", "states_grad", "d_scores", "d_pairs", "M", "rows_grad")
BUFFERS += ("columns_grad", "rows_q", "rows_k", "columns_k", "d_beta", "d_log")
GIVEN: tuple[str, ...] = ("S", "S_end", "dS", "dS0", "beta", "log_decay")
INPUTS: tuple[str, ...] = ("x", "q", "k", "v", "out", "d_out", "dq", "dk", "dv")
NARROW: tuple[str, ...] = ("inverse", "W", "states")
PLACES: tuple[str, ...] = ("table", "cu", "firsts")


def cases(
    kernel: str, dims: tuple[str, ...], decays: tuple[int, ...] = (0, 1, 2), packed: bool = True, **constants: Any
) -> Any:
    """What `register` takes for a kernel of the delta rule.

    dims: the names of its block sizes. packed: whether packed sequences are a variant, with scalar decays.
    """

    def make(arch: str, dtype: str, dim: int) -> list[Case]:
        row = configs.find(kernel, arch, dtype, dim)
        types = dict.fromkeys(BUFFERS + GIVEN, "fp32") | dict.fromkeys(INPUTS, dtype)
        types |= dict.fromkeys(NARROW, "bf16" if dtype == "bf16" else "fp32")
        types |= dict.fromkeys(PLACES, "i64")
        values = {"F": dim, "Dv": dim, "C": 64, "PRECISION": precision(arch), "DTYPE": tl_dtype(dtype), **constants}
        values |= {name: block(dim, row.blocks.get(name, 1 << 30)) for name in dims}
        found = []
        # By decay, so that the heaviest come last.
        for decay, varlen in sorted([(decay, False) for decay in decays] + [(1, True)] * packed):
            absent = () if decay == 2 else ("pairs", "rows_q", "rows_k", "columns_k")
            absent += () if decay else ("c", "log_decay", "d_log")
            absent += () if varlen else PLACES
            label = DECAYS[decay] + ", packed" * varlen
            found.append(Case(label, types, {**values, "DECAY": decay, "VARLEN": varlen, **dict.fromkeys(absent)}, row))
        return found

    return make
