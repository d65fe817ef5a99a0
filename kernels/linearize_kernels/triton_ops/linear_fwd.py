"""The forward pass of linear attention in Triton.

B batch, T length, H query heads, Hk key/value heads, F feature dim, V value dim, N states. Two passes: the states
before each chunk (`linear_states`), then all outputs at once (`linear_out`).
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from . import configs
from .chunks import Chunks
from .launch import arch_of, cdiv, on, precision, rows, strides, tl_dtype
from .linear_out import linear_out_kernel
from .linear_states import linear_states_kernel
from .linear_vector import SUB, linear_cumsum_kernel, linear_pairs_kernel


class Decay(NamedTuple):
    """MODE of the kernels (linear_chunks) and what they read: log_decay, log_k, or c."""

    mode: int
    g: Tensor | None


class States(NamedTuple):
    """Before each chunk: S (count, Hk, F, V), z (count, Hk, F), m (count, Hk); and at the end of each sequence."""

    S: Tensor
    z: Tensor
    m: Tensor
    end: tuple[Tensor, Tensor, Tensor]


def product_dtype(*inputs: Tensor) -> torch.dtype:
    """One dtype for all products, the widest of the inputs': what is read in float32 is never cut to bf16."""
    return reduce(torch.promote_types, (x.dtype for x in inputs))


def decay_of(k: Tensor, log_k: Tensor | None, log_decay: Tensor | None, chunks: Chunks) -> Decay:
    if log_k is not None:
        return Decay(2, log_k)
    if log_decay is None or log_decay.dim() == 3:
        return Decay(0 if log_decay is None else 1, log_decay)
    g, (_, length, heads, features) = rows(log_decay), k.shape
    c = torch.empty(k.shape, dtype=torch.float32, device=k.device)
    row = configs.find("linear_cumsum", arch_of(k), k.dtype, features)
    grid = (chunks.count * heads * cdiv(features, row.blocks["BF"]),)
    linear_cumsum_kernel[grid](
        g, c, chunks.table, length, heads, chunks.each, *strides(g, 3),
        PACKED=chunks.cu is not None, F=features, C=chunks.size, **row.options,
    )  # fmt: skip
    return Decay(3, c)


def states_of(
    k: Tensor, v: Tensor, decay: Decay, state: tuple[Tensor, Tensor, Tensor], chunks: Chunks, dtype: torch.dtype
) -> States:
    """`dtype`: of products. Of bf16 ones S before a chunk is nothing but a term, and is kept as such: in bf16."""
    S, z, m = (x.contiguous() for x in state)
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    before = States(
        S.new_empty(chunks.count, *S.shape[1:], dtype=kept),
        z.new_empty(chunks.count, *z.shape[1:]),
        m.new_empty(chunks.count, *m.shape[1:]),
        (torch.empty_like(S), torch.empty_like(z), torch.empty_like(m)),
    )
    heads, features, v_dim = S.shape[1:]
    arch = arch_of(k)
    row = configs.find("linear_states", arch, dtype, features, v_dim)
    grid = (S.shape[0] * heads * cdiv(features, row.blocks["BF"]) * cdiv(v_dim, row.blocks["BV"]),)
    linear_states_kernel[grid](
        k, v, decay.g, S, z, m, before.S, before.z, before.m, *before.end, chunks.cu, chunks.first,
        k.shape[1], heads, chunks.each, *strides(k, 3), *strides(v, 3), *strides(decay.g, 3),
        MODE=decay.mode, PACKED=chunks.cu is not None, PRECISION=precision(arch), DTYPE=tl_dtype(dtype),
        F=features, V=v_dim, C=chunks.size, **row.options,
    )  # fmt: skip
    return before


def pairs_of(q: Tensor, k: Tensor, decay: Decay, chunks: Chunks, dtype: torch.dtype) -> Tensor | None:
    """What each query sees of its chunk's keys, where decays differ by feature; else kernels find it themselves."""
    if decay.mode != 3:
        return None
    (_, length, queries, features), heads = q.shape, k.shape[2]
    arch = arch_of(k)
    row = configs.find("linear_pairs", arch, dtype, features)
    pairs = torch.empty(chunks.count, queries, chunks.size, chunks.size, dtype=torch.float32, device=k.device)
    linear_pairs_kernel[(chunks.count * queries * (chunks.size // SUB),)](
        q, k, decay.g, pairs, chunks.table, length, heads, queries // heads, chunks.each,
        *strides(q, 3), *strides(k, 3), *strides(decay.g, 3),
        PACKED=chunks.cu is not None, PRECISION=precision(arch), DTYPE=tl_dtype(dtype),
        F=features, C=chunks.size, SUB=SUB, **row.options,
    )  # fmt: skip
    return pairs


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_k: Tensor | None, log_decay: Tensor | None,
    S: Tensor, z: Tensor, m: Tensor, cu_seqlens: Tensor | None, scale: float, normalize: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out (B, T, H, V), den (B, T, H) (empty if not normalised), and the states after the last token."""
    with on(q):
        q, k, v = rows(q), rows(k), rows(v)
        chunks, dtype = Chunks.of(k, cu_seqlens), product_dtype(q, k, v)
        decay = decay_of(k, log_k, log_decay, chunks)
        before = states_of(k, v, decay, (S, z, m), chunks, dtype)
        pairs = pairs_of(q, k, decay, chunks, dtype)
        (batch, length, queries, features), (heads, v_dim) = q.shape, v.shape[2:]
        out = v.new_empty(batch, length, queries, v_dim)
        den = z.new_empty((batch, length, queries) if normalize else 0)
        arch = arch_of(k)
        row = configs.find("linear_out", arch, dtype, features, v_dim)
        linear_out_kernel[(chunks.count * queries * cdiv(v_dim, row.blocks["BV"]),)](
            q, k, v, decay.g, before.S, before.z, before.m, pairs, out, den, chunks.table,
            length, heads, queries // heads, chunks.each,
            *strides(q, 3), *strides(k, 3), *strides(v, 3), *strides(decay.g, 3), scale, eps,
            MODE=decay.mode, NORMALIZE=normalize, PACKED=chunks.cu is not None, PRECISION=precision(arch),
            DTYPE=tl_dtype(dtype), F=features, V=v_dim, C=chunks.size, **row.options,
        )  # fmt: skip
    return out, den, *before.end
