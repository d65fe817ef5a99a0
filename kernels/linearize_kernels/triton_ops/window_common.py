"""What the kernels of window attention share: tiles, scores, block sizes. Letters and layouts as in `window`."""

from __future__ import annotations

import triton.language as tl

from . import configs
from .configs import Row
from .launch import block, dot, jit, load

# Queries per block and keys per tile. All kernels take a score from the same product of the same two tiles (key
# tiles begin at multiples of BK), so that a backward pass meets the bits of the largest score that forward saved.
# Small heads: 64 x 64; large or float32 ones: less, for 99 KiB of shared memory.
HALF = ("bf16", "fp16")
LARGE = ("sm_80", "sm_90", "sm_100")  # cards with room for them
configs.add(
    "window",
    [
        Row({"C": 64, "BK": 64}, dtype=HALF, most=64),
        Row({"C": 64, "BK": 32}, dtype=("bf16",), most=128),
        Row({"C": 64, "BK": 32}, arch=LARGE, dtype=HALF, most=128),
        Row({"C": 32, "BK": 32}, dtype=("bf16",)),
        Row({"C": 32, "BK": 32}, arch=LARGE, dtype=HALF),
        Row({"C": 32, "BK": 32}, dtype=HALF, most=128),
        Row({"C": 32, "BK": 32}, most=64),
        Row({"C": 32, "BK": 16}, arch=LARGE, most=128),
        Row({"C": 16, "BK": 16}),
    ],
)
# Arguments that change from call to call: not compiled anew for values of 1 and multiples of 16.
LENGTHS = ("T", "before", "n", "first", "first_block", "blocks", "slots", "rows")
SINK_TILE = tl.constexpr(16)  # sinks are few: the smallest tile of a tensor core
# Scores that are this close to the largest one (relative to it) count as equal to it: a few roundings of float32.
TIE = tl.constexpr(2.0**-21)


@jit
def tile(base, rows, row_stride, seen, columns, n_columns):
    """Rows x columns of a matrix with contiguous columns, 0 where a row is not `seen` or past the last column."""
    inside = seen[:, None] & (columns < n_columns)[None, :]
    return load(base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], inside)


@jit
def scores(q, k, seen, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr):
    """(queries, keys), -inf where not seen."""
    s = dot(q, tl.trans(k), None, PRECISION, DTYPE) * scale
    if SOFTCAP:
        e = tl.exp(-2.0 * tl.abs(s / softcap))
        tanh = (1.0 - e) / (1.0 + e)
        s = softcap * tl.where(s < 0, -tanh, tanh)
    return tl.where(seen, s, float("-inf"))


@jit
def absorb(acc, total, top, s, v, PRECISION: tl.constexpr, NEAR: tl.constexpr):
    """acc, total and top (the largest score; LOWEST_SCORE before any) with the scores s and values of another tile."""
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp(s - new[:, None])
    keep = tl.exp(top - new)
    total = total * keep + tl.sum(p, 1)
    if NEAR == tl.float16:  # noqa: SIM300
        p = p.to(v.dtype)  # at most 1
    return dot(p, v, acc * keep[:, None], PRECISION, NEAR), total, new


@jit
def in_window(t, index, before, window, T, valid):
    """(queries, keys): index stands in the last `window` positions before query t, and holds a real token."""
    at = (before + t)[:, None]
    seen = (index[None, :] <= at) & (index[None, :] > at - window)
    real = tl.load(valid + index, mask=(index >= 0) & (index < before + T), other=0)
    return seen & (real != 0)[None, :] & (t < T)[:, None]


@jit
def sinks_seen(t, slot, n_sinks, window, T, position):
    """(queries, sinks): the sink has left the query's window."""
    at = tl.load(position + slot, mask=slot < n_sinks, other=0)
    seen = at[None, :] <= (t - window)[:, None]
    return seen & (slot < n_sinks)[None, :] & (t < T)[:, None]


@jit
def largest_before(peak, j, heads, seen):
    """The largest log_k of the folded keys before j; `peak` points at the value before the first, per kv head."""
    return tl.load(peak + tl.maximum(j, 0).to(tl.int64) * heads, mask=seen, other=0.0)


def fits(arch: str, dtype: str, dim: int) -> bool:
    """Whether the largest kernel, `window_dq`, finds enough shared memory: 144 KiB in float32."""
    return not (arch == "sm_86" and dtype == "fp32" and dim > 128)


def sizes(arch: str, near: str, far: str, D: int, Dv: int) -> dict[str, int]:
    """C, BK, and the padded head dims BD and BV: of the narrower choice where the exact and the far part differ."""
    rows = [configs.find("window", arch, near, D, Dv).blocks, configs.find("window", arch, far, Dv).blocks]
    return {name: min(row[name] for row in rows) for name in ("C", "BK")} | {
        "BD": block(D, 256),
        "BV": block(Dv, 256),
    }
