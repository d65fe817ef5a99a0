"""Where the chunks of linear attention lie, and the factors between their tokens.

Sums are held relative to a scale that moves with time. One formulation serves scalar decays and log_k: with four
logs per chunk, every factor is exp of something <= 0,

    key j as query t sees it    exp(row_t - col_j), j <= t        the state before, as t sees it   exp(row_t - before)
    key j at the chunk's end    exp(end - col_j)                  the state before, at the end     exp(end - before)

    decay:  row = col = c, the cumulative sum of log_decay from the chunk's start; before = 0; end = c of the last
    log_k:  row = -M, the running maximum of log_k; col = -log_k; before = -M before the chunk; end = -M of the last

In kernels, tokens count from the chunk's start, which goes into the pointers once: then nothing but short numbers
stays in registers (linear_bwd_qk at D = 64: 24 bytes spilled with tokens counted from the row's start, now none).

Decays of every feature (VECTOR) have their c for each (token, feature): see `linear_vector`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .launch import LEAST_DECAY, cdiv, jit

CHUNK = 64

NONE = tl.constexpr(0)
SCALAR = tl.constexpr(1)
LOGS = tl.constexpr(2)
VECTOR = tl.constexpr(3)

NOTHING = tl.constexpr(-1e30)  # state.NOTHING_SEEN


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


@jit
def columns(g, offsets, real, m, MODE: tl.constexpr):
    """col (C,), before, end: g + offsets points at the log_decay or log_k of the chunk's tokens; m: M before it."""
    x = tl.load(g + offsets, mask=real, other=0.0).to(tl.float32)
    if MODE == 1:
        x = tl.where(real, tl.maximum(x, LEAST_DECAY), 0.0)
        col = tl.cumsum(x, 0)
        end = tl.sum(x, 0)
        before = end * 0.0
    else:
        x = tl.where(real, x, NOTHING)
        col = -x
        end = -tl.maximum(m, tl.max(x, 0))
        before = -m
    return col, before, end


@jit
def _least(a, b):
    return tl.minimum(a, b)


@jit
def row_of(col, before, MODE: tl.constexpr):
    """row (C,), from what `columns` gave."""
    if MODE == 1:
        row = col
    else:
        row = tl.minimum(tl.associative_scan(col, 0, _least), before)
    return row


@jit
def causal_pairs(x, row, col, MODE: tl.constexpr, C: tl.constexpr):
    """x (C, C), a value for query t and key j, times the factor of j as t sees it; 0 for j > t."""
    i = tl.arange(0, C)
    seen = i[None, :] <= i[:, None]
    if MODE == 0:
        x = tl.where(seen, x, 0.0)
    else:
        # A later key may lie above: masked before exp, else it would overflow.
        x = x * tl.exp(tl.where(seen, row[:, None] - col[None, :], float("-inf")))
    return x
