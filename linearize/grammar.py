"""What commands share: their options, the recipe that these ask for, and how a result is put out."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from linearize.console import printable
from linearize.errors import LinearizeError, UsageError

if TYPE_CHECKING:
    from linearize.recipe import Recipe


RECIPE_KEYS = ("recipe", "sets", "mixer", "feature_map", "window", "sinks", "keep_softmax")


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every command has."""
    function = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")(function)
    return click.option("--debug", is_flag=True, expose_value=False, help="Tracebacks of errors.")(function)


def set_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any key of the recipe.")(function)


def import_option(function: Callable[..., Any]) -> Callable[..., Any]:
    help = "Your own mixers or maps."
    return click.option("--import", "plugins", multiple=True, metavar="MODULE", help=help)(function)


def recipe_options(keeps: bool = True) -> Callable[..., Any]:
    """The options that say what a model is converted to; `keeps`: which layers stay, too."""
    options = [
        click.option("--recipe", metavar="FILE|NAME", help="A recipe (default: `default`)."),
        click.option("--mixer", metavar="NAME", help="What replaces attention: window, linear, gla ..."),
        click.option("--feature-map", metavar="NAME", help="hedgehog, favor, elu1, cosformer ..."),
        click.option("--window", type=int, metavar="N", help="Newest tokens under exact softmax."),
        click.option("--sinks", type=int, metavar="N", help="First tokens that stay exact."),
        set_option,
        import_option,
        click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub model."),
    ]
    if keeps:
        help = "Layers to leave: none, 0,7,15, every:4, 25%, auto:25%, @selection.json."
        options.insert(5, click.option("--keep-softmax", metavar="SPEC", help=help))

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def recipe_of(options: Mapping[str, Any]) -> Recipe:
    """The checked recipe that a command's options ask for. No model is touched before this."""
    import_plugins(options["plugins"])
    typed = {key: (f"--{key.replace('_', '-')}", options.get(key)) for key in RECIPE_KEYS[2:]}
    return asked_recipe(options["recipe"], options["sets"], typed)


def asked_recipe(ref: str | None, sets: tuple[str, ...], typed: Mapping[str, tuple[str, Any]] = {}) -> Recipe:
    """The checked recipe that a command's options ask for.

    Args:
        ref: a file or a shipped name; None for the default.
        sets: KEY=VALUE, as typed.
        typed: keys that have an option of their own: key -> (option, value), where None is an option left out.

    Raises:
        UsageError: every problem, in the words that were typed where the recipe itself is sound.
    """
    from linearize.recipe import RecipeError, load_recipe

    overrides = {key: value for key, (_, value) in typed.items() if value is not None}
    flags = {key: typed[key][0] for key in overrides}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes KEY=VALUE, not '{text}'", "For example --set seed=1")
        for other in overrides:
            if key == other:
                raise UsageError(f"{key} is given twice", "Give it once")
            if other.startswith(f"{key}."):  # which would be swallowed
                what = f"--set {key} would replace what {flags[other]} gives"
                raise UsageError(what, "Give all of it in one of them")
        overrides[key] = value
        flags[key] = f"--set {key}"
    try:
        return load_recipe(ref, overrides)
    except RecipeError as error:
        if not all(problem.key in flags for problem in error.problems):
            raise
        # The recipe is sound, what was typed is not: say it in the words that were typed.
        said = [f"{flags[problem.key]}: {problem.bare()}" for problem in error.problems]
        raise UsageError("\n  ".join(said)) from None


def import_plugins(modules: tuple[str, ...]) -> None:
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


def emit(document: Any, as_json: bool, text: Callable[[Any], Any]) -> None:
    """Put a result out: as JSON, or as `text` shows it to people."""
    if as_json:
        click.echo(json.dumps(document, indent=2))  # in ASCII: a path need not be valid UTF-8
    else:
        text(document)


def note(text: str) -> None:
    """Say on stderr what a user should know before the end."""
    click.echo(printable(text), err=True)


@contextlib.contextmanager
def quiet_stdout(as_json: bool) -> Iterator[None]:
    """Libraries that print go to stderr, so that stdout holds nothing but the document."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield
