"""Linear attention beside weights that depend on the distance alone, under one denominator."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linearize.errors import UsageError
from linearize.mixers import parts
from linearize.mixers.linear import State, build_plain_map, linear_state, linear_sums, plain_features, steps_in_place
from linearize.mixers.positions import sequence_starts
from linearize.mixers.registry import AttentionShape

EPS = 1e-6  # the floor under the denominator
# The logarithm of all weights at the start: a window of 16 then weighs as much as some dozens of hedgehog's keys.
LEVEL = -2.0


class LinearBiasMixer(nn.Module):
    """Linear attention with a relative-position bias over the last tokens:

        o_t = [sum_{j <= t} phi(q_t).phi(k_j) v_j + sum_{0 <= d <= K} w_d v_{t-d}]
            / [sum_{j <= t} phi(q_t).phi(k_j)     + sum_{0 <= d <= K} w_d]

    with w_d = exp(level + bias_d) learned per query head, K the option `reach`. This is the causal half of the form
    that sums over |t - j| <= K. Keys before the beginning and padding are in neither sum. Distances are counted in
    slots, as in positional maps.

    The state is S (B, Hk, F, Dv + 1), whose last column sums phi(k), the z and m of `LinearMixer`, and the last K
    values v (B, K, Hk, Dv), in the model's dtype, with valid (B, K) bool; with a positional map also its `seen`.

    Raises:
        UsageError: a negative reach, or a feature map with log scales, beside which w has no scale of its own.
    """

    layer_type = "linear_attention"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"level": (-8.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)}

    def __init__(
        self,
        shape: AttentionShape,
        *,
        feature_map: str = "hedgehog",
        feature_map_options: dict[str, Any] | None = None,
        reach: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if reach < 0:
            raise UsageError(f"mixer 'linear_bias' can't have reach={reach}", "Use at least 0")
        self.reach = reach
        self.feature_map = build_plain_map("linear_bias", feature_map, feature_map_options or {}, shape, generator)
        self.level = nn.Parameter(torch.full((shape.num_heads,), LEVEL, dtype=torch.float32))
        self.bias = parts.zeros(shape.num_heads, reach + 1)

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
        phi_q, phi_k, seen = plain_features(self.feature_map, q, k, state, cu_seqlens)
        dtype, (batch, length, kv_heads) = phi_q.dtype, k.shape[:3]
        valid = torch.ones(batch, length, dtype=torch.bool, device=v.device) if mask is None else mask
        values = v.masked_fill(~valid[..., None, None], 0)
        sums, after = linear_sums(
            phi_q,
            phi_k,
            _with_ones(values, valid, dtype),
            None if state is None else linear_state(state),
            in_place=steps_in_place(state, q),
            mask=mask,
            cu_seqlens=cu_seqlens,
        )
        if state is None:
            old = v.new_zeros(batch, self.reach, *v.shape[2:]), valid.new_zeros(batch, self.reach)
        else:
            old = state["v"], state["valid"]
        values, valid = torch.cat([old[0], values], 1), torch.cat([old[1], valid], 1)
        weight = (self.level[:, None] + self.bias).to(dtype).exp().view(kv_heads, -1, self.reach + 1)
        starts = None if cu_seqlens is None else sequence_starts(cu_seqlens, length, v.device)
        sums = sums + _nearby(_with_ones(values, valid, dtype), weight, starts).flatten(2, 3)
        out = (sums[..., :-1] / sums[..., -1:].clamp_min(EPS)).to(v.dtype)
        if not return_state:
            return out, None
        if cu_seqlens is None:
            last = {"v": values[:, length:].clone(), "valid": valid[:, length:].clone()}
        else:
            last = self._ends(values, valid, cu_seqlens.to(v.device))
        return out, {**after._asdict(), **last, **seen}

    def _ends(self, values: Tensor, valid: Tensor, bounds: Tensor) -> State:
        """The last K values of each packed sequence, and which of them there are."""
        back = torch.arange(-self.reach, 0, device=bounds.device)
        place = bounds[1:, None] + back
        there = valid[0, place + self.reach] & (place >= bounds[:-1, None])
        return {"v": values[0, place + self.reach].masked_fill(~there[..., None, None], 0), "valid": there}


def _with_ones(values: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, Hk, Dv + 1): values beside a 1 where they are valid, so that one sum gives numerator and denominator."""
    ones = valid[..., None, None].expand(*values.shape[:3], 1)
    return torch.cat([values.to(dtype), ones.to(dtype)], dim=-1)


def _nearby(values: Tensor, weight: Tensor, starts: Tensor | None) -> Tensor:
    """(B, T, Hk, G, E): sum over d of weight (Hk, G, K + 1) at d times values (B, K + T, Hk, E) d tokens back.

    Token by token in d: all at once would take K times the memory.

    Args:
        starts: (T,), where each token's sequence begins, if several are packed.
    """
    reach = weight.shape[2] - 1
    length = values.shape[1] - reach
    if length == 1:
        return torch.einsum("bjke,kgj->bkge", values, weight.flip(2))[:, None]
    total: Any = 0
    for back in range(reach + 1):
        part = values[:, reach - back : reach - back + length]
        if starts is not None:
            inside = torch.arange(length, device=values.device) - starts >= back
            part = part * inside[:, None, None]
        total = total + part[:, :, :, None] * weight[:, :, back, None]
    return total
