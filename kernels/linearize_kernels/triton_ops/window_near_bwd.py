"""Gradients of the exact part: of q and the sinks by blocks of queries, of keys and values by tiles of keys.

inverse, slope as in `window_far_bwd`. ds = gamma p (inverse d_out . v + slope) for a score s with p = exp(s - top).
Without logs the largest score is part of the function: its keys share `tie` (B, T, H) = gamma sum(p dp) / their number.
"""

from __future__ import annotations

import triton.language as tl

from . import configs
from .configs import Row
from .launch import dot, jit, load32, store
from .window_common import HALF, LENGTHS, SINK_TILE, TIE, in_window, scores, sinks_seen, tile

configs.add("window_rows", [Row({"ROWS": 16})])
for _name in ("window_dq", "window_dkv"):
    configs.add(
        _name,
        [
            Row({}, num_stages=1, arch=("sm_90", "sm_100"), dtype=HALF, most=64),
            Row({}, num_warps=8, num_stages=1),
        ],
    )


@jit(do_not_specialize=LENGTHS)
def window_rows_kernel(
    d_out, out, den, inverse, slope, held, rows, eps, DV: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr
):
    """Per row: 1 / denominator, the denominator's gradient, and d_out . out where `eps` holds it (0 elsewhere)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BV)
    real = row < rows
    inside = real[:, None] & (d < DV)[None, :]
    at = row[:, None] * DV + d[None, :]
    product = tl.sum(load32(d_out + at, inside) * load32(out + at, inside), 1)
    total = tl.load(den + row, mask=real, other=1.0)
    free = total >= eps
    one_over = 1.0 / tl.maximum(total, eps)
    store(inverse + row, one_over, real)
    store(slope + row, tl.where(free, product * -one_over, 0.0), real)
    store(held + row, tl.where(free, 0.0, product), real)


@jit
def _score_gradient(s, dp, seen, near, highest, share, softcap, RELATIVE: tl.constexpr, SOFTCAP: tl.constexpr):
    """(the gradient of q k^T scale, p dp) from scores s (queries, keys) and the gradient dp of their weights."""
    p = tl.exp(s - highest[:, None])
    product = p * dp
    ds = near * product
    if RELATIVE:
        ds -= tl.where(_at_top(s, highest), share[:, None], 0.0)
    if SOFTCAP:
        part = tl.where(seen, s, 0.0) / softcap
        ds *= 1.0 - part * part
    return tl.where(seen, ds, 0.0), product


@jit
def _at_top(s, highest):
    return s - highest[:, None] >= -TIE * tl.abs(highest)[:, None]


@jit(do_not_specialize=LENGTHS)
def window_dq_kernel(
    q, k, v, valid, sink_k, sink_v, sink_position, gamma, d_out, inverse, slope, top, far,
    dq, tie, d_sink_k, d_sink_v, d_gamma,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    H, HK, T, before, window, n_sinks, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    RELATIVE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """far (B, T, H): what the exact part's weights gain together by growing, gamma sum(p dp), known from the far part.

    dq is dense. d_sink_k (B, blocks, H, sinks, D), d_sink_v, d_gamma (B, blocks, H): one part for each block.
    """
    pid = tl.program_id(0).to(tl.int64)
    head = pid % H
    blocks = (T + C - 1) // C
    i = (pid // H % blocks).to(tl.int32)
    b = pid // (H * blocks)
    h = head // (H // HK)
    t = i * C + tl.arange(0, C)
    real = t < T
    c = tl.arange(0, BD)
    d = tl.arange(0, BV)
    token = (b * T + t) * H + head
    near = tl.load(gamma + head).to(tl.float32)
    query = tile(q + b * stride_qb + head * stride_qh, t, stride_qt, real, c, D)
    d_o = tile(d_out + (b * T * H + head) * DV, t, H * DV, real, d, DV)
    weight = tl.load(inverse + token, mask=real, other=0.0)
    shift = tl.load(slope + token, mask=real, other=0.0)
    highest = tl.load(top + token, mask=real, other=0.0)
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    valid += b * (before + T)
    sink_position += b * n_sinks
    sink_k += (b * n_sinks * HK + h) * D
    sink_v += (b * n_sinks * HK + h) * DV
    begin = tl.maximum(before + i * C - window + 1, 0) // BK * BK
    end = before + tl.minimum(i * C + C, T)

    share = tl.zeros((C,), tl.float32)
    if RELATIVE:
        count = tl.zeros((C,), tl.float32)
        if SINKS:
            for s0 in range(0, n_sinks, SINK_TILE):
                slot = s0 + tl.arange(0, SINK_TILE)
                seen = sinks_seen(t, slot, n_sinks, window, T, sink_position)
                key = tile(sink_k, slot, HK * D, slot < n_sinks, c, D)
                s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
                count += tl.sum(tl.where(_at_top(s, highest) & seen, 1.0, 0.0), 1)
        for k0 in range(begin, end, BK):
            index = k0 + tl.arange(0, BK)
            seen = in_window(t, index, before, window, T, valid)
            key = tile(k, index, stride_kt, index < end, c, D)
            s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
            count += tl.sum(tl.where(_at_top(s, highest) & seen, 1.0, 0.0), 1)
        share = tl.load(far + token, mask=real, other=0.0) / tl.maximum(count, 1.0)
        store(tie + token, share, real)

    grad = tl.zeros((C, BD), tl.float32)
    gain = tl.zeros((C,), tl.float32)
    if SINKS:
        for s0 in range(0, n_sinks, SINK_TILE):
            slot = s0 + tl.arange(0, SINK_TILE)
            seen = sinks_seen(t, slot, n_sinks, window, T, sink_position)
            key = tile(sink_k, slot, HK * D, slot < n_sinks, c, D)
            value = tile(sink_v, slot, HK * DV, slot < n_sinks, d, DV)
            s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
            dp = dot(d_o, tl.trans(value), None, PRECISION, NEAR) * weight[:, None] + shift[:, None]
            ds, product = _score_gradient(s, dp, seen, near, highest, share, softcap, RELATIVE, SOFTCAP)
            gain += tl.sum(product, 1)
            grad = dot(ds, key, grad, PRECISION, NEAR)
            d_key = dot(tl.trans(ds), query, None, PRECISION, NEAR) * scale
            p = tl.exp(s - highest[:, None]) * (near * weight)[:, None]
            d_value = dot(tl.trans(p), d_o, None, PRECISION, NEAR)
            rows = (pid * n_sinks + slot)[:, None]
            store(d_sink_k + rows * D + c[None, :], d_key, (slot < n_sinks)[:, None] & (c < D)[None, :])
            store(d_sink_v + rows * DV + d[None, :], d_value, (slot < n_sinks)[:, None] & (d < DV)[None, :])
    for k0 in range(begin, end, BK):
        index = k0 + tl.arange(0, BK)
        seen = in_window(t, index, before, window, T, valid)
        key = tile(k, index, stride_kt, index < end, c, D)
        value = tile(v, index, stride_vt, index < end, d, DV)
        s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
        dp = dot(d_o, tl.trans(value), None, PRECISION, NEAR) * weight[:, None] + shift[:, None]
        ds, product = _score_gradient(s, dp, seen, near, highest, share, softcap, RELATIVE, SOFTCAP)
        gain += tl.sum(product, 1)
        grad = dot(ds, key, grad, PRECISION, NEAR)
    store(dq + token[:, None] * D + c[None, :], grad * scale, real[:, None] & (c < D)[None, :])
    tl.store(d_gamma + pid, tl.sum(gain, 0))


@jit(do_not_specialize=LENGTHS)
def window_dkv_kernel(
    q, k, v, valid, gamma, d_out, inverse, slope, top, tie, fold_dv, dk, dv,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    H, HK, T, before, window, n, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    RELATIVE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """fold_dv (B, n, Hk, Dv): what `window_fold_dv` found for the first n values. dk, dv are dense."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % HK
    L = before + T
    tiles = (L + BK - 1) // BK
    k0 = (pid // HK % tiles).to(tl.int32) * BK
    b = pid // (HK * tiles)
    index = k0 + tl.arange(0, BK)
    inside = index < L
    c = tl.arange(0, BD)
    d = tl.arange(0, BV)
    key = tile(k + b * stride_kb + h * stride_kh, index, stride_kt, inside, c, D)
    value = tile(v + b * stride_vb + h * stride_vh, index, stride_vt, inside, d, DV)
    valid += b * L
    d_key = tl.zeros((BK, BD), tl.float32)
    folded = index < n
    d_value = load32(
        fold_dv + ((b * n + index[:, None]) * HK + h) * DV + d[None, :], folded[:, None] & (d < DV)[None, :]
    )
    begin = tl.maximum(k0 - before, 0) // C * C
    end = tl.minimum(k0 + BK - 1 - before + window, T)
    for g in range(H // HK):
        head = h * (H // HK) + g
        near = tl.load(gamma + head).to(tl.float32)
        for t0 in range(begin, end, C):
            t = t0 + tl.arange(0, C)
            real = t < T
            token = (b * T + t) * H + head
            query = tile(q + b * stride_qb + head * stride_qh, t, stride_qt, real, c, D)
            d_o = tile(d_out + (b * T * H + head) * DV, t, H * DV, real, d, DV)
            weight = tl.load(inverse + token, mask=real, other=0.0)
            shift = tl.load(slope + token, mask=real, other=0.0)
            highest = tl.load(top + token, mask=real, other=0.0)
            share = tl.zeros((C,), tl.float32)
            if RELATIVE:
                share = tl.load(tie + token, mask=real, other=0.0)
            seen = in_window(t, index, before, window, T, valid)
            s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
            dp = dot(d_o, tl.trans(value), None, PRECISION, NEAR) * weight[:, None] + shift[:, None]
            ds, _ = _score_gradient(s, dp, seen, near, highest, share, softcap, RELATIVE, SOFTCAP)
            p = tl.exp(s - highest[:, None]) * (near * weight)[:, None]
            d_value = dot(tl.trans(p), d_o, d_value, PRECISION, NEAR)
            d_key = dot(tl.trans(ds), query, d_key, PRECISION, NEAR)
    rows = (b * L + index[:, None]) * HK + h
    store(dk + rows * D + c[None, :], d_key * scale, inside[:, None] & (c < D)[None, :])
    store(dv + rows * DV + d[None, :], d_value, inside[:, None] & (d < DV)[None, :])
