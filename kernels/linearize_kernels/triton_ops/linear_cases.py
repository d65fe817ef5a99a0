"""What the ahead-of-time tool needs to know of the kernels of linear attention: element types and variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import configs
from .chunks import CHUNK
from .launch import Case, precision, tl_dtype

INPUTS = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv", "states", "dstates")
SUMS = ("g", "S0", "z0", "m0", "S1", "z1", "m1", "z_states", "m_states", "den", "pairs", "c")
SUMS += ("dS0", "dz0", "dS1", "dz1", "dz_states", "weight", "dden", "gate", "dpairs", "S", "z", "m")
LABELS = ("no decay", "decay", "log_k", "vector decay")


def types(dtype: str) -> dict[str, str]:
    """The element types of pointers, by argument name. States of fp16 inputs would overflow in fp16."""
    states = dtype if dtype == "bf16" else "fp32"
    return {
        **dict.fromkeys(INPUTS, dtype),
        **dict.fromkeys(SUMS, "fp32"),
        **dict.fromkeys(("cu", "first", "table"), "i64"),
        "states": states,
        "dstates": states,
    }


def variants(name: str, modes: tuple[int, ...] = (0, 1, 2, 3), **more: Any) -> Callable[[str, str, int], list[Case]]:
    """The cases that `launch.register` asks for: one for each kind of decay, normalised, every head dim the same."""

    def cases(arch: str, dtype: str, dim: int) -> list[Case]:
        row = configs.find(name, arch, dtype, dim)
        values = {"PACKED": False, "NORMALIZE": True, "PRECISION": precision(arch), "DTYPE": tl_dtype(dtype)}
        values |= {"F": dim, "V": dim, "C": CHUNK, "cu": None, "first": None, "table": None, **row.blocks, **more}
        found = []
        for mode in modes:
            unused = {"g": None} if mode == 0 else {}
            unused |= {} if mode == 3 else {"pairs": None}
            found.append(Case(LABELS[mode], types(dtype), {**values, **unused, "MODE": mode}, row))
        return found

    return cases
