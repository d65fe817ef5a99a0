"""`linearize recipes`: grammar only."""

from __future__ import annotations

import itertools
import re
from typing import Any

import click

from linearize.console import printable, say
from linearize.errors import UsageError
from linearize.grammar import common_options, emit, import_option, import_plugins


@click.group()
def recipes() -> None:
    """List, show, copy and check recipes."""


@recipes.command("ls")
@common_options
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
    width = max(len(row["name"]) for row in rows)
    emit(rows, as_json, lambda rows: [say(f"{row['name']:{width}}  {row['summary']}") for row in rows])


def _first_sentence(text: str) -> str:
    """The first sentence of a file's leading comment, which may run over several lines."""
    header = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    joined = " ".join(line.lstrip("# ") for line in header)
    return re.split(r"(?<=\.)\s", joined, maxsplit=1)[0]


@recipes.command("cat")
@click.argument("name", metavar="FILE|NAME")
@common_options
def recipes_cat(name: str, as_json: bool) -> None:
    """Print a recipe: its text, or with --json its values, defaults filled in."""
    from linearize.recipe import find_recipe, load_recipe

    recipe = load_recipe(name)
    emit(
        recipe.to_dict(),
        as_json,
        lambda _: click.echo(printable(find_recipe(name).read_text(encoding="utf-8"), keep="\n\t"), nl=False),
    )


@recipes.command("cp")
@click.argument("name", metavar="FILE|NAME")
@click.argument("copy", metavar="COPY")
@common_options
def recipes_cp(name: str, copy: str, as_json: bool) -> None:
    """Copy a recipe to COPY, a new file or a folder, to change it there."""
    from linearize.recipe_files import copy_recipe

    path = copy_recipe(name, copy)
    emit({"recipe": name, "path": str(path)}, as_json, lambda _: say(f"wrote {path}"))


@recipes.command("validate")
@click.argument("names", metavar="FILE|NAME...", nargs=-1, required=True)
@import_option
@common_options
def recipes_validate(names: tuple[str, ...], plugins: tuple[str, ...], as_json: bool) -> None:
    """Check recipes and report every problem of each."""
    import_plugins(plugins)
    from linearize.recipe import load_recipe

    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            load_recipe(name)
            rows.append({"recipe": name, "ok": True, "verdict": f"{name}: fine"})
        except UsageError as error:
            rows.append({"recipe": name, "ok": False, "verdict": str(error)})
    emit(rows, as_json, lambda rows: [click.echo(printable(row["verdict"], keep="\n")) for row in rows])
    if not all(row["ok"] for row in rows):
        raise click.exceptions.Exit(2)
