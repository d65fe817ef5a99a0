"""Gradients of queries and keys where decays differ by feature. Anchors as in `linear_vector`."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of
from .configs import Row
from .launch import LENGTHS, dot, jit, load, load32, register, store
from .linear_bwd_states import query_weights
from .linear_cases import variants
from .linear_vector import SUB

configs.add("linear_bwd_pairs", [Row({"BV": 64}, dtype=("bf16", "fp16")), Row({"BV": 32})])
configs.add(
    "linear_bwd_vector",
    [
        Row({"BF": 32, "BV": 64}, num_stages=1, most=64, arch=("sm_80", "sm_86", "sm_90", "sm_100")),
        Row({"BF": 16, "BV": 64}, num_stages=1),
    ],
)


@jit(do_not_specialize=LENGTHS)
def linear_bwd_pairs_kernel(
    v, d_out, weight, dden, dpairs, table, T, heads, group, each,
    stride_v_b, stride_v_t, stride_v_h, stride_d_b, stride_d_t, stride_d_h,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dpairs (count, H, C, C), 0 for j > t: the gradient of `pairs`."""
    pid = tl.program_id(0).to(tl.int64)
    queries = heads * group
    head = pid % queries
    row, start, length = chunk_of(pid // queries, T, each, table, PACKED, C)
    if length <= 0:
        return
    i = tl.arange(0, C)
    token = i.to(tl.int64)
    real = i < length
    v += row * stride_v_b + start * stride_v_t + head // group * stride_v_h
    d_out += row * stride_d_b + start * stride_d_t + head * stride_d_h
    x = tl.zeros((C, C), tl.float32)
    for i_v in range((V + BV - 1) // BV):
        d = i_v * BV + tl.arange(0, BV)
        in_v = d < V
        grad = load(d_out + token[:, None] * stride_d_t + d[None, :], real[:, None] & in_v[None, :])
        value = load(v + token[None, :] * stride_v_t + d[:, None], in_v[:, None] & real[None, :])
        x = dot(grad, value, x, PRECISION, DTYPE)
    w, dd = query_weights(weight, dden, (row * T + start) * queries + head + token * queries, real, dden, 3, NORMALIZE)
    x = tl.where(i[None, :] <= i[:, None], x * w[:, None] + dd[:, None], 0.0)
    tl.store(dpairs + pid * C * C + i[:, None] * C + i[None, :], x)


@jit(do_not_specialize=LENGTHS)
def linear_bwd_vector_kernel(
    q, k, v, d_out, g, states, z_states, dstates, dz_states, weight, dden, dpairs, dq, dk, gate, table,
    T, heads, group, each, stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h, stride_d_b, stride_d_t, stride_d_h, stride_g_b, stride_g_t, stride_g_h, scale,
    NORMALIZE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """dq (B, T, H, F), dk and gate = q dq - k dk (B, T, Hk, F): one program for SUB tokens and one tile of F."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (F + BF - 1) // BF
    sub = (pid % (C // SUB) * SUB).to(tl.int32)
    i_f = pid // (C // SUB) % tiles
    h = pid // (C // SUB * tiles) % heads
    chunk = pid // (C // SUB * tiles * heads)
    row, start, length = chunk_of(chunk, T, each, table, PACKED, C)
    if sub >= length:
        return
    f = i_f * BF + tl.arange(0, BF)
    in_f = f < F
    t, j = sub + tl.arange(0, SUB), tl.arange(0, C)
    token, other = t.to(tl.int64), j.to(tl.int64)
    real = t < length
    older, later = (j < sub) & (j < length), (j >= sub + SUB) & (j < length)
    first_row = row * T + start
    mask = real[:, None] & in_f[None, :]
    here = chunk * heads + h
    states += here * F * V
    dstates += here * F * V
    q += row * stride_q_b + start * stride_q_t
    k += row * stride_k_b + start * stride_k_t + h * stride_k_h
    v += row * stride_v_b + start * stride_v_t + h * stride_v_h
    d_out += row * stride_d_b + start * stride_d_t
    g += row * stride_g_b + start * stride_g_t + h * stride_g_h
    key = load32(k + token[:, None] * stride_k_t + f[None, :], mask)
    c = load32(g + token[:, None] * stride_g_t + f[None, :], mask)
    c_all = load32(g + other[:, None] * stride_g_t + f[None, :], (j < length)[:, None] & in_f[None, :])
    first = load32(g + sub.to(tl.int64) * stride_g_t + f, in_f)
    z = load32(z_states + here * F + f, in_f)
    before = load32(k + other[:, None] * stride_k_t + f[None, :], older[:, None] & in_f[None, :])
    before = before * tl.exp(tl.minimum(first[None, :] - c_all, 0.0))
    i = tl.arange(0, SUB)
    seen = (i[None, :] <= i[:, None])[:, :, None]
    within = tl.exp(tl.where(seen, tl.minimum(c[:, None, :] - c[None, :, :], 0.0), float("-inf")))
    change = tl.zeros((SUB, BF), tl.float32)
    for n in tl.range(group, disable_licm=True):  # pyright: ignore
        head = h * group + n
        place = first_row * heads * group + head + token * (heads * group)
        w, dd = query_weights(weight, dden, place, real, dden, 3, NORMALIZE)
        inter = tl.zeros((SUB, BF), tl.float32)
        for i_v in range((V + BV - 1) // BV):
            d = i_v * BV + tl.arange(0, BV)
            grad = load(d_out + head * stride_d_h + token[:, None] * stride_d_t + d[None, :],
                        real[:, None] & (d < V)[None, :])  # fmt: skip
            S = load(states + f[None, :] * V + d[:, None], (d < V)[:, None] & in_f[None, :])
            inter = dot(grad, S, inter, PRECISION, DTYPE)
        d_query = (inter * w[:, None] + dd[:, None] * z[None, :]) * tl.exp(c)
        pair = dpairs + (chunk * heads * group + head) * C * C
        own = tl.load(pair + t[:, None] * C + t[None, :])
        query = load32(q + head * stride_q_h + token[:, None] * stride_q_t + f[None, :], mask)
        d_query += tl.sum(own[:, :, None] * key[None, :, :] * within, 1)
        rows = tl.load(pair + t[:, None] * C + j[None, :], mask=older[None, :] & (t >= 0)[:, None], other=0.0)
        d_query += dot(rows, before, None, PRECISION, DTYPE) * tl.exp(tl.minimum(c - first[None, :], 0.0))
        d_query *= scale
        store(dq + place[:, None] * F + f[None, :], d_query, mask)
        change += query * d_query
    # Keys in a loop of their own: together with queries they would need more registers than there are.
    last = load32(g + (tl.minimum(sub + SUB, length) - 1).to(tl.int64) * stride_g_t + f, in_f)
    after = tl.exp(tl.minimum(c_all - last[None, :], 0.0))
    d_key = tl.zeros((SUB, BF), tl.float32)
    d_later = tl.zeros((SUB, BF), tl.float32)
    for n in tl.range(group, disable_licm=True):  # pyright: ignore
        head = h * group + n
        pair = dpairs + (chunk * heads * group + head) * C * C
        own = tl.load(pair + t[:, None] * C + t[None, :])
        query = load32(q + head * stride_q_h + token[:, None] * stride_q_t + f[None, :], mask)
        d_key += tl.sum(own[:, :, None] * query[:, None, :] * within, 0) * scale
        columns = tl.load(pair + j[None, :] * C + t[:, None], mask=later[None, :] & (t >= 0)[:, None], other=0.0)
        new = load32(q + head * stride_q_h + other[:, None] * stride_q_t + f[None, :],
                     later[:, None] & in_f[None, :])  # fmt: skip
        d_later = dot(columns * scale, new * after, d_later, PRECISION, DTYPE)
    at_end = tl.zeros((SUB, BF), tl.float32)
    for i_v in range((V + BV - 1) // BV):
        d = i_v * BV + tl.arange(0, BV)
        value = load(v + token[:, None] * stride_v_t + d[None, :], real[:, None] & (d < V)[None, :])
        dS = load(dstates + f[None, :] * V + d[:, None], (d < V)[:, None] & in_f[None, :])
        at_end = dot(value, dS, at_end, PRECISION, DTYPE)
    end = load32(g + (length - 1).to(tl.int64) * stride_g_t + f, in_f)
    dz = load32(dz_states + here * F + f, in_f)
    d_key += (at_end + dz[None, :]) * tl.exp(tl.minimum(end[None, :] - c, 0.0))
    d_key += d_later * tl.exp(tl.minimum(last[None, :] - c, 0.0))
    place = first_row * heads + h + token * heads
    store(dk + place[:, None] * F + f[None, :], d_key, mask)
    store(gate + place[:, None] * F + f[None, :], change - key * d_key, mask)


register("linear_bwd_pairs", linear_bwd_pairs_kernel, variants("linear_bwd_pairs", (3,)))
register("linear_bwd_vector", linear_bwd_vector_kernel, variants("linear_bwd_vector", (3,), SUB=SUB))
