"""Gradients of the states of linear attention: from the end of a sequence back to its start."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import sequence_of
from .configs import Row
from .launch import LENGTHS, dot, jit, load, load32, register, store
from .linear_cases import variants
from .linear_chunks import columns, row_of

configs.add("linear_bwd_rows", [Row({"BR": 32, "BV": 64})])
configs.add(
    "linear_bwd_states",
    [Row({"BF": 64, "BV": 64}, num_warps=4, num_stages=2, dtype=("bf16", "fp16")), Row({"BF": 32, "BV": 32})],
)


@jit(do_not_specialize=LENGTHS)
def linear_bwd_rows_kernel(
    d_out, out, den, weight, dden, count, T, queries, stride_d_b, stride_d_t, stride_d_h, eps,
    V: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """With out = num / max(den, eps): weight = d num / d_out and dden = the gradient of den, both (B, T, H)."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = r < count
    head, token, row = r % queries, r // queries % T, r // (queries * T)
    d_out += row * stride_d_b + token * stride_d_t + head * stride_d_h
    total = tl.zeros((BR,), tl.float32)
    for i in range((V + BV - 1) // BV):
        d = i * BV + tl.arange(0, BV)
        mask = real[:, None] & (d < V)[None, :]
        total += tl.sum(load32(d_out[:, None] + d[None, :], mask) * load32(out + r[:, None] * V + d[None, :], mask), 1)
    x = tl.load(den + r, mask=real, other=1.0)
    inverse = 1.0 / tl.maximum(x, eps)
    tl.store(weight + r, inverse, mask=real)
    tl.store(dden + r, tl.where(x < eps, 0.0, -total * inverse), mask=real)


@jit
def query_weights(weight, dden, place, real, level, MODE: tl.constexpr, NORMALIZE: tl.constexpr):
    """d num / d_out and the gradient of den for the queries at `place`, 0 where not real."""
    if NORMALIZE:
        w = tl.load(weight + place, mask=real, other=0.0)
        dd = tl.load(dden + place, mask=real, other=0.0)
    else:
        w = tl.where(real, 1.0, 0.0)
        dd = w * 0.0
        if MODE == 2:
            w = tl.where(real, tl.exp(-level), 0.0)
    return w, dd


@jit(do_not_specialize=LENGTHS)
def linear_bwd_states_kernel(
    q, d_out, g, m_states, weight, dden, dS1, dz1, dstates, dz_states, dS0, dz0, cu, first, T, heads, group, each,
    stride_q_b, stride_q_t, stride_q_h, stride_d_b, stride_d_t, stride_d_h, stride_g_b, stride_g_t, stride_g_h, scale,
    MODE: tl.constexpr, NORMALIZE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dstates (count, Hk, F, V), dz_states (count, Hk, F) at the end of each chunk; dS0, dz0 at the start."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_v: tl.constexpr = (V + BV - 1) // BV
    tiles_f: tl.constexpr = (F + BF - 1) // BF
    i_v = pid % tiles_v
    i_f = pid // tiles_v % tiles_f
    owner = pid // (tiles_v * tiles_f)
    seq, h = owner // heads, owner % heads
    row, start, stop, chunk = sequence_of(seq, T, each, cu, first, PACKED)
    f = i_f * BF + tl.arange(0, BF)
    d = i_v * BV + tl.arange(0, BV)
    in_f, in_v = f < F, d < V
    tile, in_tile = f[:, None] * V + d[None, :], in_f[:, None] & in_v[None, :]
    dS = load32(dS1 + owner * F * V + tile, in_tile)
    dz = load32(dz1 + owner * F + f, in_f)
    n = tl.arange(0, C)
    token = n.to(tl.int64)
    q += row * stride_q_b + h * group * stride_q_h
    d_out += row * stride_d_b + h * group * stride_d_h
    if MODE > 0:
        g += row * stride_g_b + h * stride_g_h
    count = tl.cdiv(stop - start, C)
    for back in range(count):
        i = count - 1 - back
        here = (chunk + i) * heads + h
        store(dstates + here * F * V + tile, dS, in_tile)
        if i_v == 0:
            store(dz_states + here * F + f, dz, in_f)
        first_token = start + i * C
        length = tl.minimum(stop - first_token, C).to(tl.int32)
        real = n < length
        g_here = g
        if MODE > 0:
            g_here = g + first_token * stride_g_t
        mask = in_f[:, None] & real[None, :]
        factor = tl.where(real, scale, 0.0)
        level = factor
        if MODE == 3:
            c = load32(g_here + token[None, :] * stride_g_t + f[:, None], mask)
            end_f = load32(g_here + (length - 1).to(tl.int64) * stride_g_t + f, in_f)
            dS = dS * tl.exp(end_f)[:, None]
            dz = dz * tl.exp(end_f)
        elif MODE > 0:
            m = 0.0
            if MODE == 2:
                m = tl.load(m_states + here)
            col, before, end = columns(g_here, token * stride_g_t, real, m, MODE)
            level = row_of(col, before, MODE)
            factor *= tl.exp(level - before)
            dS = dS * tl.exp(end - before)
            dz = dz * tl.exp(end - before)
        place = ((row * T + first_token) * heads + h) * group + token * heads * group
        for j in tl.range(group, disable_licm=True):  # pyright: ignore
            w, dd = query_weights(weight, dden, place + j, real, level, MODE, NORMALIZE)
            q_here = q + first_token * stride_q_t + tl.cast(j, tl.int64) * stride_q_h
            d_here = d_out + first_token * stride_d_t + tl.cast(j, tl.int64) * stride_d_h
            query = load(q_here + token[None, :] * stride_q_t + f[:, None], mask)
            grad = load(d_here + token[:, None] * stride_d_t + d[None, :], real[:, None] & in_v[None, :])
            if MODE == 3:
                query = query * tl.exp(c)
            dz += tl.sum(query.to(tl.float32) * (factor * dd)[None, :], 1)
            dS = dot(query * (factor * w)[None, :], grad, dS, PRECISION, DTYPE)
    store(dS0 + owner * F * V + tile, dS, in_tile)
    if i_v == 0:
        store(dz0 + owner * F + f, dz, in_f)


register("linear_bwd_rows", linear_bwd_rows_kernel, variants("linear_bwd_rows", (0,)))
register("linear_bwd_states", linear_bwd_states_kernel, variants("linear_bwd_states"))
