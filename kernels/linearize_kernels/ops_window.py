"""The public ops of window attention; see `ops`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, custom_window, reference
from .custom import dispatched
from .dispatch import forced
from .ops import is_step, overwrite, own
from .packed import run_packed
from .state import NOTHING_SEEN, LinearState, WindowState, accumulate_dtype, empty_window_state
from .window_keys import all_keys, find_sinks, is_sink, next_state

NEVER = 2**62  # the position of a sink slot that holds no token


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
    """Softmax over the last `window` tokens, linear attention over all older ones, one denominator.

    The form of LoLCATs (Zhang et al. 2024, arXiv:2410.10254) with one sliding window for training, prefill
    and decoding. With W the last `window` positions including t, O the older ones, s_j = scale q_t.k_j:

        o_t = [gamma sum_W exp(s_j - c) v_j + phi_q S_O] / max(gamma sum_W exp(s_j - c) + phi_q z_O, eps)

    c = max_W s_j. With log_q, log_k (both or neither) the features are exp(log_q) phi_q and exp(log_k) phi_k: of maps
    that estimate the softmax kernel itself. The linear part is then on the absolute scale, phi_q S_O exp(log_q - c),
    and the denominator is floored by `eps` relative to the larger of exp(c) and exp(log_q + m).

    q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv); H a multiple of Hk. scale: D^-1/2 unless given.
    softcap: scores become softcap tanh(s / softcap), in the exact part only. gamma (H,): weight of the exact
    part, 1 unless given. phi_q (B, T, H, F), log_q (B, T, H). phi_k (B, R + T, Hk, F), log_k (B, R + T, Hk):
    of the keys of initial_state's ring, oldest first (R = window if there is one, else 0), and of k after them. Only
    the first R + T - window are read: the keys that leave the window during the call; a shorter tensor that holds
    these is fine.

    sinks: the first that many valid tokens of each sequence stay in the exact set for ever. mask (B, T) bool,
    True at real tokens: masked tokens take up positions of the window but add nothing; their outputs and
    gradients are 0. cu_seqlens (N + 1,) int: N sequences packed in one row (B = 1), with phi_k (1, T, Hk, F).

    Returns the output (B, T, H, Dv) in v's dtype, or (output, WindowState) with return_state=True. Gradients as in
    `linear_attention`. Raises ValueError for arguments that don't fit together (cu_seqlens with initial_state among
    them), and for an unusable backend.
    """
    if not is_compiling():
        checks.window_arguments(
            q, k, v, phi_q, phi_k, window, sinks, gamma, log_q, log_k, softcap, initial_state, cu_seqlens, mask
        )
    name = forced("window_attention", backend)
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    options = {"window": window, "sinks": sinks, "gamma": gamma, "scale": factor, "softcap": softcap, "eps": float(eps)}
    features = {"phi_q": phi_q, "phi_k": phi_k, "log_q": log_q, "log_k": log_k}
    if name == "reference":
        return reference.window_attention(
            q, k, v, **features, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
            mask=mask, **options,
        )  # fmt: skip
    run = partial(_sequence, **options, backend=name)
    if cu_seqlens is not None:
        result = run_packed(run, {"q": q, "k": k, "v": v, **features}, cu_seqlens, mask)
    else:
        result = run(q, k, v, **features, state=initial_state, mask=mask)
    return result if return_state else result[0]


def _sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    *,
    window: int,
    sinks: int,
    gamma: Tensor | None,
    scale: float,
    softcap: float | None,
    eps: float,
    backend: str,
    state: WindowState | None,
    mask: Tensor | None,
) -> tuple[Tensor, WindowState]:
    """`window_attention` on checked arguments, without `cu_seqlens`."""
    dtype = accumulate_dtype(q, k, v, phi_q, phi_k)
    length = q.shape[1]
    before = 0 if state is None else window
    given = state
    if state is None:
        state = empty_window_state(
            k, v, rows=q.shape[0], features=phi_q.shape[3], window=window, sinks=sinks, logs=log_k is not None,
            dtype=dtype,
        )  # fmt: skip
    state = state._replace(S=state.S.to(dtype), z=state.z.to(dtype), m=state.m.to(dtype))
    if not length or not q.shape[0]:
        return v.new_zeros(*q.shape[:3], v.shape[3]), WindowState(*(x.clone() for x in state))
    gamma = _weights(gamma, q, dtype)
    if is_step(q, given, None, k, v, phi_q, phi_k, log_q, log_k, gamma):
        state = WindowState(*map(own, state))
        tensors = (q, k, v, phi_q, phi_k, log_q, log_k, gamma)
        return _step(*tensors, state, scale=scale, softcap=softcap, eps=eps, mask=mask, backend=backend), state
    q, k, v, phi_q, log_q = _without_padding(q, k, v, phi_q, log_q, mask)
    valid = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    if given is not None:  # the oldest first
        order = {"k": state.ring(state.k), "v": state.ring(state.v), "valid": state.ring(state.valid)}
        state = state._replace(**order, start=torch.zeros_like(state.start))
    keys = all_keys(None if given is None else state, k, v, valid)
    kept = find_sinks(state, k, v, valid, sinks)
    folded = max(length + before - window, 0)
    phi_k = phi_k[:, :folded]
    log_k = None if log_k is None else log_k[:, :folded].to(dtype)
    if folded:
        counts = keys.valid[:, :folded] & ~is_sink(kept, keys, folded)
        phi_k = phi_k.masked_fill(~counts[..., None, None], 0)
        log_k = None if log_k is None else log_k.masked_fill(~counts[..., None], NOTHING_SEEN)
    position = torch.where(kept.filled, kept.position, NEVER)
    out, _, _, S, z, m = custom_window.window(
        q, keys.k, keys.v, keys.valid, phi_q, phi_k, log_q, log_k, kept.k, kept.v, position, gamma, state.S, state.z,
        state.m, window, scale, softcap or 0.0, eps, backend,
    )  # fmt: skip
    if mask is not None:  # a padded query still sees the real keys before it
        out = out.masked_fill(~mask[..., None, None], 0)
    after = next_state(state, keys, kept, LinearState(S, z, m.detach()), length, window)
    # Copies, not views, which would keep the keys of the whole call in memory.
    return out, after._replace(k=own(after.k), v=own(after.v), valid=own(after.valid))


def window_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    state: WindowState,
    *,
    window: int,
    sinks: int = 0,
    gamma: Tensor | None = None,
    scale: float | None = None,
    log_q: Tensor | None = None,
    log_k: Tensor | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """`window_attention` of one token, T = 1, whose `state` is updated in place: returns the output (B, 1, H, Dv).

    phi_k (B, >= 1, Hk, F) and log_k start with those of the oldest key of the ring, which leaves the window:
    state.k[b, state.start[b]]. Without gradients: raises ValueError if one would be needed, or if the arguments don't
    fit together.
    """
    if not is_compiling():
        checks.one_token(q, state)
        checks.window_arguments(q, k, v, phi_q, phi_k, window, sinks, gamma, log_q, log_k, softcap, state, None, mask)
    checks.no_gradient(q, k, v, phi_q, phi_k, log_q, log_k, gamma, *state)
    name = forced("window_attention", backend)
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    if name == "reference":
        out, after = reference.window_attention(
            q, k, v, phi_q, phi_k, window=window, sinks=sinks, gamma=gamma, scale=factor, log_q=log_q, log_k=log_k,
            softcap=softcap, initial_state=state, return_state=True, mask=mask, eps=eps,
        )  # fmt: skip
        return overwrite(state, after, out)
    gamma = _weights(gamma, q, state.S.dtype)
    tensors = (q, k, v, phi_q, phi_k, log_q, log_k, gamma)
    return _step(*tensors, state, scale=factor, softcap=softcap, eps=float(eps), mask=mask, backend=name)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    gamma: Tensor,
    state: WindowState,
    *,
    scale: float,
    softcap: float | None,
    eps: float,
    mask: Tensor | None,
    backend: str,
) -> Tensor:
    """One token, checked, on a state that is overwritten."""
    q, k, v, phi_q, log_q = _without_padding(q, k, v, phi_q, log_q, mask)
    valid = torch.ones(q.shape[0], dtype=torch.bool, device=q.device) if mask is None else mask[:, 0].contiguous()
    logs = (None if x is None else x[:, 0].to(state.S.dtype) for x in (log_q, log_k))
    step: Any = custom_window.window_step if dispatched(q) else custom_window.window_step_now
    out = step(
        q[:, 0], k[:, 0], v[:, 0], valid, phi_q[:, 0], phi_k[:, 0], *logs, gamma, *state, scale, softcap or 0.0, eps,
        backend,
    )[:, None]  # fmt: skip
    return out if mask is None else out.masked_fill(~mask[..., None, None], 0)


def _weights(gamma: Tensor | None, q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ones(q.shape[2], dtype=dtype, device=q.device) if gamma is None else gamma.to(dtype)


def _without_padding(
    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, log_q: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors with zeros at masked tokens, where anything may stand."""
    if mask is None:
        return q, k, v, phi_q, log_q
    q, k, v, phi_q = (x.masked_fill(~mask[..., None, None], 0) for x in (q, k, v, phi_q))
    return q, k, v, phi_q, None if log_q is None else log_q.masked_fill(~mask[..., None], 0)
