"""All task families, and how their documents are built."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from linearize.errors import UsageError, did_you_mean
from linearize_evals.document import Cell, Document, Make, Setting

ZOOLOGY, RULER = "arXiv:2312.04927 (Zoology)", "arXiv:2404.06654 (RULER)"


@dataclass(frozen=True)
class Family:
    """A task.

    Attributes:
        name: its name in lm-eval.
        version: goes up when documents change.
        kind: "recall" (accuracy of answers) or "text" (perplexity by label or position).
        axes: which of "length", "depth" and "pairs" it has.
        summary: what it asks, in a line.
        source: the paper that it is after.
        build: "module:function", which takes a `Setting` and returns a `Make`; imported on use.
        defaults: lengths, depths, pairs (for its axes) and samples (documents in each cell).
    """

    name: str
    version: int
    kind: str
    axes: tuple[str, ...]
    summary: str
    source: str
    build: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _family(name: str, build: str, summary: str, source: str, kind: str = "recall", **defaults: Any) -> Family:
    axes = tuple(axis for axis, option in AXES.items() if option in defaults)
    module = f"linearize_evals.{build}"
    return Family(f"linearize_{name}", 1, kind, axes, summary, source, module, MappingProxyType(defaults))


AXES = {"length": "lengths", "depth": "depths", "pairs": "pairs"}
_NEEDLES = {"lengths": (256, 512, 1024, 2048), "samples": 25}
_LISTS = {"pairs": (8, 16, 32, 64, 128), "samples": 25}
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _family("mqar_lines", "mqar:lines", '"key: 345" lines, stated twice, then asked for', ZOOLOGY, **_LISTS),
        _family("mqar_lines_once", "mqar:lines_once", '"key: 345" lines, stated once', ZOOLOGY, **_LISTS),
        _family("mqar_json", "mqar:json", '"key": "3456" lines of JSON, stated once', ZOOLOGY, **_LISTS),
        _family(
            "mqar_nouns", "mqar:nouns", '"key: noun" lines, stated twice', ZOOLOGY, pairs=(8, 16, 32, 64), samples=25
        ),
        _family(
            "mqar_tokens",
            "mqar_tokens:tokens",
            "pairs of token ids; for models trained on it",
            ZOOLOGY,
            lengths=(64, 128, 256, 512),
            pairs=(4, 8, 16, 32, 64),
            samples=25,
        ),
        _family(
            "niah_single",
            "niah:single",
            "one seven-digit code in filler",
            RULER,
            lengths=_NEEDLES["lengths"],
            depths=_DEPTHS,
            samples=10,
        ),
        _family("niah_multikey", "niah:multikey", "eight codes in filler, one asked for", RULER, **_NEEDLES),
        _family("niah_multivalue", "niah:multivalue", "four codes of one key, all asked for", RULER, **_NEEDLES),
        _family("niah_multiquery", "niah:multiquery", "four codes of four keys, all asked for", RULER, **_NEEDLES),
        _family(
            "passkey",
            "niah:passkey",
            "one five-digit pass key in filler, said twice",
            "arXiv:2305.16300 (Landmark Attention)",
            lengths=_NEEDLES["lengths"],
            depths=_DEPTHS,
            samples=10,
        ),
        _family(
            "variable_tracking",
            "tracking:tracking",
            "where a value goes through a chain of moves",
            RULER,
            lengths=(512, 1024),
            pairs=(1, 2, 4),
            samples=25,
        ),
        _family(
            "ar_text",
            "text:ar_text",
            "tokens of natural text, by whether their pair stood earlier in the context",
            ZOOLOGY,
            "text",
            lengths=(1024,),
            samples=20,
        ),
        _family(
            "perplexity",
            "text:perplexity",
            "perplexity of natural text by length and position",
            "",
            "text",
            lengths=(512, 1024, 2048),
            samples=20,
        ),
    )
}


def tasks_path() -> Path:
    """The folder of task files, for lm-eval's `include_path`."""
    return Path(__file__).with_name("tasks")


