"""The public ops: check the arguments, apply masks and defaults, run the custom op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, custom, reference
from .dispatch import forced
from .state import NOTHING_SEEN, DeltaState, LinearState, accumulate_dtype, empty_delta_state, empty_linear_state


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
    """Causal linear attention over features (Katharopoulos et al. 2020, arXiv:2006.16236), with or without decay.

        S_t = a_t S_{t-1} + exp(log_k_t) k_t v_t^T    z_t = a_t z_{t-1} + exp(log_k_t) k_t    a_t = exp(log_decay_t)
        o_t = scale q_t S_t / max(scale q_t z_t, eps)        or, with normalize=False,  o_t = scale q_t S_t

    q (B, T, H, F), k (B, T, Hk, F): features phi(q), phi(k), of one dtype; v (B, T, Hk, Dv). H is a multiple
    of Hk and query head h reads key/value head h // (H / Hk). Sums are float32 (float64 for float64 inputs),
    the output (B, T, H, Dv) has v's dtype.

    log_decay, at most 0: (Hk,) fixed for each head (RetNet, Sun et al. 2023, arXiv:2307.08621), (B, T, Hk) for each
    token (Mamba-2, Dao and Gu 2024, arXiv:2405.21060), or (B, T, Hk, F) for each key dim, too (GLA, Yang et al. 2023,
    arXiv:2312.06635). In float32, a decay below exp(-64) may count as that.

    log_k (B, T, Hk): log scale of the key features, for maps like FAVOR+ (Choromanski et al. 2020,
    arXiv:2009.14794) whose features span many orders of magnitude. Sums are then held relative to exp(m_t),
    m_t the largest log_k of the valid keys up to t, and so is the denominator that `eps` floors; unnormalised
    outputs are multiplied back by exp(m_t). Give log_k on every call of a sequence, or on none; not with log_decay.

    initial_state: the `LinearState` of the tokens before. mask (B, T) bool, True at real tokens: masked
    tokens add nothing and let nothing decay, their outputs and gradients are 0. cu_seqlens (N + 1,) int: N sequences
    packed in one row (B = 1), each with a state of its own (N rows).

    Returns the output, or (output, LinearState) with return_state=True. Gradients flow to all inputs and through
    S and z of the states; m is a choice of scale, and takes no gradient. Raises ValueError for arguments that
    don't fit together, and for a backend that doesn't exist or can't be used.
    """
    if not is_compiling():  # messages about symbolic shapes can't be traced
        checks.linear_arguments(q, k, v, log_k, log_decay, initial_state, cu_seqlens, mask)
    name = forced("linear_attention", backend)
    if name == "reference":
        return reference.linear_attention(
            q, k, v, scale=scale, normalize=normalize, log_k=log_k, log_decay=log_decay, initial_state=initial_state,
            return_state=return_state, cu_seqlens=cu_seqlens, mask=mask, eps=eps,
        )  # fmt: skip
    dtype = accumulate_dtype(q, k, v)
    given = initial_state
    if initial_state is None:
        initial_state = empty_linear_state(
            _rows(q, cu_seqlens), k.shape[2], k.shape[3], v.shape[3], logs=log_k is not None, dtype=dtype,
            device=q.device,
        )  # fmt: skip
    state = LinearState(*(x.to(dtype) for x in initial_state))
    if not q.shape[1] or not state.S.shape[0]:
        out = v.new_zeros(*q.shape[:3], v.shape[3])
        return (out, LinearState(*(x.clone() for x in state))) if return_state else out
    (q, k, v), log_k, log_decay = _masked(mask, (q, k, v), log_k, _per_token(log_decay, k, dtype), dtype)
    options = (float(scale), normalize, float(eps), name)
    if is_step(q, given, cu_seqlens, k, v, log_k, log_decay):
        step: Any = custom.linear_step if custom.dispatched(q) else custom.linear_step_now
        state = LinearState(*map(own, state))
        out = step(*_token(q, k, v, log_k, log_decay), *state, *options)[:, None]
    else:
        out, _, *after = custom.linear(q, k, v, log_k, log_decay, *state, cu_seqlens, *options)
        state = LinearState(after[0], after[1], after[2].detach())
    if mask is not None and not normalize:  # exp(m) may be inf, and inf * 0 is not the 0 that a masked query gives
        out = out.masked_fill(~mask[..., None, None], 0)
    return (out, state) if return_state else out


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
    """The delta rule: a state that replaces what it holds for a key, instead of adding to it.

        S'_t = a_t S_{t-1}    S_t = S'_t + beta_t k_t (v_t - k_t S'_t)^T    o_t = scale q_t S_t

    with a_t = exp(log_decay_t).

    DeltaNet (Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484) without log_decay; gated
    DeltaNet (Yang et al. 2024, arXiv:2412.06464) with log_decay (B, T, Hk), or (Hk,); Kimi Delta Attention
    (arXiv:2510.26692) with log_decay (B, T, Hk, F). It is at most 0; in float32, what is below -64 may count as -64.

    q (B, T, H, F), k (B, T, Hk, F) of one dtype, v (B, T, Hk, Dv), beta (B, T, Hk); H a multiple of Hk. Keys are
    taken as they are: the rule is stable for keys of length 1 and beta in [0, 2). scale: F^-1/2 unless given. Sums are
    float32 (float64 for float64 inputs), the output (B, T, H, Dv) has v's dtype.

    initial_state, mask and cu_seqlens as in `linear_attention`. Returns the output, or (output, DeltaState) with
    return_state=True. Raises ValueError for arguments that don't fit together, and for an unusable backend.
    """
    if not is_compiling():
        checks.delta_arguments(q, k, v, beta, log_decay, initial_state, cu_seqlens, mask)
    name = forced("delta_rule", backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if name == "reference":
        return reference.delta_rule(
            q, k, v, beta, log_decay=log_decay, scale=scale, initial_state=initial_state, return_state=return_state,
            cu_seqlens=cu_seqlens, mask=mask,
        )  # fmt: skip
    dtype = accumulate_dtype(q, k, v)
    given = initial_state
    if initial_state is None:
        initial_state = empty_delta_state(
            _rows(q, cu_seqlens), k.shape[2], k.shape[3], v.shape[3], dtype=dtype, device=q.device
        )
    S = initial_state.S.to(dtype)
    if not q.shape[1] or not S.shape[0]:
        out = v.new_zeros(*q.shape[:3], v.shape[3])
        return (out, DeltaState(S.clone())) if return_state else out
    (q, k, v), _, log_decay = _masked(mask, (q, k, v), None, _per_token(log_decay, k, dtype), dtype)
    beta = beta.to(dtype)
    beta = beta if mask is None else beta.masked_fill(~mask[..., None], 0)
    if is_step(q, given, cu_seqlens, k, v, beta, log_decay):
        step: Any = custom.delta_step if custom.dispatched(q) else custom.delta_step_now
        S = own(S)
        out = step(*_token(q, k, v, beta, log_decay), S, scale, name)[:, None]
    else:
        out, S = custom.delta(q, k, v, beta, log_decay, S, cu_seqlens, scale, name)
    return (out, DeltaState(S)) if return_state else out


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float = 1.0,
    normalize: bool = True,
    log_k: Tensor | None = None,
    log_decay: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """`linear_attention` of one token, T = 1, whose `state` is updated in place: returns the output (B, 1, H, Dv).

    The state's tensors are contiguous and float32 (`empty_linear_state` makes the one before any token). Without
    gradients: raises ValueError if one would be needed, or if the arguments don't fit together.
    """
    if not is_compiling():
        checks.one_token(q, state)
        checks.linear_arguments(q, k, v, log_k, log_decay, state, None, mask)
    checks.no_gradient(q, k, v, log_k, log_decay, *state)
    name = forced("linear_attention", backend)
    if name == "reference":
        out, after = reference.linear_attention(
            q, k, v, scale=scale, normalize=normalize, log_k=log_k, log_decay=log_decay, initial_state=state,
            return_state=True, mask=mask, eps=eps,
        )  # fmt: skip
        return overwrite(state, after, out)
    (q, k, v), log_k, log_decay = _masked(
        mask, (q, k, v), log_k, _per_token(log_decay, k, state.S.dtype), state.S.dtype
    )
    tensors = _token(q, k, v, log_k, log_decay)
    step: Any = custom.linear_step if custom.dispatched(q) else custom.linear_step_now
    out = step(*tensors, *state, float(scale), normalize, float(eps), name)[:, None]
    return out if mask is None or normalize else out.masked_fill(~mask[..., None, None], 0)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: DeltaState,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """`delta_rule` of one token, T = 1, whose `state` is updated in place: returns the output (B, 1, H, Dv).

    Without gradients: raises ValueError if one would be needed, or if the arguments don't fit together.
    """
    if not is_compiling():
        checks.one_token(q, state)
        checks.delta_arguments(q, k, v, beta, log_decay, state, None, mask)
    checks.no_gradient(q, k, v, beta, log_decay, state.S)
    name = forced("delta_rule", backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if name == "reference":
        out, after = reference.delta_rule(
            q, k, v, beta, log_decay=log_decay, scale=scale, initial_state=state, return_state=True, mask=mask
        )
        return overwrite(state, after, out)
    dtype = state.S.dtype
    (q, k, v), _, log_decay = _masked(mask, (q, k, v), None, _per_token(log_decay, k, dtype), dtype)
    beta = beta.to(dtype)
    beta = beta if mask is None else beta.masked_fill(~mask[..., None], 0)
    step: Any = custom.delta_step if custom.dispatched(q) else custom.delta_step_now
    return step(*_token(q, k, v, beta, log_decay), state.S, scale, name)[:, None]


def _rows(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _per_token(log_decay: Tensor | None, k: Tensor, dtype: torch.dtype) -> Tensor | None:
    """log_decay (B, T, Hk) or (B, T, Hk, F) in `dtype`."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(dtype)
    return log_decay.expand(k.shape[:3]) if log_decay.dim() == 1 else log_decay


def _masked(
    mask: Tensor | None,
    tensors: tuple[Tensor, ...],
    log_k: Tensor | None,
    log_decay: Tensor | None,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]:
    """The tensors with masked tokens (mask (B, T) False) made such that they add nothing and let nothing decay."""
    log_k = None if log_k is None else log_k.to(dtype)
    if mask is None:
        return tensors, log_k, log_decay
    hidden = ~mask[..., None]
    if log_k is not None:
        log_k = log_k.masked_fill(hidden, NOTHING_SEEN)
    if log_decay is not None:
        log_decay = log_decay.masked_fill(hidden if log_decay.dim() == 3 else hidden[..., None], 0)
    return tuple(x.masked_fill(hidden[..., None], 0) for x in tensors), log_k, log_decay


def is_step(q: Tensor, state: Any, cu_seqlens: Tensor | None, *others: Tensor | None) -> bool:
    """Whether the call is one token of a sequence that goes on, and takes no gradient."""
    if q.shape[1] != 1 or state is None or cu_seqlens is not None:
        return False
    inputs = (q, *others, *state)
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs))


def own(x: Tensor) -> Tensor:
    """A contiguous copy, to be updated in place."""
    return x.clone(memory_format=torch.contiguous_format)


def _token(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x[:, 0] for x in tensors]


def overwrite(state: Any, after: Any, out: Tensor) -> Tensor:
    """Put what a state has become into its own tensors."""
    for old, new in zip(state, after, strict=True):
        old.copy_(new)
    return out
