"""Conversion of a model in memory, and loading of a converted checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linearize.recipe import Recipe


def linearize_(
    model: PreTrainedModel,
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Convert a live causal LM in place, and return it.

    The result equals what `convert` writes and `load` reads: same classes, config and mixers. `recipe` and
    `overrides` are those of `load_recipe`, e.g. `linearize_(model, feature_map="favor", keep_softmax="25%")`.

    Raises:
        UsageError: for a wrong recipe.
        ModelError: if the model can't be converted, or is already.
    """
    from linearize.modeling.attach import attach
    from linearize.modeling.classes import BLOCK, block_for, classes_for, is_linearized
    from linearize.modeling.probe import probe
    from linearize.plan import plan_layers
    from linearize.recipe import load_recipe

    config: Any = model.config
    if is_linearized(config.model_type):
        raise ModelError(f"this {type(model).__name__} is converted already", "Convert the base model instead")
    settings = load_recipe(recipe, overrides)
    probed = probe(config)
    if type(model).__name__ != probed.architecture:
        raise ModelError(f"{type(model).__name__} isn't the causal language model of '{config.model_type}'")
    block = block_for(probed.base_model_type, plan_layers(probed, settings), settings.to_dict())
    config_class, model_class = classes_for(probed.base_model_type)
    attach(model, block)
    model.__class__ = model_class
    config.__class__ = config_class
    setattr(config, BLOCK, block)
    config.architectures = [model_class.__name__]
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), BLOCK}
    return model


def load(path: str | Path, **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained` for converted checkpoints; `kwargs` are its own."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path), **kwargs)
