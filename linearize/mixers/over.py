"""A mixer that stands over another one, and exact softmax attention over a window as a part of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from linearize_kernels import WindowState, accumulate_dtype, window_attention, window_attention_step
from torch import Tensor, nn

from linearize.errors import UsageError
from linearize.mixers.linear import State, steps_in_place
from linearize.mixers.registry import MIXERS, AttentionShape, check_options, lookup

INNER = "inner_"  # before the names of the inner mixer's tensors in the state
NEAR = ("k", "v", "valid", "sink_k", "sink_v", "sink_age", "start")  # what a window holds beside linear sums


def build_inner(
    name: str, over: str, options: Mapping[str, Any], shape: AttentionShape, generator: torch.Generator | None
) -> nn.Module:
    """The mixer called `over`, over which mixer `name` stands.

    Raises:
        UsageError: it isn't known, doesn't take the options, or is one that can't stand there.
    """
    entry = lookup(MIXERS, "mixer", over)
    cls = entry.load()
    if over == name or getattr(cls, "grows", False):
        reason = "can't stand over itself" if over == name else f"can't stand over '{over}', whose state grows"
        raise UsageError(f"mixer '{name}' {reason}", "Set mixer_options.over to another mixer")
    return cls(shape, generator=generator, **check_options("mixer", over, entry, options))


def inner_state(state: State | None) -> State | None:
    """The inner mixer's part of a state."""
    if state is None:
        return None
    return {key.removeprefix(INNER): x for key, x in state.items() if key.startswith(INNER)}


def with_inner(state: State | None, inner: State | None) -> State | None:
    """One state of both parts."""
    if state is None or inner is None:
        return None
    return {**state, **{f"{INNER}{key}": x for key, x in inner.items()}}


def softmax_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    sinks: int,
    shape: AttentionShape,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: State | None,
    return_state: bool,
) -> tuple[Tensor, State | None]:
    """Softmax over the last `window` tokens and the first `sinks`, (B, T, H, Dv), and its state: the NEAR of
    `WindowState`. It is window attention whose linear part has one feature, which is 0."""
    dtype, (batch, length, heads, _), kv_heads = accumulate_dtype(q), q.shape, k.shape[2]
    read = length if state is not None or cu_seqlens is not None else max(length - window, 0)
    features = (q.new_zeros(batch, length, heads, 1, dtype=dtype), q.new_zeros(batch, read, kv_heads, 1, dtype=dtype))
    options: dict[str, Any] = {
        "window": window,
        "sinks": sinks,
        "scale": shape.scaling,
        "softcap": shape.softcap,
        "mask": mask,
    }
    before = None
    if state is not None:
        sums = q.new_zeros(batch, kv_heads, 1, v.shape[3] + 1, dtype=dtype)
        m = q.new_zeros(batch, kv_heads, dtype=dtype)
        before = WindowState(sums[..., 1:].contiguous(), sums[..., 0].clone(), m, *(state[name] for name in NEAR))
    if before is not None and steps_in_place(state, q):
        return window_attention_step(q, k, v, *features, before, **options), state
    result = window_attention(
        q, k, v, *features, initial_state=before, return_state=return_state, cu_seqlens=cu_seqlens, **options
    )
    if not return_state:
        return result, None
    return result[0], {name: getattr(result[1], name) for name in NEAR}
