"""What a decoder's attention looks like, learned by running it once on the meta device.

A forward of two tokens without any weight, under an attention implementation that only takes notes, tells which
modules go through transformers' AttentionInterface, how often, and with which heads and dims. So no table of model
families is needed, and a family that transformers adds tomorrow is covered today.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from linearize.errors import ModelError, first_line
from linearize.mixers.registry import AttentionShape
from linearize.modeling import compat

PROBE = "linearize_probe"
MASKED_PROBE = "linearize_probe_masked"
TOKENS = 2
# Tensors that tell where tokens stand, which mixers learn from the running forward.
CONTEXT_ARGUMENTS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
LEFT_OUT = {
    "s_aux": "the attention-sink logit",
    "sinks": "the attention-sink logit",
    "position_bias": "the position bias",
    "indices": "the sparse selection of keys",
    "block_indices": "the sparse selection of keys",
}
CONSTANT_SIZE_TYPES = ("sliding_attention", "chunked_attention")
_OWN_ATTENTION = (
    "model type '{}' has no attention that goes through transformers' AttentionInterface: it has none, or computes it "
    "in its own code, so there is nothing to replace"
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


# The attention calls that the probe of this thread has seen.
_calls: ContextVar[list[tuple]] = ContextVar("linearize_probe_calls")


def probe(config: PreTrainedConfig) -> Probe:
    """Learn a decoder's attention layers from its config; no weight is read and none is allocated.

    Raises:
        ModelError: with the reason, if the model isn't a decoder whose attention can be replaced.
    """
    model = meta_model(config)
    calls, cache = _run(model, config.model_type)
    names = {id(module): name for name, module in model.named_modules()}
    layers = _describe(calls, cache, names, model.config)
    num_layers = getattr(model.config, "num_hidden_layers", None) or len(layers)
    if all(layer.refusal for layer in layers):
        reason = layers[0].refusal if layers else "its attention isn't over tokens"
        raise ModelError(f"model type '{config.model_type}' has no attention layer to convert: {reason}")
    return Probe(config.model_type, type(model).__name__, num_layers, layers)


def meta_model(config: PreTrainedConfig) -> Any:
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
    for implementation in (PROBE, MASKED_PROBE):
        AttentionInterface.register(implementation, _record)
    AttentionMaskInterface.register(MASKED_PROBE, eager_mask)
    config = copy.deepcopy(config)
    # Routing of experts that doesn't depend on values, as the meta device has none.
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation=PROBE).eval()
        except (ValueError, ImportError, AttributeError, KeyError) as error:
            if PROBE in str(error):
                raise ModelError(_OWN_ATTENTION.format(model_type)) from error
            raise ModelError(
                f"model type '{model_type}' can't be built from its config ({first_line(error)})"
            ) from error


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
    _calls.get().append((module, query, key, value, scaling, kwargs))
    batch, heads, length, _ = query.shape
    return query.new_zeros(batch, length, heads, value.shape[-1]), None


class _MadeUpValues(TorchFunctionMode):
    """Answers questions about values, which meta tensors don't have: 1 for a number, nothing selected for a routing.

    Some families branch on values (which expert gets which token, is anything padded). What they do there doesn't
    change the shape of attention.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            x = args[0]
            if name in ("__bool__", "__int__", "__index__", "__float__", "item"):
                number = torch.ones((), dtype=x.dtype, device="cpu").item()
                return {"__bool__": bool, "__float__": float, "item": lambda n: n}.get(name, int)(number)
            if name in ("tolist", "cpu"):
                ones = torch.ones(x.shape, dtype=x.dtype, device="cpu")
                return ones.tolist() if name == "tolist" else ones
            if name == "nonzero":
                return torch.empty(0, x.dim(), dtype=torch.long, device="meta")
            if name == "where" and len(args) == 1:
                return tuple(torch.empty(0, dtype=torch.long, device="meta") for _ in range(x.dim()))
        return function(*args, **(kwargs or {}))


def _run(model: Any, model_type: str) -> tuple[list[tuple], Any]:
    """The attention calls of one forward, and the cache that it filled."""

    def forward(tokens: Tensor, mask: Tensor | None) -> Any:
        return model(input_ids=tokens, attention_mask=mask, use_cache=True)

    calls, output = run_without_weights(model, forward, "its attention")
    if not calls:
        raise ModelError(_OWN_ATTENTION.format(model_type))
    return calls, compat.cache_of(output)


