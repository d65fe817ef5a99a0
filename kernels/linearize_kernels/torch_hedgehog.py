"""`hedgehog_features` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.einsum("bthd,hde->bthe", x, weight.to(x.dtype))
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)


def backward(d_phi: Tensor, x: Tensor, weight: Tensor, phi: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor]:
    """Gradients of x, if it is wanted, and weight."""
    plus, minus = (
        p * (d - (p * d).sum(-1, keepdim=True)) for p, d in zip(phi.chunk(2, -1), d_phi.chunk(2, -1), strict=True)
    )
    dy = plus - minus
    dx = torch.einsum("bthe,hde->bthd", dy, weight.to(x.dtype)) if wanted else None
    return dx, torch.einsum("bthd,bthe->hde", x, dy).to(weight.dtype)
