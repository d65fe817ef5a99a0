"""The backend for CPUs: C++ (csrc/), compiled on first use where there is a compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from . import build, delta, linear, window
from .build import status
from .call import DTYPES

__all__ = ["delta", "linear", "refuses", "status", "window"]


def refuses(op: str, tensors: dict[str, Tensor | None]) -> str | None:
    """Why these tensors can't be served, or None. Compiles the library, if that is all that is missing."""
    for name, x in tensors.items():
        if x is None:
            continue
        if x.device.type != "cpu":
            return f"{name} is on {x.device}, not on the CPU"
        if x.is_floating_point() and x.dtype not in DTYPES:
            return f"{name} is {x.dtype}: the CPU backend sums in float32"
    try:
        library = build.library()
    except build.Unavailable as error:
        return str(error)
    if any(x is not None and x.dtype == torch.float16 for x in tensors.values()) and not library.lz_float16():
        return "the compiler has no float16"
    return None
