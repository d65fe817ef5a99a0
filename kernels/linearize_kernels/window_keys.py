"""Which keys window attention sees: the ring's, the call's, and the sinks. Letters as in `torch_window`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .state import LinearState, WindowState


class Sinks(NamedTuple):
    """k (B, n, Hk, D), v (B, n, Hk, Dv), position (B, n) from the call's first token on, filled (B, n)."""

    k: Tensor
    v: Tensor
    position: Tensor
    filled: Tensor


class Keys(NamedTuple):
    """The ring's tokens, if there is a state, then the call's: k, v (B, R + T, Hk, .), valid (B, R + T)."""

    k: Tensor
    v: Tensor
    valid: Tensor
    before: int  # R


def all_keys(state: WindowState | None, k: Tensor, v: Tensor, valid: Tensor) -> Keys:
    """The keys of the state's ring, if there is one, oldest first (start = 0), and the call's."""
    if state is None:
        return Keys(k, v, valid, 0)
    return Keys(
        torch.cat([state.k.to(k.dtype), k], 1),
        torch.cat([state.v.to(v.dtype), v], 1),
        torch.cat([state.valid, valid], 1),
        state.k.shape[1],
    )


def find_sinks(state: WindowState, k: Tensor, v: Tensor, valid: Tensor, sinks: int) -> Sinks:
    """The sinks at the end of the call: those of the state, then the first valid tokens."""
    held = state.sink_age > 0
    if not sinks:
        return Sinks(state.sink_k, state.sink_v, -state.sink_age, held)
    count = held.sum(1, keepdim=True) + valid.cumsum(1)
    ordinal = torch.arange(1, sinks + 1, device=k.device).expand(k.shape[0], -1).contiguous()
    found = torch.searchsorted(count, ordinal)
    new = ~held & (found < k.shape[1])
    index = found.clamp(max=k.shape[1] - 1)

    def pick(old: Tensor, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return torch.where(new[..., None, None], x[rows, index], old.to(x.dtype))

    return Sinks(
        pick(state.sink_k, k),
        pick(state.sink_v, v),
        torch.where(held, -state.sink_age, found),
        held | new,
    )


def is_sink(sinks: Sinks, keys: Keys, count: int) -> Tensor:
    """(B, count), True where one of the first `count` keys is a sink and so is never folded."""
    position = torch.arange(count, device=keys.valid.device) - keys.before
    same = sinks.position[:, None] == position[:, None]
    return (same & sinks.filled[:, None]).any(-1)


def next_state(
    state: WindowState,
    keys: Keys,
    sinks: Sinks,
    linear: LinearState,
    length: int,
    window: int,
) -> WindowState:
    """The state after the call: the last `window` of the keys, oldest first, and the sinks with their ages."""

    def last(x: Tensor, old: Tensor) -> Tensor:
        x = x[:, -window:]
        # Without a state the call may be shorter than the ring; the empty state's slots are the padding.
        return x if x.shape[1] == window else torch.cat([old[:, x.shape[1] :], x], 1)

    ring = (last(keys.k, state.k), last(keys.v, state.v), last(keys.valid, state.valid))
    age = torch.where(sinks.filled, length - sinks.position, torch.zeros_like(sinks.position))
    return WindowState(*linear, *ring, sinks.k, sinks.v, age, torch.zeros_like(state.start))
