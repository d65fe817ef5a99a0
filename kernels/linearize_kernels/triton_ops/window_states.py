"""The linear sums before every block of queries, and the gradients of the sums after it: scans over the blocks.

One program per (row, key/value head, tile of F, tile of Dv). The key that joins the sums for query t stands `first`
places before it in `phi_k`, so a block of queries [t0, t0 + C) comes with the keys [t0 - first, t0 + C - first).
"""

from __future__ import annotations

import triton.language as tl

from . import configs
from .configs import Row
from .launch import dot, jit, load32, store
from .window_common import HALF, LENGTHS, tile

for _name in ("window_states", "window_states_bwd"):
    configs.add(
        _name,
        [
            Row({"BF": 64, "BX": 64}, dtype=HALF, most=64),
            Row({"BF": 64, "BX": 64}, num_warps=8, dtype=HALF),
            Row({"BF": 32, "BX": 32}),
        ],
    )


@jit(do_not_specialize=LENGTHS)
def window_states_kernel(
    phi_k, v, log_k, peak, S0, z0, states, sums, S1, z1,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    HK, T, n, first, first_block, blocks, slots,
    F: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BX: tl.constexpr,
    LOGS: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    v_tiles: tl.constexpr = (DV + BX - 1) // BX
    f_tiles: tl.constexpr = (F + BF - 1) // BF
    v_tile = pid % v_tiles
    f = (pid // v_tiles % f_tiles) * BF + tl.arange(0, BF)
    d = v_tile * BX + tl.arange(0, BX)
    row = pid // (v_tiles * f_tiles)
    b, h = row // HK, row % HK
    inside = (f < F)[:, None] & (d < DV)[None, :]
    at = f[:, None] * DV + d[None, :]
    S = load32(S0 + row * F * DV + at, inside)
    z = load32(z0 + row * F + f, f < F)
    phi_k += b * stride_kb + h * stride_kh
    v += b * stride_vb + h * stride_vh
    log_k += b * n * HK + h
    peak += b * (n + 1) * HK + h
    for i in range(first_block, blocks):
        slot = row * slots + (i - first_block)
        store(states + slot * F * DV + at, S, inside)
        if v_tile == 0:
            store(sums + slot * F + f, z, f < F)
        t = i * C + tl.arange(0, C)
        j = t - first
        seen = (j >= 0) & (t < T)
        x = tile(phi_k, j, stride_kt, seen, f, F)
        values = tile(v, j, stride_vt, seen, d, DV)
        if LOGS:
            end = tl.load(peak + tl.maximum(tl.minimum(i * C + C - first, n), 0) * HK)
            start = tl.load(peak + tl.maximum(tl.minimum(i * C - first, n), 0) * HK)
            logs = tl.load(log_k + j.to(tl.int64) * HK, mask=seen, other=0.0)
            keep = tl.exp(start - end)
            S *= keep
            z *= keep
            x = x.to(tl.float32) * tl.exp(tl.where(seen, logs - end, float("-inf")))[:, None]
        S = dot(tl.trans(x), values, S, PRECISION, FAR)
        z += tl.sum(x.to(tl.float32), 0)
    store(S1 + row * F * DV + at, S, inside)
    if v_tile == 0:
        store(z1 + row * F + f, z, f < F)


@jit(do_not_specialize=LENGTHS)
def window_states_bwd_kernel(
    phi_q, log_q, d_out, inverse, slope, top, peak, dS1, dz1, d_states, d_sums, dS0, dz0,
    stride_qb, stride_qt, stride_qh,
    H, HK, T, n, first, first_block, blocks, slots,
    F: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BX: tl.constexpr,
    LOGS: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """d_states, d_sums: gradients of the sums after each block. d_out (B, T, H, Dv), inverse ... (B, T, H) dense."""
    pid = tl.program_id(0).to(tl.int64)
    v_tiles: tl.constexpr = (DV + BX - 1) // BX
    f_tiles: tl.constexpr = (F + BF - 1) // BF
    v_tile = pid % v_tiles
    f = (pid // v_tiles % f_tiles) * BF + tl.arange(0, BF)
    d = v_tile * BX + tl.arange(0, BX)
    row = pid // (v_tiles * f_tiles)
    b, h = row // HK, row % HK
    inside = (f < F)[:, None] & (d < DV)[None, :]
    at = f[:, None] * DV + d[None, :]
    dS = load32(dS1 + row * F * DV + at, inside)
    dz = load32(dz1 + row * F + f, f < F)
    peak += b * (n + 1) * HK + h
    for back in range(blocks):
        i = blocks - 1 - back
        if i >= first_block:
            slot = row * slots + (i - first_block)
            store(d_states + slot * F * DV + at, dS, inside)
            if v_tile == 0:
                store(d_sums + slot * F + f, dz, f < F)
        t = i * C + tl.arange(0, C)
        seen = t < T
        if LOGS:
            end = tl.load(peak + tl.maximum(tl.minimum(i * C + C - first, n), 0) * HK)
            start = tl.load(peak + tl.maximum(tl.minimum(i * C - first, n), 0) * HK)
            keep = tl.exp(start - end)
            dS *= keep
            dz *= keep
        for g in range(H // HK):
            head = h * (H // HK) + g
            token = (b * T + t) * H + head
            x = tile(phi_q + b * stride_qb + head * stride_qh, t, stride_qt, seen, f, F).to(tl.float32)
            if LOGS:
                logs = tl.load(log_q + token, mask=seen, other=0.0)
                tops = tl.load(top + token, mask=seen, other=0.0)
                x *= tl.exp(tl.where(seen, logs + start - tops, float("-inf")))[:, None]
            scaled = x * tl.load(inverse + token, mask=seen, other=0.0)[:, None]
            d_o = tile(d_out + (b * T * H + head) * DV, t, H * DV, seen, d, DV)
            dS = dot(tl.trans(scaled), d_o, dS, PRECISION, FAR)
            dz += tl.sum(x * tl.load(slope + token, mask=seen, other=0.0)[:, None], 0)
    store(dS0 + row * F * DV + at, dS, inside)
    if v_tile == 0:
        store(dz0 + row * F + f, dz, f < F)
