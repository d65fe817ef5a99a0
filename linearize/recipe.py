"""The schema of a recipe: which layers become what, and how what they lost is trained back.

A recipe is a YAML file. Unknown keys are errors, every problem is reported at once and with its line, and names
are checked against the registries, so that a typo is found before a model is touched. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from linearize.errors import LinearizeError
from linearize.keep_softmax import FORMS
from linearize.mixers.registry import FEATURE_MAPS, MIXERS, Entry, check_options, lookup
from linearize.recipe_errors import Problem, RecipeError, problems_of, wrong
from linearize.recipe_files import MIXER_KEYS, SECTIONS, find_recipe, override, read_recipe, shipped_recipes
from linearize.training.schema import SELF, Data, Distill, Evaluation, Every, Name, Precision, Stage, Trackers, as_tuple

__all__ = ["Recipe", "RecipeError", "find_recipe", "load_recipe", "shipped_recipes"]

DEFAULT_RECIPE = "default"


def _keep_softmax(value: Any) -> str | tuple[int, ...]:
    """`value` in its one normal form: "none", "every:4", "25%" or an ascending tuple of layer numbers."""
    if isinstance(value, bool) or not isinstance(value, (str, int, list, tuple)):
        raise ValueError(f"can't be {value!r}; write {FORMS}")
    if isinstance(value, int):
        value = [value]
    if isinstance(value, str):
        text = value.strip()
        if text == "auto":
            raise ValueError(f"'auto' is not available in this version; write {FORMS}")
        percent = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", text)
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
    mixer: str = Field("window", description="what stands in the place of softmax attention")
    feature_map: str | None = Field(None, description="the map phi that replaces exp(q·k) by phi(q)·phi(k)")
    feature_map_options: dict[str, Any] | None = Field(None, description="options of the feature map")
    window: Annotated[int, Field(ge=1)] | None = Field(None, description="newest tokens under exact softmax")
    sinks: Annotated[int, Field(ge=0)] | None = Field(None, description="first tokens that stay exact")
    mixer_options: dict[str, Any] = Field({}, description="further options, for a mixer of your own")
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
        problems, broken = [], set()
        try:
            handler(data)
        except ValidationError as error:
            problems = problems_of(error, cls)
            broken = {problem.key.partition(".")[0] for problem in problems}
        filled, more = _fill({key: value for key, value in data.items() if key not in broken}, broken)
        if problems or more:
            raise RecipeError(problems + more)
        return handler(filled)

    def mixer_spec(self) -> dict[str, Any]:
        """What `linearize.mixers.build_mixer` takes: the mixer's name and every option that it has."""
        keys = {key: getattr(self, key) for key in MIXER_KEYS if getattr(self, key) is not None}
        return {"name": self.mixer, **keys, **self.mixer_options}

    def conversion(self) -> dict[str, Any]:
        """The keys that decide what becomes of a model, as JSON: what config.json of a converted model holds."""
        values = self.model_dump(mode="json", include=CONVERSION, exclude_none=True)
        if not values["mixer_options"]:
            del values["mixer_options"]
        return values

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and complete: `load_recipe(recipe.to_dict()) == recipe`, whatever later defaults are."""
        others = self.model_dump(mode="json", exclude=CONVERSION)
        return self.conversion() | {key: value for key, value in others.items() if value is not None}


# All others say how a model is trained and judged, or where it is.
CONVERSION = {
    *("version", "mixer", *MIXER_KEYS, "mixer_options"),
    *("keep_softmax", "convert_sliding", "seed"),
}


def _fill(data: dict[str, Any], broken: set[str]) -> tuple[dict[str, Any], list[Problem]]:
    """`data` with the mixer's own defaults, and what is wrong with it apart from the `broken` keys."""
    problems: list[Problem] = []
    if "mixer" in broken:
        return data, problems
    mixer = data.get("mixer", Recipe.model_fields["mixer"].default)
    entry = _look_up(MIXERS, "mixer", mixer, problems)
    if entry:
        for key in MIXER_KEYS:
            if key not in entry.options and data.get(key) is not None:
                problems.append(wrong(key, _does_not_apply(key, mixer)))
            elif key in entry.options and data.get(key) is None and key not in broken:
                data[key] = entry.options[key]
    if entry and "mixer_options" not in broken:
        own = {key: value for key, value in entry.options.items() if key not in MIXER_KEYS}
        entry = replace(entry, options=own)
        data["mixer_options"] = _options("mixer", mixer, entry, data.get("mixer_options") or {}, problems)
    if isinstance(data.get("feature_map"), str):
        name, given = data["feature_map"], data.get("feature_map_options") or {}
        entry = _look_up(FEATURE_MAPS, "feature_map", name, problems)
        if entry and "feature_map_options" not in broken:
            data["feature_map_options"] = _options("feature_map", name, entry, given, problems)
    return data, problems


def _look_up(registry: Mapping[str, Entry], kind: str, name: str, problems: list[Problem]) -> Entry | None:
    try:
        return lookup(registry, kind, name)
    except LinearizeError as error:
        problems.append(wrong(kind, error.what))
        return None


def _options(kind: str, name: str, entry: Entry, given: dict, problems: list[Problem]) -> dict[str, Any]:
    prefix = f"{kind}_options"
    merged: dict[str, Any] = dict(entry.options)
    for key, value in given.items():
        path = f"{prefix}.{key}"
        try:
            check_options(kind, name, entry, {key: value})
        except LinearizeError as error:
            problems.append(wrong(path, error.what))
            continue
        default = entry.options[key]
        if not _same_kind(value, default):
            problems.append(wrong(path, f"must be like its default {default!r}, not {value!r}"))
        merged[key] = value
    return merged


def _same_kind(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, float) and not isinstance(value, bool):
        return isinstance(value, (int, float))
    return type(value) is type(default)


def _does_not_apply(key: str, mixer: str) -> str:
    others = [name for name, entry in MIXERS.items() if key in entry.options]
    mend = f"use mixer: {others[0]}, or leave {key} out" if others else f"leave {key} out"
    return f"mixer '{mixer}' has no {key}; {mend}"


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
