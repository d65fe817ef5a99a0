"""Exact softmax over a sliding window beside any other mixer, weighed by a gate."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from linearize_kernels import accumulate_dtype
from torch import Tensor, nn

from linearize.mixers import parts
from linearize.mixers.linear import State
from linearize.mixers.over import NEAR, build_inner, inner_state, softmax_window, with_inner
from linearize.mixers.registry import AttentionShape

# The window alone is nearer to softmax attention than most mixers that were never trained.
GATE_START = 3.0


class WindowedMixer(nn.Module):
    """o_t = a W_t + (1 - a) inner_t, W_t the softmax attention over the last `window` tokens and the first `sinks`
    ones, inner_t what the mixer `over` gives for all tokens.

    a = sigmoid(gate), learned per query head. Each part has a scale of its own: unlike in `WindowMixer`, there is no
    denominator that both could share, since decays and delta rules have none. So the window's tokens are in both parts,
    and a doesn't depend on what the window holds. Attention beside a recurrence in one layer is the form of Hymba (Dong
    et al. 2024, arXiv:2411.13676), which gives each part heads of its own; here both see every head's q, k and v.

    The state is the last `window` keys and values and the sinks, in the model's dtype, and that of the inner mixer,
    with `inner_` before its names.

    Raises:
        UsageError: a wrong option, or an inner mixer that can't stand here: another of this kind, or one that grows.
    """

    layer_type = "hybrid_sliding"
    branches = ("linear", "window")
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"gate": (-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)}
    ablated: str | None = None  # the branch that gives nothing, set by `linearize.ablate`

    def __init__(
        self,
        shape: AttentionShape,
        *,
        over: str = "gated_deltanet",
        over_options: dict[str, Any] | None = None,
        window: int = 64,
        sinks: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.window, self.sinks = shape, window, sinks
        self.inner: Any = build_inner("windowed", over, over_options or {}, shape, generator)
        self.starts = parts.starts(self.inner)
        self.gate = nn.Parameter(torch.full((shape.num_heads,), GATE_START, dtype=torch.float32))

    def start(self, distance: Tensor) -> None:
        """Let the inner mixer start from the distances (H,), if it does."""
        if self.starts:
            self.inner.start(distance)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        hidden_states: Tensor | None = None,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, State | None]:
        """Mix q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv) into (B, T, H, Dv), causally; as `LinearMixer`."""
        call: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens, "return_state": return_state}
        near_before = None if state is None else {name: state[name] for name in NEAR}
        near, near_state = softmax_window(
            q, k, v, window=self.window, sinks=self.sinks, shape=self.shape, state=near_before, **call
        )
        inner, after = self.inner(
            q, k, v, hidden_states=hidden_states, position_ids=position_ids, state=inner_state(state), **call
        )
        after = with_inner(near_state, after)
        if self.ablated is not None:
            return (inner if self.ablated == "window" else near), after
        dtype = accumulate_dtype(q)
        a = self.gate.to(dtype).sigmoid()[:, None]
        return (a * near.to(dtype) + (1 - a) * inner.to(dtype)).to(v.dtype), after
