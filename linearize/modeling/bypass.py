"""Run a converted model without its mixers, or without one branch of them.

The teacher of a fresh conversion is the same set of weights with the mixers bypassed, so that no second model has to be
in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from linearize.errors import UsageError
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
    owner = owner_of(model)
    switch = owner._linearize_switch
    modules = {name: owner.get_submodule(name) for name in switch.configs}
    if switch.bypassed:
        raise UsageError("the model is bypassed already")
    own = {name: module.config for name, module in modules.items()}
    implementation = owner.config._attn_implementation_internal
    try:
        switch.bypassed = True
        if implementation == IMPLEMENTATION:  # no softmax layer was left
            owner.config._attn_implementation_internal = switch.softmax
        for name, module in modules.items():
            module.config = switch.configs[name]
        yield model
    finally:
        switch.bypassed = False
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
