"""Which layers keep softmax attention: the `keep_softmax` grammar, applied to a model's layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from linearize.errors import UsageError

FORMS = "none, a list of layers such as 0,7,15, every:4, 25%, auto:25% or @selection.json"
AUTO, FROM_FILE = "auto:", "@"  # what these begin is settled by `linearize.selection_file`, once the model is known
Kept = TypeVar("Kept")
PERCENT = r"(\d{1,3}(?:\.\d{1,9})?)%"


def kept_layers(spec: str | int | Sequence[int], convertible: Sequence[int], with_attention: Sequence[int]) -> set[int]:
    """The decoder layers that `spec` keeps as they are.

    Args:
        spec: "none"; layer indices ("0,7,15" or [0, 7, 15]); "every:4", which is positions 0, 4, 8... among
            the convertible layers; "25%", that share of the convertible layers, evenly spread, the first
            one first; or "auto:25%" or "auto:3", whose layers aren't known yet: as many, evenly spread, stand in.
        convertible: indices of the layers that would be converted, ascending.
        with_attention: indices of all layers that have attention: the ones that a list may name.

    Raises:
        UsageError: an unknown form, or a layer that the model doesn't have.
    """
    if isinstance(spec, str):
        text = spec.strip()
        if text == "none":
            return set()
        if text.startswith(AUTO):
            return spread(budget_count(text.removeprefix(AUTO), len(convertible)), convertible)
        if match := re.fullmatch(r"every:([1-9]\d{0,8})", text):
            return set(convertible[:: int(match[1])])
        if match := re.fullmatch(PERCENT, text):
            return _share(float(match[1]), convertible)
        if not re.fullmatch(r"\d{1,9}(\s*,\s*\d{1,9})*", text):
            raise UsageError(f"keep_softmax can't be '{spec}'", f"Write {FORMS}")
        spec = [int(part) for part in text.split(",")]
    wanted = {spec} if isinstance(spec, int) else set(spec)
    wrong = sorted(wanted - set(with_attention))
    if wrong:
        layers = "layer " + str(wrong[0]) if len(wrong) == 1 else "layers " + ", ".join(map(str, wrong))
        raise UsageError(
            f"keep_softmax names {layers}; the model's layers with attention are {ranges(with_attention)}",
            "Name layers of that list",
        )
    return wanted


def _share(percent: float, convertible: Sequence[int]) -> set[int]:
    if percent > 100:
        raise UsageError(f"keep_softmax can't be '{percent:g}%'", "Write at most 100%")
    return spread(_rounded(percent, len(convertible)), convertible)


def _rounded(percent: float, layers: int) -> int:
    count = int(percent * layers / 100 + 0.5)
    return max(count, 1) if percent > 0 and layers else count


def spread(count: int, layers: Sequence[Kept]) -> set[Kept]:
    """`count` of the `layers`, evenly spread, the first one first."""
    return {layers[i * len(layers) // count] for i in range(count)}


def is_budget(text: str) -> bool:
    """Whether `text` is a share of the layers such as "25%", or a number of them."""
    percent = re.fullmatch(PERCENT, text)
    return 0 < float(percent[1]) < 100 if percent else bool(re.fullmatch(r"[1-9]\d{0,8}", text))


def budget_count(budget: str, units: int, what: str = "convertible layers") -> int:
    """How many of so many `units`, called `what`, a budget keeps: "25%" of them, rounded, at least one; or "3".

    Raises:
        UsageError: it is neither, or leaves no layer to convert.
    """
    if not is_budget(budget):
        raise UsageError(f"the budget can't be '{budget}'", "Write a share of the layers such as 25%, or a number")
    count = _rounded(float(budget[:-1]), units) if budget.endswith("%") else int(budget)
    if count >= units:
        raise UsageError(
            f"a budget of {budget} keeps {count} of the model's {units} {what} as softmax, "
            "so nothing is left to convert",
            f"Keep at most {units - 1}" if units > 1 else "Convert it without keep_softmax",
        )
    return count


def ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
