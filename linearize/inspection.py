"""What a model is, what it would become (or has become), and what that takes; no weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.errors import UsageError
from linearize.family import base_type, load_config
from linearize.mixers.registry import of_checkpoint
from linearize.plan import layer_bytes, make_plan, plan_tensors
from linearize.source import Source, resolve

if TYPE_CHECKING:
    from linearize.modeling.probe import Probe, ProbedLayer
    from linearize.recipe import Recipe

LENGTHS = (1024, 8192, 32768, 131072)
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def inspect(
    model: str | Path,
    *,
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    cache_dtype: str | None = None,
) -> dict[str, Any]:
    """Describe a model before or after its conversion, as a JSON-able dict.

    `cache_dtype` is what caches are reckoned in, by default what the model is stored in. A row of `layers` says
    `grows: true` where the state of a layer gets larger with each token; its state_bytes are those at one token.

    Of an unconverted model it says what `recipe` would make of it. Keys: model, origin, converted, family,
    architecture, parameters, weight_bytes, dtypes (bytes by dtype), tied, num_layers, layers, new_parameters,
    cache (bytes at 1k, 8k, 32k and 128k tokens, of one sequence), cache_dtype, disk, memory_bytes, recipe,
    notes.

    Raises:
        UsageError, ModelError, NetworkError: as `convert` does, with nothing written. UsageError as well for a
            recipe of a model that is converted already.
    """
    from linearize.recipe import load_recipe

    settings = load_recipe(recipe, overrides or {})
    source = resolve(model, revision=revision, allow_converted=True)
    if source.gguf:
        from linearize.gguf import describe

        source = describe(source)
    if source.config.get("linearize"):
        if recipe is not None or overrides:
            raise UsageError(f"{model} is converted already, so no recipe applies to it", "Leave out its options")
        return _converted(source, cache_dtype)
    plan = make_plan(source, settings)
    report = _facts(source, plan.probe) | {"recipe": plan.recipe.conversion()}
    report |= _becomes(source, plan.probe, plan.layers, plan.new_tensors, cache_dtype)
    linked = sum(file.bytes for file in plan.files if file.how == "link")
    report["disk"] = {
        "bytes_needed": plan.bytes_needed,
        "bytes_needed_on_another_disk": plan.bytes_needed + linked,
    }
    report["memory_bytes"] = plan.memory_bytes
    return report | {"notes": list(plan.notes)}


def _converted(source: Source, cache_dtype: str | None) -> dict[str, Any]:
    from linearize.modeling.classes import checked_block
    from linearize.modeling.probe import probe

    block = checked_block(source.config.get("model_type"), source.config.get("linearize"))
    probed = probe(load_config(source.config, source.name))
    report = _facts(source, probed) | {"recipe": block.get("recipe")}
    with of_checkpoint():
        report |= _becomes(source, probed, block["layers"], plan_tensors(block["layers"], 0), cache_dtype)
    files = sum(header.file_bytes for header in source.shards.values()) + sum(source.side_files.values())
    return report | {"disk": {"bytes": files}, "notes": list(source.notes)}


def _facts(source: Source, probed: Probe) -> dict[str, Any]:
    config = source.config
    return {
        "model": source.name,
        "origin": source.origin,
        "converted": bool(config.get("linearize")),
        "family": base_type(config),
        "architecture": probed.architecture,
        "parameters": source.num_parameters,
        "weight_bytes": source.weight_bytes or source.loaded_bytes,
        "dtypes": source.dtypes,
        "tied": bool(getattr(load_config(config, source.name), "tie_word_embeddings", False)),
        "num_layers": probed.num_layers,
    }


def _becomes(
    source: Source,
    probed: Probe,
    layers: Sequence[Mapping[str, Any]],
    new_tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    cache_dtype: str | None,
) -> dict[str, Any]:
    """Layer by layer what it becomes and why, and what the cache costs before and after."""
    import torch

    from linearize.mixers import grows

    cache_dtype = cache_dtype or _cache_dtype(source)
    width = torch.finfo(getattr(torch, cache_dtype)).bits // 8
    config = load_config(source.config, source.name)
    added = layer_bytes(new_tensors)
    parameters = sum(math.prod(shape) for _, shape in new_tensors.values())
    by_module = {layer.module: layer for layer in probed.layers}
    rows = []
    for entry in layers:
        was = by_module[entry["module"]]
        row = {
            "layer": entry["layer"], "module": entry["module"], "type": was.kind, "becomes": entry["type"],
            "because": entry.get("because", ""), "mixer": entry.get("mixer"), "heads": was.shape.num_heads,
            "key_value_heads": was.shape.num_key_value_heads, "head_dim": was.shape.head_dim,
            "v_head_dim": was.shape.v_head_dim, "new_bytes": added.get(entry["module"], 0),
        }  # fmt: skip
        if entry.get("mixer"):
            row["state_bytes"] = _state_bytes(entry, cache_dtype, 1)
            row["grows"] = grows(entry["mixer"])
        rows.append(row)
    cache = []
    for tokens in LENGTHS:
        before = [_kv_bytes(by_module[row["module"]], config, tokens, width) for row in rows]
        after = [
            _state_bytes(entry, cache_dtype, tokens) if row.get("grows") else row.get("state_bytes", kv)
            for entry, row, kv in zip(layers, rows, before, strict=True)
        ]
        cache.append({"tokens": tokens, "before_bytes": sum(before), "after_bytes": sum(after)})
    return {"layers": rows, "new_parameters": parameters, "cache": cache, "cache_dtype": cache_dtype}


def _state_bytes(entry: Mapping[str, Any], cache_dtype: str, tokens: int) -> int:
    """Bytes of the state of one converted layer, for one sequence."""
    import torch

    from linearize.mixers import AttentionShape, state_bytes

    dtype = getattr(torch, cache_dtype)
    return state_bytes(entry["mixer"], AttentionShape(**entry["shape"]), dtype=dtype, tokens=tokens)


def _cache_dtype(source: Source) -> str:
    """What the model runs in: its config says so, else what most of its weights are stored in."""
    named = str(source.config.get("dtype") or source.config.get("torch_dtype") or "").removeprefix("torch.")
    if named in _TORCH_NAMES.values():
        return named
    floats = {dtype: count for dtype, count in source.dtypes.items() if dtype in _TORCH_NAMES}
    return _TORCH_NAMES[max(floats, key=lambda dtype: floats[dtype])] if floats else "bfloat16"


def _kv_bytes(layer: ProbedLayer, config: Any, tokens: int, width: int) -> int:
    """Bytes of the softmax cache of one layer for one sequence."""
    if layer.kind == "sliding_attention":
        window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        tokens = min(tokens, window or tokens)
    shape = layer.shape
    return tokens * shape.num_key_value_heads * (shape.head_dim + shape.v_head_dim) * width
