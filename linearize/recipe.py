"""The schema of a recipe: which layers become what.

A recipe is a flat YAML file. Unknown keys are errors, every problem is reported at once and with its line,
and names are checked against the registries, so that a typo is found before a model is touched. Nothing here
imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from linearize.errors import LinearizeError, UsageError, did_you_mean
from linearize.keep_softmax import FORMS
from linearize.mixers.registry import FEATURE_MAPS, MIXERS, Entry, check_options, lookup
from linearize.yaml_text import parse

DEFAULT_RECIPE = "default"
MAX_FILE_BYTES = 1_000_000  # a recipe is a page of text: more than this is another file, given by mistake
MIXER_KEYS = ("feature_map", "feature_map_options", "window", "sinks")


class Problem(NamedTuple):
    """One thing that is wrong: `before`, the place of `key` in the file, then `after`."""

    key: str
    before: str
    after: str

    def place(self, where: Mapping[str, str]) -> str:
        return where.get(self.key) or where.get(self.key.split(".")[0]) or ""

    def position(self, where: Mapping[str, str]) -> int:
        _, _, line = self.place(where).partition("line ")
        return int(line or 0)

    def text(self, where: Mapping[str, str]) -> str:
        place = self.place(where)
        return self.before + (f" ({place})" if place else "") + self.after

    def bare(self) -> str:
        """What is wrong, for a reader who knows which key is meant."""
        return self.after.removeprefix(": ") if self.before == self.key else self.before + self.after


class RecipeError(UsageError):
    """Every problem of one recipe. `where` maps keys to their place in the file (`{"window": "line 7"}`)."""

    def __init__(self, problems: list[Problem], source: str = "the recipe", where: Mapping[str, str] = {}) -> None:
        self.problems = problems
        lines = [problem.text(where) for problem in sorted(problems, key=lambda one: one.position(where))]
        if len(lines) == 1:
            super().__init__(f"{source}: {lines[0]}")
        else:
            super().__init__(f"{source} has {len(lines)} problems:\n  " + "\n  ".join(lines))


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
    """What a model is converted to. See docs/recipes.md.

    Keys that the mixer takes and the recipe leaves out are filled in from the mixer's defaults; those that it
    doesn't take are None. Raises `RecipeError` (a `UsageError`) that lists every problem.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = Field(1, description="version of this schema")
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

    @model_validator(mode="wrap")
    @classmethod
    def _collect(cls, data: Any, handler: Any) -> Recipe:
        if not isinstance(data, dict):
            return handler(data)
        problems, broken = [], set()
        try:
            handler(data)
        except ValidationError as error:
            problems = [_problem(item) for item in error.errors(include_url=False)]
            broken = {problem.key for problem in problems}
        filled, more = _fill({key: value for key, value in data.items() if key not in broken}, broken)
        if problems or more:
            raise RecipeError(problems + more)
        return handler(filled)

    def mixer_spec(self) -> dict[str, Any]:
        """What `linearize.mixers.build_mixer` takes: the mixer's name and every option that it has."""
        keys = {key: getattr(self, key) for key in MIXER_KEYS if getattr(self, key) is not None}
        return {"name": self.mixer, **keys, **self.mixer_options}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able and complete: `load_recipe(recipe.to_dict()) == recipe`, whatever later defaults are."""
        values = self.model_dump(mode="json", exclude_none=True)
        if not values["mixer_options"]:
            del values["mixer_options"]
        return values


def _wrong(key: str, text: str) -> Problem:
    return Problem(key, key, f": {text}")


def _problem(item: Any) -> Problem:
    """One of pydantic's errors in our words."""
    key = str(item["loc"][0])
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        hint = did_you_mean(key, Recipe.model_fields)
        rest = "; recipes allow only documented keys" + (f"; {hint}" if hint else "")
        return Problem(key, f"unknown key '{key}'", rest)
    if kind == "literal_error":
        return _wrong(key, f"this release of linearize reads version {context['expected']}, not {value!r}")
    if kind == "greater_than_equal":
        return _wrong(key, f"must be at least {context['ge']}, not {value!r}")
    if kind == "value_error":
        return _wrong(key, str(context["error"]))
    wanted = {
        "int_type": "an integer",
        "bool_type": "true or false",
        "dict_type": "a mapping",
        "string_type": "a name",
    }
    return _wrong(key, f"must be {wanted[kind]}, not {value!r}" if kind in wanted else f"{item['msg']}, not {value!r}")


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
                problems.append(_wrong(key, _does_not_apply(key, mixer)))
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
        problems.append(_wrong(kind, error.what))
        return None


