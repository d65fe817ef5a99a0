"""The backward pass of linear attention in Triton, written by hand: states are made again, not kept.

With G the cumulative log decay, every term of the loss is q_t k_j exp(G_t - G_j): so dG = q dq - k dk, plus what
the final states hold at the end of a sequence, and a log decay's gradient is the sum of dG from its token on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import configs
from .chunks import Chunks
from .launch import LEAST_DECAY, arch_of, cdiv, on, precision, rows, strides, tl_dtype
from .linear_bwd_qkv import linear_bwd_qk_kernel, linear_bwd_v_kernel
from .linear_bwd_states import linear_bwd_rows_kernel, linear_bwd_states_kernel
from .linear_fwd import Decay, States, decay_of, pairs_of, product_dtype, states_of
from .linear_vector import SUB
from .linear_vector_bwd import linear_bwd_pairs_kernel, linear_bwd_vector_kernel


class Call(NamedTuple):
    """What the kernels of one backward pass share: weight = d num / d_out and dden (B, T, H), or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    decay: Decay
    chunks: Chunks
    weight: Tensor | None
    dden: Tensor | None
    scale: float
    dtype: torch.dtype  # of products

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, Hk, query heads for each, chunks in a row: the kernels' numbers."""
        return self.q.shape[1], self.k.shape[2], self.q.shape[2] // self.k.shape[2], self.chunks.each

    def options(self, kernel: str, *dims: int) -> dict[str, Any]:
        """All constexprs but MODE, blocks by the table."""
        arch = arch_of(self.k)
        shared = {"NORMALIZE": self.weight is not None, "PACKED": self.chunks.cu is not None}
        shared |= {"PRECISION": precision(arch), "DTYPE": tl_dtype(self.dtype), "C": self.chunks.size}
        return shared | configs.find(kernel, arch, self.dtype, *dims).options


