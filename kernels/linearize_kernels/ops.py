"""The public ops: check the arguments, choose a backend, run it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks, reference, torch_linear, torch_step, torch_window
from .dispatch import choose
from .packed import run_packed
from .state import LinearState, WindowState


def _full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off: it would run the products of float32 sums in half precision."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    normalize: bool = True,
    log_k: Tensor | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Any:
    """Causal linear attention over features (Katharopoulos et al. 2020, arXiv:2006.16236).

        S_t = sum_{j <= t} exp(log_k_j) k_j v_j^T    z_t = sum_{j <= t} exp(log_k_j) k_j
        o_t = scale q_t S_t / max(scale q_t z_t, eps)        or, with normalize=False,  o_t = scale q_t S_t

    q (B, T, H, F), k (B, T, Hk, F): features phi(q), phi(k), of one dtype; v (B, T, Hk, Dv). H is a multiple
    of Hk and query head h reads key/value head h // (H / Hk). Sums are float32 (float64 for float64 inputs),
    the output (B, T, H, Dv) has v's dtype.

    log_k (B, T, Hk): log scale of the key features, for maps like FAVOR+ (Choromanski et al. 2020,
    arXiv:2009.14794) whose features span many orders of magnitude. Sums are then held relative to exp(m_t),
    m_t the largest log_k of the valid keys up to t, and so is the denominator that `eps` floors; unnormalised
    outputs are multiplied back by exp(m_t). Give log_k on every call of a sequence, or on none.

    initial_state: the `LinearState` of the tokens before. mask (B, T) bool, True at real tokens: masked
    tokens add nothing, their outputs and gradients are 0. cu_seqlens (N + 1,) int: N sequences packed in one
    row (B = 1), each with a state of its own (N rows).

    Returns the output, or (output, LinearState) with return_state=True. Raises ValueError for arguments that
    don't fit together, and for a backend that doesn't exist or can't be used.
    """
    if not is_compiling():  # messages about symbolic shapes can't be traced
        checks.linear_arguments(q, k, v, log_k, initial_state, cu_seqlens, mask)
    if choose("linear_attention", q, backend).backend == "reference":
        return reference.linear_attention(
            q, k, v, scale=scale, normalize=normalize, log_k=log_k, initial_state=initial_state,
            return_state=return_state, cu_seqlens=cu_seqlens, mask=mask, eps=eps,
        )  # fmt: skip
    options = {"scale": float(scale), "normalize": normalize, "eps": eps}
    with _full_precision(q):
        if cu_seqlens is not None:
            op = partial(torch_linear.linear_attention, **options)
            result = run_packed(
                op,
                {"q": q, "k": k, "v": v, "log_k": log_k},
                cu_seqlens,
                mask,
                initial_state,
            )
        elif q.shape[1] == 1 and initial_state is not None:
            result = torch_step.linear_attention_step(q, k, v, log_k=log_k, state=initial_state, mask=mask, **options)
        else:
            result = torch_linear.linear_attention(q, k, v, log_k=log_k, state=initial_state, mask=mask, **options)
    return result if return_state else result[0]


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

    c = max_W s_j. With log_q, log_k the features are exp(log_q) phi_q and exp(log_k) phi_k. Maps that
    estimate the softmax kernel itself give both; the linear part is then on the absolute scale, phi_q S_O
    exp(log_q - c), and the denominator is floored by `eps` relative to the larger of exp(c) and exp(log_q +
    m). Other maps give no log_q.

    q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv); H a multiple of Hk. scale: D^-1/2 unless given.
    softcap: scores become softcap tanh(s / softcap), in the exact part only. gamma (H,): weight of the exact
    part, 1 unless given. phi_q (B, T, H, F), log_q (B, T, H). phi_k (B, R + T, Hk, F), log_k (B, R + T, Hk):
    of the keys of initial_state's ring (R = window if there is one, else 0) and of k after them. Only the
    first R + T - window are read: the keys that leave the window during the call; a shorter tensor that holds
    these is fine.

    sinks: the first that many valid tokens of each sequence stay in the exact set for ever. mask (B, T) bool,
    True at real tokens: masked tokens take up positions of the window but add nothing; their outputs and
    gradients are 0. cu_seqlens (N + 1,) int: N sequences packed in one row (B = 1), with phi_k (1, T, Hk, F).

    Returns the output (B, T, H, Dv) in v's dtype, or (output, WindowState) with return_state=True. Raises
    ValueError for arguments that don't fit together (cu_seqlens with initial_state among them), and for an
    unusable backend.
    """
    if not is_compiling():
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
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    options = {
        "window": window,
        "sinks": sinks,
        "gamma": gamma,
        "scale": scale,
        "softcap": softcap,
        "eps": eps,
    }
    if choose("window_attention", q, backend).backend == "reference":
        return reference.window_attention(
            q, k, v, phi_q, phi_k, log_q=log_q, log_k=log_k, initial_state=initial_state,
            return_state=return_state, cu_seqlens=cu_seqlens, mask=mask, **options,
        )  # fmt: skip
    rest: dict[str, Any] = {"log_q": log_q, "log_k": log_k}
    with _full_precision(q):
        if cu_seqlens is not None:
            tensors = {"q": q, "k": k, "v": v, "phi_q": phi_q, "phi_k": phi_k, **rest}
            result = run_packed(
                partial(torch_window.window_attention, **options),
                tensors,
                cu_seqlens,
                mask,
                None,
            )
        elif q.shape[1] == 1 and initial_state is not None:
            result = torch_step.window_attention_step(
                q, k, v, phi_q, phi_k, state=initial_state, mask=mask, **rest, **options
            )
        else:
            result = torch_window.window_attention(
                q, k, v, phi_q, phi_k, state=initial_state, mask=mask, **rest, **options
            )
    return result if return_state else result[0]


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, **options: Any
) -> tuple[Tensor, LinearState]:
    """`linear_attention` of one token (T = 1) after `state`: always returns (output, new state); state is not
    changed.

    Takes the other keyword arguments of `linear_attention`; state None stands for no token before.
    """
    checks.require(
        q.dim() == 4 and q.shape[1] == 1,
        f"q must be one token, (B, 1, H, F), not {tuple(q.shape)}",
    )
    return linear_attention(q, k, v, initial_state=state, return_state=True, **options)


def window_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    state: WindowState | None,
    **options: Any,
) -> tuple[Tensor, WindowState]:
    """`window_attention` of one token (T = 1) after `state`: always returns (output, new state); state is not
    changed.

    phi_k (B, >= 1, Hk, F) starts with the features of state.k[:, 0], the key that leaves the window. Takes
    the other keyword arguments of `window_attention`; state None stands for no token before.
    """
    checks.require(
        q.dim() == 4 and q.shape[1] == 1,
        f"q must be one token, (B, 1, H, D), not {tuple(q.shape)}",
    )
    return window_attention(q, k, v, phi_q, phi_k, initial_state=state, return_state=True, **options)
