"""Exact softmax over a sliding window, linear attention over everything older, one denominator.

The form is that of LoLCATs (Zhang et al. 2024, arXiv:2410.10254), except that the window is the same sliding one in
training, prefill and decoding.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from linearize_kernels import WindowState, accumulate_dtype, window_attention, window_attention_step
from torch import Tensor, nn

from linearize.mixers.linear import State, build_feature_map, steps_in_place, with_gradients
from linearize.mixers.positions import slots
from linearize.mixers.registry import AttentionShape

# gamma = exp of these at the start. Maps that estimate the softmax kernel itself are on the exact part's own scale, so
# that gamma = 1 makes the sum an estimate of full softmax. The sums of others grow with the number of keys, and would
# drown the exact part (benchmarks/untrained.py compares starts).
GATE_START = 3.0
GATE_START_ABSOLUTE = 0.0


class WindowMixer(nn.Module):
    """o_t = [gamma W_t + phi(q_t) S_t] / [gamma w_t + phi(q_t) z_t], W_t and w_t the exact softmax sums over the last
    `window` tokens (and the first `sinks` ones), S_t and z_t the linear sums over all older tokens.

    gamma = exp(gate), learned per head: any ratio of the two parts can be reached. The state is S, z, m (and with a
    positional map `seen`) as in `LinearMixer`, plus the last `window` keys and values and the sinks, in the model's
    dtype.
    """

    layer_type = "hybrid_sliding"
    branches = ("linear", "window")
    # What calibration may choose for each head, by the error against softmax attention.
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"gate": (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)}
    ablated: str | None = None  # the branch that gives nothing, set by `linearize.ablate`

    def __init__(
        self,
        shape: AttentionShape,
        *,
        feature_map: str = "favor",
        feature_map_options: dict[str, Any] | None = None,
        window: int = 64,
        sinks: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.scaling = shape.scaling
        self.softcap = shape.softcap
        self.window = window
        self.sinks = sinks
        self.feature_map = build_feature_map(feature_map, feature_map_options or {}, shape, generator)
        start = GATE_START_ABSOLUTE if getattr(self.feature_map, "absolute", False) else GATE_START
        self.gate = nn.Parameter(torch.full((shape.num_heads,), start, dtype=torch.float32))

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
        dtype = accumulate_dtype(q)
        previous = None if state is None else WindowState(*(state[name] for name in WindowState._fields))
        places, seen = slots(self.feature_map, q, state, cu_seqlens)
        phi_q = self.feature_map(q.to(dtype), "q", places)
        leaving, places = self._leaving_keys(k, places, previous, cu_seqlens)
        phi_k = self.feature_map(leaving.to(dtype), "k", places)
        gamma = self.gate.to(dtype).exp()
        options: dict[str, Any] = {
            "window": self.window,
            "sinks": self.sinks,
            "gamma": torch.zeros_like(gamma) if self.ablated == "window" else gamma,
            "scale": self.scaling,
            "softcap": self.softcap,
            "log_q": phi_q.log_scale,
            "log_k": phi_k.log_scale,
            "mask": mask,
        }
        if self.ablated == "window":
            # Where a key in the window would have outweighed them, the linear sums that are left are far below 1.
            options["eps"] = 1e-30
        features = (phi_q.phi, torch.zeros_like(phi_k.phi) if self.ablated == "linear" else phi_k.phi)
        if previous is not None and steps_in_place(state, q):
            return window_attention_step(q, k, v, *features, previous, **options), {**state, **seen}
        result = window_attention(
            q,
            k,
            v,
            *features,
            initial_state=previous,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            **options,
        )
        out, after = result if return_state else (result, None)
        out = with_gradients(out, self.feature_map)  # while no key has left the window, the map plays no part
        return out, None if after is None else {**after._asdict(), **seen}

    def _leaving_keys(
        self, k: Tensor, places: Tensor | None, previous: WindowState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The keys that leave the window during this call, the only ones whose features are ever used, and where they
        stand. `places` are those of k, if the map asks for any."""
        length = k.shape[1]
        if cu_seqlens is not None:
            return k, places
        if previous is None:
            count = max(length - self.window, 0)
            return k[:, :count], None if places is None else places[:, :count]
        places = None if places is None else places - self.window
        if length == 1:
            return previous.oldest(previous.k), places
        return torch.cat([previous.ring(previous.k), k], dim=1)[:, :length], places
