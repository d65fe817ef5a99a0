"""Decoders whose layers hand on one tensor and nothing else: a few of their layers can run without the others.

Whether a family is built so is learned as in `probe`, from one forward without weights: each layer has to take exactly
what the one before it gave, and nothing else that an earlier layer has made. Then a part of the layers stays the same
model if the others are replaced by stubs that pass on what is known of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linearize.errors import ModelError
from linearize.modeling.attach import SWITCH, find_body
from linearize.modeling.classes import model_class_for
from linearize.modeling.probe import TOKENS, meta_model, run_without_weights


@dataclass(frozen=True)
class Chain:
    """How a decoder's layers are strung together.

    Attributes:
        layers: name of the list that holds them.
        returns: for each, the length of the tuple that it returns, whose first entry are the hidden states; 0 for a
            layer that returns them alone.
        shape: of a token's hidden states.
        dtype: theirs.
    """

    layers: str
    returns: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def layer_list(model: nn.Module, attention: Sequence[str]) -> str:
    """The name of a decoder's list of layers: of the longest one that holds all attention modules.

    Raises:
        ModelError: there is none.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    holding = [(len(module), name) for name, module in lists if all(one.startswith(f"{name}.") for one in attention)]
    if not holding:
        raise ModelError(f"{type(model).__name__} doesn't keep its layers in one list")
    return max(holding)[1]


def chain(config: Any, attention: Sequence[str], dtype: torch.dtype) -> Chain:
    """Learn how the layers of a decoder are strung together; no weight is read and none is allocated.

    Args:
        config: of the base model, which is changed.
        attention: names of its attention modules.
        dtype: of its weights.

    Raises:
        ModelError: its layers can't run without one another; naming the first that doesn't fit.
    """
    config.dtype = dtype
    model = meta_model(config).requires_grad_(False)
    name = layer_list(model, attention)
    body = find_body(model, list(attention))
    links = _Links(list(model.get_submodule(name)))  # pyright: ignore[reportArgumentType]

    def forward(tokens: Tensor, mask: Tensor | None) -> None:
        with links.watching():
            body(input_ids=tokens, attention_mask=mask, use_cache=False)

    run_without_weights(model, forward, "how its layers are strung together")
    fault = links.fault()
    if fault:
        raise ModelError(f"the layers of model type '{config.model_type}' can't run block by block: {fault}")
    return Chain(name, tuple(links.returns), tuple(links.shapes[0][2:]), links.dtype)


class _Links:
    """Looks at what layers take and give. What one gives is marked as needing a gradient, which whatever is made of it
    then needs, too: so it can be told where else it goes."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self._begin()

    def _begin(self) -> None:
        self.order: list[int] = []
        self.returns: list[int] = []
        self.shapes: list[torch.Size] = []
        self.dtype = torch.float32
        self._faults: list[str] = []
        self._last: Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._begin()
        handles = []
        for number, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def fault(self) -> str:
        """Why they are no chain; empty if they are one."""
        if self._faults:
            return self._faults[0]
        if self.order != list(range(len(self.layers))):
            return f"its {len(self.layers)} layers don't run once each in their order"
        if len(set(self.shapes)) > 1 or self.shapes[0][:2] != (1, TOKENS):
            return f"its hidden states of shape {list(self.shapes[0])} aren't one for each token"
        return ""

    def _enter(self, number: int, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        torch.set_grad_enabled(True)  # for the rest of the forward
        self.order.append(number)
        if not args:
            self._faults.append(f"layer {number} takes its hidden states by name")
        elif self._last is not None and args[0] is not self._last:
            self._faults.append(f"something happens to the hidden states between layers {number - 1} and {number}")
        elif any(tensor.requires_grad for tensor in _tensors((args[1:], kwargs))):
            self._faults.append(f"layer {number} reads more of what earlier layers made than the hidden states")

    def _leave(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        entries = output if isinstance(output, tuple) else (output,)
        if not isinstance(entries[0], Tensor) or any(entry is not None for entry in entries[1:]):
            self._faults.append(f"layer {self.order[-1]} returns more than hidden states")
            return output
        self.returns.append(len(output) if isinstance(output, tuple) else 0)
        self.shapes.append(entries[0].shape)
        self.dtype = entries[0].dtype
        self._last = torch.empty_like(entries[0]).requires_grad_() * 1  # no leaf: families may write into it
        return (self._last, *entries[1:]) if isinstance(output, tuple) else self._last


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """All tensors in arguments of a layer, in containers and small objects, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, depth)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one, depth)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module) and depth < 3:
        yield from _tensors(vars(value), depth + 1)


