"""`linearize train` and `linearize run`: grammar only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from linearize.errors import UsageError
from linearize.grammar import (
    asked_recipe,
    common_options,
    emit,
    import_option,
    import_plugins,
    note,
    quiet_stdout,
    set_option,
)

DATA = "teacher, a .txt/.jsonl/.parquet file, a folder of them, or a dataset."
DEVICE = "cpu, cuda or cuda:N (default: a GPU if there is one)."


@click.command()
@click.argument("checkpoint")
@click.option("--recipe", required=True, metavar="FILE|NAME", help="A recipe with a section `train`.")
@set_option
@click.option("--data", metavar="SOURCE", help=DATA)
@click.option("-o", "--out", metavar="OUT", help="Folder to write (default: CHECKPOINT-trained).")
@click.option("--resume", is_flag=True, help="Go on with the interrupted training for OUT.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--device", metavar="DEVICE", help=DEVICE)
@import_option
@common_options
def train(checkpoint: str, out: str | None, as_json: bool, **options: Any) -> None:
    """Train what the conversion of CHECKPOINT has lost back into it, and write the result to OUT.

    CHECKPOINT is a folder that `convert` wrote. OUT is one, too; what training itself keeps lies beside it, in
    OUT-training. Under `accelerate launch -m linearize train ...` several processes share the work.
    """
    from linearize.recipe import check_training_keys

    import_plugins(options["plugins"])
    check_training_keys(text.partition("=")[0] for text in options["sets"])
    recipe = asked_recipe(options["recipe"], options["sets"], {"data.source": ("--data", options["data"])})
    _check_stages(recipe, options["recipe"])
    folder = out or f"{Path(os.path.abspath(checkpoint)).name}-trained"
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; there is a bar for each stage
    from linearize.training.session import train as start
    from linearize.training.show import print_training, progress

    chosen = {key: options[key] for key in ("resume", "force", "device")}
    with quiet_stdout(as_json), progress() as bars:
        summary = start(checkpoint, folder, recipe=recipe, progress=bars, note=note, **chosen)
    if summary:  # in the first process alone
        emit(summary, as_json, lambda shown: print_training(shown, options["plugins"]))
    _leave()


@click.command()
@click.argument("recipe")
@click.option("-o", "--out", required=True, metavar="OUT", help="Folder to write.")
@click.option("--model", metavar="MODEL", help="What to convert (default: the recipe's).")
@click.option("--data", metavar="SOURCE", help=DATA)
@set_option
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in OUT.")
@click.option("--device", metavar="DEVICE", help=DEVICE)
@import_option
@common_options
def run(recipe: str, out: str, as_json: bool, **options: Any) -> None:
    """Convert, train and judge what RECIPE (a file or a shipped name) says, and write the model's card.

    OUT gets the folders `converted`, `model`, `training` and `evaluation`. What is there already and made from the
    same is not made again.
    """
    import_plugins(options["plugins"])
    typed = {"model": ("--model", options["model"]), "data.source": ("--data", options["data"])}
    asked = asked_recipe(recipe, options["sets"], typed)
    if asked.model is None:
        raise UsageError(f"the recipe {recipe} names no model", "Add --model MODEL")
    _check_stages(asked, recipe)
    os.environ.setdefault("TQDM_DISABLE", "1")
    from linearize.pipeline import run as start
    from linearize.training.show import print_run, progress

    with quiet_stdout(as_json), progress() as bars:
        document = start(asked, out, resume=options["resume"], device=options["device"], progress=bars, note=note)
    if document:
        emit(document, as_json, lambda shown: print_run(shown, options["plugins"]))
    _leave()


def _check_stages(recipe: Any, name: str) -> None:
    if not recipe.train:
        raise UsageError(f"the recipe {name} has no section train", "Choose one that has, see `linearize recipes ls`")


def _leave() -> None:
    """End one of several processes without waiting for what the others tear down."""
    from linearize_evals import processes

    processes.leave()
