"""`linearize select`: grammar only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from linearize.errors import UsageError
from linearize.grammar import (
    RECIPE_KEYS,
    common_options,
    emit,
    import_plugins,
    note,
    quiet_stdout,
    recipe_of,
    recipe_options,
)
from linearize.selection import BUDGET, DEFAULT_SCORE, SCORES
from linearize.selection_file import read_selection

WORDS = {"sets": "set", "plugins": "import"}  # options whose parameters have other names


@click.command()
@click.argument("model")
@click.option("-o", "--out", required=True, metavar="FILE", help="File to write, .json; a .png goes beside it.")
@click.option("--budget", default=BUDGET, metavar="P%|K", help=f"How many layers (or heads) keep softmax ({BUDGET}).")
@click.option("--heads", is_flag=True, help="Choose key/value heads, with the query heads that read them, not layers.")
@click.option("--score", default=DEFAULT_SCORE, metavar="NAME", help=f"{', '.join(SCORES)} (default: {DEFAULT_SCORE}).")
@recipe_options(keeps=False)
@click.option("--data", metavar="FILE", help="Text for the KL: .txt, .jsonl, .gz, or a dataset (default: bundled).")
@click.option("--samples", type=int, default=8, metavar="N", help="Texts, lists and needles, of each (8).")
@click.option("--length", type=int, default=512, metavar="N", help="Tokens of a text and of a needle's filler (512).")
@click.option("--pairs", default="16,32", metavar="N,...", help="Facts in the lists (16,32).")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the documents and the random sets.")
@click.option("--dtype", metavar="DTYPE", help="bfloat16, float16 or float32 (default: the faster on a CPU).")
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: a GPU if there is one).")
@common_options
def select(model: str, out: str, as_json: bool, **options: Any) -> None:
    """Choose the layers of MODEL (or the heads) that should keep softmax attention, by measuring what each one's mixer
    loses.

    MODEL is a base model, or a converted one that keeps no layer, fresh or after attention transfer. Use the choice
    with `linearize convert MODEL -o OUT --keep-softmax @FILE`.
    """
    asked = any(options.get(key) not in (None, ()) for key in RECIPE_KEYS)
    recipe = recipe_of(options) if asked else import_plugins(options["plugins"])
    try:
        pairs = [int(text) for text in options["pairs"].split(",")]
    except ValueError:
        raise UsageError("--pairs takes whole numbers", "For example --pairs 16,32") from None
    units = "heads" if options["heads"] else "layers"
    file = _place(out)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; there is a bar for the whole run
    from linearize import console
    from linearize.select_show import print_selection, write
    from linearize.selection import select as measure

    names = ("budget", "score", "data", "samples", "length", "seed", "revision", "dtype", "device")
    chosen = {name: options[name] for name in names}
    with quiet_stdout(as_json), console.progress("layers run") as bar:
        document = measure(model, units=units, recipe=recipe, pairs=pairs, progress=bar, note=note, **chosen)
    wrote = write(document, file)
    emit(document | {"wrote": wrote}, as_json, lambda shown: print_selection(shown, _typed(options)))


def _typed(options: Mapping[str, Any]) -> list[str]:
    """The options that gave the recipe, to be given again: what a layer loses depends on its mixer."""
    words = []
    for key in (*RECIPE_KEYS, "plugins", "revision"):
        value, option = options.get(key), f"--{WORDS.get(key, key.replace('_', '-'))}"
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        words += [word for one in values for word in (option, str(one))]
    return words


def _place(out: str) -> Path:
    """The file, if it and its figure can be written; what takes minutes must not fail at its end."""
    try:
        file = Path(out).expanduser()
    except RuntimeError:
        raise UsageError(f"-o {out} is in the home folder of a user who doesn't exist", "Check the name") from None
    if file.suffix != ".json":
        raise UsageError(f"-o {out} isn't the name of a .json file", "For example -o selection.json")
    picture = file.with_suffix(".png")
    nearest = next(path for path in (file, *file.absolute().parents) if os.path.lexists(path))
    blocked = [path for path in (file, picture) if path.is_dir()]
    blocked += [nearest] if nearest != file and not nearest.is_dir() else []
    if blocked:
        raise UsageError(f"-o {out} can't be written: {blocked[0]} is in the way", "Choose another file")
    if not os.access(nearest, os.W_OK):
        raise UsageError(f"-o {out} can't be written: {nearest} is not yours to write to", "Choose another file")
    strange = [path for path in (file, picture) if path.exists() and not _is_selection(file)]
    if strange:
        raise UsageError(f"-o {out} would replace {strange[0]}, which is no selection's", "Choose another file")
    return file


def _is_selection(file: Path) -> bool:
    """Whether `linearize select` wrote it, so that it may write it anew."""
    try:
        return bool(read_selection(file))
    except UsageError:
        return False
