"""One token at a time, on states that are updated in place: the sums of the chunked code, without its blocks.

B batch, H query heads, Hk key/value heads, F feature dim, D key dim, Dv value dim, w window, n sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_k: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    z: Tensor,
    m: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
) -> Tensor:
    """`torch_linear.forward` for q (B, H, F), k (B, Hk, F), v (B, Hk, Dv): out (B, H, Dv)."""
    decay(S, log_decay)
    if log_decay is not None:
        z.mul_(per_feature(log_decay).to(z.dtype).exp())
    fold(S, z, m, k, v, log_k)
    num, den = read(S, z, q.to(S.dtype) * scale)
    if normalize:
        num = num / den.clamp_min(eps)[..., None]
    elif log_k is not None:
        num = num * m.exp()[..., None, None]
    return num.flatten(1, 2).to(v.dtype)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor, scale: float
) -> Tensor:
    """`torch_delta.forward` for q (B, H, F), k (B, Hk, F), v (B, Hk, Dv), beta (B, Hk): out (B, H, Dv)."""
    k, v, beta = k.to(S.dtype)[..., None], v.to(S.dtype)[..., None, :], beta.to(S.dtype)
    decay(S, log_decay)
    S.addcmul_(k, beta[..., None, None] * (v - torch.matmul(k.transpose(-1, -2), S)))
    return torch.matmul(grouped(q.to(S.dtype) * scale, S), S).flatten(1, 2).to(v.dtype)


def window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    gamma: Tensor,
    S: Tensor,
    z: Tensor,
    m: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    ring_valid: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    sink_age: Tensor,
    start: Tensor,
    scale: float,
    softcap: float,
    eps: float,
) -> Tensor:
    """`torch_window.forward` for one token (B, ...) after a state: out (B, H, Dv)."""
    dtype, window = S.dtype, ring_k.shape[1]
    rows = torch.arange(q.shape[0], device=q.device)
    # The oldest slot leaves the window: into the sums, unless it is padding or a sink. The new token takes its place.
    counts = ring_valid[rows, start] & ~(sink_age == window).any(1)
    fold(S, z, m, phi_k, ring_v[rows, start], log_k, counts)
    ring_k[rows, start], ring_v[rows, start], ring_valid[rows, start] = k.to(ring_k.dtype), v.to(ring_v.dtype), valid
    start.add_(1).remainder_(window)
    _take_sink(k, v, valid, sink_k, sink_v, sink_age)

    keys, values = torch.cat([ring_k, sink_k], 1).to(dtype), torch.cat([ring_v, sink_v], 1).to(dtype)
    seen = torch.cat([ring_valid, sink_age > window], 1)
    scores = torch.matmul(grouped(q.to(dtype) * scale, S), keys.permute(0, 2, 3, 1))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    # A padded token may see no key at all: a finite top keeps exp(-inf - top) = 0.
    top = scores.amax(-1).clamp_min(torch.finfo(dtype).min)
    weight, far = gamma.to(dtype).unflatten(0, (S.shape[1], -1)), None
    if log_q is not None:
        old = log_q.to(dtype).unflatten(1, (S.shape[1], -1)) + m[..., None]
        far = (old - torch.maximum(top, old)).exp()
        top = torch.maximum(top, old)
    weights = (scores - top[..., None]).exp() * weight[..., None]
    num, den = read(S, z, phi_q.to(dtype))
    if far is not None:
        num, den = num * far[..., None], den * far
    num, den = num + torch.matmul(weights, values.transpose(1, 2)), den + weights.sum(-1)
    return (num / den.clamp_min(eps)[..., None]).flatten(1, 2).to(v.dtype)


def grouped(q: Tensor, S: Tensor) -> Tensor:
    """(B, H, F) to (B, Hk, G, F), for S (B, Hk, ...)."""
    return q.unflatten(1, (S.shape[1], -1))


def per_feature(log_decay: Tensor) -> Tensor:
    return log_decay[..., None] if log_decay.dim() == 2 else log_decay


def decay(S: Tensor, log_decay: Tensor | None) -> None:
    """log_decay (B, Hk) or (B, Hk, F)."""
    if log_decay is not None:
        S.mul_(per_feature(log_decay).to(S.dtype).exp()[..., None])


def fold(
    S: Tensor, z: Tensor, m: Tensor, phi: Tensor, v: Tensor, log_k: Tensor | None, counts: Tensor | None = None
) -> None:
    """Add one key per row to the sums: phi (B, Hk, F), v (B, Hk, Dv), log_k (B, Hk), where counts (B,)."""
    phi, v = phi.to(S.dtype), v.to(S.dtype)
    if counts is not None:
        phi = phi.masked_fill(~counts[:, None, None], 0)
        v = v.masked_fill(~counts[:, None, None], 0)
    if log_k is not None:
        log_k = log_k.to(m.dtype)
        top = torch.maximum(m, log_k if counts is None else torch.where(counts[:, None], log_k, m))
        shrink = (m - top).exp()
        S.mul_(shrink[..., None, None])
        z.mul_(shrink[..., None])
        # A key that doesn't count may have any log scale, or NaN.
        grow = (log_k - top).exp()
        grow = grow if counts is None else grow.masked_fill(~counts[:, None], 0)
        phi = phi * grow[..., None]
        m.copy_(top)
    S.addcmul_(phi[..., None], v[..., None, :])
    z.add_(phi)


def read(S: Tensor, z: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """num (B, Hk, G, Dv) and den (B, Hk, G) of queries q (B, H, F)."""
    q = grouped(q, S)
    return torch.matmul(q, S), torch.matmul(q, z[..., None]).squeeze(-1)


def _take_sink(k: Tensor, v: Tensor, valid: Tensor, sink_k: Tensor, sink_v: Tensor, age: Tensor) -> None:
    """All sinks grow older; the new token takes the first free slot, if there is one and it is valid."""
    held = age > 0
    age.add_(held)
    free = ~held & (torch.arange(held.shape[1], device=k.device) == held.sum(1, keepdim=True)) & valid[:, None]
    sink_k.copy_(torch.where(free[..., None, None], k[:, None].to(sink_k.dtype), sink_k))
    sink_v.copy_(torch.where(free[..., None, None], v[:, None].to(sink_v.dtype), sink_v))
    age.add_(free)
