"""One token at a time: the sums of the chunked code, without its blocks. Layouts as in `torch_linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from .state import NOTHING_SEEN, LinearState, WindowState, accumulate_dtype
from .torch_window import Exact, combine


def fold(
    state: LinearState,
    phi: Tensor,
    v: Tensor,
    log_k: Tensor | None,
    counts: Tensor | None,
) -> LinearState:
    """The sums after one key per row: phi (B, Hk, F), v (B, Hk, Dv), log_k (B, Hk), where counts (B,)."""
    S, z, m = state
    phi, v = phi.to(S.dtype), v.to(S.dtype)
    if counts is not None:
        phi = phi.masked_fill(~counts[:, None, None], 0)
        v = v.masked_fill(~counts[:, None, None], 0)
    if log_k is not None:
        log_k = log_k.to(S.dtype)
        log_k = log_k if counts is None else log_k.masked_fill(~counts[:, None], NOTHING_SEEN)
        top = torch.maximum(m, log_k)
        decay = (m - top).exp()
        S, z, m = S * decay[..., None, None], z * decay[..., None], top
        phi = phi * (log_k - top).exp()[..., None]
    return LinearState(S + phi[..., None] * v[..., None, :], z + phi, m)


def read(state: LinearState, q: Tensor) -> tuple[Tensor, Tensor]:
    """num (B, Hk, G, Dv) and den (B, Hk, G) of queries q (B, H, F)."""
    q = q.to(state.S.dtype).unflatten(1, (state.S.shape[1], -1))
    return torch.matmul(q, state.S), torch.matmul(q, state.z[..., None]).squeeze(-1)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    normalize: bool,
    log_k: Tensor | None,
    state: LinearState,
    mask: Tensor | None,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """`torch_linear.linear_attention` for T = 1 and a given state."""
    dtype = accumulate_dtype(q, k, v)
    counts = None if mask is None else mask[:, 0]
    state = LinearState(*(x.to(dtype) for x in state))
    state = fold(state, k[:, 0], v[:, 0], None if log_k is None else log_k[:, 0], counts)
    q = q[:, 0] if counts is None else q[:, 0].masked_fill(~counts[:, None, None], 0)
    num, den = read(state, q.to(dtype) * scale)
    if normalize:
        num = num / den.clamp_min(eps)[..., None]
    elif log_k is not None:
        num = num * state.m.exp()[..., None, None]
    out = num.flatten(1, 2)
    if counts is not None:
        out = out.masked_fill(~counts[:, None, None], 0)
    return out.to(v.dtype)[:, None], state


def window_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    *,
    window: int,
    sinks: int,
    gamma: Tensor | None,
    scale: float,
    log_q: Tensor | None,
    log_k: Tensor | None,
    softcap: float | None,
    state: WindowState,
    mask: Tensor | None,
    eps: float,
) -> tuple[Tensor, WindowState]:
    """`torch_window.window_attention` for T = 1 and a given state."""
    dtype = accumulate_dtype(q, k, v, phi_q, phi_k)
    batch, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    valid = torch.ones(batch, 1, dtype=torch.bool, device=q.device) if mask is None else mask
    if mask is not None:
        q, k, v, phi_q = (x.masked_fill(~mask[..., None, None], 0) for x in (q, k, v, phi_q))
        log_q = None if log_q is None else log_q.masked_fill(~mask[..., None], 0)
    # The oldest slot leaves the window: into the sums, unless it is padding or a sink.
    counts = state.valid[:, 0] & ~(state.sink_age == window).any(1)
    linear = LinearState(*(x.to(dtype) for x in state[:3]))
    linear = fold(
        linear,
        phi_k[:, 0],
        state.v[:, 0],
        None if log_k is None else log_k[:, 0],
        counts,
    )
    ring_k, ring_v, ring_valid = (
        torch.cat([old[:, 1:], x.to(old.dtype)], 1) for old, x in ((state.k, k), (state.v, v), (state.valid, valid))
    )
    sink_k, sink_v, age = _take_sink(state, k, v, valid)

    keys, values, seen = ring_k, ring_v, ring_valid
    if sinks:
        keys, values = torch.cat([keys, sink_k], 1), torch.cat([values, sink_v], 1)
        seen = torch.cat([seen, age > window], 1)
    query = q[:, 0].to(dtype).unflatten(1, (kv_heads, -1)) * scale
    scores = torch.matmul(query, keys.to(dtype).permute(0, 2, 3, 1))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    top = scores.amax(-1).clamp_min(torch.finfo(dtype).min)
    weights = (scores - top[..., None]).exp()
    # One formula for both: what follows is `torch_window.combine` at T = 1.
    exact = Exact(
        torch.matmul(weights, values.to(dtype).transpose(1, 2))[:, :, None],
        weights.sum(-1)[:, :, None],
        top[:, :, None],
    )
    far_num, far_den = read(linear, phi_q[:, 0])
    old = (far_num[:, :, None], far_den[:, :, None], None if log_k is None else linear.m[..., None])
    weight = None if gamma is None else gamma.to(dtype).unflatten(0, (kv_heads, 1, -1))
    out = combine(exact, old, weight, log_q, dtype, eps)[:, :, 0]
    if mask is not None:
        out = out.masked_fill(~mask[..., None, None], 0)
    new = WindowState(*linear, ring_k, ring_v, ring_valid, sink_k, sink_v, age)
    return out.reshape(batch, 1, heads, -1).to(v.dtype), new


def _take_sink(state: WindowState, k: Tensor, v: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sinks with the new token in the first free slot, if it is valid, and their ages."""
    held = state.sink_age > 0
    age = torch.where(held, state.sink_age + 1, state.sink_age)
    if not held.shape[1]:
        return state.sink_k, state.sink_v, age
    free = ~held & (torch.arange(held.shape[1], device=k.device) == held.sum(1, keepdim=True)) & valid
    sink_k = torch.where(free[..., None, None], k.to(state.sink_k.dtype), state.sink_k)
    sink_v = torch.where(free[..., None, None], v.to(state.sink_v.dtype), state.sink_v)
    return sink_k, sink_v, torch.where(free, torch.ones_like(age), age)