def _options(kind: str, name: str, entry: Entry, given: dict, problems: list[Problem]) -> dict[str, Any]:
    prefix = f"{kind}_options"
    merged: dict[str, Any] = dict(entry.options)
    for key, value in given.items():
        path = f"{prefix}.{key}"
        try:
            check_options(kind, name, entry, {key: value})
        except LinearizeError as error:
            problems.append(_wrong(path, error.what))
            continue
        default = entry.options[key]
        if not _same_kind(value, default):
            problems.append(_wrong(path, f"must be like its default {default!r}, not {value!r}"))
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


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship with linearize: name -> file."""
    from importlib.resources import files

    root = Path(str(files("linearize_recipes")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def load_recipe(
    ref: str | Path | Mapping[str, Any] | Recipe | None = None, overrides: Mapping[str, Any] = {}
) -> Recipe:
    """The recipe in a file, of a shipped name or in a mapping; None is the shipped default.

    `overrides` change single keys (`{"window": 128, "feature_map_options.features": "64"}`); strings are read
    as YAML. Where an override names another mixer or feature map, keys of the recipe that belong to the old
    one are dropped. Raises `UsageError` that lists every problem.
    """
    data, source, where = _read(DEFAULT_RECIPE if ref is None else ref)
    data = _override(data, {key: value for key, value in overrides.items() if value is not None}, where)
    try:
        return Recipe(**data)
    except RecipeError as error:
        raise RecipeError(error.problems, source, where) from None


def _read(ref: Any) -> tuple[dict[str, Any], str, dict[str, str]]:
    """The keys and values of `ref`, what to call it, and the line of each key."""
    if isinstance(ref, Recipe):
        return ref.to_dict(), "the recipe", {}
    if isinstance(ref, Mapping):
        return {str(key): value for key, value in ref.items()}, "the recipe", {}
    path = find_recipe(ref)
    source = f"recipe {path.name}"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is too large to be a recipe", "Give the path of a YAML file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"can't read the recipe {path}: {reason}") from None
    data, where = parse(text, source)
    return data, source, where


def find_recipe(ref: str | Path) -> Path:
    """The file of a shipped recipe (by name) or of the user (by path)."""
    shipped = shipped_recipes()
    if isinstance(ref, str) and ref in shipped:
        return shipped[ref]
    try:
        path = Path(ref).expanduser()
    except RuntimeError:
        raise UsageError(f"the recipe {ref} is in the home folder of a user who doesn't exist") from None
    if path.exists():
        return path
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"there is no recipe file {path}", "See `linearize recipes ls` for the shipped ones")
    hint = did_you_mean(str(ref), shipped)
    raise UsageError(
        f"there is no recipe called '{ref}'; shipped: {', '.join(shipped)}" + (f"; {hint}" if hint else ""),
        "" if hint else "Give one of these names or the path of a YAML file",
    )


def _override(data: dict[str, Any], overrides: Mapping[str, Any], where: dict[str, str]) -> dict[str, Any]:
    values = {key: _typed(key, value) for key, value in overrides.items()}
    data = dict(data)
    if values.get("mixer", data.get("mixer")) != data.get("mixer"):
        data.pop("mixer_options", None)
        entry = MIXERS.get(values["mixer"]) if isinstance(values["mixer"], str) else None
        data = {key: value for key, value in data.items() if _belongs(key, entry)}
    if values.get("feature_map", data.get("feature_map")) != data.get("feature_map"):
        data.pop("feature_map_options", None)
    for key, value in values.items():
        where[key] = "an override"
        head, _, option = key.partition(".")
        if option and head in ("feature_map_options", "mixer_options"):
            old = data.get(head)
            data[head] = {**(old if isinstance(old, dict) else {}), option: value}
        else:
            data[key] = value
    return data


def _belongs(key: str, mixer: Entry | None) -> bool:
    return key not in MIXER_KEYS or mixer is None or key in mixer.options


def _typed(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        typed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        raise UsageError(f"the value of {key} is not valid YAML: {value!r}", "Quote it") from None
    if typed is None:
        raise UsageError(f"{key} needs a value", f"Leave {key} out to use its default")
    return typed
