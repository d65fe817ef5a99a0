"""The definition of the ops: loops over tokens in float64, to be read, and to test the fast code against.

Nothing here is shared with the chunked code but the state types and the argument checks. Everything is
differentiable. Each function takes the arguments of its namesake in `linearize_kernels` (`backend` is
ignored).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .state import NOTHING_SEEN, DeltaState, LinearState, WindowState, accumulate_dtype


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    normalize: bool = True,
    log_k: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Any:
    """For every token: let the sums decay, fold its key into them, then read them with its query."""
    checks.linear_arguments(q, k, v, log_k, log_decay, initial_state, cu_seqlens, mask)
    outs, states = [], []
    for row, start, stop, index in _sequences(q, cu_seqlens):
        S, z, m = _start(k.shape[2], k.shape[3], v, log_k)
        if initial_state is not None:
            S, z, m = (x[index].double() for x in initial_state)
        for t in range(start, stop):
            if mask is not None and not mask[row, t]:
                outs.append(torch.zeros(q.shape[2], v.shape[3], dtype=torch.float64, device=q.device))
                continue
            if log_decay is not None:
                decay = _decay(log_decay, row, t)
                S, z = decay[..., None] * S, decay * z
            S, z, m = _fold(S, z, m, k[row, t], v[row, t], None if log_k is None else log_k[row, t])
            num, den = _read(S, z, scale * q[row, t].double())
            if normalize:
                outs.append(num / den.clamp(min=eps)[:, None])
            else:
                outs.append(num * _per_query(m, q.shape[2]).exp()[:, None])
        states.append((S, z, m))
    out = _rows(outs, q, v)
    if not return_state:
        return out
    dtype = accumulate_dtype(q, k, v)
    if not states:
        empty = (0, k.shape[2], k.shape[3], v.shape[3])
        return out, LinearState(*(v.new_zeros(empty[:n], dtype=dtype) for n in (4, 3, 2)))
    return out, LinearState(*(torch.stack(x).to(dtype) for x in zip(*states, strict=True)))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: DeltaState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """For every token: let the sums decay, replace what they hold for its key by its value, read them."""
    checks.delta_arguments(q, k, v, beta, log_decay, initial_state, cu_seqlens, mask)
    factor = q.shape[3] ** -0.5 if scale is None else scale
    outs, states = [], []
    for row, start, stop, index in _sequences(q, cu_seqlens):
        S = _start(k.shape[2], k.shape[3], v, None)[0]
        if initial_state is not None:
            S = initial_state.S[index].double()
        for t in range(start, stop):
            if mask is not None and not mask[row, t]:
                outs.append(torch.zeros(q.shape[2], v.shape[3], dtype=torch.float64, device=q.device))
                continue
            if log_decay is not None:
                S = _decay(log_decay, row, t)[..., None] * S
            key, value = k[row, t].double(), v[row, t].double()
            held = (key[:, :, None] * S).sum(1)
            change = beta[row, t].double()[:, None] * (value - held)
            S = S + key[:, :, None] * change[:, None, :]
            outs.append((factor * q[row, t].double()[:, :, None] * _per_query(S, q.shape[2])).sum(1))
        states.append(S)
    out = _rows(outs, q, v)
    if not return_state:
        return out
    dtype = accumulate_dtype(q, k, v)
    if not states:
        return out, DeltaState(v.new_zeros(0, k.shape[2], k.shape[3], v.shape[3], dtype=dtype))
    return out, DeltaState(torch.stack(states).to(dtype))


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    *,
    window: int,
    sinks: int = 0,
    gamma: Tensor | None = None,
    scale: float | None = None,
    log_q: Tensor | None = None,
    log_k: Tensor | None = None,
    softcap: float | None = None,
    initial_state: WindowState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Any:
    """For every token: fold the key that leaves the window, list the keys seen exactly, and divide once."""
    checks.window_arguments(
        q,
        k,
        v,
        phi_q,
        phi_k,
        window,
        sinks,
        gamma,
        log_q,
        log_k,
        softcap,
        initial_state,
        cu_seqlens,
        mask,
    )
    factor = q.shape[3] ** -0.5 if scale is None else scale
    heads, kv_heads = q.shape[2], k.shape[2]
    outs, states = [], []
    for row, start, stop, index in _sequences(q, cu_seqlens):
        S, z, m = _start(kv_heads, phi_q.shape[3], v, log_k)
        # Tokens as (k, v, valid, row of phi_k), oldest first, and the sinks as (position, k, v); position 0
        # is `start`.
        seen: dict[int, tuple[Tensor, Tensor, bool, int]] = {}
        kept: list[tuple[int, Tensor, Tensor]] = []
        if initial_state is not None:
            S, z, m = (x[index].double() for x in initial_state[:3])
            for i in range(window):
                slot = (int(initial_state.start[index]) + i) % window
                pair = (initial_state.k[index, slot], initial_state.v[index, slot])
                seen[i - window] = (*pair, bool(initial_state.valid[index, slot]), i)
            for i in range(sinks):
                age = int(initial_state.sink_age[index, i])
                if age > 0:
                    kept.append(
                        (
                            -age,
                            initial_state.sink_k[index, i],
                            initial_state.sink_v[index, i],
                        )
                    )
        offset = len(seen)
        for t in range(stop - start):
            at = start + t
            valid = mask is None or bool(mask[row, at])
            seen[t] = (k[row, at], v[row, at], valid, at + offset)
            if valid and len(kept) < sinks:
                kept.append((t, k[row, at], v[row, at]))
            if t - window in seen:
                _, v_old, valid_old, place = seen.pop(t - window)
                if valid_old and all(position != t - window for position, _, _ in kept):
                    S, z, m = _fold(
                        S,
                        z,
                        m,
                        phi_k[row, place],
                        v_old,
                        None if log_k is None else log_k[row, place],
                    )
            if not valid:
                outs.append(torch.zeros(heads, v.shape[3], dtype=torch.float64, device=q.device))
                continue
            exact = [(key, value) for key, value, real, _ in seen.values() if real]
            exact += [(key, value) for position, key, value in kept if position <= t - window]
            keys = _per_query(torch.stack([key for key, _ in exact], 1).double(), heads)
            values = _per_query(torch.stack([value for _, value in exact], 1).double(), heads)
            scores = factor * (keys * q[row, at].double()[:, None]).sum(-1)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            top = scores.amax(1)
            log_far = _per_query(m, heads) + (top if log_q is None else log_q[row, at].double())
            most = torch.maximum(top, log_far)
            weights = (scores - most[:, None]).exp()
            if gamma is not None:
                weights = weights * gamma.double()[:, None]
            num, den = _read(S, z, phi_q[row, at].double())
            far = (log_far - most).exp()
            num = (weights[..., None] * values).sum(1) + far[:, None] * num
            den = weights.sum(1) + far * den
            outs.append(num / den.clamp(min=eps)[:, None])
        states.append(_window_state(S, z, m, seen, kept, k, v, stop - start, window, sinks))
    out = _rows(outs, q, v)
    if not return_state:
        return out
    dtype = accumulate_dtype(q, k, v, phi_q, phi_k)
    if not states:
        nothing = (*_start(kv_heads, phi_q.shape[3], v, log_k), {}, [])
        return out, WindowState(*(x[None][:0] for x in _window_state(*nothing, k, v, 0, window, sinks)))
    stacked = [torch.stack(x) for x in zip(*states, strict=True)]
    return out, WindowState(*(x.to(dtype) for x in stacked[:3]), *stacked[3:])


def linear_attention_step(q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, **options: Any) -> Any:
    """One token: `linear_attention` with a state, T = 1."""
    return linear_attention(q, k, v, initial_state=state, return_state=True, **options)


def window_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    state: WindowState | None,
    **options: Any,
) -> Any:
    """One token: `window_attention` with a state, T = 1."""
    return window_attention(q, k, v, phi_q, phi_k, initial_state=state, return_state=True, **options)


def _decay(log_decay: Tensor, row: int, t: int) -> Tensor:
    """(Hk, 1) or (Hk, F): the factor of the sums at a token, of log_decay (Hk,), (B, T, Hk) or (B, T, Hk, F)."""
    factor = (log_decay if log_decay.dim() == 1 else log_decay[row, t]).double().exp()
    return factor[:, None] if factor.dim() == 1 else factor


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int, int, int]]:
    """(batch row, start, stop, state row) of every sequence."""
    if cu_seqlens is None:
        return [(row, 0, q.shape[1], row) for row in range(q.shape[0])]
    ends = cu_seqlens.tolist()
    return [(0, ends[i], ends[i + 1], i) for i in range(len(ends) - 1)]


def _start(kv_heads: int, features: int, v: Tensor, log_k: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """S, z and m before the first key."""
    S = torch.zeros(kv_heads, features, v.shape[3], dtype=torch.float64, device=v.device)
    return S, S[..., 0], S[:, 0, 0] + (0.0 if log_k is None else NOTHING_SEEN)


def _fold(S: Tensor, z: Tensor, m: Tensor, phi: Tensor, v: Tensor, log: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """S (Hk, F, Dv), z (Hk, F), m (Hk,) after a key: phi (Hk, F), v (Hk, Dv), log scale (Hk,)."""
    phi, v = phi.double(), v.double()
    if log is None:
        return S + phi[:, :, None] * v[:, None, :], z + phi, m
    log = log.double()
    new = torch.maximum(m, log)
    decay, weight = (m - new).exp(), (log - new).exp()
    phi = weight[:, None] * phi
    return (
        decay[:, None, None] * S + phi[:, :, None] * v[:, None, :],
        decay[:, None] * z + phi,
        new,
    )


def _read(S: Tensor, z: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator (H, Dv) and denominator (H,) of queries with features q (H, F)."""
    heads = q.shape[0]
    return (q[:, :, None] * _per_query(S, heads)).sum(1), (q * _per_query(z, heads)).sum(1)


