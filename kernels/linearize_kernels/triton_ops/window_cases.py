"""What the ahead-of-time tool needs to know of the kernels of window attention: element types and variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import configs
from .launch import Case, block, precision, register, tl_dtype
from .window_common import fits, sizes
from .window_far_bwd import window_dphi_k_kernel, window_dphi_q_kernel, window_fold_dv_kernel
from .window_near_bwd import window_dkv_kernel, window_dq_kernel, window_rows_kernel
from .window_out import window_out_kernel
from .window_states import window_states_bwd_kernel, window_states_kernel
from .window_step import window_step_kernel, window_step_state_kernel

INPUTS = ("q", "k", "v", "phi_q", "phi_k", "sink_k", "sink_v", "ring_k", "ring_v", "out", "d_out")
INPUTS += ("dq", "dk", "dv", "d_phi_q", "d_phi_k")
SUMS = ("log_q", "log_k", "peak", "gamma", "S", "z", "m", "S0", "z0", "S1", "z1", "sums", "den", "top", "inverse")
SUMS += ("slope", "held", "far", "tie", "dS0", "dz0", "dS1", "dz1", "d_sums", "d_log_k", "d_gamma", "fold_dv")
SUMS += ("d_sink_k", "d_sink_v")
GROUP = 4  # query heads to a key/value head


def types(name: str, dtype: str) -> dict[str, str]:
    """The element types of pointers, by argument name."""
    states = dtype if dtype == "bf16" else "fp32"
    found = dict.fromkeys(INPUTS, dtype) | dict.fromkeys(SUMS, "fp32")
    found |= dict.fromkeys(("valid", "ring_valid"), "u8") | dict.fromkeys(("sink_position", "sink_age", "begin"), "i64")
    found |= {"states": states, "d_states": states}
    return found | {"dv": "fp32"} if name == "window_fold_dv" else found


def variants(name: str) -> Callable[[str, str, int], list[Case]]:
    """Without logs (the largest score is part of the function) and with them; sinks; every head dim the same."""

    def cases(arch: str, dtype: str, dim: int) -> list[Case]:
        if not fits(arch, dtype, dim):
            return []
        row = configs.find(name, arch, dtype, dim)
        kind = tl_dtype(dtype)
        values: dict[str, Any] = {"D": dim, "DV": dim, "F": dim, "SOFTCAP": False, "SINKS": True, "G": GROUP}
        values |= {"BG": 16, "BS": 16, "BX": block(dim, 256), "PRECISION": precision(arch), "NEAR": kind, "FAR": kind}
        values |= sizes(arch, dtype, dtype, dim, dim) | row.blocks
        return [
            Case(label, types(name, dtype), {**values, "LOGS": logs, "RELATIVE": not logs}, row)
            for label, logs in (("relative", False), ("logs", True))
        ]

    return cases


KERNELS = {
    "window_states": window_states_kernel,
    "window_states_bwd": window_states_bwd_kernel,
    "window_out": window_out_kernel,
    "window_rows": window_rows_kernel,
    "window_dphi_q": window_dphi_q_kernel,
    "window_dphi_k": window_dphi_k_kernel,
    "window_fold_dv": window_fold_dv_kernel,
    "window_dq": window_dq_kernel,
    "window_dkv": window_dkv_kernel,
    "window_step": window_step_kernel,
    "window_step_state": window_step_state_kernel,
}
for _name, _fn in KERNELS.items():
    register(_name, _fn, variants(_name))
