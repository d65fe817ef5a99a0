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


def nothing(x: Tensor) -> Tensor:
    """One feature for each token and head of x (B, T, heads, D), which is 0: window attention over such features is
    softmax attention over its window and sinks."""
    return x.new_zeros(*x.shape[:3], 1, dtype=accumulate_dtype(x))


def exact_state(
    k: Tensor,
    v: Tensor,
    valid: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    sink_age: Tensor | None = None,
    start: Tensor | None = None,
) -> WindowState:
    """The state of window attention over `nothing`: no sums beside what is held exactly, as in `WindowState`. Sinks may
    be left out, where there are none; `start` is 0 unless given."""
    (batch, _, heads, _), dtype, ages = k.shape, accumulate_dtype(k), {"dtype": torch.int64, "device": k.device}
    return WindowState(
        k.new_zeros(batch, heads, 1, v.shape[3], dtype=dtype),
        k.new_zeros(batch, heads, 1, dtype=dtype),
        k.new_zeros(batch, heads, dtype=dtype),
        k,
        v,
        valid,
        k[:, :0] if sink_k is None else sink_k,
        v[:, :0] if sink_v is None else sink_v,
        torch.zeros(batch, 0, **ages) if sink_age is None else sink_age,
        torch.zeros(batch, **ages) if start is None else start,
    )


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
    # While nothing is held, the op takes the features of those keys alone that leave the window.
    leaving = k if state is not None or cu_seqlens is not None else k[:, : max(k.shape[1] - window, 0)]
    features = nothing(q), nothing(leaving)
    options: dict[str, Any] = {
        "window": window,
        "sinks": sinks,
        "scale": shape.scaling,
        "softcap": shape.softcap,
        "mask": mask,
    }
    before = None if state is None else exact_state(*(state[name] for name in NEAR))
    if before is not None and steps_in_place(state, q):
        return window_attention_step(q, k, v, *features, before, **options), state
    result = window_attention(
        q, k, v, *features, initial_state=before, return_state=return_state, cu_seqlens=cu_seqlens, **options
    )
    if not return_state:
        return result, None
    return result[0], {name: getattr(result[1], name) for name in NEAR}
