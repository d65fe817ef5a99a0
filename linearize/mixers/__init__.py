"""Mixers: what stands in the place of softmax attention. `registry` is free of torch; the rest imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from linearize.errors import UsageError
from linearize.mixers.registry import (
    FEATURE_MAPS,
    MIXERS,
    AttentionShape,
    Entry,
    NotRegistered,
    check_options,
    lookup,
    register_feature_map,
    register_mixer,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "FEATURE_MAPS",
    "MIXERS",
    "AttentionShape",
    "Entry",
    "build_mixer",
    "grows",
    "layer_type",
    "mixer_of",
    "register_feature_map",
    "register_mixer",
    "state_bytes",
]


def build_mixer(spec: dict[str, Any], shape: AttentionShape, *, layer: int, seed: int) -> nn.Module:
    """The mixer that `spec` describes: `{"name": "window", "feature_map": "hedgehog", "window": 64, ...}`.

    Its random draws depend on `seed` and `layer` alone. Raises `UsageError` for an unknown name or option.
    """
    import torch

    options = dict(spec)
    name = options.pop("name")
    entry = lookup(MIXERS, "mixer", name)
    options = check_options("mixer", name, entry, options)
    # 1_000_003 is a prime far above any layer count: no two (seed, layer) pairs of a model share a stream. torch takes
    # 63 bits.
    generator = torch.Generator(device="cpu").manual_seed((seed * 1_000_003 + layer) % 2**63)
    return entry.load()(shape, generator=generator, **options)


def mixer_of(layer: Mapping[str, Any], seed: int) -> nn.Module:
    """The mixer of a layer, as an entry of a `linearize` block's "layers" describes it.

    Raises:
        UsageError: as `build_mixer`, naming the layer.
    """
    try:
        return build_mixer(layer["mixer"], AttentionShape(**layer["shape"]), layer=layer["layer"], seed=seed)
    except NotRegistered:
        raise
    except UsageError as error:
        raise UsageError(f"layer {layer['layer']}: {error.what}", error.fix) from None


def grows(spec: dict[str, Any]) -> bool:
    """Whether the decode state of the mixer that `spec` describes gets larger with each token."""
    return bool(getattr(lookup(MIXERS, "mixer", spec["name"]).load(), "grows", False))


def layer_type(spec: dict[str, Any]) -> str:
    """The kind of layer, as config.json names it, that the mixer of `spec` makes."""
    return getattr(lookup(MIXERS, "mixer", spec["name"]).load(), "layer_type", "linear_attention")


def state_bytes(
    spec: dict[str, Any],
    shape: AttentionShape,
    *,
    batch: int = 1,
    dtype: torch.dtype | None = None,
    tokens: int = 1,
) -> int:
    """Bytes of one layer's decode state in a model of `dtype` (bfloat16 by default) after `tokens` tokens: the same at
    any length, but for mixers that `grows` names."""
    import torch

    with torch.device("meta"):
        mixer = build_mixer(spec, shape, layer=0, seed=0)
        dtype = dtype or torch.bfloat16
        length = tokens if grows(spec) else 1
        q = torch.empty(batch, length, shape.num_heads, shape.head_dim, dtype=dtype)
        k = torch.empty(batch, length, shape.num_key_value_heads, shape.head_dim, dtype=dtype)
        v = torch.empty(batch, length, shape.num_key_value_heads, shape.v_head_dim, dtype=dtype)
        hidden_states = torch.empty(batch, length, shape.hidden_size, dtype=dtype)
        _, state = mixer(q, k, v, hidden_states=hidden_states, return_state=True)
    return sum(tensor.nbytes for tensor in state.values())
