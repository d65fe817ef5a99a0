"""Exact softmax over a sliding window and linear attention over all older keys, in PyTorch.

B batch, T length, H query heads, Hk key/value heads, G = H / Hk, D key dim, Dv value dim, F feature dim, w
window, n sinks. The exact part works on blocks of C queries against the C + w - 1 keys they can see; the
linear part is plain causal linear attention of query t over keys that lag w positions behind it. Layouts as
in `torch_linear`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .state import (
    NOTHING_SEEN,
    LinearState,
    WindowState,
    accumulate_dtype,
    empty_window_state,
)
from .torch_linear import causal_sums, group_heads, heads_first, merge_heads, spans
from .window_keys import Keys, Sinks, all_keys, find_sinks, is_sink, next_state

# Queries per block: a block computes (C + w) / w times the scores it needs, but smaller ones copy more keys.
BLOCK = 32
LARGE_BLOCK = 128
# Windows above this are worked off in large blocks, one by one; up to it, blocks are stacked in one product.
LARGE_WINDOW = 256


class Exact(NamedTuple):
    """num (B, Hk, T, G, Dv), den (B, Hk, T, G) relative to exp(top), top (B, Hk, T, G) the largest score."""

    num: Tensor
    den: Tensor
    top: Tensor


def window_attention(
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
    state: WindowState | None,
    mask: Tensor | None,
    eps: float,
) -> tuple[Tensor, WindowState]:
    """`linearize_kernels.window_attention` on checked arguments, without `cu_seqlens`."""
    dtype = accumulate_dtype(q, k, v, phi_q, phi_k)
    batch, length = q.shape[:2]
    kv_heads = k.shape[2]
    continued = state is not None
    if state is None:
        state = empty_window_state(
            k,
            v,
            rows=batch,
            features=phi_q.shape[3],
            window=window,
            sinks=sinks,
            logs=log_k is not None,
            dtype=dtype,
        )
    linear = LinearState(*(x.to(dtype) for x in (state.S, state.z, state.m)))
    if length == 0:
        return v.new_zeros(*q.shape[:3], v.shape[3]), state._replace(S=linear.S, z=linear.z, m=linear.m)
    if mask is None:
        valid = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    else:
        valid = mask
        q, k, v, phi_q = (x.masked_fill(~mask[..., None, None], 0) for x in (q, k, v, phi_q))
        log_q = None if log_q is None else log_q.masked_fill(~mask[..., None], 0)
    keys = all_keys(state if continued else None, k, v, valid)
    kept = find_sinks(state, k, v, valid, sinks)

    exact = exact_sums(group_heads(q, kv_heads), keys, kept, window, scale, softcap, dtype)
    weight = None if gamma is None else gamma.to(dtype).unflatten(0, (kv_heads, 1, -1))
    # Queries 0 .. T - 1 fold the keys at indices 0 .. T - 1 of `keys` if these start w positions before the
    # call; without a ring only queries w .. T - 1 fold any.
    first = 0 if continued else window
    if first < length:
        folded = length - first
        counts = keys.valid[:, :folded] & ~is_sink(kept, keys, folded)
        phi = phi_k[:, :folded].masked_fill(~counts[..., None, None], 0)
        logs = None
        if log_k is not None:
            logs = log_k[:, :folded].to(dtype).masked_fill(~counts[..., None], NOTHING_SEEN)
        sums = causal_sums(
            group_heads(phi_q[:, first:], kv_heads),
            phi,
            keys.v[:, :folded],
            logs,
            linear,
        )
        linear = sums.state
        old = _as_exact(sums.num, sums.den, sums.m, first)
        out = combine(exact, old, weight, log_q, dtype, eps)
    else:
        out = _ratio(*_weighted(exact, weight), eps)
    if mask is not None:  # a padded query still sees the real keys before it
        out = out.masked_fill(~mask[:, None, :, None, None], 0)
    new_state = next_state(state, keys, kept, linear, length, window)
    return merge_heads(out, v.dtype), new_state


def _as_exact(num: Tensor, den: Tensor, m: Tensor | None, first: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The linear sums, padded in front for the `first` queries that have none."""
    if first:
        num, den = F.pad(num, (0, 0, 0, 0, first, 0)), F.pad(den, (0, 0, first, 0))
        m = None if m is None else F.pad(m, (first, 0), value=NOTHING_SEEN)
    return num, den, m


