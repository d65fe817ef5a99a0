"""What a mixer must know of the running forward that the attention function isn't given.

transformers hands the attention function q, k, v and a mask whose form depends on the attention implementation. The
hooks in `attach` put the rest here for the time of one forward: the 2-D padding mask, positions, packed-sequence
bounds, the hidden states, and the cache slot. Nothing stays behind after the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from linearize.modeling.cache import LinearStateLayer

NOT_CAUSAL = (
    "attention_mask is a 4-D mask that is more than causal with padding, which a recurrent state can't follow: pass a "
    "(batch, length) mask, and position_ids that start again at each packed sequence"
)


@dataclass
class ForwardContext:
    """One forward of a decoder body.

    Attributes:
        mask: (B, T) bool, True at real tokens; None if there is no 2-D mask.
        per_layer_mask: whether the mask came in another form (4-D, or a dict of them), so that each layer must read
            its own.
        position_ids: (B or 1, T), or None.
        cu_seqlens: (N + 1,) bounds of sequences packed into B * T tokens, on the CPU; or None.
        hidden_states: (B, T, hidden) input of the attention module that is running.
        slot: where that module's state lives, or None without a cache.
        padding: (B, KV), the mask that this module was given, where it was one of two dims.
        owner: the hook that entered it, which also ends it.
        outer: the context that it interrupted: one model may run inside another.
        switch: of the running model (see `attach`).
    """

    mask: Tensor | None = None
    per_layer_mask: bool = False
    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    hidden_states: Tensor | None = None
    slot: LinearStateLayer | None = None
    padding: Tensor | None = None
    owner: object = None
    outer: ForwardContext | None = None
    switch: Any = None


def valid_tokens(
    context: ForwardContext, attention_mask: Any, q: Tensor, slot: LinearStateLayer | None
) -> Tensor | None:
    """(B, T) bool of real tokens among the new ones of q (B, T, H, D); None if all are.

    `attention_mask` is what the layer itself was given, `slot` its cache slot, which has counted the new tokens.
    """
    if not context.per_layer_mask:
        return None if context.mask is None else context.mask.to(q.device)
    if context.padding is not None:
        return context.padding[:, -q.shape[1] :].bool().to(q.device)
    if attention_mask is None:
        return None
    return _diagonal(attention_mask, q.shape[1], slot).to(q.device)


def _diagonal(mask: Tensor, length: int, slot: LinearStateLayer | None) -> Tensor:
    """Which of the last `length` tokens are real, read off a (B, 1, T, KV) mask: a real token sees itself.

    The diagonal is the only safe place: the last row of a sliding layer's mask hides old tokens too.
    """
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    rows = torch.arange(length, device=mask.device)
    if slot is not None and slot.is_static:
        # A static cache's mask is as long as the cache; the slot says where the new tokens stand in it. A sliding one
        # has moved on by what has left its window.
        before = slot.seen - length
        columns = rows + before
        if slot.is_sliding and slot.max_cache_len is not None:
            left = before - slot.max_cache_len + 1
            columns = columns - (left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0))
    else:
        columns = rows + (mask.shape[-1] - length)
    valid = visible[:, 0, rows, columns]
    if length > 1:
        before = visible[:, 0, rows[1:], columns[:-1]] | ~(valid[:, 1:] & valid[:, :-1])
        after = visible[:, 0, rows[:-1], columns[1:]]
        causal = before.all() & ~after.any()
        if torch.compiler.is_compiling():
            torch._assert_async(causal, NOT_CAUSAL)  # pyright: ignore[reportPrivateImportUsage]
        elif not bool(causal):
            raise ValueError(NOT_CAUSAL)
    return valid


class _Current(threading.local):
    """The running forward of each thread: two threads may run one model at the same time."""

    value: ForwardContext | None = None


_current = _Current()


def current() -> ForwardContext | None:
    """The context of the forward that runs in this thread, or None outside of one."""
    return _current.value


def enter(context: ForwardContext | None) -> None:
    """Make `context` the running one; None ends it."""
    _current.value = context


@contextmanager
def running(context: ForwardContext | None) -> Iterator[None]:
    """Run a block under `context`: for a part of a decoder that is called outside the decoder's own forward."""
    before = _current.value
    _current.value = context
    try:
        yield
    finally:
        _current.value = before


def remembering(checkpoint: Callable) -> Callable:
    """Wrap a gradient-checkpointing function, so that the recomputation in backward runs under the context that the
    forward had: the body's hook, which sets it, doesn't run again."""

    def checkpoint_with_context(function: Callable, *args: Any, **kwargs: Any) -> Any:
        context = current()
        if context is None:
            return checkpoint(function, *args, **kwargs)
        # A copy, since hidden_states and slot change from layer to layer.
        context = replace(context, hidden_states=None, slot=None, padding=None, owner=None, outer=None)

        def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
            with running(context):
                return function(*inner_args, **inner_kwargs)

        return checkpoint(run, *args, **kwargs)

    return checkpoint_with_context
