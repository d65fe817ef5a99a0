"""A raw config.json as transformers understands it, and the tensors that its architecture expects.

transformers renames and merges tensors while loading (an old name, a base-model prefix, experts stored one by
one), so the names on disk are put through its own tables before they are compared.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from linearize.errors import ModelError, first_line
from linearize.faults import Fault
from linearize.headers import TensorInfo

OURS = ("linearize", "auto_map")  # keys of a converted model's config that its base model doesn't know
# Which code computes a layer is for whoever loads the model to say, and some values import that code from the Hub.
HOW_TO_COMPUTE = re.compile(r"_?(attn|experts)_implementation(_internal|_autoset)?")
MAX_LAYERS = 4096  # far above any published model; building a model takes time for each, even without weights
KEEPS_NUMEL = {"MergeModulelist", "Concatenate", "Transpose"}  # conversions that only rearrange


def load_config(raw: Mapping[str, Any], name: str) -> Any:
    """The transformers config object of a raw config.json (of a converted one: of its base model).

    Raises:
        ModelError: transformers doesn't know the model type, or finds the values inconsistent.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    model_type = base_type(raw)
    values = {key: value for key, value in raw.items() if key not in OURS and key != "model_type"}
    values = without_how_to_compute(values)
    if model_type not in CONFIG_MAPPING:
        import transformers

        code = " (its config asks for custom code, which linearize never runs)" if raw.get("auto_map") else ""
        raise ModelError(
            f"{name}: transformers {transformers.__version__} doesn't know model_type '{model_type}'{code}",
            "Check the spelling, or update transformers",
        )
    depth_key = _depth_key(CONFIG_MAPPING[model_type])
    depth = values.get(depth_key)
    if isinstance(depth, (int, float)) and depth > MAX_LAYERS:
        raise ModelError(f"{name}: config.json has {depth_key} {depth:.6g}, more than {MAX_LAYERS}", "Correct it")
    try:
        # A copy, since config classes may write into nested values; decoded, since infinity is not JSON.
        return CONFIG_MAPPING[model_type].from_dict(PreTrainedConfig._decode_special_floats(copy.deepcopy(values)))
    except Exception as error:
        what = f"{name}: config.json isn't a valid '{model_type}' config ({first_line(error)})"
        raise ModelError(what) from error


def check_depth(config: Any, tensors: Mapping[str, TensorInfo], name: str) -> None:
    """Refuse a config of more layers than there are tensors, before a model of so many layers is built.

    Raises:
        ModelError: naming the key.
    """
    depth = getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int) and depth > len(tensors):
        raise ModelError(
            f"{name}: config.json has {_depth_key(type(config))} {depth}, but only {len(tensors)} tensors are stored",
            "Correct config.json, or download the whole model",
        )


def _depth_key(config_class: Any) -> str:
    """What the number of layers is called in the config.json of a family."""
    key = "num_hidden_layers"
    return (getattr(config_class, "attribute_map", None) or {}).get(key, key)