def build(
    name: str,
    tokenizer: Any,
    *,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    depths: Sequence[float] | None = None,
    pairs: Sequence[int] | None = None,
    samples: int | None = None,
    text: str | None = None,
    haystack: str | None = None,
) -> list[Document]:
    """The documents of a task, those with the same number in every cell next to each other.

    A document depends on the task, its version, `seed`, its cell, its number, the tokenizer, and `text` or `haystack`;
    not on which others are built. Options for an axis
    that the task doesn't have are ignored; None stands for the task's default.

    Args:
        name: a task, one of `FAMILIES`.
        tokenizer: a tokenizer of transformers; for `linearize_mqar_tokens` also a vocabulary size.
        seed: of all documents.
        lengths: most tokens of a document, for each cell.
        depths: where the needle stands, from 0 (first) to 1 (right before the question).
        pairs: numbers of facts.
        samples: documents in each cell.
        text: the text of the text tasks (see `text.read_text`).
        haystack: the filler of the needle tasks (see `haystack.open_haystack`).

    Raises:
        UsageError: an unknown task, a value out of range, or a cell in which the facts don't fit.
    """
    family = find(name)
    asked = {"lengths": lengths, "depths": depths, "pairs": pairs}
    grid = {
        axis: _checked(axis, asked[option] if asked[option] is not None else family.defaults[option])
        for axis, option in AXES.items()
        if axis in family.axes
    }
    number = family.defaults["samples"] if samples is None else samples
    check_grid({"samples": number})
    if not _whole(seed):
        raise UsageError(f"the seed can't be {seed!r}", "Use a whole number")
    if tokenizer is None or (isinstance(tokenizer, int) and name != "linearize_mqar_tokens"):
        raise UsageError(f"{name} needs a tokenizer", "Give the folder of one")
    module, function = family.build.split(":")
    loaded = importlib.import_module(module)
    make: Make = getattr(loaded, function)(Setting(tokenizer, text, haystack, seed))
    cells = _cells(grid, getattr(loaded, "fits", None))
    return [
        make(cell, index, random.Random(f"{name}:{family.version}:{seed}:{_key(cell)}:{index}"))
        for index in range(number)
        for cell in cells
    ]


def check_grid(given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a length, depth, number of pairs or of samples out of range."""
    for axis, option in AXES.items():
        if option in given:
            _checked(axis, given[option])
    if "samples" in given and not _whole(given["samples"], 1):
        raise UsageError(f"samples can't be {given['samples']!r}", "Use a whole number of at least 1")


def find(name: str) -> Family:
    """The family called `name`; raises `UsageError` with a guess for an unknown one."""
    if name not in FAMILIES:
        mend = did_you_mean(name, FAMILIES) or f"Choose of {', '.join(FAMILIES)}"
        raise UsageError(f"there is no task '{name}'", mend)
    return FAMILIES[name]


def _cells(grid: Mapping[str, Sequence[Any]], fits: Any) -> list[Cell]:
    """All cells of a grid; of a task that says which fit, those."""
    cells = [Cell(**dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
    if fits is None:
        return cells
    kept = [cell for cell in cells if fits(cell)]
    if not kept:
        least = 4 * min(cell.pairs or 0 for cell in cells)
        raise UsageError("no length that is asked for holds its pairs and queries", f"Use a length of at least {least}")
    return kept


def _key(cell: Cell) -> str:
    return f"{cell.length}:{cell.depth}:{cell.pairs}"


def _checked(axis: str, values: Iterable[Any]) -> list[Any]:
    values = list(dict.fromkeys(values if isinstance(values, Iterable) else [values]))
    if not values:
        raise UsageError(f"no {AXES[axis]} are asked for", "Give at least one, or none to use the defaults")
    for value in values:
        if axis == "depth":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise UsageError(
                    f"depth {value!r} isn't between 0 and 1", "0 is the beginning, 1 right before the question"
                )
        elif not _whole(value, 1):
            raise UsageError(f"{axis} can't be {value!r}", "Use a whole number of at least 1")
    return [float(value) for value in values] if axis == "depth" else values


def _whole(value: Any, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
