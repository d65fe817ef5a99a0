"""`linearize run`: convert, train, judge and describe a model as one recipe says, each step once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.checkpoint import read_json
from linearize.digest import sha256_of
from linearize.ledger import RUN, Ledger, digest, of_checkpoint, of_files, of_path, versions
from linearize.preflight import CONVERTED, preflight, teachers
from linearize.selection_file import selection_of
from linearize.sink import disk_errors
from linearize.source import local_path
from linearize.swap import Lock
from linearize.target import survey
from linearize.training.local_text import find

if TYPE_CHECKING:
    from linearize.recipe import Recipe

MODEL, TRAINING, EVALUATION = "model", "training", "evaluation"  # folders of a run, beside CONVERTED
CONVERT_NEEDS = ("linearize", "torch", "transformers")
TRAIN_NEEDS = (*CONVERT_NEEDS, "accelerate", "peft", "datasets")
EVAL_NEEDS = (*CONVERT_NEEDS, "lm_eval")
Note = Callable[[str], None]


def run(
    recipe: Recipe | str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    model: str | Path | None = None,
    data: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    device: str | None = None,
    progress: Callable[..., None] | None = None,
    note: Note | None = None,
) -> dict[str, Any]:
    """Convert a model, train it, judge it and write its card, all as `recipe` says.

    `out` gets the folders `converted`, `model` (the result), `training` and `evaluation`. What is there already and
    was made from the same inputs is kept; a changed input makes its step again, and those that read what that step
    made anew. Training and evaluation that were interrupted go on where they were.

    Args:
        model: what to convert, in the place of the recipe's `model`.
        data: what to train on, in the place of the recipe's `data.source`.
        overrides: other recipe keys to change.
        resume: there has to be a run in `out` to go on with.
        device: what to train and judge on.
        progress: called with (what, done, total), by training with a text besides.
        note: called with what a user should know before the end.

    Returns:
        out, model (its folder), steps (each with `step`, `done`, `because`, `seconds`), training (what
        `linearize.train` said), results (those of `linearize eval`, or None), notes.

    Raises:
        LinearizeError: as convert, train and evaluate; what was finished before stays.
    """
    from linearize.recipe import load_recipe

    given = {"model": model, "data.source": data}
    named = {key: str(value) for key, value in given.items() if value is not None}
    settings = load_recipe(recipe, {**(overrides or {}), **named})
    folder = survey(out).path
    preflight(settings, folder, resume=resume, device=device)
    with _locked(folder):
        return _Run(settings, folder, Ledger(folder), device, progress, note).all()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One run in a folder at a time. Of a run that fails before it has written anything, nothing stays."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        with disk_errors(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder.parent / f".{folder.name}.linearize-run-lock", folder)
        try:
            yield
        finally:
            lock.release()
    finally:
        with suppress(OSError):  # it isn't empty
            for parent in missing:
                parent.rmdir()


@dataclass
class _Run:
    """A run whose settings make sense; `all` carries it out."""

    recipe: Recipe
    folder: Path
    ledger: Ledger
    device: str | None
    progress: Callable[..., None] | None
    note: Note | None
    steps: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def all(self) -> dict[str, Any]:
        self._convert()
        self._train()
        results = self._evaluate()
        self._card(results)
        return {
            "out": str(self.folder),
            "model": str(self.folder / MODEL),
            "steps": self.steps,
            "training": self.ledger.steps["train"].get("summary"),
            "results": results,
            "notes": self.notes,
        }

    def _say(self, text: str) -> None:
        if self.note is not None:
            self.note(text)

    def _kept(self, step: str, because: str) -> None:
        self.steps.append({"step": step, "done": False, "because": because, "seconds": 0.0})
        self._say(f"{step}: kept, {because}")

    def _step(
        self,
        step: str,
        inputs: Mapping[str, Any],
        output: Callable[[], str | None],
        make: Callable[[bool], Mapping[str, Any] | None],
        work: Path | None = None,
    ) -> None:
        """Carry out a step, unless what it would make is there.

        Args:
            output: the digest of what is there, None if that isn't whole.
            make: does it, and returns what is to be kept of it; told whether to go on with what is in `work`.
            work: the folder where an interrupted step has left what it goes on from. It is removed where the inputs
                are others, and where the step had come to its end.
        """
        why = self.ledger.why_again(step, inputs, output())
        if not why:
            self._kept(step, "made from the same before")
            return
        from linearize.training.place import DONE

        self._say(f"{step}: {why}")
        begun = time.monotonic()
        interrupted = work is not None and (work / RUN).is_file() and not (work / DONE).exists()
        goes_on = interrupted and self.ledger.same(step, inputs)
        if work is not None and work.is_dir() and not goes_on:
            with disk_errors(work):
                shutil.rmtree(work)
        self.ledger.begin(step, inputs)
        summary = make(goes_on)
        made = output()
        if made is None:
            raise RuntimeError(f"step '{step}' of a run ended without its output")
        seconds = time.monotonic() - begun
        self.ledger.end(step, made, seconds, summary)
        self.steps.append({"step": step, "done": True, "because": why, "seconds": round(seconds, 3)})

    def _convert(self) -> None:
        from linearize.conversion import convert

        out, name = self.folder / CONVERTED, str(self.recipe.model)
        inputs = {
            "recipe": self.recipe.conversion(),
            "model": name,
            "model's files": of_path(local_path(name), content=False),
            "versions": versions(CONVERT_NEEDS),
        }
        selection = selection_of(self.recipe)
        if selection is not None:
            inputs["selection"] = of_path(selection)

        def make(goes_on: bool) -> None:
            result = convert(name, out, recipe=self.recipe, force=True, progress=self.progress)
            self.notes += [*result.plan.notes, *result.notes]

        self._step("convert", inputs, lambda: of_checkpoint(out), make)

    def _train(self) -> None:
        from linearize.training import session

        out, work = self.folder / MODEL, self.folder / TRAINING
        keys = self.recipe.to_dict()
        inputs = {
            "recipe": {key: keys[key] for key in ("data", "train", "precision", "shard") if key in keys},
            "converted": of_checkpoint(self.folder / CONVERTED),
            "data's files": _data_digest(self.recipe.data.source),
            "teachers' files": [of_path(name, content=False) for name in teachers(self.recipe)],
            "versions": versions(TRAIN_NEEDS),
        }

        def make(goes_on: bool) -> dict[str, Any]:
            return session.train(
                self.folder / CONVERTED,
                out,
                recipe=self.recipe,
                work=work,
                teacher=self.recipe.model,
                resume=goes_on,
                force=True,
                device=self.device,
                progress=self.progress,
                note=self.note,
            )

        self._step("train", inputs, lambda: _model_digest(out), make, work)

    def _evaluate(self) -> dict[str, Any] | None:
        if self.recipe.eval is None:
            self._kept("eval", "the recipe has no section eval")
            return None
        from linearize_evals.run import evaluate

        model, out = self.folder / MODEL, self.folder / EVALUATION
        asked = self.recipe.eval.model_dump()
        asked["teacher"] = asked["teacher"] or self._teacher()
        inputs = {
            "recipe": {"eval": asked},
            "model": _model_digest(model),
            "teacher's files": of_path(asked["teacher"], content=False),
            "texts": [of_path(asked[key]) for key in ("text", "haystack")],
            "versions": versions(EVAL_NEEDS),
        }

        def make(goes_on: bool) -> None:
            evaluate(model, out, resume=goes_on, device=self.device, progress=self.progress, note=self.note, **asked)

        self._step("eval", inputs, lambda: _results_digest(out), make, out)
        return {**json.loads((out / "results.json").read_text(encoding="utf-8")), "out": str(out)}

    def _teacher(self) -> str | None:
        """None where the trained model is its own teacher, else what it was converted from."""
        from linearize.training.output import ADAPTER, UNCHANGED

        record = read_json(self.folder / MODEL, "config.json")["linearize"]["training"]
        own = record["base_weights"] == UNCHANGED and not (self.folder / MODEL / ADAPTER).is_dir()
        return None if own else self.recipe.model

    def _card(self, results: Mapping[str, Any] | None) -> None:
        from linearize.training.card import base_card, card, licence_of
        from linearize.training.output import ADAPTER, CARD, replace_card

        model = self.folder / MODEL
        text = card(
            read_json(model, "config.json"),
            base_card(self.recipe.model),
            results,
            teacher=self.recipe.model,
            licence=licence_of(model),
            adapter=(model / ADAPTER).is_dir(),
        )
        path = model / CARD
        if path.is_file() and path.read_bytes() == text.encode():
            self._kept("card", "it says all of this already")
            return
        begun = time.monotonic()
        self.notes += replace_card(model, text, progress=self.progress)
        because = "scores were measured" if results else "the model was described otherwise"
        seconds = round(time.monotonic() - begun, 3)
        self.steps.append({"step": "card", "done": True, "because": because, "seconds": seconds})


def _data_digest(source: str) -> str | None:
    """Of the files that are trained on; None where there are none."""
    paths = None if source == "teacher" else find(source)
    return None if paths is None else of_files(paths, Path(source).expanduser())


def _model_digest(model: Path) -> str | None:
    """Of everything but the card, which the last step of a run writes anew."""
    from linearize.training.output import CARD

    return of_checkpoint(model, leaving_out=(CARD,))


def _results_digest(folder: Path) -> str | None:
    results = folder / "results.json"
    if not results.is_file() or not (folder / "report.html").is_file():
        return None
    return digest(sha256_of(results))