def _weighted(exact: Exact, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    if weight is None:
        return exact.num, exact.den
    return exact.num * weight[..., None], exact.den * weight


def _ratio(num: Tensor, den: Tensor, eps: float) -> Tensor:
    return num / den.clamp_min(eps)[..., None]


def combine(
    exact: Exact,
    old: tuple[Tensor, Tensor, Tensor | None],
    weight: Tensor | None,
    log_q: Tensor | None,
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    """One numerator over one denominator (B, Hk, T, G, Dv)."""
    num, den, m = old
    if log_q is None and m is None:
        near_num, near_den = _weighted(exact, weight)
        return _ratio(near_num + num, near_den + den, eps)
    if log_q is None:
        scale_old = exact.top
    else:
        scale_old = heads_first(group_heads(log_q, exact.top.shape[1]), dtype)
    if m is not None:
        scale_old = scale_old + m[..., None]
    top = torch.maximum(exact.top, scale_old)
    near = (exact.top - top).exp()
    near = near if weight is None else near * weight
    far = (scale_old - top).exp()
    return _ratio(
        exact.num * near[..., None] + num * far[..., None],
        exact.den * near + den * far,
        eps,
    )


def exact_sums(
    q: Tensor,
    keys: Keys,
    sinks: Sinks,
    window: int,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Exact:
    """Softmax sums of q (B, T, Hk, G, D) over the last `window` keys, and over the sinks older than that."""
    large = window > LARGE_WINDOW
    parts = []
    for start, n, size in spans(q, LARGE_BLOCK if large else BLOCK, 1 if large else None):
        parts.append(_exact_block(q, keys, sinks, window, scale, softcap, dtype, start, n, size))
    if len(parts) == 1:
        return parts[0]
    return Exact(*(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)))


def _exact_block(
    q: Tensor,
    keys: Keys,
    sinks: Sinks,
    window: int,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
    start: int,
    n: int,
    size: int,
) -> Exact:
    """`exact_sums` of the n * size queries from `start` on."""
    stop = start + n * size
    batch, _, heads, groups, dim = q.shape
    q_rows = (heads_first(q[:, start:stop], dtype) * scale).view(batch, heads, n, size * groups, dim)
    # The first block sees w - 1 older keys, where there are as many; stacked blocks are all given w - 1.
    older = min(window - 1, keys.before + start)
    missing = window - 1 - older if n > 1 else 0
    part = slice(keys.before + start - older, keys.before + stop)
    span = size + older + missing
    k_b = _blocks(keys.k[:, part], missing, span, size, dtype)
    v_b = _blocks(keys.v[:, part], missing, span, size, dtype)
    hidden = _hidden(keys.valid[:, part], missing, span, size, window)
    if sinks.k.shape[1]:
        k_b = torch.cat([k_b, heads_first(sinks.k, dtype).unsqueeze(2).expand(-1, -1, n, -1, -1)], 3)
        v_b = torch.cat([v_b, heads_first(sinks.v, dtype).unsqueeze(2).expand(-1, -1, n, -1, -1)], 3)
        time = torch.arange(start, stop, device=q.device).view(1, n, size, 1)
        seen = sinks.filled[:, None, None] & (sinks.position[:, None, None] <= time - window)
        hidden = torch.cat([hidden, ~seen], 3)
    scores = torch.matmul(q_rows, k_b.transpose(-1, -2)).view(batch, heads, n, size, groups, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(hidden[:, None, :, :, None], -torch.inf)
    # A padded query may see no key at all: a finite top keeps exp(-inf - top) = 0.
    top = scores.amax(-1).clamp_min(torch.finfo(dtype).min)
    weights = (scores - top[..., None]).exp_()
    num = torch.matmul(weights.view(batch, heads, n, size * groups, -1), v_b)
    shape = (batch, heads, n * size, groups)
    return Exact(num.view(*shape, -1), weights.sum(-1).view(shape), top.view(shape))


def _blocks(x: Tensor, missing: int, span: int, size: int, dtype: torch.dtype) -> Tensor:
    """x (B, L, Hk, D) to overlapping blocks (B, Hk, n, span, D), each `size` tokens after the one before."""
    x = heads_first(x, dtype)
    if missing:
        x = F.pad(x, (0, 0, missing, 0))
    return x.unfold(2, span, size).transpose(-1, -2)


def _hidden(valid: Tensor, missing: int, span: int, size: int, window: int) -> Tensor:
    """(B, n, size, span), True where the query doesn't see the key: outside its window, or no valid key."""
    if missing:
        valid = F.pad(valid, (missing, 0), value=False)
    # The last query of a block stands at its last key.
    query = torch.arange(span - size, span, device=valid.device)[:, None]
    key = torch.arange(span, device=valid.device)
    outside = (key > query) | (key <= query - window)
    return outside | ~valid.unfold(1, span, size)[:, :, None]
