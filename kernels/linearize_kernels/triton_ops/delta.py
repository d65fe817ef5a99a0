"""The delta rule in Triton: S_t = a_t S_{t-1}, S_t += k_t (beta_t (v_t - S_t^T k_t))^T, out_t = scale S_t^T q_t.

Chunked by the WY form (Yang et al. 2024, arXiv:2406.06484; with decays arXiv:2412.06464, and by feature 2510.26692):
within a chunk that starts from S, with c the sum of log decays since its start, what the tokens write is

    U = (I + A)^-1 (beta V - beta (K exp c) S),    A_tj = beta_t sum_f k_tf k_jf exp(c_tf - c_jf), j < t

so that a chunk needs one triangular inverse, and the states one pass over the chunks. `delta_chunk` has what needs no
state, `delta_states` the passes and outputs, `delta_backward` the gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import launch
from .delta_backward import (
    delta_backward_inputs,
    delta_backward_local,
    delta_backward_scores,
    delta_backward_solve,
    delta_backward_states,
)
from .delta_backward_pairs import delta_backward_columns, delta_backward_rows
from .delta_chunk import delta_pairs, delta_solve, delta_sums
from .delta_plan import CHUNK, Plan
from .delta_states import delta_out, delta_states, delta_step
from .launch import cdiv, rows, strides

LARGEST = 256  # head dim: a program holds a tile of all features of a state


def refuses(tensors: dict[str, Tensor]) -> str | None:
    """Why the kernels can't serve these tensors, or None."""
    for name in ("q", "k", "v"):
        x = tensors.get(name)
        if x is not None and x.shape[-1] > LARGEST:
            return f"{name} has head dim {x.shape[-1]}, and the kernels hold at most {LARGEST}"
    return None


class Chunks(NamedTuple):
    """What a forward makes on its way, by chunk and kv head."""

    c: Tensor | None
    pairs: Tensor | None  # of queries and keys, where decays are by feature
    inverse: Tensor
    W: Tensor
    U: Tensor
    states: Tensor
    S: Tensor  # at the end


def sums(plan: Plan, log_decay: Tensor | None) -> Tensor | None:
    """The sums of log decays within each chunk."""
    if log_decay is None:
        return None
    vector = plan.decay == 2
    c = plan.empty(plan.chunks, plan.Hk, CHUNK, *([plan.F] if vector else []))
    constants = plan.constants("delta_sums", BK=plan.F)
    tiles = cdiv(plan.F, constants["BK"]) if vector else 1
    x = rows(log_decay) if vector else log_decay
    delta_sums[(plan.chunks * plan.Hk * tiles,)](
        x, c, plan.table, plan.T, plan.Hk, tiles, *strides(x, 3),
        F=plan.F, C=CHUNK, VECTOR=vector, VARLEN=plan.packed, **constants,
    )  # fmt: skip
    return c