class _Enough(Exception):
    """Ends a forward whose result is there already."""


class _Elsewhere(nn.Module):
    """Stands for a module that isn't needed: has its attributes and none of its weights."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        vars(self)["_stands_for"] = module  # past nn.Module, which would make it a submodule
        if forward is not None:
            self.forward = forward

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_stands_for"], name)


class Part:
    """Layers `begin` to `end` of a model, all others of which are away.

    Attributes:
        model: a causal LM that has only these layers, and what stands before them.
    """

    def __init__(self, model: Any, chain: Chain, begin: int, end: int) -> None:
        """Send the other layers away, in place."""
        self.model, self.begin, self.end = model, begin, end
        self._chain = chain
        self._given: Tensor | None = None
        self._found: Tensor | None = None
        self._layers: Any = model.get_submodule(chain.layers)
        self.away = {n: self._layers[n] for n in range(len(chain.returns)) if not begin <= n < end}
        for number, layer in self.away.items():
            self._layers[number] = _Elsewhere(layer, partial(self._stand_in, number))

    def bring_back(self) -> None:
        """Put the other layers in their places again."""
        for number, layer in self.away.items():
            self._layers[number] = layer

    def run(self, forward: Callable[[], Tensor], given: Tensor | None) -> Tensor:
        """(B, T, ...), what layer `end` would be given in a `forward` of the decoder; what that gives if there is none.

        Args:
            given: what layer `begin` is given; None for layer 0, which takes it from before it.
        """
        self._given, self._found = given, None
        with suppress(_Enough):
            self._found = forward()
        found, self._given, self._found = self._found, None, None
        assert found is not None
        return found

    def _stand_in(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if number >= self.end:
            self._found = hidden
            raise _Enough
        length = self._chain.returns[number]
        return (self._given, *[None] * (length - 1)) if length else self._given


def load_part(
    folder: str | Path, chain: Chain, begin: int, end: int, *, dtype: torch.dtype, device: torch.device
) -> Part:
    """Layers `begin` to `end` of a converted checkpoint, and what stands before them; nothing else is read.

    transformers loads a class whose other layers have no weights: renamed, fused and tied tensors are its own affair.

    Raises:
        ModelError: a tensor is missing.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    whole: Any = model_class_for(type(config))
    parts: list[Part] = []

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, *args, **kwargs)
        parts.append(Part(self, chain, begin, end))
        away = (rf"(^|\.){re.escape(chain.layers.rpartition('.')[2])}\.{number}\." for number in parts[-1].away)
        known = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*known, *away, *_send_head_away(self)}

    # transformers looks up by the class's name how tensors are renamed.
    own: Any = type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})
    model = own.from_pretrained(folder, config=config, dtype=dtype, device_map={"": device})
    model.requires_grad_(False)
    return parts[0]


def _send_head_away(model: Any) -> Iterator[str]:
    """Replace what stands beside the decoder, unless it shares its weights; gives patterns of the weights' names."""
    body, tied = vars(model)[SWITCH].body, getattr(model, "all_tied_weights_keys", None)
    if not body or tied is None:
        return
    shared = {*tied, *tied.values()}
    for name, child in list(model.named_children()):
        own = {f"{name}.{inner}" for inner, _ in child.named_parameters()}
        if own and not f"{body}.".startswith(f"{name}.") and not own & shared:
            setattr(model, name, _Elsewhere(child))
            yield rf"^{re.escape(name)}\."
