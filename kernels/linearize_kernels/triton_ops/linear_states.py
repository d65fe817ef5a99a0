"""The states before every chunk: one program walks along a sequence for one tile of S."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import sequence_of
from .configs import Row
from .launch import LENGTHS, dot, jit, load, load32, register, store
from .linear_cases import variants
from .linear_chunks import columns

configs.add(
    "linear_states",
    [Row({"BF": 64, "BV": 64}, num_warps=4, num_stages=2, dtype=("bf16", "fp16")), Row({"BF": 32, "BV": 32})],
)


@jit(do_not_specialize=LENGTHS)
def linear_states_kernel(
    k, v, g, S0, z0, m0, states, z_states, m_states, S1, z1, m1, cu, first, T, heads, each,
    stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t, stride_v_h, stride_g_b, stride_g_t, stride_g_h,
    MODE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """k (B, T, Hk, F), v (B, T, Hk, V); g: log_decay or log_k (B, T, Hk), or c (B, T, Hk, F) for VECTOR.

    states (count, Hk, F, V), z_states (count, Hk, F), m_states (count, Hk) before each chunk; S1, z1, m1 at the end.
    """
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
    S = load32(S0 + owner * F * V + tile, in_tile)
    z = load32(z0 + owner * F + f, in_f)
    m = tl.load(m0 + owner)
    k += row * stride_k_b + start * stride_k_t + h * stride_k_h
    v += row * stride_v_b + start * stride_v_t + h * stride_v_h
    if MODE > 0:
        g += row * stride_g_b + start * stride_g_t + h * stride_g_h
    j = tl.arange(0, C)
    token = j.to(tl.int64)
    for i in range(tl.cdiv(stop - start, C)):
        here = (chunk + i) * heads + h
        store(states + here * F * V + tile, S, in_tile)
        if i_v == 0:
            store(z_states + here * F + f, z, in_f)
            if (i_f == 0) & (MODE == 2):
                tl.store(m_states + here, m)
        length = tl.minimum(stop - start, C).to(tl.int32)
        real = j < length
        key = load(k + token[None, :] * stride_k_t + f[:, None], in_f[:, None] & real[None, :])
        value = load(v + token[:, None] * stride_v_t + d[None, :], real[:, None] & in_v[None, :])
        if MODE == 3:
            c = load32(g + token[None, :] * stride_g_t + f[:, None], in_f[:, None] & real[None, :])
            end_f = load32(g + (length - 1).to(tl.int64) * stride_g_t + f, in_f)
            key = key * tl.exp(tl.where(real[None, :], end_f[:, None] - c, 0.0))
            S = S * tl.exp(end_f)[:, None]
            z = z * tl.exp(end_f)
        elif MODE > 0:
            col, before, end = columns(g, token * stride_g_t, real, m, MODE)
            key = key * tl.exp(end - col)[None, :]
            S = S * tl.exp(end - before)
            z = z * tl.exp(end - before)
            if MODE == 2:
                m = -end
        z += tl.sum(key.to(tl.float32), 1)
        S = dot(key, value, S, PRECISION, DTYPE)
        start += C
        k += C * tl.cast(stride_k_t, tl.int64)
        v += C * tl.cast(stride_v_t, tl.int64)
        if MODE > 0:
            g += C * tl.cast(stride_g_t, tl.int64)
    store(S1 + owner * F * V + tile, S, in_tile)
    if i_v == 0:
        store(z1 + owner * F + f, z, in_f)
        if i_f == 0:
            tl.store(m1 + owner, m)


register("linear_states", linear_states_kernel, variants("linear_states"))