def run_without_weights(
    model: Any, forward: Callable[[Tensor, Tensor | None], Any], aim: str
) -> tuple[list[tuple], Any]:
    """The attention calls of `forward(tokens (1, T), mask (1, T) or None)` of a `meta_model`, and what it returns.

    Families differ in what they take without values: some look into a missing mask, some look at the values of a
    given one, some slice the mask that the implementation makes. So `forward` may run several times.

    Raises:
        ModelError: it can't be run, so that `aim` can't be learned.
    """
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    failures = []
    for made_up in (False, True):
        for implementation, mask in ((PROBE, None), (PROBE, torch.ones_like(tokens)), (MASKED_PROBE, None)):
            model.config._attn_implementation = implementation
            try:
                guess = _MadeUpValues() if made_up else nullcontext()
                with torch.no_grad(), torch.device("meta"), compat.meta_autocast(), guess:
                    return _noting(lambda mask=mask: forward(tokens, mask))
            except Exception as error:
                failures.append(error)
    raise ModelError(
        f"model type '{model.config.model_type}' can't be run without weights, so {aim} can't be learned "
        f"({type(failures[0]).__name__}: {first_line(failures[0])})"
    ) from failures[0]


def _noting(forward: Callable[[], Any]) -> tuple[list[tuple], Any]:
    token = _calls.set([])
    try:
        output = forward()
        return _calls.get(), output
    finally:
        _calls.reset(token)


def _describe(calls: list[tuple], cache: Any, names: dict[int, str], config: Any) -> tuple[ProbedLayer, ...]:
    counts = Counter(id(module) for module, *_ in calls)
    key_owner: dict[int, nn.Module] = {}
    readers: dict[int, nn.Module] = {}  # id of a module -> one that reads its keys
    for module, _, key, *_ in calls:
        owner = key_owner.setdefault(id(key), module)
        if owner is not module:
            readers[id(owner)] = module
    layers: dict[str, ProbedLayer] = {}
    for module, query, key, value, scaling, kwargs in calls:
        name, layer = names[id(module)], getattr(module, "layer_idx", None)
        if query.shape[2] != TOKENS or name in layers:
            continue  # attention over something else than tokens, or another call of the same module
        shape = AttentionShape(
            num_heads=query.shape[1],
            num_key_value_heads=key.shape[1],
            head_dim=query.shape[-1],
            v_head_dim=value.shape[-1],
            hidden_size=config.hidden_size,
            scaling=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
            softcap=kwargs.get("softcap"),
            max_length=_max_length(config),
        )
        if not isinstance(layer, int) or layer < 0:
            refusal, layer = "its module doesn't know its layer, so its cache slot can't be told", -1
        elif counts[id(module)] > 1:
            refusal = "its attention function is called more than once per forward"
        elif getattr(module, "is_cross_attention", False) or getattr(module, "is_causal", True) is False:
            refusal = "its attention isn't causal self-attention"
        elif key_owner[id(key)] is not module or getattr(module, "is_kv_shared_layer", False):
            refusal = "it reads the keys of an earlier layer, which a state of its own can't follow"
        elif id(module) in readers:
            refusal = f"layer {getattr(readers[id(module)], 'layer_idx', '?')} reads its keys"
        elif key.shape[-2] != query.shape[-2]:
            refusal = f"its {key.shape[-2]} keys for {query.shape[-2]} tokens aren't one key per token"
        elif query.shape[1] % key.shape[1]:
            refusal = f"its {query.shape[1]} query heads don't divide into {key.shape[1]} key heads"
        else:
            refusal = _slot_refusal(cache, layer)
        layers[name] = ProbedLayer(layer, name, _kind(config, layer, kwargs), shape, refusal, _left_out(kwargs))
    return tuple(sorted(layers.values(), key=lambda entry: entry.layer))


def _max_length(config: Any) -> int | None:
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def _slot_refusal(cache: Any, layer: int) -> str:
    slots = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
    if slots is None or layer >= len(slots) or type(slots[layer]) in compat.PLAIN_SLOTS:
        return ""
    return f"its cache slot ({type(slots[layer]).__name__}) keeps more than keys and values"


def _kind(config: Any, layer: int, kwargs: dict[str, Any]) -> str:
    types = getattr(config, "layer_types", None) or ()
    typed = types[layer] if 0 <= layer < len(types) else None
    constant = typed in CONSTANT_SIZE_TYPES or kwargs.get("sliding_window") is not None
    return "sliding_attention" if constant else "full_attention"


def _left_out(kwargs: dict[str, Any]) -> tuple[str, ...]:
    """What this layer's softmax does beyond q, k, v and scaling, and a mixer doesn't."""
    notes = []
    if kwargs.get("softcap") is not None:
        notes.append(f"logit soft-capping ({kwargs['softcap']}) holds only where softmax is exact")
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and name not in CONTEXT_ARGUMENTS:
            notes.append(f"{LEFT_OUT.get(name, f'the argument {name}')} is left out")
    return tuple(notes)
