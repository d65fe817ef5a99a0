"""`favor_features` in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .state import accumulate_dtype


def forward(x: Tensor, omega: Tensor, scale: float, hyperbolic: bool) -> tuple[Tensor, Tensor]:
    """phi (B, T, H, F) and its log scale (B, T, H)."""
    dtype = accumulate_dtype(x)
    u = x.to(dtype) * math.sqrt(scale)
    exponent = u @ omega.to(dtype).T
    if hyperbolic:
        exponent = torch.cat([exponent, -exponent], -1)
    largest = exponent.amax(-1, keepdim=True)
    phi = (exponent - largest).exp() / math.sqrt(exponent.shape[-1])
    return phi.to(x.dtype), largest.squeeze(-1) - u.square().sum(-1) / 2


def backward(
    d_phi: Tensor, d_log: Tensor, x: Tensor, omega: Tensor, phi: Tensor, scale: float, hyperbolic: bool
) -> Tensor:
    """The gradient of x."""
    dtype = accumulate_dtype(x)
    dy = d_phi.to(dtype) * phi.to(dtype)
    if hyperbolic:
        plus, minus = dy.chunk(2, -1)
        dy = plus - minus
    dx = math.sqrt(scale) * (dy @ omega.to(dtype)) - scale * d_log.to(dtype)[..., None] * x.to(dtype)
    return dx.to(x.dtype)
