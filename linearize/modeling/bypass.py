"""Run a converted model without its mixers, without some of them, or without one branch of them.

The teacher of a fresh conversion is the same set of weights with the mixers bypassed, and so is every hybrid of the
two: no second model has to be in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from linearize.errors import UsageError
from linearize.mixers.heads import keeping_heads
from linearize.mixers.registry import AttentionShape
from linearize.modeling.attach import SWITCH
from linearize.modeling.attention import IMPLEMENTATION


def owner_of(model: Any) -> Any:
    """The converted model itself, which PEFT and others may have wrapped."""
    for module in model.modules():
        if SWITCH in vars(module):
            return module
    raise UsageError(f"this {type(model).__name__} isn't converted, so it has no mixers", "Convert it first")


def is_bypassed(model: Any) -> bool:
    """Whether `model` runs within `bypass`."""
    return SWITCH in vars(model) and vars(model)[SWITCH].bypassed


@contextmanager
def bypass(model: Any) -> Iterator[Any]:
    """Within the block, `model` is its base model: every layer runs the softmax attention that it had.

    With weights that no training has changed, its outputs equal the base model's bit for bit. A cache belongs to the
    mode that filled it. Not for a model that another thread is running.

    Raises:
        UsageError: if the model isn't converted, or is bypassed already.
    """
    switch = owner_of(model)._linearize_switch
    with _softmax_in(model, set(switch.configs)):
        switch.bypassed = True
        yield model


@contextmanager
def keeping(model: Any, layers: Collection[int], heads: Mapping[int, Sequence[int]] | None = None) -> Iterator[Any]:
    """Within the block, `model` is the hybrid whose converted `layers` run softmax attention, the others their mixers.

    It is what a conversion of the same weights with `keep_softmax: layers` gives; with all converted layers it is the
    base model, as `bypass` gives it, and with none the model as it is.

    Args:
        layers: numbers of converted layers; what else the model has runs as it does anyway.
        heads: for other converted layers, key/value heads that run softmax attention with the query heads that read
            them, while the layer's mixer runs for its other heads. It is what mixer `heads` over that mixer gives. No
            cache can be filled then.

    Raises:
        UsageError: a layer isn't a converted one, or its heads aren't some, but not all, of those that it has; the
            model isn't converted, or runs in another mode already.
    """
    heads = heads or {}
    owner = owner_of(model)
    switch = owner._linearize_switch
    wrong = sorted({*layers, *heads} - set(switch.layers.values()))
    if wrong:
        raise UsageError(f"layer {wrong[0]} isn't converted, so it has no mixer to set aside")
    both = sorted(set(layers) & set(heads))
    if both:
        raise UsageError(f"layer {both[0]} is kept whole, so none of its heads can be")
    names = {name for name, layer in switch.layers.items() if layer in layers}
    if names == set(switch.layers):
        with bypass(model):
            yield model
        return
    shapes = {entry["layer"]: entry.get("shape") for entry in owner.config.linearize["layers"]}
    with _softmax_in(model, names), ExitStack() as stack:
        for name, layer in switch.layers.items():
            if layer in heads:
                mixer = owner.get_submodule(name).linearize
                stack.enter_context(keeping_heads(mixer, AttentionShape(**shapes[layer]), heads[layer]))
        switch.kept = frozenset(layers)
        yield model


@contextmanager
def _softmax_in(model: Any, names: Collection[str]) -> Iterator[None]:
    """The converted attention modules called `names` run what they ran before, and get its masks."""
    owner = owner_of(model)
    switch = owner._linearize_switch
    if switch.busy:
        raise UsageError("the model is bypassed or observed already")
    modules = {name: owner.get_submodule(name) for name in names}
    own = {name: module.config for name, module in modules.items()}
    implementation = owner.config._attn_implementation_internal
    try:
        switch.busy = True
        if names and implementation == IMPLEMENTATION:  # no softmax layer was left, so that no mask would be made
            owner.config._attn_implementation_internal = switch.softmax
        for name, module in modules.items():
            module.config = switch.configs[name]
        yield
    finally:
        switch.busy, switch.bypassed, switch.kept = False, False, frozenset()
        owner.config._attn_implementation_internal = implementation
        for name, module in modules.items():
            module.config = own[name]


def branches(model: Any) -> set[str]:
    """The branches that `ablate` can take away from a model; none of one that isn't converted."""
    return {branch for module in model.modules() for branch in getattr(type(module), "branches", ())}


@contextmanager
def ablate(model: Any, branch: str) -> Iterator[Any]:
    """Within the block, `branch` ("linear" or "window") of every mixer that has several gives nothing.

    What is left keeps its own denominator, so that a token that sees nothing any more gets 0. Layers with one branch
    run as they are.

    Raises:
        UsageError: if the model isn't converted, or no mixer of it has that branch beside another.
    """
    owner_of(model)
    # Found by what they are, since PEFT may train copies of them.
    chosen: list[Any] = [module for module in model.modules() if branch in getattr(type(module), "branches", ())]
    if not chosen:
        raise UsageError(f"no mixer of this {type(model).__name__} has a '{branch}' branch beside another")
    before = [mixer.ablated for mixer in chosen]
    try:
        for mixer in chosen:
            mixer.ablated = branch
        yield model
    finally:
        for mixer, value in zip(chosen, before, strict=True):
            mixer.ablated = value
