"""The delta rule in chunks, in PyTorch: what a chunk writes is the solution of one triangular system.

Letters and states as in `torch_linear`. Within a chunk, u_t = beta_t (v_t - what the state holds for k_t) is linear in
the state before the chunk (the WY form of Yang et al. 2024, arXiv:2406.06484):

    (I + A) U = beta V - (beta K') S    A_tj = beta_t k_t'k_j, j < t    so  U = U0 - W S

with every product scaled by the decay between its tokens. U belongs to the key/value head, not to the queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import torch_step
from .packed import on_sequences
from .state import accumulate_dtype
from .torch_blocks import Span, load, store
from .torch_factors import Factors, decay_gradient
from .torch_plan import Plan, plan, queries

step = torch_step.delta_step


class Block(NamedTuple):
    """A span, solved up to the states before its chunks."""

    k: Tensor  # (N, C, F)
    v: Tensor  # (N, C, Dv)
    beta: Tensor  # (N, C, 1)
    products: Tensor  # (N, C, C): of keys with earlier keys, before beta
    system: Tensor  # (N, C, C): A
    read: Tensor  # (N, C, F): keys as they read the state before the chunk
    write: Tensor  # (N, C, F): keys as they stand in the state after the chunk
    U0: Tensor  # (N, C, Dv)
    W: Tensor  # (N, C, F)


def solve_block(k: Tensor, v: Tensor, beta: Tensor, span: Span, factors: Factors, dtype: torch.dtype) -> Block:
    k_b, v_b, beta_b = load(k, span, dtype), load(v, span, dtype), load(beta, span, dtype)[..., None]
    products = factors.scores(k_b[:, None], k_b)[:, 0].tril(-1)
    system, read = products * beta_b, factors.read(k_b[:, None])[:, 0]
    both = solve(system, torch.cat([beta_b * v_b, beta_b * read], -1))
    U0, W = both.split([v_b.shape[-1], k_b.shape[-1]], -1)
    return Block(k_b, v_b, beta_b, products, system, read, factors.write(k_b), U0, W)


def solve(system: Tensor, right: Tensor) -> Tensor:
    """x of (I + A) x = right, for A strictly lower triangular."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def states_before(block: Block, chunk: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """The states (n + 1, R, F, Dv), before each chunk and after the last, and U (N, C, Dv)."""
    n = block.k.shape[0] // S.shape[0]
    S_all, U = S.new_empty(n + 1, *S.shape), block.U0.contiguous()
    S_all[0] = S
    parts = [x.unflatten(0, (n, -1)) for x in (U, block.W, block.write.transpose(1, 2))]
    for i in range(n):
        U_i, W_i, write_i = (x[i] for x in parts)
        U_i.baddbmm_(W_i, S_all[i], alpha=-1)
        kept = S_all[i] if chunk is None else S_all[i] * chunk[i]
        torch.baddbmm(kept, write_i, U_i, out=S_all[i + 1])
    return S_all, U


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    S: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, T, H, Dv) and the final S."""
    if cu_seqlens is not None:

        def run(*tensors: Any) -> Any:
            q, k, v, beta, log_decay, S = tensors
            out, S = forward(q, k, v, beta, log_decay, S, None, scale)
            return [out], [S]

        outs, ends = on_sequences(run, (q, k, v, beta, log_decay), (S,), cu_seqlens, {})
        return cast(Tensor, outs[0]), ends[0]
    how, shape = _plan(q, k, v, beta, log_decay, S), S.shape
    out, S = v.new_empty(*q.shape[:3], v.shape[3]), S.to(how.dtype).flatten(0, 1)
    for span in how.cover:
        factors = how.factors(span)
        block = solve_block(k, v, beta, span, factors, how.dtype)
        S_all, U = states_before(block, factors.chunk, S)
        q_b = queries(q, span, k.shape[2], how.dtype) * scale
        rows, old = factors.scores(q_b, block.k).flatten(1, 2), factors.read(q_b).flatten(1, 2)
        num = torch.bmm(rows, U).baddbmm_(old, S_all[:-1].flatten(0, 1))
        store(out, span, num.view(-1, q_b.shape[2], num.shape[-1]))
        S = S_all[-1]
    return out, S.reshape(shape).clone()


def _plan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor) -> Plan:
    return plan(q, None, log_decay, S, accumulate_dtype(q, k, v, beta, S))


