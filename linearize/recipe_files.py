"""Where a recipe comes from: shipped ones, files and mappings, and keys that are changed on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from linearize.errors import UsageError, did_you_mean
from linearize.keep_softmax import FROM_FILE
from linearize.mixers.registry import MIXERS, Entry
from linearize.yaml_text import parse

MAX_FILE_BYTES = 1_000_000  # a recipe is a page of text: more than this is another file, given by mistake
DEFAULT_MIXER = "window"
MIXER_KEYS = ("feature_map", "feature_map_options", "window", "sinks")
OPTIONS = ("feature_map_options", "mixer_options")
SECTIONS = ("data", "train", "every", "eval")
LAUNCHERS = "accelerate"  # a folder of files for `accelerate launch`, beside the recipes
MOST_LAYERS = 10_000  # so that a short key can't ask for gigabytes
LAYERS = "layers"  # blocks of mixer keys, each under a list of layers
PLACES = ("model", "data.source")  # paths may hold anything, also what YAML has another meaning for


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship with linearize: name -> file."""
    from importlib.resources import files

    root = Path(str(files("linearize_recipes")))
    found = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    return {name: path for name, path in found.items() if not name.startswith(f"{LAUNCHERS}/")}


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
    hint = did_you_mean(str(ref), shipped)
    if path.suffix in (".yaml", ".yml") or (len(path.parts) > 1 and not hint):
        raise UsageError(f"there is no recipe file {path}", "See `linearize recipes ls` for the shipped ones")
    raise UsageError(
        f"there is no recipe called '{ref}'; shipped: {', '.join(shipped)}" + (f"; {hint}" if hint else ""),
        "" if hint else "Give one of these names or the path of a YAML file",
    )


def read_recipe(ref: str | Path) -> tuple[dict[str, Any], str, dict[str, str]]:
    """The keys and values of a recipe file, what to call it, and the place of each key."""
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


def copy_recipe(ref: str | Path, file: str | Path) -> Path:
    """Copy a recipe's text to a file that isn't there yet (into a folder: under its own name), and say where it is.

    Raises:
        UsageError: there is no such recipe, or a file already, or it can't be written.
    """
    read_recipe(ref)  # what isn't one is refused
    source = find_recipe(ref)
    path, begun = Path(file) / source.name if Path(file).is_dir() else Path(file), False
    try:
        with open(path, "xb") as copy:
            begun = True
            copy.write(source.read_bytes())
    except FileExistsError:
        raise UsageError(f"there is a file {path} already", "Choose another name, or remove it") from None
    except OSError as error:
        if begun:
            path.unlink(missing_ok=True)
        raise UsageError(f"can't write {path}: {error.strerror}", "Choose another place") from None
    return path


def override(data: dict[str, Any], overrides: Mapping[str, Any], where: dict[str, str]) -> dict[str, Any]:
    """`data` with single keys changed; notes in `where` that they were. Strings are read as YAML, paths as they are."""
    return _changed(data, {key: _typed(key, value) for key, value in overrides.items()}, where)


def _changed(data: dict[str, Any], values: Mapping[str, Any], where: dict[str, str]) -> dict[str, Any]:
    """`override` with typed values; of a recipe, or of a block of `layers`."""
    data = dict(data)
    if values.get("mixer", data.get("mixer")) != data.get("mixer"):
        data.pop("mixer_options", None)
        entry = MIXERS.get(values["mixer"]) if isinstance(values["mixer"], str) else None
        before = MIXERS.get(str(data.get("mixer", DEFAULT_MIXER)))
        data = {key: value for key, value in data.items() if _belongs(key, entry, before)}
    if values.get("feature_map", data.get("feature_map")) != data.get("feature_map"):
        data.pop("feature_map_options", None)
    of_blocks: dict[Any, dict[str, Any]] = {}
    for key, value in values.items():
        head, *path = key.split(".")
        if head == LAYERS and path:
            name = _block_named(data.get(LAYERS), path[0])
            where[".".join((LAYERS, str(name), *path[1:]))] = "an override"
            of_blocks.setdefault(name, {})[".".join(path[1:])] = value
            continue
        where[key] = "an override"
        if path and head in (*OPTIONS, *SECTIONS):
            data[head] = _put(data.get(head, [] if head == "train" else {}), path, value, key)
        else:
            data[key] = value
    for name, changes in of_blocks.items():
        blocks = data[LAYERS] if isinstance(data.get(LAYERS), Mapping) else {}
        block = changes.pop("", blocks.get(name, {}))  # the whole block was given
        if changes:
            block = _changed(dict(block) if isinstance(block, Mapping) else {}, changes, {})
        data[LAYERS] = {**blocks, name: block}
    return data


def layer_numbers(text: str) -> list[int] | None:
    """The layers that a key of `layers` names, in its order: "2-4, 9" is [2, 3, 4, 9]. None if it names none, or more
    than a model can have."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]) or len(numbers) > MOST_LAYERS:
            return None
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return numbers


def _block_named(blocks: Any, name: str) -> Any:
    """The key of `blocks` that names the layers that `name` does, or `name` itself."""
    numbers = layer_numbers(name)
    for key in blocks if isinstance(blocks, Mapping) and numbers is not None else ():
        if sorted(layer_numbers(str(key)) or ()) == sorted(numbers or ()):
            return key
    return name


def _put(old: Any, path: list[str], value: Any, key: str) -> Any:
    """`old` with what stands at `path` in it replaced; nothing is changed in place."""
    if not path:
        return value
    head, *rest = path
    if isinstance(old, (list, tuple)):
        items = list(old)
        if not head.isdecimal() or int(head) >= len(items):
            raise UsageError(*_no_such_item(items, key))
        number = int(head)
        return [*items[:number], _put(items[number], rest, value, key), *items[number + 1 :]]
    known = old if isinstance(old, dict) else {}
    return {**known, head: _put(known.get(head), rest, value, key)}


def _no_such_item(items: list[Any], key: str) -> tuple[str, str]:
    if not key.startswith("train.") or not items:
        return f"{key}: the recipe has no such entry", "Write it into the recipe"
    stages = [item.get("stage") if isinstance(item, dict) else item for item in items]
    return (
        f"{key}: a stage is named by its number, from 0",
        "Choose " + ", ".join(f"train.{number} ({stage})" for number, stage in enumerate(stages)),
    )


def _belongs(key: str, mixer: Entry | None, before: Entry | None) -> bool:
    """Whether what a recipe says at `key` can hold for another mixer, too. A feature map can where both mixers begin
    with the same one: some can't take those of others."""
    if key not in MIXER_KEYS or mixer is None:
        return True
    same = before is None or mixer.options.get("feature_map") == before.options.get("feature_map")
    return key in mixer.options and (same or not key.startswith("feature_map"))


def _names_file(key: str, value: str) -> bool:
    """Whether it is `keep_softmax=@FILE`; YAML has no use for an @."""
    return key == "keep_softmax" and value.startswith(FROM_FILE)


def _typed(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        typed = (value or None) if key in PLACES or _names_file(key, value) else yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        raise UsageError(f"the value of {key} is not valid YAML: {value!r}", "Quote it") from None
    # In a section null can be an answer: `train.1.clip=null`.
    if typed is None and not (value.strip() and key.partition(".")[0] in SECTIONS):
        raise UsageError(f"{key} needs a value", f"Leave {key} out to use its default")
    return typed
