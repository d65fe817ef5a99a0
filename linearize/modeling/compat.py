"""Every difference between transformers versions that linearize must know of, in one place (5.0 up to the newest)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import cache_utils

# The names under which decoder families take these arguments; the first is the newest.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
HIDDEN_NAMES = ("hidden_states", "x")


class _Absent:
    """Stands for a class that this transformers version doesn't have: nothing is an instance of it."""


def _cache_class(name: str) -> Any:
    return getattr(cache_utils, name, _Absent)


LinearAttentionCacheLayerMixin = _cache_class("LinearAttentionCacheLayerMixin")
LinearAttentionLayer = _cache_class("LinearAttentionLayer")

# Cache slots that a state can stand in for; others hold what attention reads beside keys and values.
PLAIN_SLOTS = tuple(
    _cache_class(name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
)


def cache_keyword(model: Any) -> str:
    """The name under which a model's forward takes its cache."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in taken), "past_key_values")


def query_length(query: int | Tensor) -> int:
    """What `get_mask_sizes` is asked about: a length, or (5.2 and older) the positions of the new tokens."""
    return query.shape[0] if isinstance(query, Tensor) and query.dim() else int(query)


def tokens_to_remove(count: int, seen: int) -> int:
    """How many tokens `crop(count)` takes off: -count, or (older callers) all beyond the first count.

    Raises:
        ValueError: for a positive count, where transformers itself refuses it.
    """
    if count <= 0:
        return -count
    if hasattr(cache_utils.DynamicCache, "activate_past_recording"):
        raise ValueError(f"crop({count}): pass a negative count of tokens to remove")
    return max(seen - count, 0)


def cache_of(container: Any) -> Any:
    """The cache in a model's output or keyword arguments, under whichever name this version uses."""
    return container["cache"] if "cache" in container else container.get("past_key_values")


def alias_weight_conversions(pairs: list[tuple[str, str]]) -> None:
    """Give each second name the checkpoint conversions (fused experts, renames) of the first; transformers looks them
    up by model type and by class name."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    for name, alias in pairs:
        mapping = get_checkpoint_conversion_mapping(name)
        if mapping is not None:
            register_checkpoint_conversion_mapping(alias, mapping, overwrite=True)


def alias_tokenizer(base: str, alias: str, base_config: type, config: type) -> None:
    """Give converted models the tokenizer class of their base family: AutoTokenizer chooses by model type and config
    class where the tokenizer's own files name no class, or one that is known to be wrong."""
    from transformers.models.auto import tokenization_auto as auto

    names: Any = auto.TOKENIZER_MAPPING_NAMES
    if base in names:
        names[alias] = names[base]
    wrongly_named: Any = getattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
    if base in wrongly_named:
        wrongly_named.add(alias)
    if base_config in auto.TOKENIZER_MAPPING:
        auto.TOKENIZER_MAPPING.register(config, auto.TOKENIZER_MAPPING[base_config], exist_ok=True)


@contextmanager
def meta_autocast() -> Iterator[None]:
    """Let models run on the meta device: transformers up to 5.2 asks torch whether autocast is on for the device of a
    tensor, and torch doesn't know meta."""

    def is_enabled(device_type: str | None = None) -> bool:
        if device_type == "meta":
            return False
        return asked() if device_type is None else asked(device_type)

    asked = torch.is_autocast_enabled
    with mock.patch.object(torch, "is_autocast_enabled", is_enabled):
        yield


def recompute_activations(model: Any, on: bool) -> None:
    """Switch gradient checkpointing on or off; newer versions call it activation checkpointing."""
    if on:
        switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        switch({"use_reentrant": False})
    else:
        switch = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        switch()
    # Gradients of the embeddings, which only the reentrant kind needs: asked for here, or by PEFT before.
    with suppress(AttributeError):
        model.disable_input_require_grads()
