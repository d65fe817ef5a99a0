"""`window_attention` on CPUs. Letters as in `linear`; D key dim, L keys (a ring's, then the call's), w window."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import call, rows
from .linear import LOGS, NONE


def _sizes(q: Tensor, values: Tensor, phi_q: Tensor, log_q: Tensor | None, sink_k: Tensor, window: int) -> list[int]:
    batch, length, heads, dim = q.shape
    total, kv_heads, v_dim = values.shape[1:]
    return [
        *(batch, length, heads, kv_heads, dim, v_dim, phi_q.shape[3], total, total - length),
        *(sink_k.shape[1], window, torch.get_num_threads(), NONE if log_q is None else LOGS),
    ]


def forward(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    sink_k: Tensor,
    sink_v: Tensor,
    sink_position: Tensor,
    gamma: Tensor,
    S: Tensor,
    z: Tensor,
    m: Tensor,
    window: int,
    scale: float,
    softcap: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out (B, T, H, Dv), den and top (B, T, H), and the sums after the last token."""
    features = (phi_q, phi_k, log_q, log_k)
    inputs = rows(q, keys, values, valid, *features, sink_k, sink_v, sink_position, gamma, S, z, m)
    out = values.new_empty(*q.shape[:3], values.shape[3])
    den, top = (S.new_empty(q.shape[:3]) for _ in range(2))
    S1, z1, m1 = (torch.empty(x.shape, dtype=x.dtype) for x in (S, z, m))
    call(
        "lz_window_forward",
        [*inputs, out, den, top, S1, z1, m1],
        _sizes(q, values, phi_q, log_q, sink_k, window),
        [scale, softcap, eps],
    )
    return out, den, top, S1, z1, m1


def backward(
    d_out: Tensor,
    dS: Tensor,
    dz: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    sink_k: Tensor,
    sink_v: Tensor,
    sink_position: Tensor,
    gamma: Tensor,
    S: Tensor,
    z: Tensor,
    m: Tensor,
    out: Tensor,
    den: Tensor,
    top: Tensor,
    window: int,
    scale: float,
    softcap: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, keys, values, phi_q, phi_k, log_q, log_k, sink_k, sink_v, gamma, S, z."""
    features = (phi_q, phi_k, log_q, log_k)
    inputs = rows(q, keys, values, valid, *features, sink_k, sink_v, sink_position, gamma, S, z, m)
    sizes = _sizes(q, values, phi_q, log_q, sink_k, window)
    folded = max(keys.shape[1] - window, 0)

    def like(x: Tensor | None) -> Tensor | None:
        """Unwritten, or zeros where keys beyond the folded ones stay untouched."""
        if x is None:
            return None
        whole = (x is not phi_k and x is not log_k) or x.shape[1] == folded
        return (torch.empty if whole else torch.zeros)(x.shape, dtype=x.dtype)

    wanted = (q, keys, values, phi_q, phi_k, log_q, log_k, sink_k, sink_v, gamma, S, z)
    grads = tuple(like(x) for x in wanted)
    call(
        "lz_window_backward",
        [*rows(d_out, dS, dz), *inputs, *rows(out), den, top, *grads],
        sizes,
        [scale, softcap, eps],
    )
    return grads


def step(
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
    """out (B, H, Dv) of one token; every tensor of the state changes in place."""
    batch, heads, dim = q.shape
    out = v.new_empty(batch, heads, v.shape[2])
    new = rows(q, k, v, valid, phi_q, phi_k, log_q, log_k, gamma)
    ring = [ring_k, ring_v, ring_valid, sink_k, sink_v, sink_age, start]
    sizes = [batch, heads, k.shape[1], dim, v.shape[2], phi_q.shape[2], ring_k.shape[1], sink_k.shape[1]]
    call(
        "lz_window_step",
        [*new, S, z, m, *ring, out],
        [*sizes, torch.get_num_threads(), log_q is not None],
        [scale, softcap, eps],
    )
    return out
