"""Normalised linear attention (Katharopoulos et al. 2020, arXiv:2006.16236) over any feature map."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from linearize_kernels import LinearState, accumulate_dtype, linear_attention, linear_attention_step
from torch import Tensor, nn

from linearize.errors import UsageError
from linearize.mixers.feature_maps import FeatureMap
from linearize.mixers.positions import slots
from linearize.mixers.registry import FEATURE_MAPS, AttentionShape, check_options, lookup

State = dict[str, Tensor]


def build_feature_map(
    name: str, options: dict[str, Any], shape: AttentionShape, generator: torch.Generator | None
) -> FeatureMap:
    """The feature map called `name`; raises `UsageError` for an unknown name or option."""
    entry = lookup(FEATURE_MAPS, "feature_map", name)
    cls = entry.load()
    if not issubclass(cls, FeatureMap):
        raise UsageError(f"feature map '{name}' is a {cls.__name__}, which doesn't derive from FeatureMap")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise UsageError(f"feature map '{name}' ({cls.__name__}) doesn't define {' and '.join(missing)}")
    return cls(shape, generator=generator, **check_options("feature_map", name, entry, options))


def steps_in_place(state: State | None, q: Tensor) -> TypeGuard[State]:
    """Whether q (B, T, H, D) is one token that continues `state`, which may then be updated in place."""
    if state is None or q.shape[1] != 1 or torch.is_grad_enabled():
        return False
    # What was made under inference_mode can't be changed outside of it; a trace can't ask.
    if torch.compiler.is_compiling():
        return True
    return torch.is_inference_mode_enabled() or not any(x.is_inference() for x in state.values())


def linear_state(state: State) -> LinearState:
    """The sums among a mixer's state."""
    return LinearState(state["S"], state["z"], state["m"])


def build_plain_map(
    mixer: str, name: str, options: dict[str, Any], shape: AttentionShape, generator: torch.Generator | None
) -> FeatureMap:
    """As `build_feature_map`, for a mixer whose output a factor of all of a query's features would change.

    Raises:
        UsageError: also if the map's features come with log scales.
    """
    feature_map = build_feature_map(name, options, shape, generator)
    if feature_map.absolute:
        raise UsageError(
            f"mixer '{mixer}' can't take feature map '{name}', whose features are known up to a factor of each query: "
            "no denominator of this mixer cancels it",
            "Choose a map without one, such as hedgehog or elu1",
        )
    return feature_map


def plain_features(
    feature_map: FeatureMap, q: Tensor, k: Tensor, state: State | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Features of q and k in the dtype of sums, and what the state keeps of positions (see `slots`)."""
    dtype = accumulate_dtype(q)
    positions, seen = slots(feature_map, q, state, cu_seqlens)
    phi_q, phi_k = feature_map(q.to(dtype), "q", positions), feature_map(k.to(dtype), "k", positions)
    if phi_q.log_scale is not None or phi_k.log_scale is not None:
        raise ValueError(f"{type(feature_map).__name__} returns log scales, and so needs `absolute = True`")
    return phi_q.phi, phi_k.phi, seen


def with_gradients(out: Tensor, feature_map: nn.Module) -> Tensor:
    """`out` for a forward in which the map played no part: its gradients are then 0 rather than absent, which
    data-parallel training needs."""
    # Offloaded weights are on meta by now, and aren't trained.
    trained = [p for p in feature_map.parameters() if p.requires_grad and not p.is_meta]
    return out + sum(0 * p.sum() for p in trained) if trained and torch.is_grad_enabled() else out


def linear_sums(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, before: LinearState | None, *, in_place: bool = False, **options: Any
) -> tuple[Tensor, LinearState]:
    """phi(q_t) S_t, undivided, and the state after it, which is `before` updated if `in_place`.

    phi_q (B, T, H, F), phi_k (B, T, Hk, F), v (B, T, Hk, Dv); options as `linear_attention` takes them.
    """
    if in_place and before is not None:
        del options["cu_seqlens"]
        return linear_attention_step(phi_q, phi_k, v, before, normalize=False, **options), before
    return linear_attention(phi_q, phi_k, v, normalize=False, initial_state=before, return_state=True, **options)


class LinearMixer(nn.Module):
    """o_t = phi(q_t) S_t / phi(q_t) z_t with S_t = sum of phi(k_j) v_j^T and z_t = sum of phi(k_j), j <= t.

    The state is S (B, Hk, F, Dv), z (B, Hk, F) and m (B, Hk), the running maximum of the keys' log scales; all of
    them float32, whatever the model's dtype. With a positional map also `seen` (B,) int64, the tokens so far.
    """

    layer_type = "linear_attention"

    def __init__(
        self,
        shape: AttentionShape,
        *,
        feature_map: str = "favor",
        feature_map_options: dict[str, Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.feature_map = build_feature_map(feature_map, feature_map_options or {}, shape, generator)

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
        """Mix q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv) into (B, T, H, Dv), causally.

        mask (B, T) is True at real tokens. `state` continues an earlier call, and is used up by it: a step of one token
        without gradients updates it in place. With `cu_seqlens` (N + 1,) and B = 1, each packed sequence has a state
        of its own. Raises ValueError for more tokens than a positional map takes.
        """
        dtype = accumulate_dtype(q)
        positions, seen = slots(self.feature_map, q, state, cu_seqlens)
        phi_q = self.feature_map(q.to(dtype), "q", positions)
        phi_k = self.feature_map(k.to(dtype), "k", positions)
        options = {
            "log_k": phi_k.log_scale,
            "mask": mask,
            # Relative to the largest key so far, sums of a map with log scales are rightly tiny where a query is far
            # from that key: its floor only has to keep 0 / 0 away.
            "eps": 1e-6 if phi_k.log_scale is None else 1e-30,
        }
        before = None if state is None else linear_state(state)
        if before is not None and steps_in_place(state, q):
            return linear_attention_step(phi_q.phi, phi_k.phi, v, before, **options), {**state, **seen}
        result = linear_attention(
            phi_q.phi,
            phi_k.phi,
            v,
            initial_state=before,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
            **options,
        )
        if return_state:
            return result[0], {**result[1]._asdict(), **seen}
        return result, None
