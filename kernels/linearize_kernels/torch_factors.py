"""How the terms of a chunk are scaled: not at all, by log scales of the keys, or by decay.

Every term is scaled from where its key stands to where it is read. N rows (one for each chunk and key/value head), G
query heads per key/value head, C tokens, F features; R = batch x key/value heads. `PerFeature` in `torch_decay` has
the same methods for decay that differs by feature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_blocks import Span, load


class Factors:
    """One scale per token and head; all factors are exp of something <= 0, or None for no scales at all.

    pair (N, 1, C, C): key j as query t sees it, 0 for j > t. query (N, C, 1): the state before the chunk as query t
    sees it. key (N, C, 1): key j as the chunk's end sees it. chunk (n, R, 1, 1): the state before the chunk as its end
    sees it.
    """

    pair: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    chunk: Tensor | None = None

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(N, G, C, C): products of q (N, G, C, F) with k (N, C, F), scaled, 0 for later keys."""
        products = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).view(*q.shape[:3], k.shape[1])
        return products.tril_() if self.pair is None else products.mul_(self.pair)

    def scores_backward(self, d: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients by q and k of the scores, for d (N, G, C, C), which is overwritten."""
        rows = (d.tril_() if self.pair is None else d.mul_(self.pair)).flatten(1, 2)
        return torch.bmm(rows, k).view_as(q), torch.bmm(rows.transpose(1, 2), q.flatten(1, 2))

    def read(self, q: Tensor) -> Tensor:
        """Queries (N, G, C, F), or gradients by them, as they read the state before the chunk."""
        return q if self.query is None else q * self.query[:, None]

    def write(self, k: Tensor) -> Tensor:
        """Keys (N, C, F), or gradients by them, as they stand in the state at the chunk's end."""
        return k if self.key is None else k * self.key


def of_pairs(row: Tensor, col: Tensor, before: Tensor, end: Tensor, n: int, dtype: torch.dtype) -> Factors:
    """Terms exp(row_t - col_j) of row, col (N, C); the state stands at exp(before), then exp(end), both (N, 1)."""
    factors = Factors()
    pair = row[:, :, None] - col[:, None, :]
    # A later key may lie far above: masked before exp, else it would overflow.
    future = torch.ones(pair.shape[1:], dtype=torch.bool, device=pair.device).triu_(1)
    factors.pair = pair.to(dtype).masked_fill_(future, -torch.inf).exp_()[:, None]
    factors.query = (row - before).exp().to(dtype)[..., None]
    factors.key = (end - col).exp().to(dtype)[..., None]
    factors.chunk = (end - before).exp().to(dtype).view(n, -1, 1, 1)
    return factors


def of_log_scales(log_k: Tensor, running: Tensor, m: Tensor, span: Span, dtype: torch.dtype) -> Factors:
    """For log scales of keys (B, T, Hk), their running maximum, and m (B, Hk), the one before the call."""
    top = load(running, span, dtype)
    end = top[:, -1:]
    first = m if not span.start else running[:, span.start - 1]
    rows = end.shape[0] // span.n
    before = torch.cat([first.to(dtype).reshape(rows, 1), end[:-rows]])
    return of_pairs(-top, -load(log_k, span, dtype), -before, -end, span.n, dtype)


def of_decay(log_decay: Tensor, span: Span, dtype: torch.dtype) -> Factors:
    """For one log decay per token and head, (B, T, Hk)."""
    # A small difference of two large sums must not lose its digits.
    c = clamp(load(log_decay, span, widest(log_decay)), dtype).cumsum(1)
    return of_pairs(c, c, torch.zeros_like(c[:, :1]), c[:, -1:], span.n, dtype)


def widest(x: Tensor) -> torch.dtype:
    """float64 where x's device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def clamp(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite, and the same to `dtype`: exp is 0 below these."""
    return log_decay.clamp_min(-800.0 if dtype == torch.float64 else -110.0)


def decay_gradient(exponent: Tensor, at_end: Tensor) -> Tensor:
    """Gradient by log_decay (B, T, Hk, ...), from those by its sums up to every token, and by the last of them."""
    d = exponent.to(widest(exponent), copy=True)
    d[:, -1] += at_end
    return d.flip(1).cumsum_(1).flip(1).to(exponent.dtype)
