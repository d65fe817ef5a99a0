"""Put mixers on a decoder: one submodule per converted attention module, and two forward pre-hooks.

The model's own modules stay: projections, biases, RoPE, norms, gates. Each converted attention module gets a copy of
its config whose attention implementation is ours, so every other layer runs exactly what it ran before.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linearize.errors import ModelError
from linearize.mixers import mixer_of
from linearize.modeling import attention
from linearize.modeling import context as forward_context
from linearize.modeling.cache import adopt
from linearize.modeling.compat import CACHE_NAMES, HIDDEN_NAMES
from linearize.modeling.context import ForwardContext

SWITCH = "_linearize_switch"
MASK = "attention_mask"


@dataclass
class Switch:
    """Whether the mixers of one model are bypassed, and what runs in their place then (see `bypass`).

    Attributes:
        softmax: the attention implementation that the model had.
        configs: the config that each converted attention module had, by the module's name.
        layers: the number of its decoder layer, by the same name.
        kept: the layers that run softmax attention while the others run their mixers (see `keeping`).
        busy: whether the model runs in a mode of `bypass`, `keeping` or `observing`.
        body: the name of the decoder, whose output the head takes ("" if that is the model itself).
        observer: called in each converted layer, whose softmax attention runs then (see `observe`).
    """

    softmax: str | None
    configs: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    bypassed: bool = False
    kept: frozenset[int] = frozenset()
    busy: bool = False
    body: str = ""
    observer: Callable[..., None] | None = None


def attach(model: PreTrainedModel, block: dict[str, Any]) -> None:
    """Put the mixers that `block` (the config's `linearize` block) describes on `model`, in place.

    New mixers take their attention module's device, and are deterministic in the recipe's seed.

    Raises:
        ModelError: if the block names a module that the model lacks. The model is then what it was.
        UsageError: if a mixer or feature map isn't registered, or can't be built; the same.
    """
    seed = block.get("recipe", {}).get("seed", 0)
    converted = [layer for layer in block["layers"] if layer.get("mixer")]
    modules = dict(model.named_modules())
    mixers = [_mixer(model, modules.get(layer["module"]), layer, seed) for layer in converted]
    attention.register()
    switch = Switch(model.config._attn_implementation_internal)
    vars(model)[SWITCH] = switch
    for layer, mixer in zip(converted, mixers, strict=True):
        module: Any = modules[layer["module"]]
        module.add_module("linearize", mixer)
        switch.configs[layer["module"]] = module.config
        switch.layers[layer["module"]] = layer["layer"]
        private: Any = copy.copy(module.config)
        private._attn_implementation_internal = attention.IMPLEMENTATION
        module.config = private
        module.register_forward_pre_hook(_AttentionHook(module, switch, layer["layer"]), with_kwargs=True)
    body = find_body(model, [layer["module"] for layer in converted])
    switch.body = next(name for name, module in modules.items() if module is body)
    hook = _BodyHook(body, switch)
    body.register_forward_pre_hook(hook, with_kwargs=True)
    body.register_forward_hook(hook.leave, always_call=True)
    if len(converted) == len(block["layers"]):
        # No softmax layer is left to need a T x T mask.
        model.config._attn_implementation_internal = attention.IMPLEMENTATION


def _mixer(model: Any, module: nn.Module | None, layer: dict[str, Any], seed: int) -> nn.Module:
    """The mixer of an attention module, on its device."""
    if module is None:
        raise ModelError(
            f"config.json converts '{layer['module']}', which {type(model).__name__} doesn't have",
            "Convert the base model again",
        )
    with _device_of(module):
        return mixer_of(layer, seed)


def find_body(model: Any, names: list[str]) -> Any:
    """The module whose forward sees the padding mask and holds all converted attention modules."""
    named = [model.get_decoder(), getattr(model, model.base_model_prefix, None)]
    candidates = [*(module for module in named if module is not model), *model.children(), model]
    attention_modules = {id(model.get_submodule(name)) for name in names}
    for candidate in candidates:
        if candidate is not None and attention_modules <= {id(module) for module in candidate.modules()}:
            return candidate
    raise AssertionError("unreachable: the model holds its own modules")


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


class _Arguments:
    """Reads and sets arguments of a module's forward by name, however the caller passed them."""

    def __init__(self, module: nn.Module) -> None:
        self.positions = {name: i for i, name in enumerate(inspect.signature(module.forward).parameters)}

    def get(self, args: tuple, kwargs: dict[str, Any], *names: str) -> Any:
        for name in names:
            if kwargs.get(name) is not None:
                return kwargs[name]
            position = self.positions.get(name)
            if position is not None and position < len(args) and args[position] is not None:
                return args[position]
        return None

    def set(self, args: tuple, kwargs: dict[str, Any], name: str, value: Any) -> tuple[tuple, dict[str, Any]]:
        """args and kwargs with `name` set, at its place if it was passed by position."""
        position = self.positions.get(name, len(args))
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}


