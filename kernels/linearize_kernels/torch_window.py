"""Exact softmax over a sliding window and linear attention over all older keys, in PyTorch.

B batch, T length, L = T or w + T keys, H query heads, Hk key/value heads, G = H / Hk, D key dim, Dv value dim, F
feature dim, w window, s sinks. The exact part works on blocks of queries (`torch_softmax`); the linear part is causal
linear attention (`torch_linear`) of query t over keys that lag w positions behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import torch_step
from .state import accumulate_dtype
from .torch_blocks import Span
from .torch_linear import causal_sums, causal_sums_backward
from .torch_plan import Plan, plan, queries, store_queries
from .torch_softmax import Near, blocks, from_rows, to_rows

step = torch_step.window_step


class Far(NamedTuple):
    """The linear part: of queries `first` .. T - 1, over the n keys that leave the window."""

    first: int
    q: Tensor  # (B, n, H, F)
    k: Tensor  # (B, n, Hk, F)
    v: Tensor  # (B, n, Hk, Dv)
    how: Plan | None  # None where no key leaves the window


def _far(
    q: Tensor,
    values: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_k: Tensor | None,
    m: Tensor,
    window: int,
    dtype: torch.dtype,
) -> Far:
    length = q.shape[1]
    first = window - (values.shape[1] - length)
    n = max(length - first, 0)
    parts = phi_q[:, first:] if n else phi_q[:, :0], phi_k[:, :n], values[:, :n]
    return Far(first, *parts, plan(parts[0], None if log_k is None else log_k[:, :n], None, m, dtype) if n else None)


def _log_far(log_q: Tensor | None, m: Tensor, far: Far, dtype: torch.dtype) -> Tensor | None:
    """(B, T, H): the log scale of every query's linear part; None where it is that of the exact part."""
    if log_q is None:
        return None
    running = m[:, None].expand(-1, log_q.shape[1], -1)
    if far.how is not None and far.how.running is not None:
        running = torch.cat([running[:, : far.first], far.how.running], 1)
    return log_q.to(dtype) + running.repeat_interleave(log_q.shape[2] // m.shape[1], 2)


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
    """out (B, T, H, Dv), den (B, T, H) before the floor eps, top (B, T, H): the scale of den, and the final S, z, m.

    Where all keys are the call's (L = T), the state is the empty one.
    """
    dtype = accumulate_dtype(q, keys, values, phi_q, phi_k, S)
    S, z = S.to(dtype), z.to(dtype)
    num = values.new_zeros(*q.shape[:3], values.shape[3], dtype=dtype)
    den = num.new_zeros(q.shape[:3])
    far = _far(q, values, phi_q, phi_k, log_k, m, window, dtype)
    log_far = _log_far(log_q, m, far, dtype)
    if far.how is not None:

        def keep(span: Span, block_num: Tensor, block_den: Tensor) -> None:
            store_queries(num[:, far.first :], span, block_num)
            store_queries(den[:, far.first :], span, block_den)

        S, z = causal_sums(far.q, far.k, far.v, S, z, 1.0, far.how, keep)
        m = m if far.how.running is None else far.how.running[:, -1]
    out, top = values.new_empty(num.shape), torch.empty_like(den)
    near = Near(keys, values, valid, sink_k, sink_v, sink_position, window, scale, softcap, dtype)
    weight = gamma.to(dtype).view(1, m.shape[1], 1, -1, 1)
    for block in blocks(q, near):
        best = block.best()
        scale_far, add = None, [to_rows(x, block.part, m.shape[1]) for x in (num, den)]
        if log_far is not None:
            old = to_rows(log_far, block.part, m.shape[1])
            scale_far = (old - torch.maximum(best, old)).exp()
            best = torch.maximum(best, old)
        weights = (block.scores - best[..., None]).exp_()
        near_num, near_den = block.times_values(weights).mul_(weight[..., None]), weights.sum(-1).mul_(weight)
        if scale_far is None:
            near_num.add_(add[0])
            near_den.add_(add[1])
        else:
            near_num.addcmul_(add[0], scale_far[..., None])
            near_den.addcmul_(add[1], scale_far)
        from_rows(out, block.part, near_num.div_(near_den.clamp_min(eps)[..., None]))
        from_rows(den, block.part, near_den)
        from_rows(top, block.part, best)
    return out, den, top, S.clone(), z.clone(), m.clone()


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
    """dq, dkeys, dvalues, dphi_q, dphi_k, dlog_q, dlog_k, dsink_k, dsink_v, dgamma, and dS, dz of the state before."""
    dtype = accumulate_dtype(q, keys, values, phi_q, phi_k, S)
    kv_heads = m.shape[1]
    near = Near(keys, values, valid, sink_k, sink_v, sink_position, window, scale, softcap, dtype)
    dq, d_near = torch.empty_like(q), near.zeros()
    d_weight = gamma.new_zeros(kv_heads, gamma.shape[0] // kv_heads, dtype=dtype)
    weight = gamma.to(dtype).view(1, kv_heads, 1, -1, 1)
    for block in blocks(q, near):
        g = to_rows(d_out, block.part, kv_heads).to(dtype)
        below, ratio = (to_rows(x, block.part, kv_heads).to(dtype) for x in (den, out))
        # The largest score is found again, not read: some score must equal it to the last bit.
        best = block.best() if log_q is None else to_rows(top, block.part, kv_heads)
        d_num = g / below.clamp_min(eps)[..., None]
        d_den = (d_num * ratio).sum(-1).neg_().masked_fill_(below < eps, 0)
        weights = (block.scores - best[..., None]).exp_()
        d = block.by_values(d_num).add_(d_den[..., None]).mul_(weights)
        total = d.sum(-1)
        d_weight += total.sum((0, 2, 4))
        if log_q is None:  # best is the largest score, and part of the function
            largest = block.scores == best[..., None]
            d.addcmul_(largest, (total / largest.sum(-1).clamp_min_(1))[..., None], value=-1)
        from_rows(dq, block.part, block.backward(d, weights, d_num, weight[..., None], d_near))
    dkeys, dvalues, dsink_k, dsink_v = near.unpadded(d_near)

    far = _far(q, values, phi_q, phi_k, log_k, m, window, dtype)
    dphi_q, dphi_k = torch.zeros_like(phi_q), torch.zeros_like(phi_k)
    dlog_q = None if log_q is None else torch.zeros_like(log_q)
    dlog_k = None if log_k is None else torch.zeros_like(log_k)
    if far.how is not None:
        log_far = _log_far(log_q, m, far, dtype)

        def gradients(span: Span) -> tuple[Tensor, Tensor]:
            late = (x[:, far.first :] for x in (d_out, den, out))
            g, below, ratio = (queries(x, span, kv_heads, dtype) for x in late)
            d_num = g / below.clamp_min(eps)[..., None]
            d_den = (d_num * ratio).sum(-1).neg_().masked_fill_(below < eps, 0)
            if log_far is None:
                return d_num, d_den
            size = queries((log_far - top)[:, far.first :], span, kv_heads, dtype).exp()
            return d_num * size[..., None], d_den * size

        d_far_q, d_far_k, d_far_v, d_log, dS, dz = causal_sums_backward(
            far.q, far.k, far.v, S.to(dtype), z.to(dtype), dS, dz, 1.0, far.how, gradients
        )
        n = d_far_k.shape[1]
        dphi_q[:, far.first :], dphi_k[:, :n] = d_far_q, d_far_k
        dvalues[:, :n] += d_far_v
        if dlog_q is not None:
            dlog_q[:, far.first :] = (far.q.to(dtype) * d_far_q).sum(-1)
        if dlog_k is not None and d_log is not None:
            dlog_k[:, :n] = d_log
    grads = (dkeys, dvalues, dsink_k, dsink_v)
    dkeys, dvalues, dsink_k, dsink_v = (
        x.to(y.dtype) for x, y in zip(grads, (keys, values, sink_k, sink_v), strict=True)
    )
    dgamma = d_weight.flatten().to(gamma.dtype)
    return dq, dkeys, dvalues, dphi_q, dphi_k, dlog_q, dlog_k, dsink_k, dsink_v, dgamma, dS.clone(), dz.clone()
