"""Which layers keep softmax attention: the `keep_softmax` grammar, applied to a model's layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from linearize.errors import UsageError

FORMS = "none, a list of layers such as 0,7,15, every:4 or 25%"


def kept_layers(spec: str | int | Sequence[int], convertible: Sequence[int], with_attention: Sequence[int]) -> set[int]:
    """The decoder layers that `spec` keeps as they are.

    Args:
        spec: "none"; layer indices ("0,7,15" or [0, 7, 15]); "every:4", which is positions 0, 4, 8... among
            the convertible layers; or "25%", that share of the convertible layers, evenly spread, the first
            one first.
        convertible: indices of the layers that would be converted, ascending.
        with_attention: indices of all layers that have attention: the ones that a list may name.

    Raises:
        UsageError: an unknown form, or a layer that the model doesn't have.
    """
    if isinstance(spec, str):
        text = spec.strip()
        if text == "none":
            return set()
        if text == "auto":
            raise UsageError("keep_softmax 'auto' is not available in this version", f"Write {FORMS}")
        if match := re.fullmatch(r"every:([1-9]\d{0,8})", text):
            return set(convertible[:: int(match[1])])
        if match := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", text):
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
    count = int(percent * len(convertible) / 100 + 0.5)
    if percent > 0 and convertible:
        count = max(count, 1)
    return {convertible[i * len(convertible) // count] for i in range(count)}


def ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
