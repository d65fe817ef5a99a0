"""Conversion of a model in memory, and loading of a converted checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.errors import ModelError, UsageError, first_line
from linearize.source import resolve

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
    from linearize.layer_plan import plan_layers
    from linearize.modeling.attach import SWITCH, attach
    from linearize.modeling.classes import BLOCK, block_for, classes_for, is_linearized
    from linearize.modeling.probe import probe
    from linearize.recipe import load_recipe
    from linearize.selection_file import is_auto, settled

    config: Any = model.config
    if is_linearized(config.model_type) or SWITCH in vars(model):
        raise ModelError(f"this {type(model).__name__} is converted already", "Convert the base model instead")
    settings = load_recipe(recipe, overrides)
    probed = probe(config)
    if type(model).__name__ != probed.architecture:
        raise ModelError(f"{type(model).__name__} isn't the causal language model of '{config.model_type}'")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError("this model has weights on the meta device or offloaded", "Load it whole, or use convert")
    settings, chosen, _ = settled(settings, probed)
    if is_auto(settings):
        raise UsageError(
            f"keep_softmax: {settings.keep_softmax} has to measure the model, which needs it on disk",
            'Choose first, with `linearize select MODEL -o selection.json`, then give keep_softmax="@selection.json"',
        )
    config = _own_config(model)
    block = block_for(probed.base_model_type, plan_layers(probed, settings, chosen), settings.conversion())
    config_class, model_class = classes_for(probed.base_model_type)
    attach(model, block)
    model.__class__ = model_class
    config.__class__ = config_class
    vars(config).pop("model_type", None)  # what `from_pretrained` left there would hide the class's own
    setattr(config, BLOCK, block)
    config.architectures = [model_class.__name__]
    _remember_context(model)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), BLOCK}
    return model


def _own_config(model: Any) -> Any:
    """A copy of the model's config in the place of one that another model may share."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
    return own


def _remember_context(model: Any) -> None:
    """Gradient checkpointing that is on already must recompute under the forward's context, too."""
    from linearize.modeling.context import remembering

    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = remembering(module._gradient_checkpointing_func)


def load(model: str | Path, *, revision: str | None = None, **kwargs: Any) -> Any:
    """A causal LM, converted or not, from a folder, a Hub id or a GGUF file (which is dequantised).

    `kwargs` are those of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        UsageError, ModelError, NetworkError: as `inspect` does.
    """
    from transformers import AutoModelForCausalLM

    source = resolve(model, revision=revision, allow_converted=True)
    if source.gguf:
        from linearize.gguf import describe, load_gguf

        return load_gguf(describe(source), **kwargs)[0]
    return AutoModelForCausalLM.from_pretrained(source.folder, **kwargs)


def load_tokenizer(model: str | Path, *, revision: str | None = None) -> Any:
    """The tokenizer that belongs to a model, wherever `load` takes it from.

    Raises:
        ModelError: if there is none, or it can't be read.
        UsageError, NetworkError: as `inspect` does.
    """
    from transformers import AutoTokenizer

    source = resolve(model, revision=revision, allow_converted=True)
    options = {"gguf_file": source.gguf.name} if source.gguf else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, **options)
    except Exception as error:
        what = f"{model} has no tokenizer that transformers can read ({first_line(error)})"
        raise ModelError(what, "Copy the original model's tokenizer files into its folder") from error
    if not len(tokenizer):
        raise ModelError(f"the tokenizer of {model} has no tokens", "Copy the original model's tokenizer files")
    return tokenizer
