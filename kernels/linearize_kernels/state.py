"""Decode states. Their size depends on the shapes and the window alone, never on how many tokens were seen.

N sequences (batch rows), Hk key/value heads, F feature dim, D key dim, Dv value dim, w window, n sinks. Every
tensor has N first, so `index_select(0, rows)` on each of them reorders a state (beam search).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# m where no key has been seen yet: below any log scale that occurs, yet finite, so that differences never are
# NaN.
NOTHING_SEEN = -1e30


class LinearState(NamedTuple):
    """The sums of linear attention, held relative to exp(m): the true sums are exp(m) * S and exp(m) * z.

    S (N, Hk, F, Dv) sums phi(k) v^T, z (N, Hk, F) sums phi(k), m (N, Hk) is the largest `log_k` of the valid
    keys so far: 0 without `log_k`, `NOTHING_SEEN` before the first key. All float32, or float64 for float64
    inputs.
    """

    S: Tensor
    z: Tensor
    m: Tensor


class DeltaState(NamedTuple):
    """S (N, Hk, F, Dv): what the delta rule holds for each key, float32, or float64 for float64 inputs."""

    S: Tensor


class WindowState(NamedTuple):
    """Linear sums over the keys that have left the window, the last `window` keys and values, and the sinks.

    S, z, m: as in `LinearState`. k (N, w, Hk, D), v (N, w, Hk, Dv): the last w positions, in the inputs'
    dtype. valid (N, w) bool: False at slots that are still empty or padded, where k and v are 0.
    sink_k (N, n, Hk, D), sink_v (N, n, Hk, Dv): the first n valid tokens. sink_age (N, n) int64: how many
    positions the sink stands before the next token (the token just seen has age 1); 0 at slots that are not
    filled yet. start (N,) int64: the slot of k, v and valid that holds the oldest position; the others follow it
    in a ring (`ring` puts them in order).
    """

    S: Tensor
    z: Tensor
    m: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_age: Tensor
    start: Tensor

    def oldest(self, x: Tensor) -> Tensor:
        """x (N, w, ...), one of k, v and valid, at the oldest position alone: (N, 1, ...)."""
        return x[torch.arange(x.shape[0], device=x.device), self.start][:, None]

    def ring(self, x: Tensor) -> Tensor:
        """x (N, w, ...), one of k, v and valid, with the oldest position first."""
        order = (self.start[:, None] + torch.arange(x.shape[1], device=x.device)) % max(x.shape[1], 1)
        return x[torch.arange(x.shape[0], device=x.device)[:, None], order]


def accumulate_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the tensors is, else float32: the dtype of every sum and state."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def empty_linear_state(
    rows: int,
    kv_heads: int,
    features: int,
    v_dim: int,
    *,
    logs: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> LinearState:
    """The state before any token. `logs`: whether the keys come with a log scale."""
    return LinearState(
        torch.zeros(rows, kv_heads, features, v_dim, dtype=dtype, device=device),
        torch.zeros(rows, kv_heads, features, dtype=dtype, device=device),
        torch.full((rows, kv_heads), NOTHING_SEEN if logs else 0.0, dtype=dtype, device=device),
    )


def empty_delta_state(
    rows: int, kv_heads: int, features: int, v_dim: int, *, dtype: torch.dtype, device: torch.device
) -> DeltaState:
    """The state before any token."""
    return DeltaState(torch.zeros(rows, kv_heads, features, v_dim, dtype=dtype, device=device))


def empty_window_state(
    k: Tensor,
    v: Tensor,
    *,
    rows: int,
    features: int,
    window: int,
    sinks: int,
    logs: bool,
    dtype: torch.dtype,
) -> WindowState:
    """The state before any token, for keys and values like k (B, T, Hk, D) and v (B, T, Hk, Dv)."""
    heads, dim, v_dim = k.shape[2], k.shape[3], v.shape[3]
    linear = empty_linear_state(rows, heads, features, v_dim, logs=logs, dtype=dtype, device=k.device)
    return WindowState(
        *linear,
        k.new_zeros(rows, window, heads, dim),
        v.new_zeros(rows, window, heads, v_dim),
        torch.zeros(rows, window, dtype=torch.bool, device=k.device),
        k.new_zeros(rows, sinks, heads, dim),
        v.new_zeros(rows, sinks, heads, v_dim),
        torch.zeros(rows, sinks, dtype=torch.int64, device=k.device),
        torch.zeros(rows, dtype=torch.int64, device=k.device),
    )
