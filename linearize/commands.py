"""The commands: grammar only. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from linearize.console import printable
from linearize.errors import LinearizeError, UsageError

RECIPE_KEYS = ("recipe", "sets", "mixer", "feature_map", "window", "sinks", "keep_softmax")


def _command(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every command has."""
    function = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)
    return click.option("--debug", is_flag=True, expose_value=False, help="Tracebacks of errors.")(function)


def _recipe_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        [
            click.option("--recipe", metavar="FILE|NAME", help="A recipe (default: `default`)."),
            click.option("--mixer", metavar="NAME", help="What replaces attention: window, linear."),
            click.option("--feature-map", metavar="NAME", help="hedgehog, elu1, relu, t2r, favor, taylor."),
            click.option("--window", type=int, metavar="N", help="Newest tokens under exact softmax."),
            click.option("--sinks", type=int, metavar="N", help="First tokens that stay exact."),
            click.option("--keep-softmax", metavar="SPEC", help="Layers to leave: none, 0,7,15, every:4, 25%."),
            click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any key of the recipe."),
            click.option("--import", "plugins", multiple=True, metavar="MODULE", help="Your own mixers or maps."),
            click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub model."),
        ]
    ):
        function = option(function)
    return function


def _recipe(options: dict[str, Any]) -> Any:
    """The checked recipe that a command's options ask for. No model is touched before this."""
    _import_plugins(options["plugins"])
    from linearize.recipe import RecipeError, load_recipe

    overrides: dict[str, Any] = {}
    flags: dict[str, str] = {}
    for key in RECIPE_KEYS[2:]:
        if options[key] is not None:
            overrides[key] = options[key]
            flags[key] = f"--{key.replace('_', '-')}"
    for text in options["sets"]:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes KEY=VALUE, not '{text}'", "For example --set seed=1")
        if key in overrides:
            raise UsageError(f"{key} is given twice", "Give it once")
        overrides[key] = value
        flags[key] = f"--set {key}"
    try:
        return load_recipe(options["recipe"], overrides)
    except RecipeError as error:
        if not all(problem.key in flags for problem in error.problems):
            raise
        # The recipe is sound, what was typed is not: say it in the words that were typed.
        said = [f"{flags[problem.key]}: {problem.bare()}" for problem in error.problems]
        raise UsageError("\n  ".join(said)) from None


