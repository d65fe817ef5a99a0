"""What a recipe says of mixers: one for all layers, others for the layers that `layers` names, and their options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from linearize.errors import LinearizeError, UsageError
from linearize.keep_softmax import ranges
from linearize.mixers.registry import FEATURE_MAPS, LEAST, MIXERS, Entry, check_options, lookup, wrong_value
from linearize.recipe_errors import Problem, wrong
from linearize.recipe_files import DEFAULT_MIXER, MIXER_KEYS, layer_numbers

Window = Annotated[int, Field(ge=LEAST["window"])]
Sinks = Annotated[int, Field(ge=LEAST["sinks"])]


class Block(BaseModel):
    """The mixer of the layers that one key of `layers` names. It stands alone: what it leaves out is not the recipe's,
    but the mixer's own default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mixer: str = DEFAULT_MIXER
    feature_map: str | None = None
    feature_map_options: dict[str, Any] | None = None
    window: Window | None = None
    sinks: Sinks | None = None
    mixer_options: dict[str, Any] = {}


def spec_of(block: Any) -> dict[str, Any]:
    """What `linearize.mixers.build_mixer` takes: the name of the block's (or recipe's) mixer, and all its options."""
    keys = {key: getattr(block, key) for key in MIXER_KEYS if getattr(block, key) is not None}
    return {"name": block.mixer, **keys, **block.mixer_options}


def named_blocks(given: Any, problems: list[Problem]) -> Any:
    """The recipe's `layers` with keys of text; those that name no layers, or one that is named already, are problems.
    What isn't a mapping is returned as it is."""
    if not isinstance(given, Mapping):
        return given
    blocks: dict[str, Any] = {}
    owner: dict[int, str] = {}
    for key, block in given.items():
        name = str(key)
        blocks[name] = block.model_dump() if isinstance(block, Block) else block
        numbers = layer_numbers(name)
        if numbers is None:
            problems.append(wrong(f"layers.{name}", "names no layers; write numbers and ranges, such as 2-9 or 10, 12"))
            continue
        twice = sorted(number for number, times in Counter(numbers).items() if times > 1 or number in owner)
        if twice:
            others = dict.fromkeys(owner.get(number, name) for number in twice)
            where = " and ".join(f"'{other}'" for other in others)
            word = "layer" if len(twice) == 1 else "layers"
            problems.append(wrong(f"layers.{name}", f"{word} {ranges(twice)} stands in {where} already; name it once"))
        owner |= dict.fromkeys(numbers, name)
    return blocks


def in_order(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """`layers` in its one normal form: keys as `ranges` writes them, the first layer first."""
    numbers = {key: layer_numbers(key) or [] for key in blocks}
    return {ranges(numbers[key]): blocks[key] for key in sorted(blocks, key=lambda key: min(numbers[key]))}


def fill(data: dict[str, Any], broken: set[str], prefix: str = "") -> tuple[dict[str, Any], list[Problem]]:
    """`data` (of a recipe, or of a block of `layers`) with the mixer's own defaults, and what is wrong with it apart
    from the `broken` keys. `prefix` is what stands before its keys in messages."""
    problems: list[Problem] = []
    if "mixer" in broken:
        return data, problems
    mixer = data.get("mixer", DEFAULT_MIXER)
    entry = _look_up(MIXERS, "mixer", mixer, f"{prefix}mixer", problems)
    if entry:
        for key in MIXER_KEYS:
            if key not in entry.options and data.get(key) is not None:
                problems.append(wrong(prefix + key, _does_not_apply(key, mixer)))
            elif key in entry.options and data.get(key) is None and key not in broken:
                data[key] = entry.options[key]
    if entry and "mixer_options" not in broken:
        own = replace(entry, options={key: value for key, value in entry.options.items() if key not in MIXER_KEYS})
        given, at = data.get("mixer_options") or {}, f"{prefix}mixer_options."
        data["mixer_options"] = _inner(_options("mixer", mixer, own, given, at, problems), [mixer], at, problems)
    if "feature_map_options" not in broken:
        data |= _of_map(data, prefix, problems)
    elif isinstance(data.get("feature_map"), str):
        _look_up(FEATURE_MAPS, "feature_map", data["feature_map"], f"{prefix}feature_map", problems)
    return data, problems


def check_named(blocks: Mapping[str, Any], reasons: Mapping[int, str]) -> None:
    """Refuse `layers` that names a layer which isn't converted.

    Args:
        reasons: the layers that have attention -> why they stay as they are, or "".

    Raises:
        UsageError: naming each of them.
    """
    problems = []
    for key in blocks:
        numbers = layer_numbers(key) or []
        absent = [number for number in numbers if number not in reasons]
        if absent:
            word = "layers" if len(absent) > 1 else "layer"
            there = ranges(list(reasons))
            problems.append(
                f"layers.{key} names {word} {ranges(absent)}; the model's layers with attention are {there}"
            )
        problems += [
            f"layers.{key} names layer {number}, which stays as it is: {reasons[number]}"
            for number in numbers
            if reasons.get(number)
        ]
    if problems:
        raise UsageError("; ".join(problems), "Name layers that are converted")


def _of_map(data: Mapping[str, Any], prefix: str, problems: list[Problem]) -> dict[str, Any]:
    """The options of the feature map that `data` names, with the map's defaults."""
    name = data.get("feature_map")
    entry = _look_up(FEATURE_MAPS, "feature_map", name, f"{prefix}feature_map", problems) if _is_name(name) else None
    if entry is None:
        return {}
    given, at = data.get("feature_map_options") or {}, f"{prefix}feature_map_options."
    return {"feature_map_options": _options("feature_map", str(name), entry, given, at, problems)}


def _inner(options: dict[str, Any], outer: list[str], prefix: str, problems: list[Problem]) -> dict[str, Any]:
    """`options` of a mixer that stands over another one (`over`, `over_options`), with that one's checked and filled
    in, too."""
    name, given = options.get("over"), options.get("over_options")
    if not (_is_name(name) and isinstance(given, Mapping)):
        return options
    entry = _look_up(MIXERS, "mixer", name, f"{prefix}over", problems)
    if entry is None:
        return options
    if name in outer:
        problems.append(wrong(f"{prefix}over", f"mixer '{name}' can't stand over itself; name another mixer"))
        return options
    at = f"{prefix}over_options."
    inner = _options("mixer", str(name), entry, given, at, problems)
    inner |= _of_map(inner, at, problems)
    return options | {"over_options": _inner(inner, [*outer, str(name)], at, problems)}


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _look_up(registry: Mapping[str, Entry], kind: str, name: Any, key: str, problems: list[Problem]) -> Entry | None:
    try:
        return lookup(registry, kind, name)
    except LinearizeError as error:
        problems.append(wrong(key, error.what))
        return None


def _options(
    kind: str, name: str, entry: Entry, given: Mapping[str, Any], prefix: str, problems: list[Problem]
) -> dict[str, Any]:
    merged: dict[str, Any] = dict(entry.options)
    for key, value in given.items():
        if key in entry.options:
            found = wrong_value(key, value, entry.options[key])
            if found:
                problems.append(wrong(f"{prefix}{key}", found))
            merged[key] = value
            continue
        try:
            check_options(kind, name, entry, {key: value})
        except LinearizeError as error:
            problems.append(wrong(f"{prefix}{key}", error.what))
    return merged


def _does_not_apply(key: str, mixer: str) -> str:
    others = [name for name, entry in MIXERS.items() if key in entry.options]
    mend = f"use mixer: {others[0]}, or leave {key} out" if others else f"leave {key} out"
    return f"mixer '{mixer}' has no {key}; {mend}"
