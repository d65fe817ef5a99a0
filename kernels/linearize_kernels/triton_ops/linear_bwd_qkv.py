"""Gradients of queries, keys and values of linear attention: one program for a chunk of a key/value head, which
goes through that head's query heads."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of
from .configs import Row
from .launch import LENGTHS, dot, jit, load, load32, register, store
from .linear_bwd_states import query_weights
from .linear_cases import variants
from .linear_chunks import causal_pairs, columns, row_of

# Smaller tiles where operands of tensor cores come from registers (before wgmma): with larger ones log_k spills.
configs.add(
    "linear_bwd_qk",
    [
        Row({"BF": 32, "BV": 32}, num_warps=8, num_stages=1, dtype=("bf16", "fp16"), arch=("sm_80", "sm_86")),
        Row({"BF": 64, "BV": 64}, num_warps=8, num_stages=1, dtype=("bf16", "fp16")),
        Row({"BF": 32, "BV": 32}, num_stages=1),
    ],
)
configs.add(
    "linear_bwd_v",
    [Row({"BF": 64, "BV": 64}, num_stages=1, dtype=("bf16", "fp16")), Row({"BF": 32, "BV": 32}, num_stages=1)],
)


@jit(do_not_specialize=(*LENGTHS, "stride_g_b"))
def linear_bwd_qk_kernel(
    q, k, v, d_out, g, states, z_states, m_states, dstates, dz_states, weight, dden, dq, dk, gate, table,
    T, heads, group, each, total, stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h, stride_d_b, stride_d_t, stride_d_h, stride_g_b, stride_g_t, stride_g_h, scale,
    MODE: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dq (B, T, H, F), dk (B, T, Hk, F), for all decays but VECTOR, one tile of F per program.

    gate (tiles, B, T, Hk): each tile's part of the gradient of the cumulative log decay, q dq - k dk, or of log_k,
    k dk. total = B * T * Hk.
    """
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (F + BF - 1) // BF
    i_f = pid % tiles
    h = pid // tiles % heads
    chunk = pid // (tiles * heads)
    row, start, length = chunk_of(chunk, T, each, table, PACKED, C)
    if length <= 0:
        return
    i = tl.arange(0, C)
    real = i < length
    token = i.to(tl.int64)
    q += row * stride_q_b + start * stride_q_t
    k += row * stride_k_b + start * stride_k_t + h * stride_k_h
    d_out += row * stride_d_b + start * stride_d_t
    first = row * T + start
    f = i_f * BF + tl.arange(0, BF)
    in_f = f < F
    mask = real[:, None] & in_f[None, :]
    here = chunk * heads + h
    states += here * F * V
    dstates += here * F * V
    v += row * stride_v_b + start * stride_v_t + h * stride_v_h
    key = load(k + token[:, None] * stride_k_t + f[None, :], mask)
    z = load32(z_states + here * F + f, in_f)
    level = tl.zeros((C,), tl.float32)
    col = level
    query_factor = level + 1.0
    key_factor = query_factor
    if MODE > 0:
        m = 0.0
        if MODE == 2:
            m = tl.load(m_states + here)
        offsets = row * stride_g_b + h * stride_g_h + (start + token) * stride_g_t
        col, before, end = columns(g, offsets, real, m, MODE)
        level = row_of(col, before, MODE)
        query_factor = tl.exp(level - before)
        key_factor = tl.exp(end - col)
    d_key = tl.zeros((C, BF), tl.float32)
    change = tl.zeros((C,), tl.float32)
    for j in tl.range(group, disable_licm=True):  # pyright: ignore
        head = h * group + j
        place = first * heads * group + head + token * (heads * group)
        w, dd = query_weights(weight, dden, place, real, level, MODE, NORMALIZE)
        pairs = tl.zeros((C, C), tl.float32)
        d_query = tl.zeros((C, BF), tl.float32)
        for i_v in range((V + BV - 1) // BV):
            d = i_v * BV + tl.arange(0, BV)
            in_v = d < V
            grad = load(d_out + head * stride_d_h + token[:, None] * stride_d_t + d[None, :],
                        real[:, None] & in_v[None, :])  # fmt: skip
            value = load(v + token[None, :] * stride_v_t + d[:, None], in_v[:, None] & real[None, :])
            pairs = dot(grad, value, pairs, PRECISION, DTYPE)
            S = load(states + f[None, :] * V + d[:, None], in_v[:, None] & in_f[None, :])
            d_query = dot(grad, S, d_query, PRECISION, DTYPE)
        pairs = causal_pairs(pairs * w[:, None] + dd[:, None], level, col, MODE, C)
        d_query = d_query * (query_factor * w)[:, None] + (query_factor * dd)[:, None] * z[None, :]
        d_query = dot(pairs, key, d_query, PRECISION, DTYPE) * scale
        store(dq + place[:, None] * F + f[None, :], d_query, mask)
        query = load(q + head * stride_q_h + token[:, None] * stride_q_t + f[None, :], mask)
        d_key = dot(tl.trans(pairs * scale), query, d_key, PRECISION, DTYPE)
        if MODE == 1:
            change += tl.sum(query.to(tl.float32) * d_query, 1)
    at_end = tl.zeros((C, BF), tl.float32)
    for i_v in range((V + BV - 1) // BV):
        d = i_v * BV + tl.arange(0, BV)
        in_v = d < V
        value = load(v + token[:, None] * stride_v_t + d[None, :], real[:, None] & in_v[None, :])
        dS = load(dstates + f[None, :] * V + d[:, None], in_v[:, None] & in_f[None, :])
        at_end = dot(value, dS, at_end, PRECISION, DTYPE)
    dz = load32(dz_states + here * F + f, in_f)
    d_key += (at_end + dz[None, :]) * key_factor[:, None]
    place = first * heads + h + token * heads
    store(dk + place[:, None] * F + f[None, :], d_key, mask)
    if MODE > 0:
        own = tl.sum(key.to(tl.float32) * d_key, 1)
        if MODE == 1:
            own = change - own
        tl.store(gate + i_f * tl.cast(total, tl.int64) + place, own, mask=real)


@jit(do_not_specialize=LENGTHS)
def linear_bwd_v_kernel(
    q, k, d_out, g, m_states, pairs, dstates, weight, dden, dv, table, T, heads, group, each,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_d_b, stride_d_t, stride_d_h, stride_g_b, stride_g_t, stride_g_h, scale,
    MODE: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dv (B, T, Hk, V), one tile of V per program. pairs: as in `linear_out_kernel`."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (V + BV - 1) // BV
    d = pid % tiles * BV + tl.arange(0, BV)
    h = pid // tiles % heads
    chunk = pid // (tiles * heads)
    row, start, length = chunk_of(chunk, T, each, table, PACKED, C)
    if length <= 0:
        return
    i = tl.arange(0, C)
    real = i < length
    token = i.to(tl.int64)
    q += row * stride_q_b + start * stride_q_t
    d_out += row * stride_d_b + start * stride_d_t
    first = row * T + start
    in_v = d < V
    here = chunk * heads + h
    k += row * stride_k_b + start * stride_k_t + h * stride_k_h
    level = tl.zeros((C,), tl.float32)
    col = level
    key_factor = level + 1.0
    if MODE > 0:
        g += row * stride_g_b + start * stride_g_t + h * stride_g_h
    if (MODE == 1) | (MODE == 2):
        m = 0.0
        if MODE == 2:
            m = tl.load(m_states + here)
        col, before, end = columns(g, token * stride_g_t, real, m, MODE)
        level = row_of(col, before, MODE)
        key_factor = tl.exp(end - col)
    d_value = tl.zeros((C, BV), tl.float32)
    for i_f in range((F + BF - 1) // BF):
        f = i_f * BF + tl.arange(0, BF)
        mask = real[:, None] & (f < F)[None, :]
        key = load(k + token[:, None] * stride_k_t + f[None, :], mask)
        if MODE == 3:
            c = load32(g + token[:, None] * stride_g_t + f[None, :], mask)
            end_f = load32(g + (length - 1).to(tl.int64) * stride_g_t + f, f < F)
            key = key * tl.exp(tl.where(real[:, None], end_f[None, :] - c, 0.0))
        else:
            key = key * key_factor[:, None]
        dS = load(dstates + here * F * V + f[:, None] * V + d[None, :], (f < F)[:, None] & in_v[None, :])
        d_value = dot(key, dS, d_value, PRECISION, DTYPE)
    for j in tl.range(group, disable_licm=True):  # pyright: ignore
        head = h * group + j
        place = first * heads * group + head + token * (heads * group)
        w, _ = query_weights(weight, dden, place, real, level, MODE, NORMALIZE)
        if MODE == 3:
            scores = tl.load(pairs + (chunk * heads * group + head) * C * C + i[:, None] * C + i[None, :])
        else:
            scores = tl.zeros((C, C), tl.float32)
            for i_f in range((F + BF - 1) // BF):
                f = i_f * BF + tl.arange(0, BF)
                in_f = f < F
                query = load(q + head * stride_q_h + token[:, None] * stride_q_t + f[None, :],
                             real[:, None] & in_f[None, :])  # fmt: skip
                key = load(k + token[None, :] * stride_k_t + f[:, None], in_f[:, None] & real[None, :])
                scores = dot(query, key, scores, PRECISION, DTYPE)
            scores = causal_pairs(scores, level, col, MODE, C)
        grad = load(d_out + head * stride_d_h + token[:, None] * stride_d_t + d[None, :],
                    real[:, None] & in_v[None, :])  # fmt: skip
        d_value = dot(tl.trans(scores * (w * scale)[:, None]), grad, d_value, PRECISION, DTYPE)
    place = first * heads + h + token * heads
    store(dv + place[:, None] * V + d[None, :], d_value, real[:, None] & in_v[None, :])


register("linear_bwd_qk", linear_bwd_qk_kernel, variants("linear_bwd_qk", (0, 1, 2)))
register("linear_bwd_v", linear_bwd_v_kernel, variants("linear_bwd_v"))
