"""Blocks of a sequence for the chunked PyTorch code.

A span is n chunks of C tokens, worked on at once. Its chunks become rows of batched matrix products, N = n * B *
heads of them, the chunk first: so the states before all chunks are one contiguous piece of the states' buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
# Query rows (batch x tokens x heads) worked on at once: on a CPU their score blocks should stay in cache.
ROWS = 4096
ROWS_ON_DEVICE = 1 << 18


class Span(NamedTuple):
    """n chunks of C tokens from `start` on, each followed by `pad` tokens that are none."""

    start: int
    n: int
    chunk: int
    pad: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.n * self.chunk


def spans(q: Tensor, *, unit: int = 1, rows: int | None = None) -> list[Span]:
    """Cover q (B, T, H, ...) by spans; a last chunk that is shorter is padded to a multiple of `unit`."""
    batch, length, heads = q.shape[:3]
    rows = rows or (ROWS if q.device.type == "cpu" else ROWS_ON_DEVICE)
    most = max(rows // max(batch * heads * CHUNK, 1), 1)
    whole = length // CHUNK
    cover = [Span(i * CHUNK, min(most, whole - i), CHUNK, -CHUNK % unit) for i in range(0, whole, most)]
    rest = length - whole * CHUNK
    return cover + ([Span(length - rest, 1, rest, -rest % unit)] if rest else [])


def load(x: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """(B, T, heads, ...) to (N, C, ...), contiguous, in `dtype`; may share memory with x."""
    view = _rows(x, span)
    # One pass where the dtype changes; `to` alone leaves the layout as it is where it doesn't.
    block = view.to(dtype, memory_format=torch.contiguous_format).contiguous().flatten(0, 2)
    if not span.pad:
        return block
    return torch.cat([block, block.new_zeros(block.shape[0], span.pad, *block.shape[2:])], 1)


def store(x: Tensor, span: Span, block: Tensor) -> None:
    """Write a block (N, C, ...) to x (B, T, heads, ...), in x's dtype."""
    view = _rows(x, span)
    view.copy_(block[:, : span.chunk].reshape(view.shape))


def _rows(x: Tensor, span: Span) -> Tensor:
    """(B, T, heads, ...) to a view (n, B, heads, C, ...) of a span."""
    x = x[:, span.start : span.stop].unflatten(1, (span.n, span.chunk))
    return x.permute(1, 0, 3, 2, *range(4, x.dim()))
