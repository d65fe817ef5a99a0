"""How the figures of a run are put into words, in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE = "–"
SIDES = ("teacher", "student")


def number(value: float | None, form: str, *, none: str = NONE, minus: str = "−") -> str:
    """`value` in a format of Python, without negative zeros; `none` for a figure there isn't."""
    if value is None:
        return none
    text = format(value, form)
    return text.lstrip("-") if float(text) == 0 else text.replace("-", minus)


def percent(value: float) -> str:
    """`0.934` as `93 %`; a figure that isn't 0 or 1 never reads as if it were."""
    if 0.01 <= value <= 0.99 or value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    return f"{min(max(100 * value, 0.1), 99.9):.1f} %" if 0 < value < 1 else f"{100 * value:.1f} %"


def short(task: str) -> str:
    """The name without what all our tasks have in common."""
    return task.removeprefix("linearize_")


def of_gate(results: Mapping[str, Any], gate: str) -> dict[str, Any]:
    """The recall tasks of one gate, by short name."""
    return {short(name): task for name, task in results.get("tasks", {}).items() if task["gate"] == gate}