class _AttentionHook:
    """Before a converted attention module runs: its hidden states and its cache slot, for the attention function."""

    def __init__(self, module: nn.Module, switch: Switch, layer: int) -> None:
        self.arguments = _Arguments(module)
        self.switch = switch
        self.layer = layer

    def __call__(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        context = forward_context.current()
        if context is None or self.switch.bypassed or self.layer in self.switch.kept:
            return None  # the attention function refuses with the reason
        context.hidden_states = self.arguments.get(args, kwargs, *HIDDEN_NAMES)
        if context.hidden_states is None and args:
            context.hidden_states = args[0]
        cache = self.arguments.get(args, kwargs, *CACHE_NAMES)
        context.slot = None if cache is None else adopt(cache, module.layer_idx)
        mask = self.arguments.get(args, kwargs, MASK)
        context.padding = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if context.padding is None:
            return None
        # Some attention modules (Doge's) mask what they compute beside attention, and slice a mask of four dims for it.
        return self.arguments.set(args, kwargs, MASK, context.padding[:, None, None])


class _BodyHook:
    """Before the decoder body runs: the padding mask in 2-D, positions, packed-sequence bounds."""

    def __init__(self, body: nn.Module, switch: Switch) -> None:
        self.arguments = _Arguments(body)
        self.switch = switch

    def __call__(self, body: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        get = self.arguments.get
        tokens = get(args, kwargs, "input_ids", "inputs_embeds")
        if tokens is None or self.switch.bypassed:
            return None  # without tokens, the body says what is missing
        batch, length = tokens.shape[:2]
        mask, position_ids = get(args, kwargs, "attention_mask"), get(args, kwargs, "position_ids")
        cache = get(args, kwargs, *CACHE_NAMES)
        context = ForwardContext(owner=self, outer=forward_context.current(), switch=self.switch)
        changed = None
        if isinstance(mask, Tensor) and mask.dim() == 2:
            mask = mask.bool()
            seen = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
            context.mask = _new_columns(mask, seen, length)
            if position_ids is None and "position_ids" in self.arguments.positions:
                # Softmax with RoPE doesn't notice a shift of all positions, but feature maps of rotated q and k do:
                # a padded row must get the positions that it has alone.
                position_ids = _new_columns((mask.long().cumsum(-1) - 1).clamp(min=0), seen, length)
                changed = self.arguments.set(args, kwargs, "position_ids", position_ids)
        elif mask is not None:
            context.per_layer_mask = True
        context.position_ids = position_ids
        if position_ids is not None and cache is None and mask is None and not self._makes_cache(body, args, kwargs):
            context.cu_seqlens = _packed_bounds(position_ids, batch, length)  # pyright: ignore[reportCallIssue]
        given = get(args, kwargs, "cu_seq_lens_q")
        if given is not None:
            # The ops look at the bounds in every layer: a GPU is waited for once, here.
            context.cu_seqlens = given.cpu()
        forward_context.enter(context)
        return changed

    def _makes_cache(self, body: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the body will make a cache of its own: transformers then doesn't separate packed sequences."""
        asked = self.arguments.get(args, kwargs, "use_cache")
        if asked is not None:
            return bool(asked)
        checkpointing = body.training and getattr(body, "gradient_checkpointing", False)
        return bool(getattr(body.config, "use_cache", False)) and not checkpointing

    def leave(self, body: nn.Module, args: tuple, output: Any) -> None:
        context = forward_context.current()
        if context is not None and context.owner is self:
            forward_context.enter(context.outer)


def _new_columns(x: Tensor, seen: int | Tensor, length: int) -> Tensor:
    """The columns of x (B, seen + T or more) that belong to the T new tokens.

    Raises:
        ValueError: if x doesn't cover them.
    """
    if isinstance(seen, Tensor) and (torch.compiler.is_compiling() or seen.device.type != "cpu"):
        # Asking a GPU for the number would wait for it at every decoded token.
        return x.index_select(1, torch.arange(length, device=x.device) + seen.to(x.device))
    seen = int(seen)
    if x.shape[1] < seen + length:
        raise ValueError(
            f"attention_mask is {tuple(x.shape)} but {seen} tokens were seen and {length} are new: it must cover both"
        )
    return x[:, seen : seen + length]


@torch.compiler.disable
def _packed_bounds(position_ids: Tensor, batch: int, length: int) -> Tensor | None:
    """Bounds (N + 1,) of packed sequences, told by positions that start again; None if there is one per row.

    For calls without mask and cache, as transformers itself does. What it returns depends on values, so it stays
    outside of compiled graphs; calls without explicit positions never get here.
    """
    if position_ids.dim() != 2 or length == 1:
        return None
    starts = torch.ones(batch, length, dtype=torch.bool, device=position_ids.device)
    starts[:, 1:] = (position_ids.diff(dim=-1) != 1).expand(batch, -1)
    if not bool(starts[:, 1:].any()):
        return None
    bounds = starts.flatten().cpu().nonzero().flatten()
    return torch.cat([bounds, bounds.new_tensor([batch * length])])
