"""Chunked linear attention in PyTorch: batched matrix products over chunks, a short loop over their states.

B batch, T length, Hk key/value heads, G query heads per key/value head, F feature dim, Dv value dim; n chunks
of C tokens. Inside, heads come before time and the G query heads of one token are neighbouring rows: (B, Hk,
T, G, .), so that keys and values are never repeated for their query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .state import NOTHING_SEEN, LinearState, accumulate_dtype, empty_linear_state

CHUNK = 64
# Query rows (batch x tokens x heads) worked on at once: on a CPU their score blocks should stay in cache.
ROWS = 4096
ROWS_ON_DEVICE = 1 << 18


class Sums(NamedTuple):
    """num (B, Hk, T, G, Dv) and den (B, Hk, T, G), both relative to exp(m), m (B, Hk, T) or None for 0."""

    num: Tensor
    den: Tensor
    m: Tensor | None
    state: LinearState


def spans(q: Tensor, chunk: int, most: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(start, n, C): cover q (B, T, Hk, G, .) by n <= most chunks of C tokens, the last maybe shorter."""
    length = q.shape[1]
    rows = ROWS if q.device.type == "cpu" else ROWS_ON_DEVICE
    group = most or rows // (q.shape[0] * q.shape[2] * q.shape[3] * chunk or 1) or 1
    start = 0
    while length - start >= chunk:
        n = min(group, (length - start) // chunk)
        yield start, n, chunk
        start += n * chunk
    if start < length:
        yield start, 1, length - start


def heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, Hk, ...) to (B, Hk, T, ...), contiguous, in `dtype`."""
    # One pass where the dtype changes; `to` alone leaves the layout as it is where it doesn't.
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).contiguous()


def group_heads(x: Tensor, kv_heads: int) -> Tensor:
    """(B, T, H, ...) to (B, T, Hk, G, ...)."""
    return x.unflatten(2, (kv_heads, -1))


def causal_sums(q: Tensor, k: Tensor, v: Tensor, log_k: Tensor | None, state: LinearState) -> Sums:
    """The sums over keys j <= t for every query t, T >= 1.

    q (B, T, Hk, G, F), k (B, T, Hk, F), v (B, T, Hk, Dv), any dtype; log_k (B, T, Hk) in the state's dtype.
    Keys that should not count must be 0, with NOTHING_SEEN as their log_k.
    """
    dtype = state.S.dtype
    S, z, m = state
    logs = running = None
    if log_k is not None:
        logs = heads_first(log_k, dtype)
        running = torch.maximum(logs.cummax(-1).values, m[..., None])
    nums, dens = [], []
    for start, n, chunk in spans(q, CHUNK):
        part = slice(start, start + n * chunk)
        q_b = heads_first(q[:, part], dtype).unflatten(2, (n, chunk))
        k_b = heads_first(k[:, part], dtype).unflatten(2, (n, chunk))
        v_b = heads_first(v[:, part], dtype).unflatten(2, (n, chunk))
        decay = None
        if logs is not None and running is not None:
            decay = _Decay.of(
                logs[..., part].unflatten(-1, (n, chunk)),
                running[..., part].unflatten(-1, (n, chunk)),
                m,
            )
            m = running[..., part.stop - 1]
        num, den, S, z = _super_block(q_b, k_b, v_b, decay, S, z)
        nums.append(num)
        dens.append(den)
    num = nums[0] if len(nums) == 1 else torch.cat(nums, 2)
    den = dens[0] if len(dens) == 1 else torch.cat(dens, 2)
    return Sums(num, den, running, LinearState(S, z, m))


class _Decay(NamedTuple):
    """Factors that bring every term to the scale it is summed at; all are exp of something <= 0."""

    pair: Tensor  # (B, Hk, n, C, C): key j as query t sees it, 0 for j > t
    key: Tensor  # (B, Hk, n, C): key j as the chunk's end sees it
    query: Tensor  # (B, Hk, n, C): the state before the chunk as query t sees it
    chunk: Tensor  # (B, Hk, n): the state before the chunk as the chunk's end sees it

    @staticmethod
    def of(logs: Tensor, running: Tensor, m: Tensor) -> _Decay:
        end = running[..., -1]
        before = torch.cat([m[..., None], end[..., :-1]], -1)
        # A future key may lie above the maximum so far: masked before exp, else it would overflow.
        pair = logs[..., None, :] - running[..., :, None]
        pair = pair.masked_fill(_future(pair.shape[-1], pair.device), -torch.inf).exp()
        return _Decay(
            pair,
            (logs - end[..., None]).exp(),
            (before[..., None] - running).exp(),
            (before - end).exp(),
        )


def _future(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)


def _super_block(
    q: Tensor, k: Tensor, v: Tensor, decay: _Decay | None, S: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """num, den, S, z of n chunks: q (B, Hk, n, C, G, F), k (B, Hk, n, C, F), v (B, Hk, n, C, Dv)."""
    batch, heads, n, chunk, groups, features = q.shape
    flat = (batch * heads * n, chunk * groups, features)
    q_rows = q.reshape(flat)
    scores = torch.bmm(q_rows, k.reshape(-1, chunk, features).transpose(1, 2)).view(*q.shape[:-1], chunk)
    if decay is None:
        k_end, q_start = k, q_rows
        scores = _causal_(scores)
    else:
        k_end = k * decay.key[..., None]
        q_start = (q * decay.query[..., None, None]).reshape(flat)
        scores = scores * decay.pair[..., :, None, :]
    befores, S, z = _chunk_states(k_end, v, None if decay is None else decay.chunk, S, z)
    S_before, z_before = befores
    rows = scores.view(flat[0], flat[1], chunk)
    num = torch.baddbmm(
        torch.bmm(rows, v.reshape(-1, chunk, v.shape[-1])),
        q_start,
        S_before.reshape(-1, features, v.shape[-1]),
    )
    den = rows.sum(-1) + torch.bmm(q_start, z_before.reshape(-1, features, 1)).squeeze(-1)
    shape = (batch, heads, n * chunk, groups)
    return num.view(*shape, -1), den.view(shape), S, z


def _causal_(scores: Tensor) -> Tensor:
    """Zero the future in scores (..., C, G, C), in place."""
    if scores.shape[-2] == 1:
        return scores.squeeze(-2).tril_().unsqueeze(-2)
    return scores.masked_fill_(_future(scores.shape[-1], scores.device)[:, None, :], 0)


def _chunk_states(
    k: Tensor, v: Tensor, decay: Tensor | None, S: Tensor, z: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """The states before each chunk, (B, Hk, n, F, Dv) and (B, Hk, n, F), and the ones after the last."""
    added = torch.matmul(k.transpose(-1, -2), v)
    added_z = k.sum(-2)
    if k.shape[2] == 1 and decay is None:
        return (
            (S.unsqueeze(2), z.unsqueeze(2)),
            S + added[:, :, 0],
            z + added_z[:, :, 0],
        )
    S_list, z_list = [], []
    for i in range(k.shape[2]):
        S_list.append(S)
        z_list.append(z)
        if decay is not None:
            S, z = S * decay[:, :, i, None, None], z * decay[:, :, i, None]
        S, z = S + added[:, :, i], z + added_z[:, :, i]
    return (torch.stack(S_list, 2), torch.stack(z_list, 2)), S, z


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    normalize: bool,
    log_k: Tensor | None,
    state: LinearState | None,
    mask: Tensor | None,
    eps: float,
) -> tuple[Tensor, LinearState]:
    """`linearize_kernels.linear_attention` on checked arguments, without `cu_seqlens`."""
    dtype = accumulate_dtype(q, k, v)
    if state is None:
        state = empty_linear_state(
            q.shape[0],
            k.shape[2],
            k.shape[3],
            v.shape[3],
            logs=log_k is not None,
            dtype=dtype,
            device=q.device,
        )
    state = LinearState(*(x.to(dtype) for x in state))
    if q.shape[1] == 0:
        return v.new_zeros(*q.shape[:3], v.shape[3]), state
    if mask is not None:
        q, k, v = (x.masked_fill(~mask[..., None, None], 0) for x in (q, k, v))
    if log_k is not None:
        log_k = log_k.to(dtype)
        log_k = log_k if mask is None else log_k.masked_fill(~mask[..., None], NOTHING_SEEN)
    if scale != 1.0:
        q = q.to(dtype) * scale
    sums = causal_sums(group_heads(q, k.shape[2]), k, v, log_k, state)
    if normalize:
        out = sums.num / sums.den.clamp_min(eps)[..., None]
    elif sums.m is not None:
        out = sums.num * sums.m.exp()[..., None, None]
        if mask is not None:  # exp(m) may be inf, and inf * 0 is not the 0 that a masked query gives
            out = out.masked_fill(~mask[:, None, :, None, None], 0)
    else:
        out = sums.num
    return merge_heads(out, v.dtype), sums.state


def merge_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, Hk, T, G, Dv) to (B, T, Hk * G, Dv) in `dtype`."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).flatten(2, 3)
