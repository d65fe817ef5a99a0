"""`favor_features` on CPUs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .call import call, rows
from .hedgehog import part_count


def _sizes(x: Tensor, omega: Tensor, hyperbolic: bool) -> list[int]:
    return [*x.shape, omega.shape[0], torch.get_num_threads(), part_count(x.shape[1]), hyperbolic]


def forward(x: Tensor, omega: Tensor, scale: float, hyperbolic: bool) -> tuple[Tensor, Tensor]:
    """phi (B, T, H, F) and its log scale (B, T, H)."""
    phi = x.new_empty(*x.shape[:3], omega.shape[0] * (2 if hyperbolic else 1))
    log = torch.empty(x.shape[:3])
    call("lz_favor_forward", [*rows(x, omega), phi, log], _sizes(x, omega, hyperbolic), [math.sqrt(scale)])
    return phi, log


def backward(
    d_phi: Tensor, d_log: Tensor, x: Tensor, omega: Tensor, phi: Tensor, scale: float, hyperbolic: bool
) -> Tensor:
    """The gradient of x."""
    dx = torch.empty(x.shape, dtype=x.dtype)
    sizes = _sizes(x, omega, hyperbolic)
    call("lz_favor_backward", [*rows(d_phi), d_log, *rows(x, omega, phi), dx], sizes, [math.sqrt(scale)])
    return dx
