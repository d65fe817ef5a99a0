"""Gradients of the delta rule, given what a forward makes on its way (`delta_chunk`, `delta_states`).

With dU the gradient on U, and R = (I + A)^-T dU: dv = beta R, dA = -R U^T below the diagonal, and the keys that read
the states get -beta R S^T. d_scores is the gradient on the products of queries and keys. Where these meet decays,
queries and reading keys come with exp(c_t), writing keys with exp(-c_j): the gradient on c is q.dq + k.dk_reading -
k.dk_writing, and that on c_end is of all that the end sees: exp(c_end) S.dS + sum (k exp(c_end - c)).dk_end.
"""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of, sequence_of
from .delta_cases import cases
from .delta_chunk import (
    load_end,
    load_sums,
    load_tile,
    load_tile32,
    pair_decay,
    store_tile,
)
from .launch import LEAST_DECAY, LENGTHS, dot, jit, load32, register


@jit(do_not_specialize=LENGTHS)
def delta_backward_local(
    q, k, d_out, c, pairs, dU, states_grad, table, T, H, Hk, tiles, scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    F: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What a chunk's own outputs ask of its U, and (into states_grad) of the state before it.

    One program for a chunk, kv head and tile of values; its query heads are summed.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile, at = pid % tiles, pid // tiles
    i, hk = at // Hk, at % Hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    G = H // Hk
    k += row * stride_kb + start * stride_kt + hk * stride_kh
    q += row * stride_qb + start * stride_qt
    d_out += row * stride_ob + start * stride_ot
    rows = tl.arange(0, C)
    columns = tile * BV + tl.arange(0, BV)
    total = tl.zeros([C, BV], tl.float32)
    for g in range(G):
        h = hk * G + g
        if DECAY == 2:
            scores = tl.load(pairs + (i * H + h) * C * C + rows[:, None] * C + rows[None, :])
        else:
            scores = tl.zeros([C, C], tl.float32)
            for f in range(0, F, BK):
                features = f + tl.arange(0, BK)
                query = load_tile(q + h * stride_qh, stride_qt, rows, features, length, F)
                key = load_tile(k, stride_kt, rows, features, length, F)
                scores = dot(query, tl.trans(key), scores, PRECISION, DTYPE)
            scores *= pair_decay(c, at, C, DECAY)
        given = load_tile(d_out + h * stride_oh, stride_ot, rows, columns, length, Dv)
        total = dot(tl.trans(scores), given, total, PRECISION, DTYPE)
    store_tile(dU + at * C * Dv, Dv, rows, columns, C, Dv, total * scale)
    for f in range(0, F, BK):
        features = f + tl.arange(0, BK)
        asked = tl.zeros([BK, BV], tl.float32)
        for g in range(G):
            h = hk * G + g
            query = load_tile32(q + h * stride_qh, stride_qt, rows, features, length, F)
            if DECAY != 0:
                query *= tl.exp(load_sums(c, at, rows, features, F, C, DECAY))
            given = load_tile(d_out + h * stride_oh, stride_ot, rows, columns, length, Dv)
            asked = dot(tl.trans(query), given, asked, PRECISION, DTYPE)
        store_tile(states_grad + at * F * Dv, Dv, features, columns, F, Dv, asked * scale)


@jit(do_not_specialize=LENGTHS)
def delta_backward_states(
    k, c, W, dU, states_grad, dS, dS0, cu, firsts, T, Hk, tiles, stride_kb, stride_kt, stride_kh,
    F: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """From each chunk's end to its start: dU += (k exp(c_end - c)) dS, then dS = exp(c_end) dS - W^T dU + what its
    outputs ask. states_grad, which holds the latter, gets dS at each chunk's end instead."""
    pid = tl.program_id(0).to(tl.int64)
    tile, nh = pid % tiles, pid // tiles
    n, h = nh // Hk, nh % Hk
    row, start, stop, first = sequence_of(n, T, tl.cdiv(T, C), cu, firsts, VARLEN)
    count = tl.cdiv(stop - start, C)
    k += row * stride_kb + start * stride_kt + h * stride_kh
    rows, features = tl.arange(0, C), tl.arange(0, BF)
    columns = tile * BV + tl.arange(0, BV)
    grad = load_tile32(dS + nh * F * Dv, Dv, features, columns, F, Dv)
    for back in range(count):
        i = tl.cast(count - 1 - back, tl.int64)
        at = (first + i) * Hk + h
        asked = load_tile32(states_grad + at * F * Dv, Dv, features, columns, F, Dv)
        store_tile(states_grad + at * F * Dv, Dv, features, columns, F, Dv, grad)
        key = load_tile32(k + i * C * stride_kt, stride_kt, rows, features, stop - start - i * C, F)
        u = load_tile32(dU + at * C * Dv, Dv, rows, columns, C, Dv)
        if DECAY != 0:
            end = load_end(c, at, features, F, C, DECAY)
            key *= tl.exp(end[None, :] - load_sums(c, at, rows, features, F, C, DECAY))
            u = dot(key, grad, u, PRECISION, DTYPE)
            grad *= tl.exp(end)[:, None]
        else:
            u = dot(key, grad, u, PRECISION, DTYPE)
        store_tile(dU + at * C * Dv, Dv, rows, columns, C, Dv, u)
        w = load_tile(W + at * C * F, F, rows, features, C, F)
        grad += asked - dot(tl.trans(w), u, None, PRECISION, DTYPE)
    store_tile(dS0 + nh * F * Dv, Dv, features, columns, F, Dv, grad)


@jit(do_not_specialize=LENGTHS)
def delta_backward_solve(
    v, beta, inverse, U, dU, dv, d_beta, d_pairs, table, T, Hk,
    stride_vb, stride_vt, stride_vh, stride_bb, stride_bt, stride_bh, stride_ob, stride_ot, stride_oh,
    Dv: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """dU becomes R, in place; dv; d_pairs = dA without its factor beta; d_beta (B, T, Hk), the values' part R.v."""
    at = tl.program_id(0).to(tl.int64)
    i, h = at // Hk, at % Hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    v += row * stride_vb + start * stride_vt + h * stride_vh
    dv += row * stride_ob + start * stride_ot + h * stride_oh
    rows = tl.arange(0, C)
    square = rows[:, None] * C + rows[None, :]
    b = load32(beta + row * stride_bb + (start + rows) * stride_bt + h * stride_bh, rows < length)
    X = tl.load(inverse + at * C * C + square)
    d_A = tl.zeros([C, C], tl.float32)
    by_beta = tl.zeros([C], tl.float32)
    for d in range(0, Dv, BV):
        columns = d + tl.arange(0, BV)
        R = load_tile32(dU + at * C * Dv, Dv, rows, columns, C, Dv)
        R = dot(tl.trans(X), R, None, PRECISION, DTYPE)
        store_tile(dU + at * C * Dv, Dv, rows, columns, C, Dv, R)
        store_tile(dv, stride_ot, rows, columns, length, Dv, R * b[:, None])
        by_beta += tl.sum(R * load_tile32(v, stride_vt, rows, columns, length, Dv), 1)
        u = load_tile32(U + at * C * Dv, Dv, rows, columns, C, Dv)
        d_A = dot(R, tl.trans(u), d_A, PRECISION, DTYPE)
    tl.store(d_pairs + at * C * C + square, tl.where(rows[:, None] > rows[None, :], -d_A, 0.0))
    tl.store(d_beta + (row * T + start + rows) * Hk + h, by_beta, mask=rows < length)


@jit(do_not_specialize=LENGTHS)
def delta_backward_scores(
    d_out, U, d_scores, table, T, H, Hk, scale, stride_ob, stride_ot, stride_oh,
    Dv: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """d_scores_tj = scale d_out_t.U_j, j <= t, of a chunk and query head."""
    ih = tl.program_id(0).to(tl.int64)
    i, h = ih // H, ih % H
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    d_out += row * stride_ob + start * stride_ot + h * stride_oh
    U += (i * Hk + h // (H // Hk)) * C * Dv
    rows = tl.arange(0, C)
    found = tl.zeros([C, C], tl.float32)
    for d in range(0, Dv, BV):
        columns = d + tl.arange(0, BV)
        given = load_tile(d_out, stride_ot, rows, columns, length, Dv)
        found = dot(given, tl.trans(load_tile32(U, Dv, rows, columns, C, Dv)), found, PRECISION, DTYPE)
    found = tl.where(rows[:, None] >= rows[None, :], found * scale, 0.0)
    tl.store(d_scores + ih * C * C + rows[:, None] * C + rows[None, :], found)


@jit(do_not_specialize=LENGTHS)
def delta_backward_inputs(
    q, k, beta, log_decay, d_out, c, states, states_grad, U, dU, d_scores, d_pairs, rows_q, rows_k, columns_k,
    dq, dk, d_beta, d_log, table, T, H, Hk, tiles, tokens, scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_bb, stride_bt, stride_bh,
    stride_ldb, stride_ldt, stride_ldh, stride_ob, stride_ot, stride_oh,
    F: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """dq, dk, the keys' part of d_beta, and the gradient on log decays, of a chunk, kv head and tile of features.

    dq (B, T, H, F), dk (B, T, Hk, F) and, by feature, d_log (B, T, Hk, F) are contiguous; d_beta and, for scalar
    decays, d_log (tiles, B, T, Hk) are parts, one for each tile of features; tokens = B T. With decays by feature,
    rows_q, rows_k and columns_k are what `delta_backward_pairs` found.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile, at = pid % tiles, pid // tiles
    i, hk = at // Hk, at % Hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    G = H // Hk
    k += row * stride_kb + start * stride_kt + hk * stride_kh
    d_out += row * stride_ob + start * stride_ot
    token = row * T + start  # of the contiguous outputs
    rows = tl.arange(0, C)
    features = tile * BK + tl.arange(0, BK)
    square = rows[:, None] * C + rows[None, :]
    reading = tl.zeros([C, BK], tl.float32)
    ending = tl.zeros([C, BK], tl.float32)
    at_end = tl.zeros([BK], tl.float32)
    for d in range(0, Dv, BV):
        columns = d + tl.arange(0, BV)
        S = load_tile32(states + at * F * Dv, Dv, features, columns, F, Dv)
        dS = load_tile32(states_grad + at * F * Dv, Dv, features, columns, F, Dv)
        at_end += tl.sum(S * dS, 1)
        R = load_tile32(dU + at * C * Dv, Dv, rows, columns, C, Dv)
        reading = dot(R, tl.trans(S), reading, PRECISION, DTYPE)
        u = load_tile32(U + at * C * Dv, Dv, rows, columns, C, Dv)
        ending = dot(u, tl.trans(dS), ending, PRECISION, DTYPE)
    key = load_tile32(k, stride_kt, rows, features, length, F)
    b = load32(beta + row * stride_bb + (start + rows) * stride_bt + hk * stride_bh, rows < length)
    if DECAY != 0:
        sums = load_sums(c, at, rows, features, F, C, DECAY)
        end = load_end(c, at, features, F, C, DECAY)
        reading *= tl.exp(sums)
        ending *= tl.exp(end[None, :] - sums)
        at_end = at_end * tl.exp(end) + tl.sum(key * ending, 0)
    if DECAY == 2:
        reading = load_tile32(rows_k + at * C * F, F, rows, features, C, F) - reading
        writing = ending + load_tile32(columns_k + at * C * F, F, rows, features, C, F)
    else:
        M = tl.load(d_pairs + at * C * C + square)  # of the past alone, as d_scores is
        if DECAY == 1:
            M *= pair_decay(c, at, C, DECAY)
        reading = dot(M, key, -reading, PRECISION, DTYPE)
        writing = dot(tl.trans(M), key * b[:, None], ending, PRECISION, DTYPE)
    part = (tile * tokens + token + rows) * Hk + hk
    tl.store(d_beta + part, tl.sum(key * reading, 1), mask=rows < length)
    # From here on one tile has both of the keys' parts, and by_sums makes up for the reading part's sign.
    reading *= b[:, None]
    writing += reading
    by_sums = 2 * key * reading
    for g in tl.range(G, disable_licm=True):  # pyright: ignore  # tiles of S kept for all heads would spill
        h = hk * G + g
        query = load_tile32(
            q + row * stride_qb + start * stride_qt + h * stride_qh, stride_qt, rows, features, length, F
        )
        grad = tl.zeros([C, BK], tl.float32)
        for d in range(0, Dv, BV):
            columns = d + tl.arange(0, BV)
            given = load_tile(d_out + h * stride_oh, stride_ot, rows, columns, length, Dv)
            S = load_tile(states + at * F * Dv, Dv, features, columns, F, Dv)
            grad = dot(given, tl.trans(S), grad, PRECISION, DTYPE)
        grad *= scale
        if DECAY != 0:
            grad *= tl.exp(load_sums(c, at, rows, features, F, C, DECAY))
        if DECAY == 2:
            grad += load_tile32(rows_q + (i * H + h) * C * F, F, rows, features, C, F)
        else:
            M = tl.load(d_scores + (i * H + h) * C * C + square)
            if DECAY == 1:
                M *= pair_decay(c, at, C, DECAY)
            grad = dot(M, key, grad, PRECISION, DTYPE)
            writing = dot(tl.trans(M), query, writing, PRECISION, DTYPE)
        store_tile(dq + (token * H + h) * F, H * F, rows, features, length, F, grad)
        by_sums += query * grad
    store_tile(dk + (token * Hk + hk) * F, Hk * F, rows, features, length, F, writing)
    if DECAY != 0:
        log_decay += row * stride_ldb + start * stride_ldt + hk * stride_ldh
        by_sums -= key * writing
    if DECAY == 1:
        log = load32(log_decay + rows.to(tl.int64) * stride_ldt, rows < length)
        by_log = tl.cumsum(tl.sum(by_sums, 1), 0, reverse=True) + tl.sum(at_end, 0)
        tl.store(d_log + part, tl.where(log >= LEAST_DECAY, by_log, 0.0), mask=rows < length)
    if DECAY == 2:
        log = load_tile32(log_decay, stride_ldt, rows, features, length, F)
        by_log = tl.cumsum(by_sums, 0, reverse=True) + at_end[None, :]
        by_log = tl.where(log >= LEAST_DECAY, by_log, 0.0)
        store_tile(d_log + (token * Hk + hk) * F, Hk * F, rows, features, length, F, by_log)


configs.add("delta_backward_local", [configs.Row({"BK": 64, "BV": 64}, num_warps=8)])
configs.add(
    "delta_backward_states",
    [
        configs.Row({"BV": 16}, num_warps=4, num_stages=1, arch=("gfx942",), most=128),
        configs.Row({"BV": 32}, num_warps=8, most=128),
        configs.Row({"BV": 16}, num_warps=8, num_stages=1),
    ],
)
configs.add("delta_backward_solve", [configs.Row({"BV": 64})])
configs.add("delta_backward_scores", [configs.Row({"BV": 64})])
configs.add(
    "delta_backward_inputs",
    [
        configs.Row({"BK": 64, "BV": 32}, num_warps=8, arch=("sm_90", "sm_100"), dtype=("bf16",)),
        configs.Row({"BK": 32, "BV": 32}, num_warps=8, num_stages=1),  # mma.sync holds all operands in registers
    ],
)
register("delta_backward_local", delta_backward_local, cases("delta_backward_local", ("BK", "BV")))
register("delta_backward_states", delta_backward_states, cases("delta_backward_states", ("BF", "BV")))
register("delta_backward_solve", delta_backward_solve, cases("delta_backward_solve", ("BV",), (0,), packed=False))
register("delta_backward_scores", delta_backward_scores, cases("delta_backward_scores", ("BV",), (0,), packed=False))
register("delta_backward_inputs", delta_backward_inputs, cases("delta_backward_inputs", ("BK", "BV")))
