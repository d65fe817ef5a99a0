"""What `linearize run` can refuse before it writes anything, so that it doesn't fail hours later."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from linearize.errors import UsageError
from linearize.ledger import Ledger
from linearize.source import local_path
from linearize.target import check_target, survey

if TYPE_CHECKING:
    from linearize.recipe import Recipe

CONVERTED = "converted"
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # set by launchers


def preflight(recipe: Recipe, folder: Path, *, resume: bool) -> None:
    """Check everything about a run that needs no weight.

    Args:
        folder: where it writes.
        resume: there has to be a run to go on with.

    Raises:
        UsageError: the recipe lacks what a run needs, its tasks or options don't fit, a package is missing, or `folder`
            belongs to something else.
        ModelError: a model that the recipe names is a path where nothing is.
        NetworkError: the data set can't be loaded.
    """
    if any(os.environ.get(name, "1") != "1" for name in SIZES):
        raise UsageError(
            "`linearize run` is one process", "Launch the training alone: accelerate launch -m linearize train ..."
        )
    if recipe.model is None:
        raise UsageError("the recipe names no model", "Add the key `model`, or give --model MODEL")
    if not recipe.train:
        raise UsageError("the recipe has no section `train`", "Add one, or use `linearize convert`")
    ledger = Ledger(folder)
    if resume and not ledger.exists:
        raise UsageError(f"there is no run in {folder} to go on with", "Leave out --resume to begin one")
    place = local_path(recipe.model)
    if place is not None:
        check_target(survey(folder / CONVERTED), place, force=True)
    for name in teachers(recipe):
        local_path(name)
    _check_evaluation(recipe)
    if not _trained_on(ledger, recipe):
        from linearize.training import sources

        sources.check(recipe.data)


def teachers(recipe: Recipe) -> list[str]:
    """The models that stages learn from, besides the student's own weights."""
    names = [getattr(stage, "teacher", "self") for stage in recipe.train]
    return [name for name in names if name != "self"]


def _trained_on(ledger: Ledger, recipe: Recipe) -> bool:
    """Whether training on this data has ended: then a data set needn't be asked for again, nor the network be there."""
    entry = ledger.steps.get("train", {})
    return "output" in entry and entry["inputs"].get("recipe", {}).get("data") == recipe.data.model_dump(mode="json")


def _check_evaluation(recipe: Recipe) -> None:
    if recipe.eval is None:
        return
    from linearize_evals.options import NEEDED

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        mend = "pip install 'linearize[eval]', or leave `eval` out of the recipe"
        raise UsageError(f"evaluation needs {', '.join(missing)}", mend)
    from linearize_evals.suites import check_uses, chosen_tasks

    asked = recipe.eval
    grid = {key: getattr(asked, key) for key in ("lengths", "depths", "pairs", "samples")}
    ours, others = chosen_tasks(asked.suite, asked.tasks, **grid)
    check_uses(ours, others, text=asked.text, haystack=asked.haystack, limit=asked.limit)
