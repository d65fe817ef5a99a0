"""What a training can refuse before it reads a weight: everything that its recipe asks of the model and its data."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from linearize.errors import ResourceError, UsageError
from linearize.family import load_config
from linearize.mixers.registry import of_checkpoint
from linearize.plan import human
from linearize.source import Source, resolve
from linearize.target import survey
from linearize.training.redraw import drawn
from linearize.training.schema import SELF
from linearize.training.trainable import MIXER, lora_modules, lora_targets

# A trained parameter and its two moments, in float32.
BYTES = 12


def check_packages(recipe: Any) -> None:
    """Refuse a recipe that needs a package which isn't there, or has no stages.

    Raises:
        UsageError: naming it.
    """
    if not recipe.train:
        raise UsageError("the recipe has no section train", "Choose one that has, see `linearize recipes ls`")
    lora = [stage.lora for stage in recipe.train if getattr(stage, "trains", "") == "lora"]
    if lora and find_spec("peft") is None:
        raise UsageError("LoRA needs the package peft", "pip install 'linearize[train]'")
    if any(one != lora[0] for one in lora):
        raise UsageError("stages of one training share their LoRA, and its settings differ", "Make `lora` equal in all")
    if recipe.every.evaluate and find_spec("lm_eval") is None:
        raise UsageError(
            "looks at recall during training need the evaluation's packages",
            "pip install 'linearize[eval]', or switch them off with --set every.evaluate=0",
        )
    for tracker in recipe.trackers:
        from accelerate.tracking import get_available_trackers

        available = [getattr(name, "value", name) for name in get_available_trackers()]
        if tracker not in available:
            raise UsageError(f"trackers: '{tracker}' isn't installed here", f"pip install {tracker}, or leave it out")


def skeleton(source: Source) -> Any:
    """The converted model of a checked folder without its weights (on the meta device)."""
    import torch
    from transformers import AutoModelForCausalLM

    from linearize.modeling.attach import attach
    from linearize.modeling.classes import BLOCK

    config = load_config(source.config, str(source.folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    setattr(model.config, BLOCK, source.config[BLOCK])
    with of_checkpoint():
        attach(model, source.config[BLOCK])
    return model


def check_model(source: Source, recipe: Any) -> Any:
    """Refuse stages that the model has nothing for; returns its skeleton.

    Raises:
        UsageError: no layer is converted; mixers have nothing to train; LoRA's targets match nothing; a row is longer
            than the model's positions; it can't be checkpointed.
    """
    layers = [layer for layer in source.config["linearize"]["layers"] if layer.get("mixer")]
    if not layers:
        raise UsageError(f"{source.folder} has no converted layer, so there is nothing to train")
    model = skeleton(source)
    for number, stage in enumerate(recipe.train):
        _check_stage(model, number, stage)
    return model


def _check_stage(model: Any, number: int, stage: Any) -> None:
    trains = getattr(stage, "trains", "mixers" if stage.stage == "transfer" else "")
    if trains == "mixers" and not any(MIXER in name for name, _ in model.named_parameters()):
        mixers = [layer["mixer"] for layer in model.config.linearize["layers"] if layer.get("mixer")]
        names = [" with ".join(filter(None, (mixer["name"], mixer.get("feature_map")))) for mixer in mixers]
        kind = ", ".join(dict.fromkeys(names))
        raise UsageError(
            f"train.{number} ({stage.stage}) trains mixers, and those of this model ({kind}) have nothing to train",
            "Convert with a feature map that learns, such as hedgehog, or train LoRA",
        )
    if getattr(stage, "redraw", 0) and not drawn(model):
        raise UsageError(
            f"train.{number}.redraw: no mixer of this model has random features to draw anew",
            "Set it to 0, or convert with feature_map: favor or mixer: rfa",
        )
    if trains == "lora":
        lora_targets(stage.lora, *lora_modules(model))
    if getattr(stage, "gradient_checkpointing", False) and not model.supports_gradient_checkpointing:
        raise UsageError(
            f"train.{number}.gradient_checkpointing: {model.config.model_type} models can't do it", "Set it to false"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and stage.length > positions:
        from linearize_evals.loading import has_position_table

        if has_position_table(model, positions):
            raise UsageError(
                f"train.{number}.length: the model has learned {positions} positions, and no more", "Use shorter rows"
            )


def check_text(checkpoint: str | Path, recipe: Any) -> None:
    """Refuse a model without a tokenizer, and text that is too short for a single row beside those held out.

    Raises:
        UsageError, ModelError, NetworkError: as `Stream` and `linearize.load_tokenizer` do.
    """
    import linearize
    from linearize.training import sources
    from linearize.training.stream import Stream

    data, longest = recipe.data, max(stage.length for stage in recipe.train)
    sources.check(data)
    tokenizer = linearize.load_tokenizer(checkpoint)
    if data.source == "teacher":
        needed = (data.held_out + 1) * longest
        if data.teacher_tokens < needed:
            raise UsageError(
                f"data.teacher_tokens: {data.held_out} rows of {longest} tokens are held out, and "
                f"{data.teacher_tokens:,} leave none to train on",
                f"Sample at least {needed:,}, or lower data.held_out",
            )
        return
    Stream(data, tokenizer, longest).take(1)


def check_teachers(checkpoint: str | Path, recipe: Any) -> None:
    """Refuse teachers that aren't there, or have other tokens.

    Raises:
        UsageError, ModelError, NetworkError: as `resolve` and `check_tokenizers` do.
    """
    from linearize_evals.loading import check_tokenizers

    import linearize

    names = dict.fromkeys(getattr(stage, "teacher", SELF) for stage in recipe.train)
    for name in names:
        if name == SELF:
            continue
        resolve(name, allow_converted=True)
        check_tokenizers(linearize.load_tokenizer(name), linearize.load_tokenizer(checkpoint))


def check_space(work: Path, model: Any, recipe: Any) -> None:
    """Refuse a disk on which the training checkpoints can't be.

    Args:
        model: `skeleton` of what is trained.

    Raises:
        ResourceError: with the bytes.
    """
    most = max(_trained(model, stage) for stage in recipe.train)
    needed = BYTES * most * (recipe.keep + 1)  # one more while it is written
    place = survey(work)
    own = sum(path.stat().st_size for path in work.glob("checkpoints/*/*"))  # of a training that goes on
    free = place.free_bytes + own
    if needed > free:
        raise ResourceError(
            f"{work} needs {human(needed)} for training checkpoints and {place.disk} has {human(free)} free",
            "Free some space, lower `keep`, or choose an OUT on another disk",
        )


def _trained(model: Any, stage: Any) -> int:
    """How many numbers a stage changes."""
    trains = getattr(stage, "trains", "mixers")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    chosen = sum(shape.numel() for name, shape in shapes.items() if trains == "all" or MIXER in name)
    chosen += sum(buffer.numel() for buffer in drawn(model).values()) if getattr(stage, "redraw", 0) else 0
    if trains != "lora":
        return chosen
    targets = lora_targets(stage.lora, *lora_modules(model))
    return chosen + sum(stage.lora.r * sum(shapes[f"{name}.weight"]) for name in targets)
