"""Linear attention whose weights are normalised over queries, for each key, instead of over keys, for each query."""

from __future__ import annotations

from typing import Any

import torch
from linearize_kernels import LinearState, accumulate_dtype
from torch import Tensor, nn

from linearize.errors import UsageError
from linearize.mixers import parts
from linearize.mixers.linear import State, build_plain_map, linear_state, linear_sums, plain_features, steps_in_place
from linearize.mixers.registry import AttentionShape

EPS = 1e-6  # a key that no query has matched has a sum of 0


def key_normalised_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> Tensor:
    """o_t = sum of phi(q_t).phi(k_j) v_j / z_j, z_j = sum of phi(q_i).phi(k_j) over the queries i.

    The sum over i takes the mean of the query heads that share a key/value head. With `causal`, o_t sums over j <= t,
    and z_j over i <= j: over the queries that there were when the key came. Otherwise both sum over all tokens.

    Args:
        phi_q: (B, T, H, F); phi_k: (B, T, Hk, F); v: (B, T, Hk, Dv); H a multiple of Hk.
        mask: (B, T), True at real tokens.

    Returns:
        (B, T, H, Dv) in v's dtype.
    """
    if causal:
        return _causal(phi_q, phi_k, v, None, None, mask=mask, cu_seqlens=None)[0].to(v.dtype)
    dtype = accumulate_dtype(phi_q, phi_k, v)
    phi_q, phi_k, values = (x.to(dtype) for x in (phi_q, phi_k, v))
    if mask is not None:
        phi_q, phi_k, values = (x.masked_fill(~mask[..., None, None], 0) for x in (phi_q, phi_k, values))
    grouped = phi_q.unflatten(2, (phi_k.shape[2], -1))  # (B, T, Hk, H / Hk, F)
    z = torch.einsum("bkf,btkf->btk", grouped.mean(3).sum(1), phi_k)
    S = torch.einsum("btkf,btkv->bkfv", phi_k, values / z.clamp_min(EPS)[..., None])
    return torch.einsum("btkgf,bkfv->btkgv", grouped, S).flatten(2, 3).to(v.dtype)


class KeyNormalisedMixer(nn.Module):
    """o_t = out_scale sum_{j <= t} phi(q_t).phi(k_j) v_j / z_j, z_j = sum_{i <= j} phi(q_i).phi(k_j).

    The causal mirror of key normalisation. Normalised over all queries, as is done where attention sees both ways, it
    would sum over queries to come, and show a language model its future: `causal: false` is refused, and there is
    `key_normalised_attention` for such uses. z_j is fixed once the key has come: a key's weight is relative to how
    much the queries before it matched it. Weights of one query don't sum to 1; out_scale (H,) puts that right on
    average.

    z is linear attention itself, the roles of q and k exchanged. The state has the S, z, m of `LinearMixer`, and
    query_S (B, Hk, F, 1), query_z (B, Hk, F) and query_m (B, Hk) of the sums over queries; with a positional map also
    its `seen`.

    Raises:
        UsageError: not causal, or a feature map with log scales, which differ from query to query and don't cancel.
    """

    layer_type = "linear_attention"
    scale = "out_scale"

    def __init__(
        self,
        shape: AttentionShape,
        *,
        feature_map: str = "hedgehog",
        feature_map_options: dict[str, Any] | None = None,
        causal: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not causal:
            raise UsageError(
                "mixer 'key_normalised' can't have causal=false: each key would be divided by a sum over queries to "
                "come, so that a language model would see its future",
                "Set causal to true; for models that see both ways there is "
                "linearize.mixers.key_normalised.key_normalised_attention",
            )
        self.feature_map = build_plain_map("key_normalised", feature_map, feature_map_options or {}, shape, generator)
        self.out_scale = parts.ones(shape.num_heads)

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
        keys = queries = None
        if state is not None:
            keys = linear_state(state)
            queries = LinearState(state["query_S"], state["query_z"], state["query_m"])
        in_place = steps_in_place(state, q)
        out, keys, queries = _causal(
            phi_q, phi_k, v, keys, queries, in_place=in_place, mask=mask, cu_seqlens=cu_seqlens
        )
        out = (out * self.out_scale.to(out.dtype)[:, None]).to(v.dtype)
        if not return_state:
            return out, None
        return out, {**keys._asdict(), **{f"query_{name}": x for name, x in queries._asdict().items()}, **seen}


def _causal(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, keys: LinearState | None, queries: LinearState | None, **options: Any
) -> tuple[Tensor, LinearState, LinearState]:
    """The output (B, T, H, Dv) in the dtype of sums, and what the sums over keys and over queries have become."""
    dtype = accumulate_dtype(phi_q, phi_k, v)
    mean_q = phi_q.unflatten(2, (phi_k.shape[2], -1)).mean(3)
    z, queries = linear_sums(phi_k, mean_q, torch.ones_like(v[..., :1], dtype=dtype), queries, **options)
    out, keys = linear_sums(phi_q, phi_k, v.to(dtype) / z.clamp_min(EPS), keys, **options)
    return out, keys, queries