def pairs(plan: Plan, x: Tensor, k: Tensor, c: Tensor | None) -> Tensor | None:
    """(chunks, heads of x, C, C) products of x and k with decays by feature; None without such decays."""
    if plan.decay != 2:
        return None
    found = plan.empty(plan.chunks, x.shape[2], CHUNK, CHUNK)
    delta_pairs[(plan.chunks * x.shape[2] * (CHUNK // 16),)](
        x, k, c, found, plan.table, plan.T, x.shape[2], plan.Hk, *strides(x, 3), *strides(k, 3),
        F=plan.F, C=CHUNK, VARLEN=plan.packed, **plan.constants("delta_pairs", BK=plan.F), **plan.products,
    )  # fmt: skip
    return found


def chunk_states(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor
) -> Chunks:
    """All that a forward makes but the outputs."""
    c = sums(plan, log_decay)
    key_pairs = pairs(plan, k, k, c)
    heads = (plan.chunks, plan.Hk)
    inverse = plan.empty(*heads, CHUNK, CHUNK, wide=False)
    W = plan.empty(*heads, CHUNK, plan.F, wide=False)
    U = plan.empty(*heads, CHUNK, plan.Dv)
    delta_solve[(plan.chunks * plan.Hk,)](
        k, v, beta, c, key_pairs, inverse, W, U, plan.table, plan.T, plan.Hk,
        *strides(k, 3), *strides(v, 3), *strides(beta, 3),
        **plan.shape,
        **plan.constants("delta_solve", BK=plan.F, BV=plan.Dv), **plan.products,
    )  # fmt: skip
    states = plan.empty(*heads, plan.F, plan.Dv, wide=False)
    S_end = torch.empty(S.shape, dtype=torch.float32, device=S.device)
    constants = plan.constants("delta_states", BF=plan.F, BV=plan.Dv)
    tiles = cdiv(plan.Dv, constants["BV"])
    delta_states[(plan.N * plan.Hk * tiles,)](
        k, c, W, U, states, S.contiguous(), S_end, plan.cu, plan.firsts, plan.T, plan.Hk, tiles,
        *strides(k, 3), **plan.shape, **constants, **plan.products,
    )  # fmt: skip
    return Chunks(c, pairs(plan, q, k, c), inverse, W, U, states, S_end)


def forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor, cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, T, H, Dv) and the final states (N, Hk, F, Dv), float32."""
    plan = Plan.of(q, k, v, log_decay, S, cu_seqlens)
    q, k, v = rows(q), rows(k), rows(v)
    out = torch.empty(plan.B, plan.T, plan.H, plan.Dv, dtype=v.dtype, device=v.device)
    with launch.on(q):
        made = chunk_states(plan, q, k, v, beta, log_decay, S)
        constants = plan.constants("delta_out", BK=plan.F, BV=plan.Dv)
        tiles = cdiv(plan.Dv, constants["BV"])
        delta_out[(plan.chunks * plan.H * tiles,)](
            q, k, made.c, made.pairs, made.U, made.states, out, plan.table,
            plan.T, plan.H, plan.Hk, tiles, scale, *strides(q, 3), *strides(k, 3), *strides(out, 3),
            **plan.shape, **constants, **plan.products,
        )  # fmt: skip
    return out, made.S


def step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor, scale: float) -> Tensor:
    """out (B, H, Dv) of one token; S (B, Hk, F, Dv), float32 and contiguous, is updated in place."""
    plan = Plan.of(q[:, None], k[:, None], v[:, None], None, S, None)
    q, k, v = rows(q), rows(k), rows(v)
    decay = 0 if log_decay is None else log_decay.dim() - 1
    log_decay = rows(log_decay) if decay == 2 else log_decay
    out = torch.empty(plan.B, plan.H, plan.Dv, dtype=v.dtype, device=v.device)
    constants = plan.constants("delta_step", BF=plan.F, BV=plan.Dv)
    tiles = cdiv(plan.Dv, constants["BV"])
    with launch.on(q):
        delta_step[(plan.B * plan.Hk * tiles,)](
            q, k, v, beta, log_decay, S, out, plan.Hk, tiles, scale,
            *strides(q, 2), *strides(k, 2), *strides(v, 2), *strides(beta, 2), *strides(log_decay, 2),
            *strides(out, 2), F=plan.F, Dv=plan.Dv, G=plan.H // plan.Hk, DECAY=decay, **constants,
        )  # fmt: skip
    return out


def backward(
    d_out: Tensor, dS: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor,
    cu_seqlens: Tensor | None, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, dbeta, dlog_decay or None, dS0: inverse and states are made again rather than kept."""
    plan = Plan.of(q, k, v, log_decay, S, cu_seqlens)
    q, k, v, d_out = rows(q), rows(k), rows(v), rows(d_out)
    B, T, H, Hk, F, Dv = plan[:6]
    with launch.on(q):
        made = chunk_states(plan, q, k, v, beta, log_decay, S)
        heads = (plan.chunks, Hk)
        dU, states_grad = plan.empty(*heads, CHUNK, Dv), plan.empty(*heads, F, Dv)
        constants = plan.constants("delta_backward_local", BK=F, BV=Dv)
        tiles = cdiv(Dv, constants["BV"])
        delta_backward_local[(plan.chunks * Hk * tiles,)](
            q, k, d_out, made.c, made.pairs, dU, states_grad, plan.table, T, H, Hk, tiles, scale,
            *strides(q, 3), *strides(k, 3), *strides(d_out, 3), **plan.shape, **constants, **plan.products,
        )  # fmt: skip
        dS0 = torch.empty(S.shape, dtype=torch.float32, device=S.device)
        constants = plan.constants("delta_backward_states", BF=F, BV=Dv)
        tiles = cdiv(Dv, constants["BV"])
        delta_backward_states[(plan.N * Hk * tiles,)](
            k, made.c, made.W, dU, states_grad, dS.contiguous(), dS0, plan.cu, plan.firsts, T, Hk, tiles,
            *strides(k, 3), **plan.shape, **constants, **plan.products,
        )  # fmt: skip
        dv = torch.empty(B, T, Hk, Dv, dtype=v.dtype, device=v.device)
        by_values, d_pairs = plan.empty(B, T, Hk), plan.empty(*heads, CHUNK, CHUNK)
        delta_backward_solve[(plan.chunks * Hk,)](
            v, beta, made.inverse, made.U, dU, dv, by_values, d_pairs, plan.table, T, Hk,
            *strides(v, 3), *strides(beta, 3), *strides(dv, 3), Dv=Dv, C=CHUNK, VARLEN=plan.packed,
            **plan.constants("delta_backward_solve", BV=Dv), **plan.products,
        )  # fmt: skip
        d_scores = plan.empty(plan.chunks, H, CHUNK, CHUNK)
        delta_backward_scores[(plan.chunks * H,)](
            d_out, made.U, d_scores, plan.table, T, H, Hk, scale, *strides(d_out, 3), Dv=Dv, C=CHUNK,
            VARLEN=plan.packed, **plan.constants("delta_backward_scores", BV=Dv), **plan.products,
        )  # fmt: skip
        through = _through_pairs(plan, q, k, beta, made.c, d_scores, d_pairs) if plan.decay == 2 else (None,) * 3
        dq = torch.empty(B, T, H, F, dtype=q.dtype, device=q.device)
        dk = torch.empty(B, T, Hk, F, dtype=k.dtype, device=k.device)
        constants = plan.constants("delta_backward_inputs", BK=F, BV=Dv)
        tiles = cdiv(F, constants["BK"])
        by_keys, d_log = plan.empty(tiles, B, T, Hk), None
        if log_decay is not None:
            d_log = plan.empty(B, T, Hk, F) if plan.decay == 2 else plan.empty(tiles, B, T, Hk)
        decays = rows(log_decay) if plan.decay == 2 else log_decay
        delta_backward_inputs[(plan.chunks * Hk * tiles,)](
            q, k, beta, decays, d_out, made.c, made.states, states_grad, made.U, dU, d_scores, d_pairs, *through,
            dq, dk, by_keys, d_log, plan.table, T, H, Hk, tiles, B * T, scale,
            *strides(q, 3), *strides(k, 3), *strides(beta, 3), *strides(decays, 3), *strides(d_out, 3),
            **plan.shape, **constants, **plan.products,
        )  # fmt: skip
    if log_decay is not None and d_log is not None:
        d_log = (d_log if plan.decay == 2 else d_log.sum(0)).to(log_decay.dtype)
    return dq, dk, dv, (by_values + by_keys.sum(0)).to(beta.dtype), d_log, dS0


def _through_pairs(
    plan: Plan, q: Tensor, k: Tensor, beta: Tensor, c: Tensor | None, d_scores: Tensor, d_pairs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the gradients on products with decays by feature give queries, reading keys and writing keys."""
    found = []
    for M, heads in ((d_scores, plan.H), (d_pairs, plan.Hk)):
        grad = plan.empty(plan.chunks, heads, CHUNK, plan.F)
        constants = plan.constants("delta_backward_rows", BK=plan.F)
        tiles = cdiv(plan.F, constants["BK"])
        delta_backward_rows[(plan.chunks * heads * (CHUNK // 16) * tiles,)](
            M, k, c, grad, plan.table, plan.T, heads, plan.Hk, tiles, *strides(k, 3),
            F=plan.F, C=CHUNK, VARLEN=plan.packed, **constants, **plan.products,
        )  # fmt: skip
        found.append(grad)
    written = torch.empty_like(found[1])
    for M, x, weight in ((d_scores, q, None), (d_pairs, k, beta)):
        constants = plan.constants("delta_backward_columns", BK=plan.F)
        tiles = cdiv(plan.F, constants["BK"])
        delta_backward_columns[(plan.chunks * plan.Hk * (CHUNK // 16) * tiles,)](
            M, x, weight, c, written, plan.table, plan.T, x.shape[2], plan.Hk, tiles, *strides(x, 3),
            *strides(weight, 3), F=plan.F, C=CHUNK, ADD=weight is not None, VARLEN=plan.packed,
            **constants, **plan.products,
        )  # fmt: skip
    return found[0], found[1], written
