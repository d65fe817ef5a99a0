"""Forward: one program per block of queries, query head and tile of Dv."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .configs import Row
from .launch import LOWEST_SCORE, dot, jit, load32, store
from .window_common import HALF, LENGTHS, SINK_TILE, absorb, in_window, largest_before, scores, sinks_seen, tile

configs.add(
    "window_out",
    [
        Row({"BF": 64, "BX": 64}, dtype=HALF, most=64),
        Row({"BF": 64, "BX": 128}, num_warps=8, arch=("sm_90", "sm_100"), dtype=HALF, most=128),
        Row({"BF": 64, "BX": 64}, num_warps=8, num_stages=1, dtype=HALF),
        Row({"BF": 32, "BX": 64}),
    ],
)


@jit(do_not_specialize=LENGTHS)
def window_out_kernel(
    q, k, v, valid, phi_q, phi_k, log_q, log_k, peak, sink_k, sink_v, sink_position, gamma, states, sums,
    out, den, top,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_fb, stride_ft, stride_fh, stride_gb, stride_gt, stride_gh,
    H, HK, T, before, window, n, first, first_block, slots, n_sinks, scale, softcap, eps,
    D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    BF: tl.constexpr, BX: tl.constexpr, LOGS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Strides f are phi_q's, g phi_k's. log_q, den, top (B, T, H), out, the sinks and the states are dense."""
    pid = tl.program_id(0).to(tl.int64)
    v_tiles: tl.constexpr = (DV + BX - 1) // BX
    v_tile = pid % v_tiles
    head = pid // v_tiles % H
    blocks = (T + C - 1) // C
    i = (pid // (v_tiles * H) % blocks).to(tl.int32)
    b = pid // (v_tiles * H * blocks)
    h = head // (H // HK)
    t = i * C + tl.arange(0, C)
    real = t < T
    c = tl.arange(0, BD)
    d = v_tile * BX + tl.arange(0, BX)
    token = (b * T + t) * H + head

    # The exact part.
    query = tile(q + b * stride_qb + head * stride_qh, t, stride_qt, real, c, D)
    k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    valid += b * (before + T)
    acc = tl.zeros((C, BX), tl.float32)
    total = tl.zeros((C,), tl.float32)
    most = tl.full((C,), LOWEST_SCORE, tl.float32)
    if SINKS:
        sink_position += b * n_sinks
        sink_k += (b * n_sinks * HK + h) * D
        sink_v += (b * n_sinks * HK + h) * DV
        for s0 in range(0, n_sinks, SINK_TILE):
            slot = s0 + tl.arange(0, SINK_TILE)
            key = tile(sink_k, slot, HK * D, slot < n_sinks, c, D)
            value = tile(sink_v, slot, HK * DV, slot < n_sinks, d, DV)
            seen = sinks_seen(t, slot, n_sinks, window, T, sink_position)
            s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
            acc, total, most = absorb(acc, total, most, s, value, PRECISION, NEAR)
    begin = tl.maximum(before + i * C - window + 1, 0) // BK * BK
    end = before + tl.minimum(i * C + C, T)
    for k0 in range(begin, end, BK):
        index = k0 + tl.arange(0, BK)
        key = tile(k, index, stride_kt, index < end, c, D)
        value = tile(v, index, stride_vt, index < end, d, DV)
        seen = in_window(t, index, before, window, T, valid)
        s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
        acc, total, most = absorb(acc, total, most, s, value, PRECISION, NEAR)

    # Both parts relative to the larger of their scales.
    near = tl.load(gamma + head).to(tl.float32)
    j = t - first
    if LOGS:
        peak += b * (n + 1) * HK + h
        start = tl.load(peak + tl.maximum(tl.minimum(i * C - first, n), 0) * HK)
        logs = tl.load(log_q + token, mask=real, other=0.0)
        highest = tl.maximum(most, logs + largest_before(peak, j + 1, HK, real))
        weight = near * tl.exp(most - highest)
        far = tl.exp(tl.where(real, logs + start - highest, float("-inf")))
    else:
        highest = most
        weight = tl.full((C,), 1.0, tl.float32) * near
        far = tl.full((C,), 1.0, tl.float32)
    acc *= weight[:, None]
    total *= weight

    # The keys that have left the window: the sums before the block, and those that joined them during it.
    phi_q += b * stride_fb + head * stride_fh
    phi_k += b * stride_gb + h * stride_gh
    at = (b * HK + h) * slots + tl.maximum(i - first_block, 0)
    joined = (j >= 0) & real
    pair = tl.zeros((C, C), tl.float32)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        x = tile(phi_q, t, stride_ft, real, f, F)
        y = tile(phi_k, j, stride_gt, joined, f, F)
        pair = dot(x, tl.trans(y), pair, PRECISION, FAR)
        x = x.to(tl.float32) * far[:, None]
        z = load32(sums + at * F + f, f < F)
        total += tl.sum(x * z[None, :], 1)
        S = tile(states + at * F * DV, f, DV, f < F, d, DV)
        acc = dot(x, S, acc, PRECISION, FAR)
    seen = (t[None, :] <= t[:, None]) & joined[None, :] & real[:, None]
    if LOGS:
        key_logs = tl.load(log_k + b * n * HK + h + j.to(tl.int64) * HK, mask=joined, other=0.0)
        exponent = (logs - highest)[:, None] + key_logs[None, :]
        pair *= tl.exp(tl.where(seen, exponent, float("-inf")))
    else:
        pair = tl.where(seen, pair, 0.0)
    total += tl.sum(pair, 1)
    acc = dot(pair, tile(v, j, stride_vt, joined, d, DV), acc, PRECISION, FAR)

    acc = acc / tl.maximum(total, eps)[:, None]
    store(out + token[:, None] * DV + d[None, :], acc, real[:, None] & (d < DV)[None, :])
    if v_tile == 0:
        store(den + token, total, real)
        store(top + token, highest, real)
