"""Some heads of a layer keep softmax attention, the others get another mixer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from linearize_kernels import window_attention, window_attention_step
from torch import Tensor, nn

from linearize.errors import UsageError
from linearize.mixers.linear import State, steps_in_place
from linearize.mixers.over import build_inner, exact_state, inner_state, nothing, with_inner
from linearize.mixers.registry import AttentionShape

NAMES = ("kept_k", "kept_v", "kept_valid")


class HeadsMixer(nn.Module):
    """Softmax attention over all tokens in the key/value heads `keep` and the query heads that read them, the mixer
    `over` in all other heads.

    Whole groups are kept, so that the cache of keys and values shrinks with them. The state holds the keys and values
    of the kept heads, kept_k (B, t, n, D) and kept_v (B, t, n, Dv) in the model's dtype, kept_valid (B, t) bool, and
    that of the inner mixer with `inner_` before its names. It is the one mixer whose state grows: a step makes it anew,
    and a static cache can't hold it.

    Raises:
        UsageError: `keep` isn't a list of some, but not all, of the layer's key/value heads, or a wrong inner mixer.
    """

    layer_type = "hybrid_heads"
    grows = True

    def __init__(
        self,
        shape: AttentionShape,
        *,
        keep: Sequence[int] = (0,),
        over: str = "window",
        over_options: dict[str, Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.keep, self.others = shape, list(keep), _others(shape, keep)
        self.group = shape.num_heads // shape.num_key_value_heads
        self.inner: Any = build_inner("heads", over, over_options or {}, shape.part(self.others), generator)

    def calibrated(self, *per_head: Tensor) -> tuple[nn.Module, list[Tensor]]:
        """What calibration is left to: the inner mixer, and of each (B, T, H or Hk, .) the heads that it has."""
        heads = self.shape.num_key_value_heads
        return self.inner, [_pick(x, self.others, x.shape[2] // heads) for x in per_head]

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
        kept, after = _softmax(
            self.shape,
            _pick(q, self.keep, self.group),
            _pick(k, self.keep),
            _pick(v, self.keep),
            mask,
            cu_seqlens,
            state,
        )
        other, inner = self.inner(
            _pick(q, self.others, self.group),
            _pick(k, self.others),
            _pick(v, self.others),
            hidden_states=hidden_states,
            mask=mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            state=inner_state(state),
            return_state=return_state,
        )
        out = _together(kept, other, self.keep, self.others, self.group)
        return out, with_inner(after, inner) if return_state else None


@contextmanager
def keeping_heads(mixer: nn.Module, shape: AttentionShape, keep: Sequence[int]) -> Iterator[None]:
    """Within the block, `mixer`, in a layer of `shape`, gives softmax attention in the heads that `keep` names, as
    `HeadsMixer` does, and its own in the others. It takes and gives no state.

    Raises:
        UsageError: as `HeadsMixer`.
    """
    others, group = _others(shape, keep), shape.num_heads // shape.num_key_value_heads

    def mixed(module: nn.Module, qkv: tuple[Tensor, ...], inputs: dict[str, Any], output: Any) -> Any:
        if inputs.get("return_state") or inputs.get("state") is not None:
            raise RuntimeError("a mixer whose heads are kept for a while has no state: pass use_cache=False")
        q, k, v = _pick(qkv[0], keep, group), _pick(qkv[1], keep), _pick(qkv[2], keep)
        kept, _ = _softmax(shape, q, k, v, inputs.get("mask"), inputs.get("cu_seqlens"), None)
        return _together(kept, _pick(output[0], others, group), keep, others, group), None

    handle = mixer.register_forward_hook(mixed, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _others(shape: AttentionShape, keep: Sequence[int]) -> list[int]:
    """The key/value heads beside those that `keep` names; raises `UsageError` where there is none, or no such head."""
    heads = shape.num_key_value_heads
    wrong = [head for head in keep if type(head) is not int or not 0 <= head < heads]
    if wrong or not keep or len(set(keep)) < len(keep) or len(keep) >= heads:
        raise UsageError(
            f"mixer 'heads' can't have keep={list(keep)} in a layer of {heads} key/value heads",
            "List some of them, each once, counted from 0" if heads > 1 else "Use another mixer for it",
        )
    return [head for head in range(heads) if head not in keep]


def _softmax(
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: State | None,
) -> tuple[Tensor, State]:
    """Causal softmax attention, and the keys and values of all tokens so far.

    It is window attention over a window that holds them all, and whose linear part has one feature, which is 0.
    """
    batch, length = q.shape[:2]
    valid = torch.ones(batch, length, dtype=torch.bool, device=q.device) if mask is None else mask
    k, v = (x if mask is None else x.masked_fill(~mask[..., None, None], 0) for x in (k, v))
    features = nothing(q), nothing(k)
    options: dict[str, Any] = {"scale": shape.scaling, "softcap": shape.softcap, "mask": mask}
    if state is None:
        out = window_attention(q, k, v, *features, window=max(length, 1), cu_seqlens=cu_seqlens, **options)
        return out, dict(zip(NAMES, (k, v, valid), strict=True))
    seen = state["kept_k"].shape[1]
    # A ring of all tokens, where the new ones find empty slots behind the old ones.
    ring_k, ring_v = (torch.cat([state[name], x], 1) for name, x in zip(NAMES, (k, v), strict=False))
    empty = torch.cat([state["kept_valid"], torch.zeros_like(valid)], 1)
    start = torch.full((batch,), seen, dtype=torch.int64, device=q.device)
    before = exact_state(ring_k, ring_v, empty, start=start)
    options["window"] = seen + length
    if steps_in_place(state, q):
        out = window_attention_step(q, k, v, *features, before, **options)
    else:
        out = window_attention(q, k, v, *features, initial_state=before, **options)
    return out, dict(zip(NAMES, (ring_k, ring_v, torch.cat([state["kept_valid"], valid], 1)), strict=True))


def _together(kept: Tensor, other: Tensor, keep: Sequence[int], others: Sequence[int], group: int) -> Tensor:
    """(B, T, H, Dv) of the outputs of groups `keep` and of groups `others`, all in the layer's order."""
    order = [*keep, *others]
    return _pick(torch.cat([kept, other], 2), [order.index(head) for head in range(len(order))], group)


def _pick(x: Tensor, heads: Sequence[int], group: int = 1) -> Tensor:
    """Of x (B, T, heads, .), the groups of `group` heads each that `heads` numbers, in that order."""
    return torch.cat([x[:, :, head * group : (head + 1) * group] for head in heads], 2)
