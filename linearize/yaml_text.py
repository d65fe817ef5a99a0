"""YAML text to keys, values and the lines they stand on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from linearize.errors import UsageError


def parse(text: str, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys and values of YAML text, and the line of each key."""
    try:
        data = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise UsageError(f"{source}{line} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{source} is not valid YAML: {error}") from None
    if data is None:
        return {}, {}
    if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{source} must be a mapping of keys to values, not a {type(data).__name__}")
    lines: dict[str, int] = {}
    twice = []
    for key, line in _keys(node):
        if key in lines:
            twice.append(f"key '{key}' (line {line}) is given already on line {lines[key]}")
        lines.setdefault(key, line)
    if twice:
        raise UsageError(f"{source}: " + "; ".join(twice), "Keep one of them")
    return {str(key): value for key, value in data.items()}, {key: f"line {line}" for key, line in lines.items()}


def _keys(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(key, line) of every key of a recipe: the top level and the one below it."""
    for key, value in node.value:
        name = prefix + str(key.value)
        yield name, key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and not prefix:
            yield from _keys(value, f"{name}.")
