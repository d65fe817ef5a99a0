"""Gradients through sum_f x_tf k_jf exp(c_tf - c_jf), decays by feature: no factor is ever above 1 here either."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .chunks import chunk_of
from .delta_cases import cases
from .delta_chunk import NEVER, load_sums, load_tile32, store_tile
from .launch import LENGTHS, dot, jit, load32, register


@jit(do_not_specialize=LENGTHS)
def delta_backward_rows(
    M, k, c, rows_grad, table, T, H, Hk, tiles, stride_kb, stride_kt, stride_kh,
    F: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """rows_grad_t = sum_{j<=t} M_tj k_j exp(c_t - c_j), for 16 rows t of one of H heads: the gradient on x."""
    pid = tl.program_id(0).to(tl.int64)
    tile, block = pid % tiles, pid // tiles % (C // 16)
    ih = pid // tiles // (C // 16)
    i, h = ih // H, ih % H
    hk = h // (H // Hk)
    kv = i * Hk + hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    k += row * stride_kb + start * stride_kt + hk * stride_kh
    first = (block * 16).to(tl.int32)
    r, j = tl.arange(0, 16), tl.arange(0, C)
    features = tile * BK + tl.arange(0, BK)
    M += ih * C * C + (first + r)[:, None] * C
    c_t = load_sums(c, kv, first + r, features, F, C, 2)
    anchor = load32(c + (kv * C + first) * F + features, features < F)
    key = load_tile32(k, stride_kt, j, features, tl.minimum(length, first), F)
    weight = tl.exp(tl.where((j < first)[:, None], anchor[None, :] - load_sums(c, kv, j, features, F, C, 2), NEVER))
    total = dot(tl.load(M + j[None, :]), key * weight, None, PRECISION, DTYPE) * tl.exp(c_t - anchor[None, :])
    for one in range(tl.minimum(length - first, 16)):
        key_one = load32(k + tl.cast(first + one, tl.int64) * stride_kt + features, features < F)
        c_one = load32(c + (kv * C + first + one) * F + features, features < F)
        weight_one = tl.exp(tl.where((r >= one)[:, None], c_t - c_one[None, :], NEVER))
        total += tl.load(M + (first + one)) * key_one[None, :] * weight_one
    store_tile(rows_grad + ih * C * F, F, first + r, features, C, F, total)


@jit(do_not_specialize=LENGTHS)
def delta_backward_columns(
    M, x, beta, c, columns_grad, table, T, H, Hk, tiles,
    stride_xb, stride_xt, stride_xh, stride_bb, stride_bt, stride_bh,
    F: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """columns_grad_j = sum_{t>=j} M_tj x_t exp(c_t - c_j), over the heads of x, for 16 rows j of a kv head: the
    gradient on k. beta, if given, multiplies x; ADD to what columns_grad holds."""
    pid = tl.program_id(0).to(tl.int64)
    tile, block = pid % tiles, pid // tiles % (C // 16)
    at = pid // tiles // (C // 16)
    i, hk = at // Hk, at % Hk
    row, start, length = chunk_of(i, T, tl.cdiv(T, C), table, VARLEN, C)
    if length <= 0:
        return
    G = H // Hk
    x += row * stride_xb + start * stride_xt
    first = (block * 16).to(tl.int32)
    last = first + 15
    r, t = tl.arange(0, 16), tl.arange(0, C)
    features = tile * BK + tl.arange(0, BK)
    c_j = load_sums(c, at, first + r, features, F, C, 2)
    anchor = load32(c + (at * C + last) * F + features, features < F)
    weight = tl.exp(tl.where((t > last)[:, None], load_sums(c, at, t, features, F, C, 2) - anchor[None, :], NEVER))
    after = tl.zeros([16, BK], tl.float32)
    among = tl.zeros([16, BK], tl.float32)
    if beta is not None:
        beta += row * stride_bb + start * stride_bt + hk * stride_bh
        weight *= load32(beta + t.to(tl.int64) * stride_bt, t < length)[:, None]
    for g in range(G):
        h = hk * G + g
        here = M + (i * H + h) * C * C
        query = load_tile32(x + h * stride_xh, stride_xt, t, features, length, F)
        block_M = tl.load(here + t[None, :] * C + (first + r)[:, None])
        after = dot(block_M, query * weight, after, PRECISION, DTYPE)
        for one in range(tl.minimum(length - first, 16)):
            place = tl.cast(first + one, tl.int64)
            query_one = load32(x + h * stride_xh + place * stride_xt + features, features < F)
            if beta is not None:
                query_one *= tl.load(beta + place * stride_bt).to(tl.float32)
            c_one = load32(c + (at * C + first + one) * F + features, features < F)
            weight_one = tl.exp(tl.where((r <= one)[:, None], c_one[None, :] - c_j, NEVER))
            column = tl.load(here + place * C + first + r)
            among += column[:, None] * query_one[None, :] * weight_one
    total = among + after * tl.exp(anchor[None, :] - c_j)
    columns_grad += at * C * F
    if ADD:
        total += load_tile32(columns_grad, F, first + r, features, C, F)
    store_tile(columns_grad, F, first + r, features, C, F, total)


configs.add("delta_backward_rows", [configs.Row({"BK": 64})])
configs.add("delta_backward_columns", [configs.Row({"BK": 64})])
register("delta_backward_rows", delta_backward_rows, cases("delta_backward_rows", ("BK",), (2,), packed=False))
register(
    "delta_backward_columns",
    delta_backward_columns,
    cases("delta_backward_columns", ("BK",), (2,), packed=False, ADD=True),
)