def without_how_to_compute(value: Any) -> Any:
    """A raw config without the keys that choose an implementation of attention or experts, at every level."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: without_how_to_compute(inner) for key, inner in value.items() if not HOW_TO_COMPUTE.fullmatch(str(key))
    }


def base_type(raw: Mapping[str, Any]) -> str:
    """The model type of the base model."""
    block = raw.get("linearize")
    if isinstance(block, Mapping) and isinstance(block.get("base_model_type"), str):
        return block["base_model_type"]
    return str(raw.get("model_type"))


@dataclass(frozen=True)
class Loaded:
    """How transformers would load stored tensors into the model of a config.

    Attributes:
        expected: name in the model -> shape.
        stored: name in the model -> names on disk that fill it.
        comparable: name in the model -> "shape", "numel" or "" (the stored tensors are transformed).
        tied: name in the model -> the name that it shares its weight with.
        may_lack, may_ignore: whether loading passes over a missing, or an unknown, tensor in silence.
    """

    expected: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, list[str]]
    comparable: Mapping[str, str]
    tied: Mapping[str, str]
    may_lack: Callable[[str], bool]
    may_ignore: Callable[[str], bool]


def as_loaded(config: Any, tensors: Mapping[str, TensorInfo]) -> Loaded | str:
    """Match stored names with the architecture's, as loading does; or say why that can't be told."""
    try:
        return _match(_meta_model(config), tensors)
    except Exception as error:
        # These tables are transformers' own and change between its versions: no judgement without them.
        return f"tensor names were not compared with the architecture ({type(error).__name__}: {error})"


def compare_tensors(loaded: Loaded | str, tensors: Mapping[str, TensorInfo]) -> tuple[list[Fault], list[str]]:
    """Compare what is stored with what the architecture expects, as `as_loaded` matched them.

    Returns:
        (faults, notes): a missing tensor or a wrong shape is a fault, since loading would leave random
        weights or fail; a tensor that the architecture ignores is a note.
    """
    if isinstance(loaded, str):
        return [], [loaded]
    faults = [
        Fault("config.json", key, "is part of the architecture, and stored nowhere")
        for key in loaded.expected
        if key not in loaded.stored and key not in loaded.tied and not loaded.may_lack(key)
    ]
    for key, names in loaded.stored.items():
        if key in loaded.expected:
            stored = [(name, tensors[name]) for name in names]
            faults += _wrong_size(key, loaded.expected[key], stored, loaded.comparable[key])
    extra = sorted(key for key in loaded.stored if key not in loaded.expected and not loaded.may_ignore(key))
    more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
    notes = [f"tensor '{extra[0]:.120}'{more}: stored, kept, and ignored by the architecture"] if extra else []
    return faults, notes


def tied_twice(loaded: Loaded | str) -> list[tuple[str, str]]:
    """Pairs of stored tensors that the config ties to one another, so that they should be equal."""
    if isinstance(loaded, str):
        return []
    pairs = [(loaded.stored.get(a, []), loaded.stored.get(b, [])) for a, b in loaded.tied.items()]
    return [(a[0], b[0]) for a, b in pairs if len(a) == 1 and len(b) == 1]


def _wrong_size(
    key: str, expected: tuple[int, ...], stored: list[tuple[str, TensorInfo]], comparison: str
) -> list[Fault]:
    name, first = stored[0]
    if comparison == "shape" and first.shape != expected:
        what = f"has shape {list(first.shape)!s:.80}, config.json asks for {list(expected)}"
        return [Fault(first.file, name, what)]
    if comparison == "numel" and sum(tensor.numel for _, tensor in stored) != math.prod(expected):
        what = f"and the {len(stored) - 1} others that make up '{key:.120}' don't fill its shape {list(expected)}"
        return [Fault(first.file, name, what)]
    return []


def _meta_model(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")


def _match(model: Any, tensors: Mapping[str, TensorInfo]) -> Loaded:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    stored: dict[str, list[str]] = {}
    comparable: dict[str, str] = {}
    for key in tensors:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        comparable[name] = "shape"
        if pattern is not None:
            converter = by_pattern[pattern]
            if len(converter.target_patterns) > 1:
                raise LookupError(f"'{key}' is split while loading")
            operations = {type(operation).__name__ for operation in converter.operations}
            comparable[name] = "numel" if operations <= KEEPS_NUMEL else ""
        stored.setdefault(name, []).append(key)
    return Loaded(
        expected={name: tuple(value.shape) for name, value in state.items()},
        stored=stored,
        comparable=comparable,
        tied=dict(getattr(model, "all_tied_weights_keys", None) or {}),
        may_lack=_pattern(getattr(model, "_keys_to_ignore_on_load_missing", None)),
        # The last two are old buffers, which loading drops whatever the model says.
        may_ignore=_pattern(
            [
                *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
                r"rotary_emb\.inv_freq",
                r"(^|\.)position_ids$",
            ]
        ),
    )


def _pattern(patterns: Any) -> Callable[[str], bool]:
    if not patterns:
        return lambda key: False
    joined = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return lambda key: joined.search(key) is not None