def backward(
    d_out: Tensor,
    dS: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    S: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """dq, dk, dv, dbeta, dlog_decay, and dS of the state before."""
    if cu_seqlens is not None:

        def run(*tensors: Any) -> Any:
            d_out, q, k, v, beta, log_decay, dS, S = tensors
            *grads, dS = backward(d_out, dS, q, k, v, beta, log_decay, S, None, scale)
            return grads, [dS]

        by_tokens, by_states = on_sequences(run, (d_out, q, k, v, beta, log_decay), (dS, S), cu_seqlens, {})
        return cast(Any, (*by_tokens, *by_states))
    how, shape = _plan(q, k, v, beta, log_decay, S), S.shape
    dtype = how.dtype
    S, dS = S.to(dtype).flatten(0, 1), dS.to(dtype).flatten(0, 1)
    grads = [torch.empty_like(x) for x in (q, k, v, beta)]
    exponent = at_end = None
    starts = []  # the states that spans start from
    for span in how.cover:
        starts.append(S)
        factors = how.factors(span)
        S = states_before(solve_block(k, v, beta, span, factors, dtype), factors.chunk, S)[0][-1].clone()
    if log_decay is not None:
        exponent = log_decay.new_empty(log_decay.shape, dtype=dtype)
        at_end = (S * dS).sum(-1).view(shape[:3])
        at_end = at_end.sum(-1) if exponent.dim() == 3 else at_end
    for span in reversed(how.cover):
        d_block = queries(d_out, span, k.shape[2], dtype)
        q_b = queries(q, span, k.shape[2], dtype) * scale
        factors = how.factors(span)
        block = solve_block(k, v, beta, span, factors, dtype)
        *d_inputs, d_exponent, dS = _span_backward(d_block, dS, q_b, block, factors, starts.pop())
        d_inputs[0] = d_inputs[0].flatten(0, 1) * scale
        for x, block_grad in zip(grads, d_inputs, strict=True):
            store(x, span, block_grad)
        if exponent is not None:
            store(exponent, span, d_exponent if exponent.dim() == 4 else d_exponent.sum(-1))
    d_decay = None
    if log_decay is not None and exponent is not None and at_end is not None:
        d_decay = decay_gradient(exponent, at_end).to(log_decay.dtype)
    dq, dk, dv, dbeta = grads
    return dq, dk, dv, dbeta, d_decay, dS.reshape(shape).clone()


def _span_backward(
    d_out: Tensor, dS: Tensor, q: Tensor, block: Block, factors: Factors, S: Tensor
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbeta (N, C), the gradient by the summed log decays (N, C, F), and dS before the span."""
    S_all, U = states_before(block, factors.chunk, S)
    n = S_all.shape[0] - 1
    before = S_all[:-1].flatten(0, 1)
    d_rows, old = d_out.flatten(1, 2), factors.read(q).flatten(1, 2)
    scores = factors.scores(q, block.k).flatten(1, 2)
    d_scores = torch.bmm(d_rows, U.transpose(1, 2)).view(*q.shape[:3], -1)
    dq = factors.read(torch.bmm(d_rows, before.transpose(1, 2)).view_as(q))
    # What every state gets: from the queries of its own chunk, from what the chunk keeps of it, and through U.
    dU = torch.bmm(scores.transpose(1, 2), d_rows)
    dS_all = torch.empty_like(S_all)
    dS_all[-1] = dS
    torch.bmm(old.transpose(1, 2), d_rows, out=dS_all[:-1].flatten(0, 1))
    parts = [x.unflatten(0, (n, -1)) for x in (dU, block.write, block.W.transpose(1, 2))]
    for i in range(n - 1, -1, -1):
        dU_i, write_i, W_i = (x[i] for x in parts)
        dU_i.baddbmm_(write_i, dS_all[i + 1])
        if factors.chunk is None:
            dS_all[i] += dS_all[i + 1]
        else:
            dS_all[i].addcmul_(dS_all[i + 1], factors.chunk[i])
        dS_all[i].baddbmm_(W_i, dU_i, alpha=-1)
    right = torch.linalg.solve_triangular(
        block.system.transpose(1, 2), dU, upper=True, unitriangular=True
    )  # gradient by the right-hand side
    d_system = torch.bmm(right, U.transpose(1, 2)).tril_(-1).neg_()
    dv = right * block.beta
    d_read = factors.read(torch.bmm(dv, before.transpose(1, 2)).neg_()[:, None])[:, 0]
    d_write = factors.write(torch.bmm(U, dS_all[1:].flatten(0, 1).transpose(1, 2)))
    new = block.v - torch.bmm(block.read, before)
    dbeta = (right * new).sum(-1) + (d_system * block.products).sum(-1)
    d_reading, d_earlier = factors.scores_backward((d_system * block.beta)[:, None], block.k[:, None], block.k)
    dq_scores, d_read_by_q = factors.scores_backward(d_scores, q, block.k)
    dq = dq + dq_scores
    d_read = d_read + d_reading[:, 0]
    d_write = d_write + d_earlier + d_read_by_q
    exponent = (q * dq).sum(1) + block.k * (d_read - d_write)
    return dq, d_read + d_write, dv, dbeta, exponent, dS_all[0]
