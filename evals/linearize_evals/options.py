"""What is typed after `linearize eval`, read into the arguments of `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from linearize.errors import UsageError

NEEDED = ("lm_eval", "matplotlib", "scipy", "jinja2")  # of the extra `eval`


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The command line's options with its lists of numbers and names taken apart.

    Raises:
        UsageError: something isn't a number, or a package that evaluation needs is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"evaluation needs {', '.join(missing)}", "pip install 'linearize[eval]'")
    arguments = dict(options)
    for key, kind in (("lengths", int), ("pairs", int), ("depths", float)):
        if arguments[key] is not None:
            arguments[key] = _numbers(f"--{key}", arguments[key], kind)
    arguments["tasks"] = [name for given in arguments["tasks"] for name in given.split(",")]
    if str(arguments["batch_size"]).isdecimal():
        arguments["batch_size"] = int(arguments["batch_size"])
    return arguments


def _numbers(name: str, text: str, kind: Callable[[str], float]) -> list[float]:
    return [_number(name, part, kind) for part in text.split(",") if part.strip()]


def _number(name: str, text: str, kind: Callable[[str], float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        what, example = ("whole numbers", "512,1024") if kind is int else ("numbers from 0 to 1", "0,0.5,1")
        raise UsageError(f"{name} takes {what}, with commas between them, not '{text}'", f"For example {example}")
    return value
