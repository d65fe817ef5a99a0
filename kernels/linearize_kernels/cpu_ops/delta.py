"""`delta_rule` on CPUs. Letters as in `linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import call, rows
from .linear import long, mode


def _sizes(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor) -> list[int]:
    batch, length, heads, features = q.shape
    threads = torch.get_num_threads()
    return [batch, length, heads, k.shape[2], features, v.shape[3], S.shape[0], threads, mode(None, log_decay, 3)]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    S: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, T, H, Dv) and the state after the last token."""
    out = v.new_empty(*q.shape[:3], v.shape[3])
    end = torch.empty(S.shape, dtype=S.dtype)
    call(
        "lz_delta_forward",
        [*rows(q, k, v, beta, log_decay, S), long(cu_seqlens), out, end],
        _sizes(q, k, v, log_decay, S),
        [scale],
    )
    return out, end


def backward(
    d_out: Tensor,
    dS: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    S: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, beta, log_decay, S."""
    dq, dk, dv, d_beta, dS0 = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v, beta, S))
    d_gate = None if log_decay is None else torch.empty(log_decay.shape, dtype=log_decay.dtype)
    sums = None if log_decay is None else torch.empty(log_decay.shape, dtype=torch.float32)
    call(
        "lz_delta_backward",
        [*rows(d_out, dS, q, k, v, beta, log_decay, S), long(cu_seqlens), dq, dk, dv, d_beta, d_gate, dS0, sums],
        _sizes(q, k, v, log_decay, S),
        [scale],
    )
    return dq, dk, dv, d_beta, d_gate, dS0


def step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor, scale: float) -> Tensor:
    """out (B, H, Dv) of one token; S changes in place."""
    batch, heads, features = q.shape
    out = v.new_empty(batch, heads, v.shape[2])
    call(
        "lz_delta_step",
        [*rows(q, k, v, beta, log_decay), S, out],
        [batch, heads, k.shape[1], features, v.shape[2], torch.get_num_threads(), mode(None, log_decay, 2)],
        [scale],
    )
    return out
