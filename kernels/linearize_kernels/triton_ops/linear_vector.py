"""Decays of every feature (gated linear attention): cumulative sums, and what query t sees of key j.

With c (token, feature) the cumulative log decay from the chunk's start, key j counts for query t as
sum_f q_tf k_jf exp(c_tf - c_jf): no product of two factors by itself, and exp(-c_jf) alone may overflow. So a
chunk is cut into sub-blocks of SUB tokens. For keys before the query's sub-block both factors are taken relative to
its first token, exp(c_t - a) exp(a - c_j), each <= 1; within the sub-block the differences are taken one by one.
"""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of
from .configs import Row
from .launch import LEAST_DECAY, LENGTHS, dot, jit, load32, register, store
from .linear_cases import variants

SUB = 16

configs.add("linear_cumsum", [Row({"BF": 32})])
configs.add("linear_pairs", [Row({"BF": 32}, num_warps=4, num_stages=2)])


@jit(do_not_specialize=LENGTHS)
def linear_cumsum_kernel(
    g, c, table, T, heads, each, stride_g_b, stride_g_t, stride_g_h,
    PACKED: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """c (B, T, Hk, F), contiguous: the sums of log_decay g (B, T, Hk, F) from each chunk's start."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (F + BF - 1) // BF
    i_f = pid % tiles
    h = pid // tiles % heads
    row, start, length = chunk_of(pid // (tiles * heads), T, each, table, PACKED, C)
    i = tl.arange(0, C)
    token = i.to(tl.int64)
    f = i_f * BF + tl.arange(0, BF)
    mask = (i < length)[:, None] & (f < F)[None, :]
    g += row * stride_g_b + start * stride_g_t + h * stride_g_h
    x = load32(g + token[:, None] * stride_g_t + f[None, :], mask)
    x = tl.cumsum(tl.maximum(x, LEAST_DECAY), 0)
    store(c + ((row * T + start) * heads + h) * F + (token * heads * F)[:, None] + f[None, :], x, mask)


@jit(do_not_specialize=LENGTHS)
def linear_pairs_kernel(
    q, k, g, pairs, table, T, heads, group, each,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_g_b, stride_g_t, stride_g_h,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    F: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """pairs (count, H, C, C), 0 for j > t; g: what `linear_cumsum_kernel` gave. One program: SUB queries of a head."""
    pid = tl.program_id(0).to(tl.int64)
    queries = heads * group
    sub = (pid % (C // SUB) * SUB).to(tl.int32)
    head = pid // (C // SUB) % queries
    chunk = pid // (C // SUB * queries)
    h = head // group
    row, start, length = chunk_of(chunk, T, each, table, PACKED, C)
    if length <= 0:
        return
    t, j = sub + tl.arange(0, SUB), tl.arange(0, C)
    real = t < length
    older = (j < sub) & (j < length)
    token, other = t.to(tl.int64), j.to(tl.int64)
    q += row * stride_q_b + start * stride_q_t + head * stride_q_h
    k += row * stride_k_b + start * stride_k_t + h * stride_k_h
    g += row * stride_g_b + start * stride_g_t + h * stride_g_h
    before = tl.zeros((SUB, C), tl.float32)
    within = tl.zeros((SUB, SUB), tl.float32)
    i = tl.arange(0, SUB)
    seen = (i[None, :] <= i[:, None])[:, :, None]
    for i_f in range((F + BF - 1) // BF):
        f = i_f * BF + tl.arange(0, BF)
        in_f = f < F
        mask = real[:, None] & in_f[None, :]
        query = load32(q + token[:, None] * stride_q_t + f[None, :], mask)
        same = load32(k + token[:, None] * stride_k_t + f[None, :], mask)
        c_t = load32(g + token[:, None] * stride_g_t + f[None, :], mask)
        anchor = load32(g + tl.minimum(sub, length - 1).to(tl.int64) * stride_g_t + f, in_f)
        old = in_f[:, None] & older[None, :]
        key = load32(k + other[None, :] * stride_k_t + f[:, None], old)
        c_j = load32(g + other[None, :] * stride_g_t + f[:, None], old)
        # Queries that don't exist have c = 0, above all others: no factor may exceed 1, lest inf * 0 be NaN.
        left = query * tl.exp(tl.minimum(c_t - anchor[None, :], 0.0))
        right = key * tl.exp(anchor[:, None] - c_j)
        before = dot(left, right, before, PRECISION, DTYPE)
        gap = tl.where(seen, tl.minimum(c_t[:, None, :] - c_t[None, :, :], 0.0), float("-inf"))
        within += tl.sum(query[:, None, :] * same[None, :, :] * tl.exp(gap), 2)
    pairs += (chunk * queries + head) * C * C
    outside = (j < sub) | (j >= sub + SUB)
    tl.store(pairs + t[:, None] * C + j[None, :], before, mask=(t >= 0)[:, None] & outside[None, :])
    tl.store(pairs + t[:, None] * C + t[None, :], within)


register("linear_cumsum", linear_cumsum_kernel, variants("linear_cumsum", (3,)))
register("linear_pairs", linear_pairs_kernel, variants("linear_pairs", (3,), SUB=SUB))
