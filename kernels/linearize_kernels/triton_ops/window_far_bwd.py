"""Gradients of the far part, block by block: of phi_q, of phi_k, and of the values through the sums.

inverse (B, T, H) = 1 / max(den, eps), slope (B, T, H) the gradient of the denominator. A key's weight for a query is
phi_q . phi_k times exp(log_q + log_k - top), and the gradient of that weight is inverse d_out . v + slope.
"""

from __future__ import annotations

import triton.language as tl

from . import configs
from .configs import Row
from .launch import dot, jit, load32, store
from .window_common import HALF, LENGTHS, tile

for _name in ("window_dphi_q", "window_dphi_k"):
    configs.add(
        _name,
        [
            Row({"BF": 64}, dtype=HALF, most=64),
            Row({"BF": 64}, num_warps=8, dtype=HALF),
            Row({"BF": 32}, most=64),
            Row({"BF": 32}, num_warps=8),
        ],
    )
configs.add(
    "window_fold_dv",
    [
        Row({"BF": 64, "BX": 64}, dtype=HALF, most=64),
        Row({"BF": 64, "BX": 128}, num_warps=8, dtype=HALF),
        Row({"BF": 32, "BX": 64}),
    ],
)


@jit
def _factor(log_q, log_k, top, token, b, h, HK, n, t, j, real, joined, LOGS: tl.constexpr):
    """(queries, keys): exp(log_q + log_k - top), or 1, where the key has joined the sums for the query; else 0."""
    seen = (t[None, :] <= t[:, None]) & joined[None, :] & real[:, None]
    if LOGS:
        rows = tl.load(log_q + token, mask=real, other=0.0) - tl.load(top + token, mask=real, other=0.0)
        columns = tl.load(log_k + (b * n + j) * HK + h, mask=joined, other=0.0)
        exponent = rows[:, None] + columns[None, :]
        return tl.exp(tl.where(seen, exponent, float("-inf")))
    return tl.where(seen, 1.0, 0.0)


