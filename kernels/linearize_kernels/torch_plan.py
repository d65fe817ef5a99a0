"""How a sequence is worked off: its spans, and how the terms of each are scaled. Letters as in `torch_linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import torch_blocks
from .torch_blocks import Span, load, spans, store
from .torch_decay import SUB, per_feature
from .torch_factors import Factors, of_decay, of_log_scales


class Plan(NamedTuple):
    """How a sequence is cut into spans, and how the terms of each are scaled."""

    cover: list[Span]
    factors: Callable[[Span], Factors]
    scaled: Tensor | None  # log_k, or else log_decay, or else None
    running: Tensor | None  # (B, T, Hk): the largest log_k up to every token, m among them
    dtype: torch.dtype


def plan(q: Tensor, log_k: Tensor | None, log_decay: Tensor | None, m: Tensor, dtype: torch.dtype) -> Plan:
    if log_k is not None:
        running = torch.maximum(log_k.to(dtype).cummax(1).values, m[:, None])
        return Plan(spans(q), partial(of_log_scales, log_k, running, m, dtype=dtype), log_k, running, dtype)
    if log_decay is None:
        return Plan(spans(q), lambda span: Factors(), None, None, dtype)
    if log_decay.dim() == 3:
        return Plan(spans(q), partial(of_decay, log_decay, dtype=dtype), log_decay, None, dtype)
    cover = spans(q, unit=SUB, rows=torch_blocks.ROWS // 2 if q.device.type == "cpu" else None)
    return Plan(cover, partial(per_feature, log_decay, dtype=dtype), log_decay, None, dtype)


def queries(x: Tensor, span: Span, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """(B, T, H, D) to (N, G, C, D)."""
    block = load(x, span, dtype)
    return block.view(-1, x.shape[2] // kv_heads, *block.shape[1:])


def store_queries(x: Tensor, span: Span, block: Tensor) -> None:
    """Write (N, G, C, ...) to x (B, T, H, ...)."""
    store(x, span, block.flatten(0, 1))
