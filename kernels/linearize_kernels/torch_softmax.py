"""Scores of blocks of queries with the keys of a sliding window and the sinks, and their gradients.

Letters as in `torch_window`. A block is n runs of C queries; rows of its products are (B, Hk, n, G, C), and each run
sees the same number of keys, the C + w - 1 up to its last query, and the s sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import torch_blocks

# Queries per run: one computes (C + w) / w times the scores it needs, but shorter ones copy more keys.
RUN = 32
LARGE_RUN = 128
# Windows above this are worked off in large runs, one by one; up to it, runs are stacked in one product.
LARGE_WINDOW = 256


class Part(NamedTuple):
    """n runs of `size` queries from `start` on."""

    start: int
    n: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.n * self.size


def to_rows(x: Tensor, part: Part, kv_heads: int) -> Tensor:
    """(B, T, H, ...) to (B, Hk, n, G, C, ...), contiguous."""
    return _rows(x, part, kv_heads).contiguous()


def from_rows(x: Tensor, part: Part, rows: Tensor) -> None:
    """Write (B, Hk, n, G, C, ...) to x (B, T, H, ...), in x's dtype."""
    _rows(x, part, rows.shape[1]).copy_(rows)


def _rows(x: Tensor, part: Part, kv_heads: int) -> Tensor:
    x = x[:, part.start : part.stop].unflatten(1, (part.n, part.size)).unflatten(3, (kv_heads, -1))
    return x.permute(0, 3, 1, 4, 2, *range(5, x.dim()))


