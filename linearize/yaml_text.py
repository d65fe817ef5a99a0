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


def _keys(node: yaml.Node, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """(key, line) of every key, with those that it stands in before it: `train.1.lr`. Items of lists have numbers."""
    seen = set() if seen is None else seen
    if id(node) in seen:  # an alias, which may stand in itself
        return
    seen.add(id(node))
    items: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(number), value, value) for number, value in enumerate(node.value)]
    for name, at, value in items:
        yield prefix + name, at.start_mark.line + 1
        yield from _keys(value, f"{prefix}{name}.", seen)
