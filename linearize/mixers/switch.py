"""Exact softmax attention while a sequence is short, linear attention for the tokens beyond that."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from linearize_kernels import WindowState, window_attention, window_attention_step
from linearize_kernels.packed import run_packed
from torch import Tensor, nn
from torch.nn import functional as F

from linearize.errors import UsageError
from linearize.mixers.linear import LinearMixer, State, steps_in_place, with_gradients
from linearize.mixers.over import exact_state, nothing
from linearize.mixers.positions import sequence_starts
from linearize.mixers.registry import AttentionShape


class First(NamedTuple):
    """The first L tokens of each sequence: k (B, L, Hk, D), v (B, L, Hk, Dv), 0 where none is yet; count (B,) int64,
    how many tokens there were in all."""

    k: Tensor
    v: Tensor
    count: Tensor


class LengthSwitchMixer(nn.Module):
    """Softmax attention over all tokens so far for the first L tokens of a sequence, linear attention over all tokens
    so far for the others, L the option `length`:

        o_t = sum_{j <= t} exp(s q_t.k_j) v_j / sum_{j <= t} exp(s q_t.k_j)    t <= L
        o_t = phi(q_t) S_t / phi(q_t) z_t                                       t > L    S and z as in `LinearMixer`

    Tokens count from 1 in each sequence, padding left out. Every key is added to S and z when it comes, which gives
    what adding all of them at once would, when L is passed. A sequence of at most L tokens gets full
    softmax attention, also in a layer whose own had a window. At the switch outputs change by the error of the linear
    estimate.

    The state is that of `LinearMixer`, the keys and values of the first L tokens, first_k (B, L, Hk, D) and first_v
    (B, L, Hk, Dv), in the model's dtype, and count (B,) int64. Its size is that of a softmax cache of L tokens and
    stays so.

    Raises:
        UsageError: a length below 1, an unknown feature map or option of it, or a map that takes no more tokens.
    """

    layer_type = "linear_attention"

    def __init__(
        self,
        shape: AttentionShape,
        *,
        feature_map: str = "favor",
        feature_map_options: dict[str, Any] | None = None,
        length: int = 2048,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if length < 1:
            raise UsageError(f"mixer 'length_switch' can't have length={length}", "Use at least 1")
        self.shape, self.length = shape, length
        self.linear = LinearMixer(
            shape, feature_map=feature_map, feature_map_options=feature_map_options, generator=generator
        )
        limit = self.linear.feature_map.max_length
        if limit is not None and limit <= length:
            raise UsageError(
                f"mixer 'length_switch' can't have length={length} with a feature map that takes {limit} tokens: it "
                "would never be used",
                "Lower mixer_options.length, or raise feature_map_options.length",
            )

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
        first, sums = None, None
        if state is not None:
            first = First(state["first_k"], state["first_v"], state["count"])
            sums = {name: x for name, x in state.items() if name not in ("first_k", "first_v", "count")}
        if cu_seqlens is not None:
            exact, after = run_packed(self._first_tokens, {"q": q, "k": k, "v": v}, cu_seqlens, mask)
        elif first is not None and steps_in_place(state, q):
            exact, after = self._step(q, k, v, mask, first)
        else:
            exact, after = self._first_tokens(q, k, v, mask, first)
        if state is None and not return_state and q.shape[1] <= self.length:
            return with_gradients(exact, self.linear), None
        linear, sums = self.linear(q, k, v, mask=mask, cu_seqlens=cu_seqlens, state=sums, return_state=return_state)
        out = torch.where(self._short(q, mask, cu_seqlens, first)[..., None, None], exact, linear)
        if sums is None:
            return out, None
        return out, {**sums, "first_k": after.k, "first_v": after.v, "count": after.count}

    def _short(self, q: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, first: First | None) -> Tensor:
        """(B or 1, T), True at the first L tokens of each sequence."""
        length = q.shape[1]
        valid = torch.ones(1, length, dtype=torch.bool, device=q.device) if mask is None else mask
        number = valid.cumsum(1)  # 1 for the first token
        if cu_seqlens is not None:
            before = number - valid.long()
            number = number - before[:, sequence_starts(cu_seqlens, length, q.device)]
        return number <= (self.length if first is None else self.length - first.count[:, None])

    def _first_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: First | None
    ) -> tuple[Tensor, First]:
        """Softmax attention of those tokens that are among the first L of their sequences, (B, T, H, Dv), and the first
        tokens after this call. What stands at other tokens has no meaning.

        Only these are computed: they are moved to the front of their row, behind those of the state.
        """
        (batch, length), limit = q.shape[:2], self.length
        if state is not None and (not length or _all_past(state, limit)):
            return _unread(q, v), state._replace(count=state.count + (length if mask is None else mask.sum(1)))
        n, real, place = min(length, limit), None, None
        number = state.count if state is not None else torch.zeros(batch, dtype=torch.int64, device=q.device)
        if mask is None or not length:
            q, k, v, count = q[:, :n], k[:, :n], v[:, :n], number + length
        else:
            running, slot = mask.cumsum(1), torch.arange(n, device=q.device)
            index = torch.searchsorted(running, (slot + 1).expand(batch, -1).contiguous()).clamp(max=length - 1)
            rows = torch.arange(batch, device=q.device)[:, None]
            real, place, count = slot < running[:, -1:], (running - 1).clamp(0, n - 1), number + running[:, -1]
            q, k, v = (x[rows, index].masked_fill(~real[..., None, None], 0) for x in (q, k, v))
        if state is None:
            out = self._softmax(q, k, v, window=max(n, 1), mask=real)
            rest = (0, 0, 0, 0, 0, limit - n)
            after = First(F.pad(k, rest), F.pad(v, rest), count)
        else:
            out = self._softmax(q, k, v, window=limit, mask=real, initial_state=self._window(state))
            after = First(_put(state.k, k, number), _put(state.v, v, number), count)
        if place is not None:
            return out[torch.arange(batch, device=q.device)[:, None], place], after
        return F.pad(out, (0, 0, 0, 0, 0, length - n)), after

    def _step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: First) -> tuple[Tensor, First]:
        """`_first_tokens` of one token: the state's k and v are updated in place. Rows that are past L write over slots
        that aren't read any more, and padding over one that is still empty."""
        after = state._replace(count=state.count + (1 if mask is None else mask[:, 0].long()))
        if _all_past(state, self.length):
            return _unread(q, v), after
        options = {"window": self.length, "scale": self.shape.scaling, "softcap": self.shape.softcap, "mask": mask}
        features = (nothing(q), nothing(k))
        return window_attention_step(q, k, v, *features, self._window(state), **options), after

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Causal softmax over the window alone: its linear part has one feature, which is 0."""
        options |= {"scale": self.shape.scaling, "softcap": self.shape.softcap}
        return window_attention(q, k, v, nothing(q), nothing(k), **options)

    def _window(self, state: First) -> WindowState:
        """The first tokens as a ring of L slots that isn't full: the next token's slot counts as the oldest one."""
        limit = state.k.shape[1]
        valid = torch.arange(limit, device=state.k.device) < state.count[:, None]
        return exact_state(state.k, state.v, valid, start=state.count % limit)


def _unread(q: Tensor, v: Tensor) -> Tensor:
    """(B, T, H, Dv), without memory, where nobody looks."""
    return v.new_zeros(1).expand(*q.shape[:3], v.shape[3])


def _all_past(state: First, limit: int) -> bool:
    """Whether it is known that no row has room for another of its first tokens. On the CPU alone, since a GPU would
    have to be waited for, and a trace can't ask."""
    if torch.compiler.is_compiling() or state.count.device.type != "cpu":
        return False
    return bool((state.count >= limit).all())


def _put(old: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """old (B, L, ...) with new (B, n, ...) in the slots from `count` (B,) on, as far as they go. Of tokens that aren't
    real, zeros come to stand where zeros stood."""
    source = torch.arange(old.shape[1], device=old.device) - count[:, None]
    index, rows = source.clamp(0, new.shape[1] - 1), torch.arange(old.shape[0], device=old.device)[:, None]
    return torch.where((source == index)[..., None, None], new[rows, index].to(old.dtype), old)
