"""The folder that a training works in, and the checks before it reads a weight."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from linearize_evals.settings import check_folder, write_json

from linearize.errors import UsageError
from linearize.ledger import differences, of_checkpoint, versions
from linearize.sink import disk_errors
from linearize.swap import Lock
from linearize.training import checks, output, sharding, state
from linearize.training.metrics import METRICS

RUN, DONE = "run.json", "summary.json"
CHECKPOINTS = "checkpoints"
TEACHER_TEXT = "teacher.jsonl.gz"
CALIBRATION = "calibration.json"
DTYPE = "dtype"  # in run.json: what was chosen for `precision: auto`
OTHER = "Choose another folder with -o"


def check(
    checkpoint: str | Path,
    out: str | Path,
    work: Path,
    recipe: Any,
    device: Any,
    *,
    resume: bool,
    force: bool,
    held: ExitStack,
) -> Path | None:
    """Refuse what can be refused before a weight is read; returns the training checkpoint to go on from.

    Args:
        device: what the model will run on.
        held: gets what lets go of `work` at its end.

    Raises:
        UsageError: packages, stages, or text are missing, the model has nothing that a stage trains, `work` or `out` is
            in use.
        ModelError: the checkpoint isn't a converted model, or has no tokenizer.
        ResourceError: a disk is too small, or another process works in `work`.
        NetworkError: the data set can't be loaded.
    """
    from linearize.training import blocks

    checks.check_packages(recipe)
    changes = any(_changes(stage) for stage in recipe.train)
    if (work / DONE).exists():  # looked for first: --force alone wouldn't do
        what = f"the training in {work} has come to its end, and written its model"
        raise UsageError(what, f"Remove {work} and add --force to train once more, or choose another with -o")
    source = output.check(checkpoint, out, base_changed=changes, force=force)
    decisive = _decisive(checkpoint, recipe)
    begun = _check_work(work, checkpoint, out, decisive, resume=resume)
    model = checks.check_model(source, recipe)
    checks.check_text(checkpoint, recipe)
    checks.check_teachers(checkpoint, recipe)
    checks.check_space(work, model, recipe)
    blocks.check(source, work, recipe, device)
    held.enter_context(_lock(work))
    if not resume:
        _clear(work)
    write_json(work / RUN, {**(_read(work) if resume else {}), **decisive})
    return begun


def check_processes(recipe: Any) -> None:
    """Refuse a batch that the processes of this run can't share evenly.

    Raises:
        UsageError: naming the stage and the number of processes; or torch can't shard.
    """
    from accelerate import PartialState

    world = PartialState().num_processes
    if recipe.shard and world > 1:
        sharding.check()
    for number, stage in enumerate(recipe.train):
        rows = getattr(stage, "batch", world)
        if rows % world or (rows // world) % getattr(stage, "micro_batch", 1):
            raise UsageError(
                f"train.{number}.batch: {rows} rows can't be shared by {world} processes in forwards of "
                f"{stage.micro_batch}",
                f"Use a multiple of {world * stage.micro_batch}",
            )


def earlier_dtype(work: Path) -> str | None:
    """What `precision: auto` meant when the training in `work` was begun."""
    return _read(work).get(DTYPE)


def remember_dtype(work: Path, dtype: str) -> None:
    """Let a training that goes on choose the same: on a CPU, it was measured."""
    write_json(work / RUN, {**_read(work), DTYPE: dtype})


def _changes(stage: Any) -> bool:
    """Whether a stage changes weights that the checkpoint stores."""
    trains = getattr(stage, "trains", "")
    return trains == "all" or (trains == "lora" and stage.lora.merge)


def _decisive(checkpoint: str | Path, recipe: Any) -> dict[str, Any]:
    """What has to be equal for a training to be gone on with."""
    settings = recipe.to_dict()
    kept = ("data", "train", "precision", "seed")
    return {
        "checkpoint": os.path.realpath(checkpoint),
        "weights": of_checkpoint(Path(checkpoint)),
        **{key: settings[key] for key in kept if key in settings},
        "versions": versions(("torch", "transformers")),
    }


def _check_work(
    work: Path, checkpoint: str | Path, out: str | Path, decisive: Mapping[str, Any], *, resume: bool
) -> Path | None:
    place, source, target = (Path(os.path.realpath(path)) for path in (work, checkpoint, out))
    if place == source or source in place.parents:
        raise UsageError(f"{work} lies in the folder of a model, {checkpoint}", OTHER)
    if place == target or target in place.parents or place in target.parents:
        raise UsageError(f"{work} and {out} can't lie in one another", OTHER)
    check_folder(work)
    found = {path.name for path in work.iterdir()} if work.is_dir() else set()
    if resume and RUN not in found:
        raise UsageError(f"there is no training in {work} to go on with", "Leave out --resume to begin one")
    if RUN not in found and any(not name.startswith(".") for name in found):
        raise UsageError(f"{work} holds files that aren't a training's", OTHER)
    kept = state.checkpoints(work / CHECKPOINTS)
    if not resume:
        if kept or METRICS in found:
            what = f"{work} holds a training already"
            raise UsageError(what, "Add --resume to go on with it, remove it, or choose another folder with -o")
        return None
    before = {key: value for key, value in _read(work).items() if key in decisive}
    changed = list(differences(before, json.loads(json.dumps(decisive))))
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UsageError(
            f"the training in {work} was begun with other settings ({'; '.join(changed[:3])}{more})",
            "Give the same ones to resume it, or choose another folder with -o",
        )
    return kept[-1] if kept else None


def _read(work: Path) -> dict[str, Any]:
    try:
        found = json.loads((work / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _clear(work: Path) -> None:
    """Take away what a training left that failed before its first step."""
    with disk_errors(work):
        for name in (TEACHER_TEXT, CALIBRATION):
            (work / name).unlink(missing_ok=True)
        shutil.rmtree(work / CHECKPOINTS, ignore_errors=True)


@contextmanager
def _lock(work: Path) -> Iterator[None]:
    """One training at a time."""
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = Lock(work / ".lock", work)
    try:
        yield
    finally:
        lock.release()
