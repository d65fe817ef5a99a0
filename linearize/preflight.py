"""What `linearize run` can refuse before it writes anything, so that it doesn't fail hours later."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.errors import UsageError
from linearize.ledger import Ledger, of_path
from linearize.selection import check_packages
from linearize.selection_file import is_auto, read_selection, selection_of
from linearize.source import local_path
from linearize.target import check_target, survey
from linearize.training.schema import SELF

if TYPE_CHECKING:
    from linearize.recipe import Recipe

CONVERTED = "converted"


def preflight(recipe: Recipe, folder: Path, *, resume: bool, device: str | None = None) -> None:
    """Check everything about a run that needs no weight.

    Args:
        folder: where it writes.
        resume: there has to be a run to go on with.
        device: what it was asked to train and judge on.

    Raises:
        UsageError: the recipe lacks what a run needs, its tasks, options or selection don't fit, a package is missing,
            there is no such device, or `folder` belongs to something else.
        ModelError: a model that the recipe names is a path where nothing is.
        NetworkError: a data set can't be loaded.
    """
    if recipe.model is None:
        raise UsageError("the recipe names no model", "Add the key `model`, or give --model MODEL")
    ledger = Ledger(folder)
    if resume and not ledger.exists:
        raise UsageError(f"there is no run in {folder} to go on with", "Leave out --resume to begin one")
    place = local_path(recipe.model)
    if place is not None:
        check_target(survey(folder / CONVERTED), place, force=True)
    selection = selection_of(recipe)
    if selection is not None:
        read_selection(selection)
    if is_auto(recipe):
        check_packages()
    for name in teachers(recipe):
        local_path(name)
    _check_evaluation(recipe, ledger)
    from linearize_evals.processes import SIZES

    from linearize.training import checks, sources

    if any(os.environ.get(name, "1") != "1" for name in SIZES):
        raise UsageError(
            "`linearize run` is one process", "Launch the training alone: accelerate launch -m linearize train ..."
        )
    checks.check_packages(recipe)
    if _ended(ledger, "train").get("recipe", {}).get("data") != recipe.data.model_dump(mode="json"):
        sources.check(recipe.data)
        _check_apart(recipe.data.source, folder)
    if device is not None:
        from linearize_evals.loading import choose_device

        choose_device(device)


def teachers(recipe: Recipe) -> list[str]:
    """The models that stages learn from, besides the student's own weights."""
    names = [getattr(stage, "teacher", SELF) for stage in recipe.train]
    return [name for name in names if name != SELF]


def _ended(ledger: Ledger, step: str) -> dict[str, Any]:
    """What a step that has ended was made from; empty if it hasn't.

    A data set that it was made from needn't be asked for again, nor the network be there.
    """
    entry = ledger.steps.get(step, {})
    return entry["inputs"] if "output" in entry else {}


def _check_apart(source: str, folder: Path) -> None:
    """Refuse to write a run among what it is trained on."""
    data = Path(os.path.realpath(os.path.expanduser(source)))
    if source != "teacher" and data.is_dir() and data in (folder, *folder.parents):
        raise UsageError(f"{folder} lies in the folder of its data, {data}", "Choose another folder with -o")


def _check_evaluation(recipe: Recipe, ledger: Ledger) -> None:
    if recipe.eval is None:
        return
    from linearize_evals.options import NEEDED

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        mend = "pip install 'linearize[eval]', or leave `eval` out of the recipe"
        raise UsageError(f"evaluation needs {', '.join(missing)}", mend)
    from linearize_evals.haystack import open_haystack
    from linearize_evals.settings import NONE
    from linearize_evals.suites import check_uses, chosen_tasks
    from linearize_evals.text import read_text

    asked = recipe.eval
    grid = {key: getattr(asked, key) for key in ("lengths", "depths", "pairs", "samples")}
    ours, others = chosen_tasks(asked.suite, asked.tasks, **grid)
    check_uses(ours, others, text=asked.text, haystack=asked.haystack, limit=asked.limit)
    if asked.teacher not in (None, SELF, NONE):
        local_path(asked.teacher)
    open_haystack(asked.haystack)
    done = _ended(ledger, "eval")
    known = [done.get("recipe", {}).get("eval", {}).get("text"), *done.get("texts", ())[:1]]
    if asked.text is not None and known != [asked.text, of_path(asked.text)]:  # or it would fail after results are gone
        read_text(asked.text)
