"""`hedgehog_features` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from .state import accumulate_dtype


def forward(x: Tensor, weight: Tensor) -> Tensor:
    dtype = accumulate_dtype(x)
    y = torch.einsum("bthd,hde->bthe", x.to(dtype), weight.to(dtype))
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1).to(x.dtype)


def backward(d_phi: Tensor, x: Tensor, weight: Tensor, phi: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor]:
    """Gradients of x, if it is wanted, and weight."""
    dtype = accumulate_dtype(x)
    sides = zip(phi.to(dtype).chunk(2, -1), d_phi.to(dtype).chunk(2, -1), strict=True)
    plus, minus = (p * (d - (p * d).sum(-1, keepdim=True)) for p, d in sides)
    dy = plus - minus
    dx = torch.einsum("bthe,hde->bthd", dy, weight.to(dtype)).to(x.dtype) if wanted else None
    return dx, torch.einsum("bthd,bthe->hde", x.to(dtype), dy).to(weight.dtype)
