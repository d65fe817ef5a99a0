"""`hedgehog_features` on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import call, rows

TOKENS = 512  # of a part at least


def part_count(length: int) -> int:
    """How many parts a row of tokens is cut into: a choice of the shapes alone, so that sums are the same bits."""
    return max(1, min(8, length // TOKENS))


def _sizes(x: Tensor, weight: Tensor) -> list[int]:
    return [*x.shape, weight.shape[2], torch.get_num_threads(), part_count(x.shape[1])]


def forward(x: Tensor, weight: Tensor) -> Tensor:
    phi = x.new_empty(*x.shape[:3], 2 * weight.shape[2])
    call("lz_hedgehog_forward", [*rows(x, weight), phi], _sizes(x, weight), [])
    return phi


def backward(d_phi: Tensor, x: Tensor, weight: Tensor, phi: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor]:
    """Gradients of x, if it is wanted, and weight."""
    sizes = _sizes(x, weight)
    dx = torch.empty(x.shape, dtype=x.dtype) if wanted else None
    parts = torch.empty(sizes[-1] * x.shape[0], *weight.shape)
    call("lz_hedgehog_backward", [*rows(d_phi, x, weight, phi), dx, parts], sizes, [])
    return dx, parts.sum(0).to(weight.dtype)
