"""Chunked linear attention in PyTorch: batched matrix products over chunks, a short loop over their states.

B batch, T length, H query heads, Hk key/value heads, G = H / Hk, F feature dim, Dv value dim; n chunks of C tokens a
span, N = n B Hk rows of products, R = B Hk. The G query heads of a key/value head share its products, so keys and
values are never repeated. States in a span: (n + 1, R, F, Dv), before each chunk and after the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from . import torch_step
from .packed import on_sequences
from .state import NOTHING_SEEN, accumulate_dtype
from .torch_blocks import Span, load, store
from .torch_factors import decay_gradient
from .torch_plan import Plan, plan, queries, store_queries

step = torch_step.linear_step


def states_before(k: Tensor, v: Tensor, chunk: Tensor | None, S: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """(n + 1, R, F, Dv) and (n + 1, R, F) for keys k (N, C, F) as the chunk's end sees them, from S and z (R, ...)."""
    n = k.shape[0] // S.shape[0]
    S_all, z_all = S.new_empty(n + 1, *S.shape), z.new_empty(n + 1, *z.shape)
    S_all[0], z_all[0] = S, z
    torch.bmm(k.transpose(1, 2), v, out=S_all[1:].view(-1, *S.shape[1:]))
    torch.sum(k, 1, out=z_all[1:].view(-1, z.shape[1]))
    for i in range(n):
        if chunk is None:
            S_all[i + 1] += S_all[i]
            z_all[i + 1] += z_all[i]
        else:
            S_all[i + 1].addcmul_(S_all[i], chunk[i])
            z_all[i + 1].addcmul_(z_all[i], chunk[i, ..., 0])
    return S_all, z_all


def states_after(dS: Tensor, dz: Tensor, chunk: Tensor | None) -> None:
    """Add to the gradients on each chunk's state, of its own reading (n + 1, R, ...), what later chunks make of it."""
    for i in range(dS.shape[0] - 2, -1, -1):
        if chunk is None:
            dS[i] += dS[i + 1]
            dz[i] += dz[i + 1]
        else:
            dS[i].addcmul_(dS[i + 1], chunk[i])
            dz[i].addcmul_(dz[i + 1], chunk[i, ..., 0])


