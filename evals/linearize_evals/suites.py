"""Which tasks a run asks, and on which grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from linearize.errors import UsageError, did_you_mean
from linearize_evals.builtin import task_folders
from linearize_evals.catalogue import AXES, FAMILIES, check_grid, find

Options = dict[str, Any]  # lengths, depths, pairs, samples: those of `catalogue.build`

PREFIX = "linearize_"

# Lists of token ids are for models that were trained on them.
PRETRAINED = {name: family for name, family in FAMILIES.items() if name != "linearize_mqar_tokens"}

# As in tasks/linearize_recall.yaml.
GROUPS = {"linearize_recall": [name for name, family in PRETRAINED.items() if family.kind == "recall"]}

# `quick` keeps to what a small instruct model answers nearly perfectly, so that a loss shows with few documents.
SUITES: Mapping[str, Mapping[str, Options]] = MappingProxyType(
    {
        "quick": {
            "linearize_niah_single": {"lengths": [256, 512, 1024], "depths": [0.0, 0.25, 0.5, 0.75, 1.0], "samples": 3},
            "linearize_mqar_lines": {"pairs": [8, 16, 32, 64], "samples": 4},
            "linearize_ar_text": {"lengths": [1024], "samples": 4},
            "linearize_perplexity": {"lengths": [512, 1024], "samples": 4},
        },
        "recall": {name: {} for name in PRETRAINED},
        "full": {
            name: {"lengths": [256, 512, 1024, 2048, 4096]} if "length" in family.axes else {}
            for name, family in PRETRAINED.items()
        },
    }
)


def chosen_tasks(
    suite: str,
    tasks: Sequence[str] = (),
    *,
    lengths: Sequence[int] | None = None,
    depths: Sequence[float] | None = None,
    pairs: Sequence[int] | None = None,
    samples: int | None = None,
) -> tuple[dict[str, Options], list[str]]:
    """The tasks of ours to ask with their options, and the names that must be lm-eval's own.

    `tasks` replace the suite's, and have their own grids; options that are given replace those of every task that has
    the axis.

    Raises:
        UsageError: for an unknown suite or task of ours, an option that no task has an axis for, or a task named twice.
    """
    if suite not in SUITES:
        raise UsageError(f"there is no suite '{suite}'", did_you_mean(suite, SUITES) or f"Choose {', '.join(SUITES)}")
    names = [member for name in tasks for member in GROUPS.get(name.strip(), [name.strip()])] or list(SUITES[suite])
    twice = sorted({name for name in names if names.count(name) > 1})
    if "" in names:
        raise UsageError("--tasks has an empty name in it", "Leave the option out to ask the suite's tasks")
    if twice:
        raise UsageError(f"task {twice[0]} is given twice", "Give it once")
    others = [_not_ours(name) for name in names if name not in FAMILIES]
    task_folders(others)
    asked = {"lengths": lengths, "depths": depths, "pairs": pairs, "samples": samples}
    given = {key: value if key == "samples" else list(value) for key, value in asked.items() if value is not None}
    check_grid(given)
    grids = {} if tasks else SUITES[suite]  # a task that is named is asked on its own grid
    ours = {name: _options(grids.get(name, {}), name, given) for name in names if name in FAMILIES}
    for axis, option in AXES.items():
        if option in given and not any(axis in FAMILIES[name].axes for name in ours):
            raise UsageError(f"no task that is asked has {option}", f"Leave out --{option}, or add such a task")
    return ours, others


def check_uses(ours: Iterable[str], others: Sequence[str], **given: Any) -> None:
    """Refuse options that no task has a use for.

    Raises:
        UsageError: for a text without text tasks, a haystack without needles, a limit without tasks of lm-eval.
    """
    kinds = {FAMILIES[name].kind for name in ours}
    fillers = any(FAMILIES[name].build.split(":")[0].endswith((".niah", ".tracking")) for name in ours)
    if given["limit"] is not None and not (isinstance(given["limit"], int) and given["limit"] > 0):
        raise UsageError(f"limit can't be {given['limit']}", "Use a whole number of at least 1")
    for option, used in {"text": "text" in kinds, "haystack": fillers, "limit": bool(others)}.items():
        if given[option] is not None and not used:
            raise UsageError(f"no task that is asked uses --{option}", "Leave it out, or add such a task")


def _options(grid: Options, name: str, given: Mapping[str, Any]) -> Options:
    """The grid of a task, with what is given in its place."""
    axes = {AXES[axis] for axis in FAMILIES[name].axes}
    return {**grid} | {key: value for key, value in given.items() if key == "samples" or key in axes}


def _not_ours(name: str) -> str:
    """`name`, unless it is one of ours misspelt."""
    if name.startswith(PREFIX):
        find(name)
    if PREFIX + name in FAMILIES:
        raise UsageError(f"there is no task '{name}'", f"did you mean '{PREFIX}{name}'?")
    return name
