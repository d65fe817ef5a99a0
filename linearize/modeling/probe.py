"""What a decoder's attention looks like, learned by running it once on the meta device.

A forward of two tokens without any weight, under an attention implementation that only takes notes, tells which
modules go through transformers' AttentionInterface, how often, and with which heads and dims. So no table of model
families is needed, and a family that transformers adds tomorrow is covered today.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from linearize.errors import ModelError
from linearize.mixers.registry import AttentionShape

PROBE = "linearize_probe"
CONSTANT_SIZE_TYPES = ("sliding_attention", "chunked_attention")
_OWN_ATTENTION = (
    "model type '{}' computes attention in its own code (not through transformers' AttentionInterface), so it can't "
    "be replaced"
)


@dataclass(frozen=True)
class ProbedLayer:
    """One decoder layer that has attention.

    Attributes:
        layer: its index among the decoder layers (and in the cache).
        module: name of the attention module, e.g. "model.layers.0.self_attn".
        kind: "full_attention", or "sliding_attention" if its cache is of constant size already.
        refusal: why this layer can't be converted; empty if it can.
        notes: what a mixer leaves out of this layer's attention.
    """

    layer: int
    module: str
    kind: str
    shape: AttentionShape
    refusal: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """A decoder as the probe saw it; `layers` holds the layers that have attention, in order."""

    base_model_type: str
    architecture: str
    num_layers: int
    layers: tuple[ProbedLayer, ...]


@dataclass
class _Notes:
    calls: list[tuple[nn.Module, Tensor, Tensor, Tensor, float | None, dict[str, Any]]] = field(default_factory=list)


def probe(config: PreTrainedConfig) -> Probe:
    """Learn a decoder's attention layers from its config; no weight is read and none is allocated.

    Raises:
        ModelError: with the reason, if the model isn't a decoder whose attention can be replaced.
    """
    model = _meta_model(config)
    calls = _run(model, config.model_type)
    names = {id(module): name for name, module in model.named_modules()}
    layers = _describe(calls, names, model.config)
    num_layers = getattr(model.config, "num_hidden_layers", None) or len(layers)
    if all(layer.refusal for layer in layers):
        raise ModelError(f"model type '{config.model_type}' has no attention layer to convert: {layers[0].refusal}")
    return Probe(config.model_type, type(model).__name__, num_layers, layers)


def expected_tensors(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state dict that the model of `config` has, without tied names and buffers that are
    not saved."""
    model = _meta_model(config)
    tied = set(model.all_tied_weights_keys or {})
    return {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}


def _meta_model(config: PreTrainedConfig) -> Any:
    model_type = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model type '{model_type}' is an encoder-decoder; only decoder-only language models can be converted"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model type '{model_type}' has no causal language model in transformers")
    if config.get_text_config(decoder=True) is not config:
        raise ModelError(
            f"model type '{model_type}' nests its decoder in a multimodal config, which linearize doesn't take yet",
            "Convert the text-only variant of the model",
        )
    AttentionInterface.register(PROBE, _record)
    config = copy.deepcopy(config)
    # Routing of experts that doesn't depend on values, as the meta device has none.
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation=PROBE).eval()
        except (ValueError, ImportError, AttributeError, KeyError) as error:
            if PROBE in str(error):
                raise ModelError(_OWN_ATTENTION.format(model_type)) from error
            raise ModelError(f"model type '{model_type}' can't be built from its config ({_first_line(error)})") from error


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the probe: takes notes, gives an output of the right shape."""
    assert _notes is not None
    _notes.calls.append((module, query, key, value, scaling, kwargs))
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads, value.shape[-1]), None


_notes: _Notes | None = None


def _run(model: Any, model_type: str) -> list[tuple]:
    global _notes
    _notes = _Notes()
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            # A mask is given because some families look into a missing one.
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True)
    except Exception as error:
        raise ModelError(
            f"model type '{model_type}' can't be run without weights, so its attention can't be learned "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error
    finally:
        calls, _notes = _notes.calls, None
    if not calls:
        raise ModelError(_OWN_ATTENTION.format(model_type))
    return calls


def _describe(calls: list[tuple], names: dict[int, str], config: Any) -> tuple[ProbedLayer, ...]:
    counts: dict[int, int] = {}
    key_owner: dict[int, nn.Module] = {}
    readers: dict[int, nn.Module] = {}  # id of a module -> one that reads its keys
    for module, _, key, *_ in calls:
        counts[id(module)] = counts.get(id(module), 0) + 1
        owner = key_owner.setdefault(id(key), module)
        if owner is not module:
            readers[id(owner)] = module
    layers = []
    for module, query, key, value, scaling, kwargs in calls:
        if counts.get(id(module)) is None:
            continue
        layer_types = getattr(config, "layer_types", None)
        layer = getattr(module, "layer_idx", None)
        refusal = ""
        if counts.pop(id(module)) > 1:
            refusal = "its attention function is called more than once per forward"
        elif layer is None:
            refusal = "its module doesn't know its layer index"
        elif getattr(module, "is_cross_attention", False) or not getattr(module, "is_causal", True):
            refusal = "its attention isn't causal self-attention"
        elif key_owner[id(key)] is not module or getattr(module, "is_kv_shared_layer", False):
            refusal = "it reads the keys of an earlier layer, which a state of its own can't follow"
        elif id(module) in readers:
            refusal = f"layer {getattr(readers[id(module)], 'layer_idx', '?')} reads its keys"
        elif key.shape[-2] != query.shape[-2]:
            refusal = f"it attends from {query.shape[-2]} queries to {key.shape[-2]} keys of the same tokens"
        elif query.shape[1] % key.shape[1]:
            refusal = f"its {query.shape[1]} query heads don't divide into {key.shape[1]} key heads"
        kind = "full_attention"
        typed = layer_types[layer] if layer_types and layer is not None and layer < len(layer_types) else None
        if typed in CONSTANT_SIZE_TYPES or kwargs.get("sliding_window") is not None:
            kind = "sliding_attention"
        heads, key_heads = query.shape[1], key.shape[1]
        shape = AttentionShape(
            num_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=query.shape[-1],
            v_head_dim=value.shape[-1],
            hidden_size=config.hidden_size,
            scaling=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
            softcap=kwargs.get("softcap"),
        )
        index = layer if layer is not None else len(layers)
        layers.append(ProbedLayer(index, names[id(module)], kind, shape, refusal, _left_out(kwargs)))
    return tuple(sorted(layers, key=lambda entry: entry.layer))


def _left_out(kwargs: dict[str, Any]) -> tuple[str, ...]:
    """What this layer's softmax does beyond q, k, v and scaling, and a mixer doesn't."""
    notes = []
    if kwargs.get("softcap") is not None:
        notes.append(f"logit soft-capping ({kwargs['softcap']}) holds in the window only")
    if kwargs.get("s_aux") is not None:
        notes.append("learned attention-sink logits are left out")
    if kwargs.get("position_bias") is not None:
        notes.append("the position bias is left out")
    return tuple(notes)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
