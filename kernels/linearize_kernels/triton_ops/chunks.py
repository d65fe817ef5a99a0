"""Where the chunks of sequences lie, for linear attention and for the delta rule.

In kernels, tokens count from the chunk's start, which goes into the pointers once: then nothing but short numbers
stays in registers (linear_bwd_qk at D = 64: 24 bytes spilled with tokens counted from the row's start, now none).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .launch import cdiv, jit

CHUNK = 64


class Chunks(NamedTuple):
    """Every sequence cut into chunks of `size` tokens. Without cu_seqlens each row has `each` chunks; with it the
    tables say where sequences begin: first (N,) their first chunk, table (count, 2) each chunk's first token and its
    sequence's end. They are made without waiting for the device, so `count` is the most there can be; the chunks
    that don't exist have no tokens."""

    count: int
    each: int
    size: int
    cu: Tensor | None
    first: Tensor | None
    table: Tensor | None

    @staticmethod
    def of(x: Tensor, cu_seqlens: Tensor | None, size: int = CHUNK) -> Chunks:
        """For x (B, T, ...)."""
        each = cdiv(x.shape[1], size)
        if cu_seqlens is None:
            return Chunks(x.shape[0] * each, each, size, None, None, None)
        cu = cu_seqlens.to(device=x.device, dtype=torch.int64).contiguous()
        last = ((cu.diff() + size - 1) // size).cumsum(0)
        first = last - (cu.diff() + size - 1) // size
        count = x.shape[1] // size + len(cu) - 1
        index = torch.arange(count, device=x.device)
        owner = torch.searchsorted(last, index, right=True).clamp_max_(len(cu) - 2)
        start = cu[owner] + (index - first[owner]) * size
        return Chunks(count, each, size, cu, first, torch.stack([start, cu[owner + 1]], 1))


@jit
def sequence_of(seq, T, each, cu, first, PACKED: tl.constexpr):
    """row, first token, end, first chunk of a sequence."""
    if PACKED:
        row = seq * 0
        start = tl.load(cu + seq)
        stop = tl.load(cu + seq + 1)
        chunk = tl.load(first + seq)
    else:
        row = seq
        start = seq * 0
        stop = start + T
        chunk = seq * each
    return row, start, stop, chunk


@jit
def chunk_of(chunk, T, each, table, PACKED: tl.constexpr, C: tl.constexpr):
    """row, first token, and how many tokens the chunk has (int32; none if it is 0 or less)."""
    if PACKED:
        row = chunk * 0
        start = tl.load(table + chunk * 2)
        stop = tl.load(table + chunk * 2 + 1)
    else:
        row = chunk // each
        start = chunk % each * C
        stop = chunk * 0 + T
    return row, start, tl.minimum(stop - start, C).to(tl.int32)
