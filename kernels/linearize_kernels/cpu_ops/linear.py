"""`linear_attention` on CPUs. Letters: B batch, T length, H query heads, Hk key/value heads, F features, Dv values,
N states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .call import call, rows

NONE, LOGS, DECAY, DECAYS = range(4)


def mode(log_k: Tensor | None, log_decay: Tensor | None, tokens: int) -> int:
    """Which gate there is; `tokens`: dims of a gate by head."""
    if log_k is not None:
        return LOGS
    if log_decay is None:
        return NONE
    return DECAY if log_decay.dim() == tokens else DECAYS


def long(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.long()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_k: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    z: Tensor,
    m: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out (B, T, H, Dv), den (B, T, H) before its floor, and the states after the last token."""
    batch, length, heads, features = q.shape
    kind = mode(log_k, log_decay, 3)
    out = v.new_empty(batch, length, heads, v.shape[3])
    den = S.new_empty((batch, length, heads) if normalize else (0,))
    S1, z1, m1 = (torch.empty(x.shape, dtype=x.dtype) for x in (S, z, m))
    gate = log_decay if log_k is None else log_k
    call(
        "lz_linear_forward",
        [*rows(q, k, v, gate, S, z, m), long(cu_seqlens), out, den if normalize else None, S1, z1, m1],
        [batch, length, heads, k.shape[2], features, v.shape[3], S.shape[0], torch.get_num_threads(), kind, normalize],
        [scale, eps],
    )
    return out, den, S1, z1, m1


def _backward(
    inputs: tuple[Any, ...], options: tuple[float, bool, float], grads: list[Tensor], far: Tensor | None
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of the gate, S and z; those of q, k and perhaps v go into `grads`. `far`: see features_backward."""
    d_out, dS, dz, q, k, v, log_k, log_decay, S, z, m, cu_seqlens, out, den = inputs
    scale, normalize, eps = options
    batch, length, heads, features = q.shape
    kind = mode(log_k, log_decay, 3)
    gate = log_decay if log_k is None else log_k
    d_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype)
    sums = torch.empty(gate.shape, dtype=torch.float32) if gate is not None and kind in (DECAY, DECAYS) else None
    d_state = [torch.empty(x.shape, dtype=x.dtype) for x in (S, z)]
    call(
        "lz_linear_backward",
        [
            *rows(d_out, dS, dz, q, k, v, gate, S, z, m),
            *(long(cu_seqlens), *rows(out), den if normalize else None),
            *(*grads, *(None,) * (3 - len(grads)), d_gate, *d_state, sums, far),
        ],
        [batch, length, heads, k.shape[2], features, v.shape[3], S.shape[0], torch.get_num_threads(), kind, normalize],
        [scale, eps],
    )
    return d_gate, d_state


def backward(
    d_out: Tensor,
    dS: Tensor,
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_k: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    z: Tensor,
    m: Tensor,
    cu_seqlens: Tensor | None,
    out: Tensor,
    den: Tensor,
    scale: float,
    normalize: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of q, k, v, log_k, log_decay, S, z."""
    inputs = (d_out, dS, dz, q, k, v, log_k, log_decay, S, z, m, cu_seqlens, out, den)
    dq, dk, dv = grads = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
    d_gate, (dS0, dz0) = _backward(inputs, (scale, normalize, eps), grads, None)
    return dq, dk, dv, None if log_k is None else d_gate, None if log_k is not None else d_gate, dS0, dz0


def features_backward(*inputs: Any) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """As `backward`, with dq and dk to write to behind its arguments: gradients of the gate, S and z, not of v.

    Also the sum of q dq over the features, (B, T, H).
    """
    *tensors, scale, normalize, eps, dq, dk = inputs
    far = torch.empty(dq.shape[:3])
    d_gate, (dS0, dz0) = _backward(tuple(tensors), (scale, normalize, eps), [dq, dk], far)
    return d_gate, dS0, dz0, far


def step(
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
    """out (B, H, Dv) of one token; S, z, m change in place."""
    batch, heads, features = q.shape
    out = v.new_empty(batch, heads, v.shape[2])
    kind, threads = mode(log_k, log_decay, 2), torch.get_num_threads()
    call(
        "lz_linear_step",
        [*rows(q, k, v, log_decay if log_k is None else log_k), S, z, m, out],
        [batch, heads, k.shape[1], features, v.shape[2], threads, kind, normalize],
        [scale, eps],
    )
    return out
