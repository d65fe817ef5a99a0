"""What a chunk of the delta rule needs before any state is known: one program for each chunk and kv head.

A chunk has C tokens, the last of a sequence maybe fewer. Buffers that stay inside (c, pairs, inverse, W, U) are laid
out by chunks, (chunks, heads, C, .), contiguous, so that nothing but the inputs has strides; rows past a chunk's end
are zeros there. c is the sum of log_decay within the chunk, the token's own included: (chunks, Hk, C) for scalar
decays, (chunks, Hk, C, F) for decays by feature. It goes on unchanged past the end, so that row C - 1 is the end's.
"""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of
from .delta_cases import cases
from .launch import LEAST_DECAY, LENGTHS, dot, jit, load, load32, register, store

NEVER = tl.constexpr(float("-inf"))


@jit
def load_tile(x, stride, rows, columns, length, width):
    """(rows, columns) of a matrix whose rows are `stride` apart; 0 outside of length x width."""
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    return load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], inside)


@jit
def load_tile32(x, stride, rows, columns, length, width):
    """The same in float32."""
    return load_tile(x, stride, rows, columns, length, width).to(tl.float32)


@jit
def store_tile(x, stride, rows, columns, length, width, tile):
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    store(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], tile, inside)


@jit
def load_sums(c, at, rows, columns, F, C: tl.constexpr, DECAY: tl.constexpr):
    """c of the rows, (rows, columns) by feature or (rows, 1): decay 0 for none, 1 for scalar, 2 by feature.

    `at` counts chunks and kv heads.
    """
    if DECAY == 2:
        found = load_tile32(c + at * C * F, F, rows, columns, C, F)
    elif DECAY == 1:
        found = tl.load(c + at * C + rows)[:, None]
    else:
        found = (rows * 0).to(tl.float32)[:, None]
    return found


@jit
def load_end(c, at, columns, F, C: tl.constexpr, DECAY: tl.constexpr):
    """c at the chunk's end, (columns,) by feature or a scalar as (1,)."""
    if DECAY == 2:
        found = load32(c + at * C * F + (C - 1) * F + columns, columns < F)
    elif DECAY == 1:
        found = tl.load(c + at * C + (C - 1) + tl.arange(0, 1))
    else:
        found = tl.zeros([1], tl.float32)
    return found


@jit
def pair_decay(c, at, C: tl.constexpr, DECAY: tl.constexpr):
    """(C, C): exp(c_t - c_j) for scalar decays, 1 without any, and 0 where j > t."""
    t = tl.arange(0, C)
    seen = t[:, None] >= t[None, :]
    if DECAY == 1:
        sums = tl.load(c + at * C + t)
        # Masked before exp: the future's could overflow.
        found = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], NEVER))
    else:
        found = seen.to(tl.float32)
    return found