def backward(
    d_out: Tensor, dS: Tensor, dz: Tensor, q: Tensor, k: Tensor, v: Tensor, log_k: Tensor | None,
    log_decay: Tensor | None, S: Tensor, z: Tensor, m: Tensor, cu_seqlens: Tensor | None, out: Tensor, den: Tensor,
    scale: float, normalize: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dlog_k, dlog_decay, dS0, dz0. m counts as a constant: outputs don't depend on it."""
    with on(q):
        q, k, v, d_out = rows(q), rows(k), rows(v), rows(d_out)
        chunks, dtype = Chunks.of(k, cu_seqlens), product_dtype(q, k, v)
        decay = decay_of(k, log_k, log_decay, chunks)
        before = states_of(k, v, decay, (S, z, m), chunks, dtype)
        weight, dden = _rows(d_out, out, den, eps) if normalize else (None, None)
        call = Call(q, k, v, d_out, decay, chunks, weight, dden, scale, dtype)
        dstates, dz_states, dS0, dz0 = _states(call, before, dS, dz)
        if decay.mode == 3:
            dq, dk, gate = _vector(call, before, dstates, dz_states)
        else:
            dq, dk, gate = _scalar(call, before, dstates, dz_states)
        dv = _values(call, before, dstates)
        dlog_k = dlog_decay = None
        if log_k is not None:
            dlog_k = gate.to(log_k.dtype)
        elif log_decay is not None:
            held = (before.end[0] * dS).sum(-1) + before.end[1] * dz
            held = held.sum(-1) if decay.mode == 1 else held
            dlog_decay = _from_here_on(gate, held, chunks).masked_fill_(log_decay < LEAST_DECAY.value, 0)
            dlog_decay = dlog_decay.to(log_decay.dtype)
    return dq, dk, dv, dlog_k, dlog_decay, dS0, dz0


def _rows(d_out: Tensor, out: Tensor, den: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    weight, dden = torch.empty_like(den), torch.empty_like(den)
    row = configs.find("linear_bwd_rows", arch_of(out), out.dtype, out.shape[3])
    linear_bwd_rows_kernel[(cdiv(den.numel(), row.blocks["BR"]),)](
        d_out, out.contiguous(), den.contiguous(), weight, dden, den.numel(), out.shape[1], out.shape[2],
        *strides(d_out, 3), eps, V=out.shape[3], **row.options,
    )  # fmt: skip
    return weight, dden


def _states(call: Call, before: States, dS: Tensor, dz: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the states at the end of each chunk, and of the initial ones."""
    heads, features, v_dim = dS.shape[1:]
    dS, dz = dS.contiguous(), dz.contiguous()
    found = torch.empty_like(before.S), torch.empty_like(before.z), torch.empty_like(dS), torch.empty_like(dz)
    options = call.options("linear_bwd_states", features, v_dim)
    grid = (dS.shape[0] * heads * cdiv(features, options["BF"]) * cdiv(v_dim, options["BV"]),)
    linear_bwd_states_kernel[grid](
        call.q, call.d_out, call.decay.g, before.m, call.weight, call.dden, dS, dz, *found, call.chunks.cu,
        call.chunks.first, *call.sizes, *strides(call.q, 3), *strides(call.d_out, 3), *strides(call.decay.g, 3),
        call.scale, MODE=call.decay.mode, F=features, V=v_dim, **options,
    )  # fmt: skip
    return found


def _scalar(call: Call, before: States, dstates: Tensor, dz_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, and q dq - k dk summed over features (for log_k: k dk)."""
    q, k, v, decay = call.q, call.k, call.v, call.decay
    features, v_dim = k.shape[3], v.shape[3]
    options = call.options("linear_bwd_qk", features, v_dim)
    tiles = cdiv(features, options["BF"])
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    gate = before.z.new_empty(tiles if decay.mode else 0, *k.shape[:3])
    linear_bwd_qk_kernel[(call.chunks.count * k.shape[2] * tiles,)](
        q, k, v, call.d_out, decay.g, before.S, before.z, before.m, dstates, dz_states, call.weight, call.dden,
        dq, dk, gate, call.chunks.table, *call.sizes, k.shape[0] * k.shape[1] * k.shape[2],
        *strides(q, 3), *strides(k, 3), *strides(v, 3), *strides(call.d_out, 3), *strides(decay.g, 3), call.scale,
        MODE=decay.mode, F=features, V=v_dim, **options,
    )  # fmt: skip
    return dq, dk, gate.sum(0)


def _vector(call: Call, before: States, dstates: Tensor, dz_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, and q dq - k dk for every feature."""
    q, k, v, chunks = call.q, call.k, call.v, call.chunks
    features, v_dim, queries = k.shape[3], v.shape[3], q.shape[2]
    dpairs = before.z.new_empty(chunks.count, queries, chunks.size, chunks.size)
    linear_bwd_pairs_kernel[(chunks.count * queries,)](
        v, call.d_out, call.weight, call.dden, dpairs, chunks.table, *call.sizes,
        *strides(v, 3), *strides(call.d_out, 3), V=v_dim, **call.options("linear_bwd_pairs", v_dim),
    )  # fmt: skip
    options = call.options("linear_bwd_vector", features, v_dim)
    dq, dk, gate = q.new_empty(q.shape), k.new_empty(k.shape), before.z.new_empty(k.shape)
    linear_bwd_vector_kernel[(chunks.count * k.shape[2] * cdiv(features, options["BF"]) * (chunks.size // SUB),)](
        q, k, v, call.d_out, call.decay.g, before.S, before.z, dstates, dz_states, call.weight, call.dden, dpairs,
        dq, dk, gate, chunks.table, *call.sizes, *strides(q, 3), *strides(k, 3), *strides(v, 3),
        *strides(call.d_out, 3), *strides(call.decay.g, 3), call.scale, F=features, V=v_dim, SUB=SUB, **options,
    )  # fmt: skip
    return dq, dk, gate


def _values(call: Call, before: States, dstates: Tensor) -> Tensor:
    q, k, v, decay = call.q, call.k, call.v, call.decay
    pairs = pairs_of(q, k, decay, call.chunks, call.dtype)
    options = call.options("linear_bwd_v", k.shape[3], v.shape[3])
    dv = v.new_empty(v.shape)
    linear_bwd_v_kernel[(call.chunks.count * k.shape[2] * cdiv(v.shape[3], options["BV"]),)](
        q, k, call.d_out, decay.g, before.m, pairs, dstates, call.weight, call.dden, dv, call.chunks.table,
        *call.sizes, *strides(q, 3), *strides(k, 3), *strides(call.d_out, 3), *strides(decay.g, 3), call.scale,
        MODE=decay.mode, F=k.shape[3], V=v.shape[3], **options,
    )  # fmt: skip
    return dv


def _from_here_on(x: Tensor, at_end: Tensor, chunks: Chunks) -> Tensor:
    """Sums of x (B, T, Hk, ...) over the tokens from each one to its sequence's end, plus at_end (N, Hk, ...).

    In float64: differences of sums over a whole sequence keep float32's precision for the last tokens, too.
    """
    x = x.double()
    until = x.cumsum(1)
    if chunks.cu is None:
        return until[:, -1:] - until + x + at_end[:, None]
    token = torch.arange(x.shape[1], device=x.device)
    owner = torch.searchsorted(chunks.cu[1:], token, right=True)
    return until[:, chunks.cu[owner + 1] - 1] - until + x + at_end[owner]