def causal_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    scale: float,
    how: Plan,
    finish: Callable[[Span, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """S and z at the end; finish(span, num, den) gets the sums (N, G, C, Dv) and (N, G, C), which it may overwrite."""
    shapes, kv_heads, dtype = (S.shape, z.shape), k.shape[2], how.dtype
    S, z = S.flatten(0, 1), z.flatten(0, 1)
    for span in how.cover:
        factors = how.factors(span)
        q_b, k_b, v_b = queries(q, span, kv_heads, dtype), load(k, span, dtype), load(v, span, dtype)
        if scale != 1.0:
            q_b = q_b * scale
        S_all, z_all = states_before(factors.write(k_b), v_b, factors.chunk, S, z)
        scores = factors.scores(q_b, k_b)
        rows, old = scores.flatten(1, 2), factors.read(q_b).flatten(1, 2)
        num = torch.bmm(rows, v_b).baddbmm_(old, S_all[:-1].flatten(0, 1))
        den = rows.sum(-1, keepdim=True).baddbmm_(old, z_all[:-1].flatten(0, 1)[..., None])
        finish(span, num.view(*scores.shape[:3], -1), den.view(scores.shape[:3]))
        S, z = S_all[-1], z_all[-1]
    return S.reshape(shapes[0]).clone(), z.reshape(shapes[1]).clone()


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
    """out (B, T, H, Dv), den (B, T, H) before the floor eps, and the final S, z and m."""
    if cu_seqlens is not None:

        def run(*tensors: Any) -> Any:
            q, k, v, log_k, log_decay, S, z, m = tensors
            out, den, *ends = forward(q, k, v, log_k, log_decay, S, z, m, None, scale, normalize, eps)
            return [out, den if normalize else None], ends

        tokens = (q, k, v, log_k, log_decay)
        (out, den), ends = on_sequences(run, tokens, (S, z, m), cu_seqlens, {3: NOTHING_SEEN})
        return cast(Any, (out, S.new_empty(0) if den is None else den, *ends))
    dtype = accumulate_dtype(q, k, v, S)
    how = plan(q, log_k, log_decay, m, dtype)
    out = v.new_empty(*q.shape[:3], v.shape[3])
    den = S.new_empty(q.shape[:3] if normalize else 0)

    def finish(span: Span, num: Tensor, below: Tensor) -> None:
        if normalize:
            store_queries(den, span, below)
            num.div_(below.clamp_min_(eps)[..., None])
        elif how.running is not None:
            num.mul_(load(how.running, span, dtype)[:, None, :, None].exp())
        store_queries(out, span, num)

    S, z = causal_sums(q, k, v, S.to(dtype), z.to(dtype), scale, how, finish)
    return out, den, S, z, m.clone() if how.running is None else how.running[:, -1].clone()


def causal_sums_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    dS: Tensor,
    dz: Tensor,
    scale: float,
    how: Plan,
    gradients: Callable[[Span], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """dq, dk, dv, dlog_k or dlog_decay (in the sums' dtype), and dS, dz of the states before.

    gradients(span) gives those by the sums, num (N, G, C, Dv) and den (N, G, C) or None for none; it may be written to.
    """
    shapes, kv_heads, dtype = (S.shape, z.shape), k.shape[2], how.dtype
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    S, z, dS, dz = (x.flatten(0, 1) for x in (S, z, dS.to(dtype), dz.to(dtype)))
    starts = []  # the states that spans start from
    for span in how.cover:
        starts.append((S, z))
        factors = how.factors(span)
        S_all, z_all = states_before(factors.write(load(k, span, dtype)), load(v, span, dtype), factors.chunk, S, z)
        S, z = S_all[-1].clone(), z_all[-1].clone()
    at_end = None
    exponent = None if how.scaled is None else how.scaled.new_empty(how.scaled.shape, dtype=dtype)
    if exponent is not None and how.running is None:
        at_end = ((S * dS).sum(-1) + z * dz).view(shapes[1])
        at_end = at_end.sum(-1) if exponent.dim() == 3 else at_end
    for span in reversed(how.cover):
        factors, (S, z) = how.factors(span), starts.pop()
        q_b, k_b, v_b = queries(q, span, kv_heads, dtype), load(k, span, dtype), load(v, span, dtype)
        if scale != 1.0:
            q_b = q_b * scale
        d_num, d_den = gradients(span)
        k_end, old = factors.write(k_b), factors.read(q_b).flatten(1, 2)
        S_all, z_all = states_before(k_end, v_b, factors.chunk, S, z)
        d_rows = d_num.flatten(1, 2)
        dS_all, dz_all = torch.empty_like(S_all), torch.zeros_like(z_all)
        dS_all[-1], dz_all[-1] = dS, dz
        torch.bmm(old.transpose(1, 2), d_rows, out=dS_all[:-1].flatten(0, 1))
        d_old = torch.bmm(d_rows, S_all[:-1].flatten(0, 1).transpose(1, 2))
        d_scores = torch.bmm(d_rows, v_b.transpose(1, 2))
        if d_den is not None:
            below = d_den.flatten(1, 2)[..., None]
            torch.bmm(old.transpose(1, 2), below, out=dz_all[:-1].flatten(0, 1)[..., None])
            d_old.addcmul_(below, z_all[:-1].flatten(0, 1)[:, None])
            d_scores += below
        states_after(dS_all, dz_all, factors.chunk)
        after, after_z = dS_all[1:].flatten(0, 1), dz_all[1:].flatten(0, 1)
        scores = factors.scores(q_b, k_b).flatten(1, 2)
        dv_b = torch.bmm(scores.transpose(1, 2), d_rows).baddbmm_(k_end, after)
        dk_end = torch.baddbmm(after_z[:, None], v_b, after.transpose(1, 2))
        dq_b, dk_b = factors.scores_backward(d_scores.view(*q_b.shape[:3], -1), q_b, k_b)
        dq_b += factors.read(d_old.view_as(q_b))
        dk_b += factors.write(dk_end)
        if exponent is not None:
            by_feature = k_b * dk_b
            if how.running is None:
                by_feature = (q_b * dq_b).sum(1) - by_feature
            store(exponent, span, by_feature if exponent.dim() == 4 else by_feature.sum(-1))
        store_queries(dq, span, dq_b * scale if scale != 1.0 else dq_b)
        store(dk, span, dk_b)
        store(dv, span, dv_b)
        dS, dz = dS_all[0], dz_all[0]
    if at_end is not None and exponent is not None:
        exponent = decay_gradient(exponent, at_end)
    return dq, dk, dv, exponent, dS.reshape(shapes[0]).clone(), dz.reshape(shapes[1]).clone()


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
    """dq, dk, dv, dlog_k, dlog_decay, and dS, dz of the states before."""
    if cu_seqlens is not None:

        def run(*tensors: Any) -> Any:
            d_out, out, den, q, k, v, log_k, log_decay, dS, dz, S, z, m = tensors
            grads = backward(d_out, dS, dz, q, k, v, log_k, log_decay, S, z, m, None, out, den, scale, normalize, eps)
            return grads[:5], grads[5:]

        tokens = (d_out, out, den if normalize else None, q, k, v, log_k, log_decay)
        grads, starts = on_sequences(run, tokens, (dS, dz, S, z, m), cu_seqlens, {6: NOTHING_SEEN})
        return cast(Any, (*grads, *starts))
    dtype = accumulate_dtype(q, k, v, S)
    how = plan(q, log_k, log_decay, m, dtype)

    def gradients(span: Span) -> tuple[Tensor, Tensor | None]:
        d = queries(d_out, span, k.shape[2], dtype)
        if normalize:
            below = queries(den, span, k.shape[2], dtype)
            d_ratio = d / below.clamp_min(eps)[..., None]
            d_den = (d_ratio * queries(out, span, k.shape[2], dtype)).sum(-1).neg_()
            return d_ratio, d_den.masked_fill_(below < eps, 0)
        if how.running is None:
            return d, None
        size = load(how.running, span, dtype)[:, None, :, None].exp()
        return torch.where(d == 0, 0, d * size), None  # 0 stays 0 where exp(m) is inf

    dq, dk, dv, by_scale, dS, dz = causal_sums_backward(
        q, k, v, S.to(dtype), z.to(dtype), dS, dz, scale, how, gradients
    )
    logs = (None if x is None or by_scale is None else by_scale.to(x.dtype) for x in (log_k, log_decay))
    return cast(Any, (dq, dk, dv, *logs, dS, dz))
