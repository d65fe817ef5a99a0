"""The factors between the tokens of a chunk of linear attention.

Sums are held relative to a scale that moves with time. One formulation serves scalar decays and log_k: with four
logs per chunk, every factor is exp of something <= 0,

    key j as query t sees it    exp(row_t - col_j), j <= t        the state before, as t sees it   exp(row_t - before)
    key j at the chunk's end    exp(end - col_j)                  the state before, at the end     exp(end - before)

    decay:  row = col = c, the cumulative sum of log_decay from the chunk's start; before = 0; end = c of the last
    log_k:  row = -M, the running maximum of log_k; col = -log_k; before = -M before the chunk; end = -M of the last

Decays of every feature (VECTOR) have their c for each (token, feature): see `linear_vector`.
"""

from __future__ import annotations

import triton.language as tl

from .launch import LEAST_DECAY, jit

NONE = tl.constexpr(0)
SCALAR = tl.constexpr(1)
LOGS = tl.constexpr(2)
VECTOR = tl.constexpr(3)

NOTHING = tl.constexpr(-1e30)  # state.NOTHING_SEEN


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