@jit(do_not_specialize=LENGTHS)
def window_dphi_q_kernel(
    phi_q, phi_k, v, log_q, log_k, peak, states, sums, d_out, inverse, slope, top, d_phi_q, far,
    stride_fb, stride_ft, stride_fh, stride_gb, stride_gt, stride_gh, stride_vb, stride_vt, stride_vh,
    H, HK, T, n, first, first_block, slots,
    DV: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    LOGS: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """far (B, T, H, tiles of F) = phi_q . d_phi_q, by tiles. d_phi_q is dense."""
    pid = tl.program_id(0).to(tl.int64)
    f_tiles: tl.constexpr = (F + BF - 1) // BF
    f_tile = pid % f_tiles
    head = pid // f_tiles % H
    blocks = (T + C - 1) // C
    i = (pid // (f_tiles * H) % blocks).to(tl.int32)
    b = pid // (f_tiles * H * blocks)
    h = head // (H // HK)
    t = i * C + tl.arange(0, C)
    j = t - first
    real = t < T
    joined = (j >= 0) & real
    f = f_tile * BF + tl.arange(0, BF)
    d = tl.arange(0, BV)
    token = (b * T + t) * H + head
    scale = tl.load(inverse + token, mask=real, other=0.0)
    shift = tl.load(slope + token, mask=real, other=0.0)

    d_o = tile(d_out + (b * T * H + head) * DV, t, H * DV, real, d, DV)
    at = (b * HK + h) * slots + tl.maximum(i - first_block, 0)
    S = tile(states + at * F * DV, f, DV, f < F, d, DV)
    z = load32(sums + at * F + f, f < F)
    acc = dot(d_o, tl.trans(S), None, PRECISION, FAR) * scale[:, None] + shift[:, None] * z[None, :]
    if LOGS:
        start = tl.load(peak + b * (n + 1) * HK + h + tl.maximum(tl.minimum(i * C - first, n), 0) * HK)
        logs = tl.load(log_q + token, mask=real, other=0.0) - tl.load(top + token, mask=real, other=0.0)
        acc *= tl.exp(tl.where(real, logs + start, float("-inf")))[:, None]
    values = tile(v + b * stride_vb + h * stride_vh, j, stride_vt, joined, d, DV)
    pair = dot(d_o, tl.trans(values), None, PRECISION, FAR) * scale[:, None] + shift[:, None]
    pair *= _factor(log_q, log_k, top, token, b, h, HK, n, t, j, real, joined, LOGS)
    y = tile(phi_k + b * stride_gb + h * stride_gh, j, stride_gt, joined, f, F)
    acc = dot(pair, y, acc, PRECISION, FAR)

    store(d_phi_q + token[:, None] * F + f[None, :], acc, real[:, None] & (f < F)[None, :])
    x = tile(phi_q + b * stride_fb + head * stride_fh, t, stride_ft, real, f, F).to(tl.float32)
    store(far + token * f_tiles + f_tile, tl.sum(acc * x, 1), real)


@jit(do_not_specialize=LENGTHS)
def window_dphi_k_kernel(
    phi_q, phi_k, v, log_q, log_k, peak, d_states, d_sums, d_out, inverse, slope, top, d_phi_k, d_log_k,
    stride_fb, stride_ft, stride_fh, stride_gb, stride_gt, stride_gh, stride_vb, stride_vt, stride_vh, stride_db,
    H, HK, T, n, first, first_block, slots,
    DV: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    LOGS: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """d_phi_k (B, >= n, Hk, F) dense; d_log_k (B, n, Hk, tiles of F) = phi_k . d_phi_k, by tiles."""
    pid = tl.program_id(0).to(tl.int64)
    f_tiles: tl.constexpr = (F + BF - 1) // BF
    f_tile = pid % f_tiles
    h = pid // f_tiles % HK
    i = (pid // (f_tiles * HK) % slots).to(tl.int32) + first_block
    b = pid // (f_tiles * HK * slots)
    t = i * C + tl.arange(0, C)
    j = t - first
    real = t < T
    joined = (j >= 0) & real
    f = f_tile * BF + tl.arange(0, BF)
    d = tl.arange(0, BV)

    at = (b * HK + h) * slots + (i - first_block)
    values = tile(v + b * stride_vb + h * stride_vh, j, stride_vt, joined, d, DV)
    dS = tile(d_states + at * F * DV, f, DV, f < F, d, DV)
    dz = load32(d_sums + at * F + f, f < F)
    acc = dot(values, tl.trans(dS), None, PRECISION, FAR) + dz[None, :]
    if LOGS:
        end = tl.load(peak + b * (n + 1) * HK + h + tl.maximum(tl.minimum(i * C + C - first, n), 0) * HK)
        logs = tl.load(log_k + (b * n + j) * HK + h, mask=joined, other=0.0)
        acc *= tl.exp(tl.where(joined, logs - end, float("-inf")))[:, None]
    for g in range(H // HK):
        head = h * (H // HK) + g
        token = (b * T + t) * H + head
        scale = tl.load(inverse + token, mask=real, other=0.0)
        shift = tl.load(slope + token, mask=real, other=0.0)
        d_o = tile(d_out + (b * T * H + head) * DV, t, H * DV, real, d, DV)
        pair = dot(d_o, tl.trans(values), None, PRECISION, FAR) * scale[:, None] + shift[:, None]
        pair *= _factor(log_q, log_k, top, token, b, h, HK, n, t, j, real, joined, LOGS)
        x = tile(phi_q + b * stride_fb + head * stride_fh, t, stride_ft, real, f, F)
        acc = dot(tl.trans(pair), x, acc, PRECISION, FAR)

    store(d_phi_k + b * stride_db + (j[:, None] * HK + h) * F + f[None, :], acc, joined[:, None] & (f < F)[None, :])
    if LOGS:
        y = tile(phi_k + b * stride_gb + h * stride_gh, j, stride_gt, joined, f, F).to(tl.float32)
        store(d_log_k + ((b * n + j) * HK + h) * f_tiles + f_tile, tl.sum(acc * y, 1), joined)


@jit(do_not_specialize=LENGTHS)
def window_fold_dv_kernel(
    phi_q, phi_k, log_q, log_k, peak, d_states, d_out, inverse, top, dv,
    stride_fb, stride_ft, stride_fh, stride_gb, stride_gt, stride_gh,
    H, HK, T, n, first, first_block, slots,
    DV: tl.constexpr, F: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BX: tl.constexpr,
    LOGS: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dv (B, n, Hk, Dv), float32, dense: the part of the values' gradient that goes through the sums."""
    pid = tl.program_id(0).to(tl.int64)
    v_tiles: tl.constexpr = (DV + BX - 1) // BX
    v_tile = pid % v_tiles
    h = pid // v_tiles % HK
    i = (pid // (v_tiles * HK) % slots).to(tl.int32) + first_block
    b = pid // (v_tiles * HK * slots)
    t = i * C + tl.arange(0, C)
    j = t - first
    real = t < T
    joined = (j >= 0) & real
    d = v_tile * BX + tl.arange(0, BX)
    at = (b * HK + h) * slots + (i - first_block)
    phi_k += b * stride_gb + h * stride_gh
    weight = tl.where(joined, 1.0, 0.0)
    if LOGS:
        end = tl.load(peak + b * (n + 1) * HK + h + tl.maximum(tl.minimum(i * C + C - first, n), 0) * HK)
        logs = tl.load(log_k + (b * n + j) * HK + h, mask=joined, other=0.0)
        weight = tl.exp(tl.where(joined, logs - end, float("-inf")))
    acc = tl.zeros((C, BX), tl.float32)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        y = tile(phi_k, j, stride_gt, joined, f, F).to(tl.float32) * weight[:, None]
        dS = tile(d_states + at * F * DV, f, DV, f < F, d, DV)
        acc = dot(y, dS, acc, PRECISION, FAR)
    for g in range(H // HK):
        head = h * (H // HK) + g
        token = (b * T + t) * H + head
        x_base = phi_q + b * stride_fb + head * stride_fh
        pair = tl.zeros((C, C), tl.float32)
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            x = tile(x_base, t, stride_ft, real, f, F)
            y = tile(phi_k, j, stride_gt, joined, f, F)
            pair = dot(x, tl.trans(y), pair, PRECISION, FAR)
        pair *= _factor(log_q, log_k, top, token, b, h, HK, n, t, j, real, joined, LOGS)
        pair *= tl.load(inverse + token, mask=real, other=0.0)[:, None]
        d_o = tile(d_out + (b * T * H + head) * DV, t, H * DV, real, d, DV)
        acc = dot(tl.trans(pair), d_o, acc, PRECISION, FAR)
    store(dv + ((b * n + j[:, None]) * HK + h) * DV + d[None, :], acc, joined[:, None] & (d < DV)[None, :])
