"""Calls of the library: tensors as (address, dtype, strides), sizes and scalars as plain arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .build import library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int64: 3, torch.bool: 4}
_ABSENT = (0, 0, 0, 0, 0, 0)


def rows(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors with last dims that can be read in one go: themselves, or copies."""
    return [x if x is None or x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous() for x in tensors]


def describe(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return _ABSENT
    return (x.data_ptr(), DTYPES[x.dtype], *x.stride(), *_ABSENT[: 4 - x.dim()])


def call(name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int], scalars: Sequence[float]) -> None:
    """Run a function of the library. `sizes` must be those of `tensors`: nothing is checked behind this line."""
    packed = [number for x in tensors for number in describe(x)]
    failed = getattr(library(), name)(
        (ctypes.c_int64 * len(packed))(*packed),
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_double * max(len(scalars), 1))(*scalars),
    )
    if failed:
        raise MemoryError(f"{name}: no memory for its tiles")
