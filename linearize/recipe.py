"""The schema of a recipe: which layers become what, and how what they lost is trained back.

A recipe is a YAML file. Unknown keys are errors, every problem is reported at once and with its line, and names
are checked against the registries, so that a typo is found before a model is touched. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from linearize.errors import UsageError
from linearize.keep_softmax import AUTO, FORMS, FROM_FILE, PERCENT, is_budget
from linearize.recipe_errors import Problem, RecipeError, problems_of
from linearize.recipe_files import (
    DEFAULT_MIXER,
    LAYERS,
    MIXER_KEYS,
    SECTIONS,
    find_recipe,
    layer_numbers,
    override,
    read_recipe,
    shipped_recipes,
)
from linearize.recipe_mixers import Block, Sinks, Window, fill, in_order, named_blocks, spec_of
from linearize.training.schema import SELF, Data, Distill, Evaluation, Every, Name, Precision, Stage, Trackers, as_tuple

__all__ = ["Recipe", "RecipeError", "find_recipe", "load_recipe", "shipped_recipes"]

DEFAULT_RECIPE = "default"


def _keep_softmax(value: Any) -> str | tuple[int, ...]:
    """`value` in its one normal form: "none", "every:4", "25%", "auto:25%", "@FILE" or an ascending tuple of layers."""
    if isinstance(value, bool) or not isinstance(value, (str, int, list, tuple)):
        raise ValueError(f"can't be {value!r}; write {FORMS}")
    if isinstance(value, int):
        value = [value]
    if isinstance(value, str):
        text = value.strip()
        if text.startswith(FROM_FILE) and len(text) > 1:
            return text
        if text.startswith(AUTO) and is_budget(text.removeprefix(AUTO)):
            return text
        percent = re.fullmatch(PERCENT, text)
        if text == "none" or re.fullmatch(r"every:[1-9]\d{0,8}", text) or (percent and 0 < float(percent[1]) <= 100):
            return text
        if not re.fullmatch(r"\d{1,9}(\s*,\s*\d{1,9})*", text):
            raise ValueError(f"can't be '{value}'; write {FORMS}")
        value = [int(part) for part in text.split(",")]
    for layer in value:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ValueError(f"{layer!r} is not a layer number; layers count from 0")
        if list(value).count(layer) > 1:
            raise ValueError(f"layer {layer} is listed twice")
    return tuple(sorted(value)) or "none"


class Recipe(BaseModel):
    """What a model is converted to, and how it is trained and judged then. See docs/recipes.md.

    Keys that the mixer takes and the recipe leaves out are filled in from the mixer's defaults; those that it
    doesn't take are None. Raises `RecipeError` (a `UsageError`) that lists every problem.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = Field(1, description="version of this schema")
    model: Name | None = Field(None, description="what `linearize run` converts: a folder, Hub id or GGUF file")
    mixer: str = Field(DEFAULT_MIXER, description="what stands in the place of softmax attention")
    feature_map: str | None = Field(None, description="the map phi that replaces exp(q·k) by phi(q)·phi(k)")
    feature_map_options: dict[str, Any] | None = Field(None, description="options of the feature map")
    window: Window | None = Field(None, description="newest tokens under exact softmax")
    sinks: Sinks | None = Field(None, description="first tokens that stay exact")
    mixer_options: dict[str, Any] = Field({}, description="further options, for a mixer of your own")
    layers: dict[str, Block] = Field({}, description="other mixers for some layers: lists of layers, and their mixer")
    keep_softmax: Annotated[str | tuple[int, ...], BeforeValidator(_keep_softmax)] = Field(
        "none", description=f"layers that stay as they are: {FORMS}"
    )
    convert_sliding: bool = Field(False, description="also convert layers that have sliding-window attention already")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="seed of the mixers' random draws")
    data: Data = Field(Data(), description="what is trained on")
    train: Annotated[tuple[Stage, ...], BeforeValidator(as_tuple)] = Field((), description="stages, in their order")
    every: Every = Field(Every(), description="how often things happen in training")
    keep: Annotated[int, Field(ge=1)] = Field(2, description="newest training checkpoints that are kept")
    precision: Precision = Field("auto", description="what frozen weights are held in while others are trained")
    shard: bool = Field(False, description="FSDP2: weights spread over the processes, instead of a copy in each")
    trackers: Trackers = Field((), description="where metrics go beside metrics.jsonl: accelerate's trackers")
    eval: Evaluation | None = Field(None, description="what `linearize run` asks of `linearize.evaluate`")

    @field_validator("train")
    @classmethod
    def _teacher_is_left(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        changed = [number for number, stage in enumerate(stages) if getattr(stage, "trains", "") == "all"]
        for number, stage in enumerate(stages):
            if isinstance(stage, Distill) and stage.teacher == SELF and changed and changed[0] < number:
                raise ValueError(
                    f"stage {number} has teacher self, but stage {changed[0]} trains all, the teacher's weights "
                    "among them; name a model as teacher"
                )
        return stages

    @model_validator(mode="wrap")
    @classmethod
    def _collect(cls, data: Any, handler: Any) -> Recipe:
        if not isinstance(data, dict):
            return handler(data)
        problems: list[Problem] = []
        data = {**data, LAYERS: named_blocks(data.get(LAYERS, {}), problems)}
        broken: set[tuple[str, ...]] = set()
        try:
            handler(data)
        except ValidationError as error:
            found = problems_of(error, cls)
            problems += found
            broken = {tuple(problem.key.split(".")) for problem in found}
        tops = {key[0] for key in broken}
        filled, more = fill({key: value for key, value in data.items() if key not in tops}, tops)
        problems += more
        blocks = {}
        for name, block in data[LAYERS].items() if isinstance(data[LAYERS], Mapping) else ():
            if isinstance(block, Mapping):
                wrong = {key[2] for key in broken if key[:2] == (LAYERS, name) and len(key) > 2}
                mine = {key: value for key, value in block.items() if key not in wrong}
                blocks[name], more = fill(mine, wrong, f"{LAYERS}.{name}.")
                problems += more
        if problems:
            raise RecipeError(problems)
        return handler({**filled, LAYERS: in_order(blocks)})

    def mixer_spec(self, layer: int | None = None) -> dict[str, Any]:
        """What `linearize.mixers.build_mixer` takes for `layer`: the mixer's name and every option that it has.
        Without a layer: for all those that `layers` doesn't name."""
        return spec_of(self.layers.get(self.named(layer), self))

    def named(self, layer: int | None) -> str:
        """The key of `layers` that names `layer`; "" if none does."""
        return next((key for key in self.layers if layer in (layer_numbers(key) or ())), "")

    def conversion(self) -> dict[str, Any]:
        """The keys that decide what becomes of a model, as JSON: what config.json of a converted model holds."""
        values = self.model_dump(mode="json", include=CONVERSION, exclude_none=True)
        for block in (values, *values[LAYERS].values()):
            if not block["mixer_options"]:
                del block["mixer_options"]
        if not values[LAYERS]:
            del values[LAYERS]
        return values

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and complete: `load_recipe(recipe.to_dict()) == recipe`, whatever later defaults are."""
        others = self.model_dump(mode="json", exclude=CONVERSION)
        return self.conversion() | {key: value for key, value in others.items() if value is not None}


# All others say how a model is trained and judged, or where it is.
CONVERSION = {
    *("version", "mixer", *MIXER_KEYS, "mixer_options"),
    *(LAYERS, "keep_softmax", "convert_sliding", "seed"),
}


def check_training_keys(keys: Iterable[str]) -> None:
    """Refuse keys to be changed that a training would ignore, since they say how a model is converted.

    Raises:
        UsageError: naming the first one.
    """
    for key in keys:
        if key.partition(".")[0] in CONVERSION - {"seed"}:  # draws of a training come from the seed, too
            what = f"{key} can't be changed for a training, which keeps the mixers that its checkpoint has"
            raise UsageError(what, "Convert the base model again with it, or leave it out")


def load_recipe(
    ref: str | Path | Mapping[str, Any] | Recipe | None = None, overrides: Mapping[str, Any] = {}
) -> Recipe:
    """The recipe in a file, of a shipped name or in a mapping; None is the shipped default.

    `overrides` change single keys (`{"window": 128, "train.1.lr": "3e-3"}`); strings are read as YAML. None leaves a
    key as it is, but for those of sections, where it is a value (`{"train.1.clip": None}`). Where an override names
    another mixer or feature map, keys of the recipe that belong to the old one are dropped. Raises `UsageError` that
    lists every problem.
    """
    data, source, where = _read(DEFAULT_RECIPE if ref is None else ref)
    # In a section null can be an answer.
    given = {key: value for key, value in overrides.items() if value is not None or key.partition(".")[0] in SECTIONS}
    data = override(data, given, where)
    try:
        return Recipe(**data)
    except RecipeError as error:
        raise RecipeError(error.problems, source, where) from None


def _read(ref: Any) -> tuple[dict[str, Any], str, dict[str, str]]:
    """The keys and values of `ref`, what to call it, and the place of each key."""
    if isinstance(ref, Recipe):
        return ref.to_dict(), "the recipe", {}
    if isinstance(ref, Mapping):
        return {str(key): value for key, value in ref.items()}, "the recipe", {}
    return read_recipe(ref)
