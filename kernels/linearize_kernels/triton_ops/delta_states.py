"""The delta rule's states from chunk to chunk, forwards and backwards, and the outputs they give."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of, sequence_of
from .delta_cases import cases
from .delta_chunk import load_end, load_sums, load_tile, load_tile32, pair_decay, store_tile
from .launch import LENGTHS, dot, jit, load32, register, store


@jit(do_not_specialize=LENGTHS)
def delta_states(
    k, c, W, U, states, S, S_end, cu, firsts, T, Hk, tiles, stride_kb, stride_kt, stride_kh,
    F: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """From each chunk's start to its end: U -= W S, in place; S = exp(c_end) S + (k exp(c_end - c))^T U.

    One program for a sequence, kv head and tile of values; states (chunks, Hk, F, Dv) get S before each chunk.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile, nh = pid % tiles, pid // tiles
    n, h = nh // Hk, nh % Hk
    row, start, stop, first = sequence_of(n, T, tl.cdiv(T, C), cu, firsts, VARLEN)
    count = tl.cdiv(stop - start, C)
    k += row * stride_kb + start * stride_kt + h * stride_kh
    rows, features = tl.arange(0, C), tl.arange(0, BF)
    columns = tile * BV + tl.arange(0, BV)
    state = load_tile32(S + nh * F * Dv, Dv, features, columns, F, Dv)
    for i in range(count):
        at = (first + i) * Hk + h
        store_tile(states + at * F * Dv, Dv, features, columns, F, Dv, state)
        w = load_tile32(W + at * C * F, F, rows, features, C, F)
        u = load_tile32(U + at * C * Dv, Dv, rows, columns, C, Dv)
        u -= dot(w, state, None, PRECISION, DTYPE)
        store_tile(U + at * C * Dv, Dv, rows, columns, C, Dv, u)
        done = tl.cast(i, tl.int64) * C
        key = load_tile32(k + done * stride_kt, stride_kt, rows, features, stop - start - done, F)
        if DECAY != 0:
            end = load_end(c, at, features, F, C, DECAY)
            key *= tl.exp(end[None, :] - load_sums(c, at, rows, features, F, C, DECAY))
            state *= tl.exp(end)[:, None]
        state = dot(tl.trans(key), u, state, PRECISION, DTYPE)
    store_tile(S_end + nh * F * Dv, Dv, features, columns, F, Dv, state)


@jit(do_not_specialize=LENGTHS)
def delta_out(
    q, k, c, pairs, U, states, out, table, T, H, Hk, tiles, scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    F: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """out_t = scale [q_t exp(c_t) S + sum_{j<=t} (sum_f q_tf k_jf exp(c_tf - c_jf)) U_j], S before the chunk.

    One program for a chunk, query head and tile of values.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile, ih = pid % tiles, pid // tiles
    i, h = ih // H, ih % H
    hk = h // (H // Hk)
    at = i * Hk + hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    q += row * stride_qb + start * stride_qt + h * stride_qh
    k += row * stride_kb + start * stride_kt + hk * stride_kh
    rows = tl.arange(0, C)
    columns = tile * BV + tl.arange(0, BV)
    total = tl.zeros([C, BV], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    for f in range(0, F, BK):
        features = f + tl.arange(0, BK)
        query = load_tile(q, stride_qt, rows, features, length, F)
        if DECAY != 2:
            key = load_tile(k, stride_kt, rows, features, length, F)
            scores = dot(query, tl.trans(key), scores, PRECISION, DTYPE)
        weighted = query.to(tl.float32)
        if DECAY != 0:
            weighted *= tl.exp(load_sums(c, at, rows, features, F, C, DECAY))
        state = load_tile32(states + at * F * Dv, Dv, features, columns, F, Dv)
        total = dot(weighted, state, total, PRECISION, DTYPE)
    if DECAY == 2:
        scores = tl.load(pairs + ih * C * C + rows[:, None] * C + rows[None, :])
    else:
        scores *= pair_decay(c, at, C, DECAY)
    u = load_tile32(U + at * C * Dv, Dv, rows, columns, C, Dv)
    total = dot(scores, u, total, PRECISION, DTYPE)
    store_tile(
        out + row * stride_ob + start * stride_ot + h * stride_oh, stride_ot, rows, columns, length, Dv, total * scale
    )


@jit(do_not_specialize=LENGTHS)
def delta_step(
    q, k, v, beta, log_decay, S, out, Hk, tiles, scale,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_bb, stride_bh,
    stride_ldb, stride_ldh, stride_ob, stride_oh,
    F: tl.constexpr, Dv: tl.constexpr, G: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """One token: S in place, and the outputs of all query heads that read it."""
    pid = tl.program_id(0).to(tl.int64)
    tile, at = pid % tiles, pid // tiles
    row, h = at // Hk, at % Hk
    features, columns = tl.arange(0, BF), tile * BV + tl.arange(0, BV)
    here = features < F
    S += at * F * Dv
    state = load_tile32(S, Dv, features, columns, F, Dv)
    if DECAY == 2:
        log = load32(log_decay + row * stride_ldb + h * stride_ldh + features, here)
        state *= tl.exp(log)[:, None]
    if DECAY == 1:
        state *= tl.exp(tl.load(log_decay + row * stride_ldb + h * stride_ldh).to(tl.float32))
    key = load32(k + row * stride_kb + h * stride_kh + features, here)
    value = load32(v + row * stride_vb + h * stride_vh + columns, columns < Dv)
    change = value - tl.sum(key[:, None] * state, 0)
    state += key[:, None] * (tl.load(beta + row * stride_bb + h * stride_bh).to(tl.float32) * change)[None, :]
    tl.debug_barrier()  # whichever thread stores a number, all have read theirs
    store_tile(S, Dv, features, columns, F, Dv, state)
    for g in range(G):
        head = h * G + g
        query = load32(q + row * stride_qb + head * stride_qh + features, here)
        read = scale * tl.sum(query[:, None] * state, 0)
        store(out + row * stride_ob + head * stride_oh + columns, read, columns < Dv)


configs.add(
    "delta_states",
    [
        configs.Row({"BV": 32}, num_stages=1, arch=("gfx942",), most=128),
        configs.Row({"BV": 32}, most=128),
        configs.Row({"BV": 16}, num_warps=8, num_stages=1),
    ],
)
configs.add(
    "delta_out",
    [configs.Row({"BK": 64, "BV": 64}, arch=("sm_90", "sm_100")), configs.Row({"BK": 64, "BV": 64}, num_warps=8)],
)
configs.add("delta_step", [configs.Row({"BV": 32})])
register("delta_states", delta_states, cases("delta_states", ("BF", "BV")))
register("delta_out", delta_out, cases("delta_out", ("BK", "BV")))
register("delta_step", delta_step, cases("delta_step", ("BF", "BV"), packed=False, G=4))