def _per_query(x: Tensor, heads: int) -> Tensor:
    """(Hk, ...) to (H, ...): query head h reads key/value head h // (H / Hk)."""
    return torch.stack([x[h * x.shape[0] // heads] for h in range(heads)])


def _rows(outs: list[Tensor], q: Tensor, v: Tensor) -> Tensor:
    shape = (*q.shape[:3], v.shape[3])
    return torch.stack(outs).view(shape).to(v.dtype) if outs else v.new_zeros(shape)


def _window_state(
    S: Tensor,
    z: Tensor,
    m: Tensor,
    seen: dict[int, tuple[Tensor, Tensor, bool, int]],
    kept: list[tuple[int, Tensor, Tensor]],
    k: Tensor,
    v: Tensor,
    length: int,
    window: int,
    sinks: int,
) -> tuple[Tensor, ...]:
    no_k, no_v = k.new_zeros(k.shape[2:]), v.new_zeros(v.shape[2:])
    ring = [seen.get(position, (no_k, no_v, False, 0)) for position in range(length - window, length)]
    ring = [slot if slot[2] else (no_k, no_v, False, 0) for slot in ring]
    sink_slots = [*((length - position, key, value) for position, key, value in kept)]
    sink_slots += [(0, no_k, no_v)] * (sinks - len(kept))
    return (
        S,
        z,
        m,
        torch.stack([slot[0] for slot in ring]).to(k.dtype),
        torch.stack([slot[1] for slot in ring]).to(v.dtype),
        torch.tensor([slot[2] for slot in ring], dtype=torch.bool, device=k.device),
        torch.stack([slot[1] for slot in sink_slots]).to(k.dtype) if sinks else k.new_zeros(0, *k.shape[2:]),
        torch.stack([slot[2] for slot in sink_slots]).to(v.dtype) if sinks else v.new_zeros(0, *v.shape[2:]),
        torch.tensor([slot[0] for slot in sink_slots], dtype=torch.int64, device=k.device),
        torch.zeros((), dtype=torch.int64, device=k.device),
    )