def _import_plugins(modules: tuple[str, ...]) -> None:
    """Import modules that register mixers or feature maps; the working folder counts as an import path."""
    if modules:
        sys.path.append(os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except LinearizeError:
            raise
        except Exception as error:
            what = f"--import {module} failed with {type(error).__name__}: {error}"
            raise UsageError(what, "Mend the module, or set PYTHONPATH to its folder") from error


def _emit(document: Any, as_json: bool, text: Callable[[Any], None]) -> None:
    if as_json:
        click.echo(json.dumps(document, indent=2))  # in ASCII: a path need not be valid UTF-8
    else:
        text(document)


def _lines(form: str) -> Callable[[Any], None]:
    """A printer of one line for each row."""

    def show(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            click.echo(printable(form.format(**row), keep="\n"))

    return show


@contextlib.contextmanager
def _quiet_stdout(as_json: bool) -> Iterator[None]:
    """Libraries that print go to stderr, so that stdout holds nothing but the document."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="linearize", message="%(prog)s %(version)s")
def cli() -> None:
    """Convert pretrained Hugging Face decoders to linear attention."""


@cli.command()
@click.argument("model")
@click.option("-o", "--out", required=True, metavar="OUT", help="Folder to write.")
@_recipe_options
@click.option("--dtype", metavar="DTYPE", help="Stored dtype of a GGUF model: float32, bfloat16, float16.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@_command
def convert(model: str, out: str, dry_run: bool, force: bool, as_json: bool, **options: Any) -> None:
    """Convert MODEL (a folder, a Hub id or a GGUF file) and write it to OUT.

    No weight is changed: they are linked or copied, and the mixers' tensors are added. OUT appears whole or
    not at all.
    """
    recipe = _recipe(options)
    from linearize import console
    from linearize.conversion import convert

    revision, dtype, plugins = options["revision"], options["dtype"], options["plugins"]
    old = _replaced(out) if force else None
    with _quiet_stdout(as_json), console.progress() as progress:
        result = convert(
            model,
            out,
            recipe=recipe,
            revision=revision,
            dry_run=dry_run,
            force=force,
            dtype=dtype,
            progress=progress,
        )
    document = result.to_dict() | {"replaces": old}
    _emit(document, as_json, lambda shown: console.print_result(shown, plugins))


def _replaced(out: str) -> dict[str, int] | None:
    """What --force would delete, or None if there is nothing yet."""
    from linearize.target import replaced, survey

    destination = survey(out)
    if not destination.exists:
        return None
    files, size = replaced(destination.path)
    return {"files": files, "bytes": size}


@cli.command()
@click.argument("model")
@_recipe_options
@_command
def inspect(model: str, as_json: bool, **options: Any) -> None:
    """Say what MODEL is and what each layer would become (or became). No weight is read."""
    asked = any(options[key] not in (None, ()) for key in RECIPE_KEYS)
    recipe = _recipe(options) if asked else _import_plugins(options["plugins"])
    from linearize import console
    from linearize.inspection import inspect

    with _quiet_stdout(as_json):
        report = inspect(model, recipe=recipe, revision=options["revision"])
    _emit(report, as_json, console.print_inspection)


@cli.command()
@click.argument("out")
@click.option("--import", "plugins", multiple=True, metavar="MODULE", help="Your own mixers or maps.")
@_command
def verify(out: str, plugins: tuple[str, ...], as_json: bool) -> None:
    """Check every file and tensor of the converted folder OUT, and name every fault."""
    _import_plugins(plugins)
    from linearize import console
    from linearize.verification import judge

    with _quiet_stdout(as_json), console.progress() as progress:
        verdict = judge(out, progress=progress)
    _emit(verdict.to_dict(), as_json, console.print_verdict)
    if verdict.faults:
        raise click.exceptions.Exit(3)


@cli.command("eval")
@click.argument("student")
@click.option("--teacher", metavar="MODEL", help="What STUDENT was made from; or self, none.")
@click.option("--suite", default="quick", metavar="NAME", help="quick (default), recall or full.")
@click.option("--tasks", multiple=True, metavar="NAMES", help="Tasks instead: linearize's or lm-eval's own.")
@click.option("--lengths", metavar="N,...", help="Tokens of a document, e.g. 512,2048.")
@click.option("--pairs", metavar="N,...", help="Numbers of facts, e.g. 8,64.")
@click.option("--depths", metavar="X,...", help="Where the needle is: 0 (first) to 1 (last).")
@click.option("--samples", type=int, metavar="N", help="Documents of each length, depth and number of facts.")
@click.option("--text", metavar="FILE", help="Natural text to score: .txt, .jsonl, .gz, or a dataset's name.")
@click.option("--haystack", metavar="KIND|FILE", help="Filler: sentences (default), noise or a text file.")
@click.option("--generate/--no-generate", default=None, help="Generate answers, too (default: in suite full).")
@click.option("--ablate/--no-ablate", default=True, help="Score without each branch of the mixers, too.")
@click.option("--limit", type=int, metavar="N", help="Documents of each of lm-eval's own tasks.")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the documents.")
@click.option("--batch-size", default="auto", metavar="N|auto", help="Documents in a forward.")
@click.option("--dtype", metavar="DTYPE", help="bfloat16, float16 or float32 (default: the faster on a CPU).")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one).")
@click.option("--import", "plugins", multiple=True, metavar="MODULE", help="Your own mixers or maps.")
@click.option("-o", "--out", metavar="OUT", help="Folder to write (default: STUDENT-eval).")
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in OUT.")
@_command
def evaluate(student: str, plugins: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Say what STUDENT can no longer recall: by length, depth and number of facts, beside its teacher.

    OUT gets report.html, results.json, figures, and every sample.
    """
    _import_plugins(plugins)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; there is a bar for the whole run
    from linearize_evals.options import read_options

    arguments = read_options(options)
    from linearize_evals import processes
    from linearize_evals.run import evaluate as run
    from linearize_evals.show import print_results

    from linearize import console

    with _quiet_stdout(as_json), console.progress("tokens") as progress:
        results = run(student, progress=progress, note=lambda text: click.echo(printable(text), err=True), **arguments)
    if results:
        _emit(results, as_json, print_results)
    processes.leave()


@cli.command("tasks-path")
@_command
def tasks_path(as_json: bool) -> None:
    """The folder of linearize's recall tasks, for lm_eval's --include_path."""
    from linearize_evals.catalogue import tasks_path

    _emit(str(tasks_path()), as_json, click.echo)


@cli.command()
@click.option("--import", "plugins", multiple=True, metavar="MODULE", help="Your own mixers or maps.")
@_command
def doctor(plugins: tuple[str, ...], as_json: bool) -> None:
    """Say what will run on this machine, what won't, and why."""
    _import_plugins(plugins)
    from linearize.doctor import examine, print_report

    with _quiet_stdout(as_json):
        report = examine()
    _emit(report, as_json, print_report)


@cli.group()
def recipes() -> None:
    """List, show and check recipes."""


@recipes.command("ls")
@_command
def recipes_ls(as_json: bool) -> None:
    """The recipes that ship with linearize."""
    from linearize.recipe import shipped_recipes

    rows = [
        {
            "name": name,
            "path": str(path),
            "summary": _first_sentence(path.read_text(encoding="utf-8")),
        }
        for name, path in shipped_recipes().items()
    ]
    _emit(rows, as_json, _lines("{name:18} {summary}"))


def _first_sentence(text: str) -> str:
    """The first sentence of a file's leading comment, which may run over several lines."""
    header = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    joined = " ".join(line.lstrip("# ") for line in header)
    return re.split(r"(?<=\.)\s", joined, maxsplit=1)[0]


@recipes.command("cat")
@click.argument("name", metavar="FILE|NAME")
@_command
def recipes_cat(name: str, as_json: bool) -> None:
    """Print a recipe: its text, or with --json its values, defaults filled in."""
    from linearize.recipe import find_recipe, load_recipe

    recipe = load_recipe(name)
    _emit(
        recipe.to_dict(),
        as_json,
        lambda _: click.echo(printable(find_recipe(name).read_text(encoding="utf-8"), keep="\n\t"), nl=False),
    )


@recipes.command("validate")
@click.argument("names", metavar="FILE|NAME...", nargs=-1, required=True)
@click.option("--import", "plugins", multiple=True, metavar="MODULE", help="Your own mixers or maps.")
@_command
def recipes_validate(names: tuple[str, ...], plugins: tuple[str, ...], as_json: bool) -> None:
    """Check recipes and report every problem of each."""
    _import_plugins(plugins)
    from linearize.recipe import load_recipe

    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            load_recipe(name)
            rows.append({"recipe": name, "ok": True, "verdict": f"{name}: fine"})
        except UsageError as error:
            rows.append({"recipe": name, "ok": False, "verdict": str(error)})
    _emit(rows, as_json, _lines("{verdict}"))
    if not all(row["ok"] for row in rows):
        raise click.exceptions.Exit(2)
