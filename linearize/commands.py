"""The commands: grammar only. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import os
from typing import Any

import click

from linearize.bench_commands import bench
from linearize.grammar import (
    RECIPE_KEYS,
    common_options,
    emit,
    import_option,
    import_plugins,
    note,
    quiet_stdout,
    recipe_of,
    recipe_options,
)
from linearize.recipe_commands import recipes
from linearize.select_commands import select
from linearize.training_commands import run, train


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="linearize", message="%(prog)s %(version)s")
def cli() -> None:
    """Convert pretrained Hugging Face decoders to linear attention."""


@cli.command()
@click.argument("model")
@click.option("-o", "--out", required=True, metavar="OUT", help="Folder to write.")
@recipe_options()
@click.option("--dtype", metavar="DTYPE", help="Stored dtype of a GGUF model: float32, bfloat16, float16.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@common_options
def convert(model: str, out: str, dry_run: bool, force: bool, as_json: bool, **options: Any) -> None:
    """Convert MODEL (a folder, a Hub id or a GGUF file) and write it to OUT.

    No weight is changed: they are linked or copied, and the mixers' tensors are added. OUT appears whole or
    not at all.
    """
    recipe = recipe_of(options)
    from linearize import console
    from linearize.conversion import convert

    revision, dtype, plugins = options["revision"], options["dtype"], options["plugins"]
    old = _replaced(out) if force else None
    with quiet_stdout(as_json), console.progress() as progress:
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
    emit(document, as_json, lambda shown: console.print_result(shown, plugins))


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
@recipe_options()
@common_options
def inspect(model: str, as_json: bool, **options: Any) -> None:
    """Say what MODEL is and what each layer would become (or became). No weight is read."""
    asked = any(options[key] not in (None, ()) for key in RECIPE_KEYS)
    recipe = recipe_of(options) if asked else import_plugins(options["plugins"])
    from linearize import console
    from linearize.inspection import inspect

    with quiet_stdout(as_json):
        report = inspect(model, recipe=recipe, revision=options["revision"])
    emit(report, as_json, console.print_inspection)


@cli.command()
@click.argument("out")
@import_option
@common_options
def verify(out: str, plugins: tuple[str, ...], as_json: bool) -> None:
    """Check every file and tensor of the converted folder OUT, and name every fault."""
    import_plugins(plugins)
    from linearize import console
    from linearize.verification import judge

    with quiet_stdout(as_json), console.progress() as progress:
        verdict = judge(out, progress=progress)
    emit(verdict.to_dict(), as_json, console.print_verdict)
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
@import_option
@click.option("-o", "--out", metavar="OUT", help="Folder to write (default: STUDENT-eval).")
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in OUT.")
@common_options
def evaluate(student: str, plugins: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Say what STUDENT can no longer recall: by length, depth and number of facts, beside its teacher.

    OUT gets report.html, results.json, figures, and every sample.
    """
    import_plugins(plugins)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; there is a bar for the whole run
    from linearize_evals.options import read_options

    arguments = read_options(options)
    from linearize_evals import processes
    from linearize_evals.run import evaluate as measure
    from linearize_evals.show import print_results

    from linearize import console

    with quiet_stdout(as_json), console.progress("tokens") as progress:
        results = measure(student, progress=progress, note=note, **arguments)
    if results:
        emit(results, as_json, print_results)
    processes.leave()


@cli.command("tasks-path")
@common_options
def tasks_path(as_json: bool) -> None:
    """The folder of linearize's recall tasks, for lm_eval's --include_path."""
    from linearize_evals.catalogue import tasks_path

    emit(str(tasks_path()), as_json, click.echo)


@cli.command()
@import_option
@common_options
def doctor(plugins: tuple[str, ...], as_json: bool) -> None:
    """Say what will run on this machine, what won't, and why."""
    import_plugins(plugins)
    from linearize.doctor import examine, print_report

    with quiet_stdout(as_json):
        report = examine()
    emit(report, as_json, print_report)


for command in (train, run, recipes, bench, select):
    cli.add_command(command)
