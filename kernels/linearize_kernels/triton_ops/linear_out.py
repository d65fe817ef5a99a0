"""Outputs of linear attention: one program for one chunk, one query head and one tile of the values."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of
from .configs import Row
from .launch import LENGTHS, dot, jit, load, load32, register, store
from .linear_cases import variants
from .linear_chunks import causal_pairs, columns, row_of

configs.add(
    "linear_out",
    [
        Row({"BF": 64, "BV": 64}, num_warps=4, num_stages=2, dtype=("bf16", "fp16")),
        Row({"BF": 32, "BV": 32}, num_warps=4, num_stages=2),
    ],
)


@jit(do_not_specialize=LENGTHS)
def linear_out_kernel(
    q, k, v, g, states, z_states, m_states, pairs, out, den, table, T, heads, group, each,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t, stride_v_h,
    stride_g_b, stride_g_t, stride_g_h, scale, eps,
    MODE: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """out (B, T, H, V) and den (B, T, H), contiguous, from the states before each chunk.

    pairs (count, H, C, C): with VECTOR, what query t sees of key j, 0 for j > t (`linear_vector`).
    """
    pid = tl.program_id(0).to(tl.int64)
    tiles_v: tl.constexpr = (V + BV - 1) // BV
    queries = heads * group
    i_v = pid % tiles_v
    head = pid // tiles_v % queries
    chunk = pid // (tiles_v * queries)
    h = head // group
    row, start, length = chunk_of(chunk, T, each, table, PACKED, C)
    if length <= 0:
        return
    i = tl.arange(0, C)
    real = i < length
    token = i.to(tl.int64)
    d = i_v * BV + tl.arange(0, BV)
    in_v = d < V
    q += row * stride_q_b + start * stride_q_t + head * stride_q_h
    k += row * stride_k_b + start * stride_k_t + h * stride_k_h
    v += row * stride_v_b + start * stride_v_t + h * stride_v_h
    here = chunk * heads + h
    num = tl.zeros((C, BV), tl.float32)
    scores = tl.zeros((C, C), tl.float32)
    total = tl.zeros((C,), tl.float32)
    if MODE > 0:
        g += row * stride_g_b + start * stride_g_t + h * stride_g_h
    for i_f in range((F + BF - 1) // BF):
        f = i_f * BF + tl.arange(0, BF)
        in_f = f < F
        query = load(q + token[:, None] * stride_q_t + f[None, :], real[:, None] & in_f[None, :])
        if MODE == 3:
            c = load32(g + token[:, None] * stride_g_t + f[None, :], real[:, None] & in_f[None, :])
            query = query * tl.exp(c)
        else:
            key = load(k + token[None, :] * stride_k_t + f[:, None], in_f[:, None] & real[None, :])
            scores = dot(query, key, scores, PRECISION, DTYPE)
        S = load(states + here * F * V + f[:, None] * V + d[None, :], in_f[:, None] & in_v[None, :])
        num = dot(query, S, num, PRECISION, DTYPE)
        z = load32(z_states + here * F + f, in_f)
        total += tl.sum(query.to(tl.float32) * z[None, :], 1)
    if MODE == 3:
        scores = tl.load(pairs + (chunk * queries + head) * C * C + i[:, None] * C + i[None, :])
        level = total
    elif MODE == 0:
        level = total
        scores = causal_pairs(scores, level, level, MODE, C)
    else:
        m = 0.0
        if MODE == 2:
            m = tl.load(m_states + here)
        col, before, _ = columns(g, token * stride_g_t, real, m, MODE)
        level = row_of(col, before, MODE)
        scores = causal_pairs(scores, level, col, MODE, C)
        num *= tl.exp(level - before)[:, None]
        total *= tl.exp(level - before)
    value = load(v + token[:, None] * stride_v_t + d[None, :], real[:, None] & in_v[None, :])
    num = dot(scores, value, num, PRECISION, DTYPE) * scale
    total = (total + tl.sum(scores, 1)) * scale
    if NORMALIZE:
        num = num / tl.maximum(total, eps)[:, None]
    elif MODE == 2:
        num = num * tl.exp(-level)[:, None]
    place = (row * T + start) * queries + head + token * queries
    store(out + place[:, None] * V + d[None, :], num, real[:, None] & in_v[None, :])
    if NORMALIZE & (i_v == 0):
        tl.store(den + place, total, mask=real)


register("linear_out", linear_out_kernel, variants("linear_out"))
