"""How far a student's attention output is from its teacher's, for attention transfer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# LoLCATs (arXiv:2410.10254) scales its loss so; attention outputs are small, and so Adam's epsilon stays far below.
MSE_SCALE = 1000.0


def mse(student: Tensor, teacher: Tensor) -> Tensor:
    """1000 (s - t)^2, averaged over heads and dims (LoLCATs, arXiv:2410.10254)."""
    return MSE_SCALE * (student - teacher).square().mean((-2, -1))


def normalized_l2(student: Tensor, teacher: Tensor) -> Tensor:
    """|s - t| / sqrt(d), a norm and not its square, over the d = H Dv dims of a token (RADLADS, arXiv:2505.03005)."""
    difference = (student - teacher).flatten(-2)
    return torch.linalg.vector_norm(difference, dim=-1) / difference.shape[-1] ** 0.5


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cos of the angle between a head's outputs, averaged over heads. It leaves their length free."""
    return (1 - F.cosine_similarity(student, teacher, dim=-1)).mean(-1)


# (B, T, H, Dv) twice -> (B, T), in float32
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": mse, "normalized_l2": normalized_l2, "cosine": cosine}


def attention_loss(name: str, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """The loss called `name` of student (B, T, H, Dv) against teacher, averaged over the real tokens of mask (B, T)."""
    loss = LOSSES[name](student.float(), teacher.float())
    if mask is None:
        return loss.mean()
    return (loss * mask).sum() / mask.sum().clamp(min=1)
