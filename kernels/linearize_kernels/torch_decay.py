"""Decay that differs by feature: products of queries and keys without exp of anything positive.

Two tokens of one sub-block (of 16) meet by their distance d, with exp of the d log decays between them, summed as they
are: nothing cancels. Of two sub-blocks, the query is scaled from its sub-block's start on and the key up to there, so
both factors are at most 1, and a matrix product does the rest.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from .torch_blocks import Span, load
from .torch_factors import Factors, clamp

SUB = 16


def _rest(x: Tensor) -> Tensor:
    """Sums over dim 1 from the next place on: never a difference of sums."""
    return F.pad(x[:, 1:], (0,) * (2 * (x.dim() - 2)) + (0, 1)).flip(1).cumsum(1).flip(1)


class PerFeature(Factors):
    """`Factors` for log decays g (N, C, F), C a multiple of SUB; query, key (N, C, F), chunk (n, R, F, 1)."""

    def __init__(self, g: Tensor, n: int) -> None:
        rows, _, features = g.shape
        self.sub = g.view(rows, -1, SUB, features)
        local = self.sub.cumsum(2)
        tail = _rest(self.sub.flatten(0, 1)).view_as(local)
        total = local[:, :, -1]
        before = F.pad(total[:, :-1], (0, 0, 1, 0)).cumsum(1)
        self.query = (local + before[:, :, None]).exp_().view_as(g)
        self.key = (tail + _rest(total)[:, :, None]).exp_().view_as(g)
        self.chunk = total.sum(1).exp_().view(n, -1, features, 1)
        self.near = local.exp()  # queries, from their sub-block's start on
        self.tail, self.total = tail, total

    @cached_property
    def far(self) -> list[Tensor]:
        """far[b - 1] (N, SUB b, F): the keys before sub-block b, up to its start."""
        tail, total = self.tail.exp(), self.total.exp()
        far: list[Tensor] = []
        for b in range(1, self.sub.shape[1]):
            older = [far[-1] * total[:, b - 1, None]] if far else []
            far.append(torch.cat([*older, tail[:, b - 1]], 1))
        return far

    @cached_property
    def between(self) -> list[Tensor]:
        """between[d] (N, C / SUB, SUB - d, F): from key t - d to query t."""
        factors, passed = [torch.ones_like(self.sub)], torch.zeros_like(self.sub)
        for d in range(1, SUB):
            passed = passed[:, :, 1:] + self.sub[:, :, 1 : SUB - d + 1]
            factors.append(passed.exp())
        return factors

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        rows, groups, length, features = q.shape
        out = q.new_zeros(rows, groups, length, length)
        q_sub, k_sub = q.unflatten(2, (-1, SUB)), k.unflatten(1, (-1, SUB))
        q_near = q_sub * self.near[:, None]
        for b, far in enumerate(self.far, 1):
            keys = (k[:, : b * SUB] * far).transpose(1, 2)
            product = torch.bmm(q_near[:, :, b].reshape(rows, -1, features), keys)
            out[:, :, b * SUB : (b + 1) * SUB, : b * SUB] = product.view(rows, groups, SUB, -1)
        blocks = _diagonal_blocks(out)
        for d, between in enumerate(self.between):
            keys = (k_sub[:, :, : SUB - d] * between)[:, None]
            blocks.diagonal(-d, 2, 3).copy_((q_sub[:, :, :, d:] * keys).sum(-1))
        return out

    def scores_backward(self, d: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rows, groups, _, features = q.shape
        q_sub, k_sub = q.unflatten(2, (-1, SUB)), k.unflatten(1, (-1, SUB))
        dq, dk = torch.zeros_like(q_sub), torch.zeros_like(k_sub)
        dk_flat = dk.view_as(k)
        for b, far in enumerate(self.far, 1):
            near = self.near[:, b, None]
            part = d[:, :, b * SUB : (b + 1) * SUB, : b * SUB].reshape(rows, groups * SUB, -1)
            dq[:, :, b] += near * torch.bmm(part, k[:, : b * SUB] * far).view(rows, groups, SUB, features)
            q_near = (q_sub[:, :, b] * near).reshape(rows, -1, features)
            dk_flat[:, : b * SUB] += far * torch.bmm(part.transpose(1, 2), q_near)
        blocks = _diagonal_blocks(d)
        for i, between in enumerate(self.between):
            part = blocks.diagonal(-i, 2, 3)[..., None]
            dq[:, :, :, i:] += part * (k_sub[:, :, : SUB - i] * between)[:, None]
            dk[:, :, : SUB - i] += (part * q_sub[:, :, :, i:]).sum(1) * between
        return dq.view_as(q), dk_flat


def _diagonal_blocks(x: Tensor) -> Tensor:
    """(N, G, SUB, SUB, C / SUB): a view of the SUB x SUB blocks on the diagonal of x (N, G, C, C)."""
    return x.unflatten(3, (-1, SUB)).unflatten(2, (-1, SUB)).diagonal(0, 2, 4)


def per_feature(log_decay: Tensor, span: Span, dtype: torch.dtype) -> PerFeature:
    """For log decays (B, T, Hk, F)."""
    return PerFeature(clamp(load(log_decay, span, dtype), dtype), span.n)