@jit(do_not_specialize=LENGTHS)
def delta_sums(
    log_decay, c, table, T, Hk, tiles, stride_ldb, stride_ldt, stride_ldh,
    F: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VECTOR: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """c of every chunk, kv head and, by feature, tile of features."""
    pid = tl.program_id(0).to(tl.int64)
    at, tile = pid // tiles, pid % tiles
    i, h = at // Hk, at % Hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    rows = tl.arange(0, C)
    log_decay += row * stride_ldb + start * stride_ldt + h * stride_ldh
    if VECTOR:
        columns = tile * BK + tl.arange(0, BK)
        x = load_tile32(log_decay, stride_ldt, rows, columns, length, F)
        sums = tl.cumsum(tl.maximum(x, LEAST_DECAY), 0)
        store_tile(c + at * C * F, F, rows, columns, C, F, sums)
    else:
        x = load32(log_decay + rows.to(tl.int64) * stride_ldt, rows < length)
        tl.store(c + at * C + rows, tl.cumsum(tl.maximum(x, LEAST_DECAY), 0))


@jit(do_not_specialize=LENGTHS)
def delta_pairs(
    x, k, c, pairs, table, T, H, Hk, stride_xb, stride_xt, stride_xh, stride_kb, stride_kt, stride_kh,
    F: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """pairs_tj = sum_f x_tf k_jf exp(c_tf - c_jf) for j <= t, decays by feature; 16 rows t of one head of x.

    Keys before the 16 rows are taken relative to the first of these: both factors are at most 1 then. Keys among
    them have no such anchor, and are taken one by one.
    """
    pid = tl.program_id(0).to(tl.int64)
    at, block = pid // (C // 16), pid % (C // 16)
    i, h = at // H, at % H
    kv = i * Hk + h // (H // Hk)
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    x += row * stride_xb + start * stride_xt + h * stride_xh
    k += row * stride_kb + start * stride_kt + (h // (H // Hk)) * stride_kh
    first = (block * 16).to(tl.int32)
    r, j = tl.arange(0, 16), tl.arange(0, C)
    before = tl.zeros([16, C], tl.float32)
    among = tl.zeros([16, 16], tl.float32)
    for f in range(0, F, BK):
        columns = f + tl.arange(0, BK)
        x_tile = load_tile32(x, stride_xt, first + r, columns, length, F)
        c_t = load_sums(c, kv, first + r, columns, F, C, 2)
        anchor = tl.load(c + (kv * C + first) * F + columns, mask=columns < F, other=0)
        k_tile = load_tile32(k, stride_kt, j, columns, tl.minimum(length, first), F)
        c_j = load_sums(c, kv, j, columns, F, C, 2)
        weight = tl.exp(tl.where((j < first)[:, None], anchor[None, :] - c_j, NEVER))
        x_scaled = x_tile * tl.exp(c_t - anchor[None, :])
        before = dot(x_scaled, tl.trans(k_tile * weight), before, PRECISION, DTYPE)
        for one in range(tl.minimum(length - first, 16)):
            key = load32(k + tl.cast(first + one, tl.int64) * stride_kt + columns, columns < F)
            c_one = tl.load(c + (kv * C + first + one) * F + columns, mask=columns < F, other=0)
            weight_one = tl.exp(tl.where((r >= one)[:, None], c_t - c_one[None, :], NEVER))
            column = tl.sum(x_tile * key[None, :] * weight_one, 1, keep_dims=True)
            among += tl.where((r == one)[None, :], column, 0.0)
    at_rows = pairs + at * C * C + (first + r)[:, None] * C
    outside = (j < first) | (j >= first + 16)
    tl.store(at_rows + j[None, :], before, mask=outside[None, :] & (r >= 0)[:, None])
    tl.store(at_rows + (first + r)[None, :], among)


@jit
def unit_lower_inverse(A, C: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A (C, C), C at most 64.

    Row by row within the diagonal blocks of 16, which is as stable as substitution is; what is left, I + N with N the
    solved blocks times the rest, has N^4 = 0, so (I + N)^-1 = (I - N)(I + N^2) exactly.
    """
    n: tl.constexpr = C // 16
    b, r = tl.arange(0, n), tl.arange(0, 16)
    same = (b[:, None] == b[None, :])[:, None, :, None]
    blocks = tl.reshape(A, [n, 16, n, 16])
    X = tl.sum(tl.where(same, -blocks, 0.0), 2)
    rest = tl.reshape(tl.where(same, 0.0, blocks), [C, C])
    for i in range(2, 16):
        this = (r == i)[None, :, None]
        a = tl.sum(tl.where(this, X, 0.0), 1)
        a += tl.sum(tl.expand_dims(a, 2) * X, 1)
        X = tl.where(this, tl.expand_dims(a, 1), X)
    X += (r[:, None] == r[None, :]).to(tl.float32)[None, :, :]
    D = tl.reshape(tl.where(same, X[:, :, None, :], 0.0), [C, C])
    # For half precision inputs tf32 will do: the inverse is rounded to their precision, or is used in tf32, too.
    kind: tl.constexpr = tl.float16 if DTYPE != tl.float32 else tl.float32  # pyright: ignore  # noqa: SIM300
    N = dot(D, rest, None, PRECISION, kind)
    Y = dot(dot(N, N, None, PRECISION, kind), D, D, PRECISION, kind)
    return Y - dot(N, Y, None, PRECISION, kind)


@jit(do_not_specialize=LENGTHS)
def delta_solve(
    k, v, beta, c, pairs, inverse, W, U, table, T, Hk, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_bb, stride_bt, stride_bh,
    F: tl.constexpr, Dv: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """inverse = (I + A)^-1 with A_tj = beta_t sum_f k_tf k_jf exp(c_tf - c_jf), j < t; W and U, what it makes of the
    keys and of the values: U = inverse beta v, from which W S is yet to be taken, W = inverse beta k exp(c)."""
    at = tl.program_id(0).to(tl.int64)
    i, h = at // Hk, at % Hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    k += row * stride_kb + start * stride_kt + h * stride_kh
    v += row * stride_vb + start * stride_vt + h * stride_vh
    rows = tl.arange(0, C)
    b = load32(beta + row * stride_bb + (start + rows) * stride_bt + h * stride_bh, rows < length)
    square = rows[:, None] * C + rows[None, :]
    if DECAY == 2:
        A = tl.load(pairs + at * C * C + square)
    else:
        A = tl.zeros([C, C], tl.float32)
        for f in range(0, F, BK):
            tile = load_tile(k, stride_kt, rows, f + tl.arange(0, BK), length, F)
            A = dot(tile, tl.trans(tile), A, PRECISION, DTYPE)
        A *= pair_decay(c, at, C, DECAY)
    A = tl.where(rows[:, None] > rows[None, :], b[:, None] * A, 0.0)
    X = unit_lower_inverse(A, C, PRECISION, DTYPE)
    store(inverse + at * C * C + square, X, square >= 0)
    for f in range(0, F, BK):
        columns = f + tl.arange(0, BK)
        tile = load_tile32(k, stride_kt, rows, columns, length, F)
        tile *= b[:, None] * tl.exp(load_sums(c, at, rows, columns, F, C, DECAY))
        store_tile(W + at * C * F, F, rows, columns, C, F, dot(X, tile, None, PRECISION, DTYPE))
    for d in range(0, Dv, BV):
        columns = d + tl.arange(0, BV)
        tile = load_tile32(v, stride_vt, rows, columns, length, Dv) * b[:, None]
        store_tile(U + at * C * Dv, Dv, rows, columns, C, Dv, dot(X, tile, None, PRECISION, DTYPE))


configs.add("delta_sums", [configs.Row({"BK": 64})])
configs.add("delta_pairs", [configs.Row({"BK": 64}, num_stages=1)])
configs.add("delta_solve", [configs.Row({"BK": 64, "BV": 64}, num_warps=8)])
register("delta_sums", delta_sums, cases("delta_sums", ("BK",), (1,), VECTOR=False))
register("delta_sums_by_feature", delta_sums, cases("delta_sums", ("BK",), (2,), packed=False, VECTOR=True))
register("delta_pairs", delta_pairs, cases("delta_pairs", ("BK",), (2,), packed=False))
register("delta_solve", delta_solve, cases("delta_solve", ("BK", "BV")))