class Near(NamedTuple):
    """What the queries of a call see exactly: keys, values (B, L, Hk, .), valid (B, L), and the sinks (B, s, Hk, .)."""

    keys: Tensor
    values: Tensor
    valid: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_position: Tensor
    window: int
    scale: float
    softcap: float
    dtype: torch.dtype

    @property
    def pad(self) -> int:
        """Places in front of the gradients by keys and values, for stacked runs before the first key."""
        return self.window - 1 if self.window <= LARGE_WINDOW else 0

    def zeros(self) -> tuple[Tensor, ...]:
        """Room for the gradients by keys, values, sink_k and sink_v, heads first and padded."""
        shapes = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (self.keys, self.values)]
        padded = [(b, h, length + self.pad, d) for b, h, length, d in shapes]
        sinks = [(b, h, self.sink_k.shape[1], d) for b, h, _, d in shapes]
        return tuple(self.keys.new_zeros(shape, dtype=self.dtype) for shape in padded + sinks)

    def unpadded(self, d: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients that `zeros` made room for, (B, L or s, Hk, .)."""
        return tuple(x.transpose(1, 2)[:, start:] for x, start in zip(d, (self.pad, self.pad, 0, 0), strict=True))


class Block:
    """The scores (B, Hk, n, G, C, K) of a block of queries; -inf at the keys that a query doesn't see."""

    def __init__(self, q: Tensor, near: Near, part: Part) -> None:
        self.part, self.near = part, near
        dtype, window = near.dtype, near.window
        self.q = to_rows(q, part, near.keys.shape[2]).to(dtype) * near.scale
        # The first run sees w - 1 older keys, where there are as many; stacked runs are all given w - 1.
        begin = near.keys.shape[1] - q.shape[1] + part.start
        older = min(window - 1, begin)
        missing = window - 1 - older if part.n > 1 else 0
        self.span = part.size + older + missing
        self.first = begin - older - missing  # of the first run's keys; below 0 where there are none yet
        seen = slice(begin - older, begin + part.n * part.size)
        self.k = self._runs(near.keys[:, seen].to(dtype), missing, near.sink_k)
        self.v = self._runs(near.values[:, seen].to(dtype), missing, near.sink_v)
        scores = torch.matmul(self.q.flatten(3, 4), self.k.transpose(-1, -2)).view(*self.q.shape[:-1], -1)
        self.tanh = None
        if near.softcap:
            self.tanh = torch.tanh(scores / near.softcap)
            scores = near.softcap * self.tanh
        hidden = self._hidden(near.valid[:, seen], missing)
        self.scores = scores.masked_fill_(hidden[:, None, :, None], -torch.inf)

    def _runs(self, x: Tensor, missing: int, sinks: Tensor) -> Tensor:
        """x (B, K, Hk, D) and sinks (B, s, Hk, D) to the keys or values of every run, (B, Hk, n, span + s, D)."""
        x = F.pad(x.transpose(1, 2), (0, 0, missing, 0)).unfold(2, self.span, self.part.size).transpose(-1, -2)
        sinks = sinks.to(x.dtype).transpose(1, 2)[:, :, None].expand(-1, -1, self.part.n, -1, -1)
        return torch.cat([x, sinks], 3)

    def _hidden(self, valid: Tensor, missing: int) -> Tensor:
        """(B, n, C, span + s), True where the query doesn't see the key: outside its window, or no valid key."""
        part, near = self.part, self.near
        valid = F.pad(valid, (missing, 0), value=False)
        # The last query of a run stands at its last key.
        query = torch.arange(self.span - part.size, self.span, device=valid.device)[:, None]
        key = torch.arange(self.span, device=valid.device)
        outside = (key > query) | (key <= query - near.window)
        hidden = outside | ~valid.unfold(1, self.span, part.size)[:, :, None]
        time = torch.arange(part.start, part.stop, device=valid.device).view(1, part.n, part.size, 1)
        return torch.cat([hidden, near.sink_position[:, None, None] > time - near.window], 3)

    def best(self) -> Tensor:
        """(B, Hk, n, G, C): each query's largest score; finite where it sees no key, so that exp(-inf - best) = 0."""
        return self.scores.amax(-1).clamp_min_(torch.finfo(self.scores.dtype).min)

    def times_values(self, weights: Tensor) -> Tensor:
        """(B, Hk, n, G, C, Dv) for weights like the scores."""
        return torch.matmul(weights.flatten(3, 4), self.v).view(*weights.shape[:-1], -1)

    def by_values(self, d_num: Tensor) -> Tensor:
        """Gradient by the weights, for d_num (B, Hk, n, G, C, Dv)."""
        return torch.matmul(d_num.flatten(3, 4), self.v.transpose(-1, -2)).view(*d_num.shape[:-1], -1)

    def backward(self, d: Tensor, weights: Tensor, d_num: Tensor, gamma: Tensor, d_near: tuple[Tensor, ...]) -> Tensor:
        """dq (B, Hk, n, G, C, D) for the gradients d by the scores and d_num by the sums of values, both still to be
        weighted by gamma (1, Hk, 1, G, 1, 1); overwrites d, adds to d_near (`Near.zeros`)."""
        if self.tanh is not None:
            d.mul_(1 - self.tanh.square_())
        d = d.flatten(3, 4)
        dq = torch.matmul(d, self.k).view_as(self.q).mul_(gamma * self.near.scale)
        dk = torch.matmul(d.transpose(-1, -2), (self.q * gamma).flatten(3, 4))
        dv = torch.matmul(weights.flatten(3, 4).transpose(-1, -2), (d_num * gamma).flatten(3, 4))
        first = self.first + self.near.pad
        for x, sinks, run in ((d_near[0], d_near[2], dk), (d_near[1], d_near[3], dv)):
            for i in range(self.part.n):
                at = first + i * self.part.size
                x[:, :, at : at + self.span] += run[:, :, i, : self.span]
            sinks += run[:, :, :, self.span :].sum(2)
        return dq


def blocks(q: Tensor, near: Near) -> Iterator[Block]:
    """All queries (B, T, H, D), block by block."""
    batch, length, heads = q.shape[:3]
    large = near.window > LARGE_WINDOW
    size = LARGE_RUN if large else RUN
    rows = torch_blocks.ROWS if q.device.type == "cpu" else torch_blocks.ROWS_ON_DEVICE
    most = 1 if large else max(rows // (batch * heads * size), 1)
    whole = length // size
    for i in range(0, whole, most):
        yield Block(q, near, Part(i * size, min(most, whole - i), size))
    if length % size:
        yield Block(q, near, Part(whole * size, 1, length % size))
