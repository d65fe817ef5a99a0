"""What `linearize select` prints, writes and draws."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linearize.console import say
from linearize.select_units import in_words, label

HYBRIDS = {
    "chosen": "chosen",
    "uniform": "evenly spread",
    "random": "random, mean of {}",
    "linear": "none, all mixers",
}


def print_selection(document: Mapping[str, Any], typed: Sequence[str] = ()) -> None:
    """A table of the layers (of heads, the chosen ones and as many of the next), one of the hybrids, and what to do
    next; `typed` are the options that gave the recipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from linearize.select_scores import mean_of

    console = Console()
    units = document["units"]
    shown = [row for row in document[units] if units == "layers" or row["rank"] <= 2 * document["count"]]
    alone = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
        title="what each mixer loses alone: nats/token [95 %], points",
        title_justify="left",
    )
    for name in ("layer" if units == "layers" else "layer.head", "KL", "answers' loss", "recall", "ratio", "rank", ""):
        alone.add_column(name, justify="right")
    for row in shown:
        points = f"{round(-100 * row['recall_accuracy']['value']):+d}"
        cells = (
            label(row), _with_interval(row["kl"]), _with_interval(row["recall_nll"], "+"), points,
            f"{row['ratio']:.1f}", str(row["rank"]), "kept" if row["chosen"] else "",
        )  # fmt: skip
        alone.add_row(*cells, style="bold" if row["chosen"] else None)
    console.print(alone)
    if len(shown) < len(document[units]):
        say(f"{len(document[units]) - len(shown)} more heads have lower ranks")

    tasks = list(document["teacher"]["tasks"])
    hybrids = Table(box=box.SIMPLE_HEAD, title="hybrids that keep", title_justify="left")
    hybrids.add_column(units, max_width=48)
    for name in ("KL", "answers' loss", *(task.removeprefix("linearize_") for task in tasks)):
        hybrids.add_column(name, justify="right")
    hybrids.add_row("all (the teacher)", "0", "0", *_accuracies(document["teacher"], tasks))
    for key, words in HYBRIDS.items():
        several = isinstance(document[key], list)
        hybrid = mean_of(document[key]) if several else document[key]
        name = words.format(len(document[key]))
        if "layers" in hybrid:
            name += f": {in_words(hybrid)}"
        measured = (f"{hybrid['kl']['value']:.3f}", f"{hybrid['recall_nll']['value']:+.3f}")
        hybrids.add_row(name, *measured, *_accuracies(hybrid, tasks))
    console.print(hybrids)
    for text in document["notes"]:
        say(f"note: {text}")
    for name in document.get("wrote", ()):
        say(f"wrote {name}")
    if document.get("wrote"):
        model, recipe = ("BASE", ("--recipe", "RECIPE")) if document["converted"] else (document["model"], typed)
        words = ["linearize", "convert", model, "-o", "OUT", *recipe, "--keep-softmax", f"@{document['wrote'][0]}"]
        made = f" (BASE and RECIPE: those that {document['model']} was made from)" if document["converted"] else ""
        say(f"next: {shlex.join(words)}{made}")


def _accuracies(hybrid: Mapping[str, Any], tasks: list[str]) -> list[str]:
    return [f"{hybrid['tasks'][task]['accuracy']:.2f}" for task in tasks]


def _with_interval(found: Mapping[str, Any], sign: str = "") -> str:
    value = f"{found['value']:{sign}.3f}"
    if found["low"] is None:
        return value
    low, high = (re.sub(r"^(-?)0\.", r"\1.", f"{found[end]:.3f}") for end in ("low", "high"))
    return f"{value} [{low}, {high}]"  # short, so that a row fits into 80 columns


def write(document: Mapping[str, Any], file: Path) -> list[str]:
    """Write the selection to `file` and its figure beside it, and name them.

    Raises:
        ResourceError: the disk refuses.
    """
    from linearize_evals.settings import write_file, write_json

    picture = file.with_suffix(".png")
    drawn = draw(document)
    write_json(file, document)
    write_file(picture, drawn)
    return [str(file), str(picture)]


def draw(document: Mapping[str, Any]) -> bytes:
    """A PNG of two panels over the layers (whose heads stand side by side): KL, and the rise of the loss on answers;
    what is chosen is hatched."""
    import matplotlib as mpl
    from linearize_evals.plots import GREY, LINES, STYLE
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    units = document["units"]
    rows = document[units]
    places, width = _places(rows)
    numbers = sorted({row["layer"] for row in rows})
    colour = LINES["student"]["color"]
    panels = (("kl", "KL to the teacher on text, nats/token"), ("recall_nll", "loss on answers, nats/token more"))
    with mpl.rc_context(STYLE):
        inches = min(max(5.0, 1.5 + 0.22 * len(numbers), 1.5 + 0.1 * len(rows)), 24.0)
        figure = Figure(figsize=(inches, 4.6), layout="constrained")
        for axes, (key, title) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
            bars = axes.bar(places, [row[key]["value"] for row in rows], width, color=GREY)
            for bar, row in zip(bars, rows, strict=True):
                if row["chosen"]:
                    bar.set(facecolor=colour, hatch="////", edgecolor="white")
            known = [(place, row[key]) for place, row in zip(places, rows, strict=True) if row[key]["low"] is not None]
            ends = [
                [max(found["value"] - found["low"], 0.0) for _, found in known],
                [max(found["high"] - found["value"], 0.0) for _, found in known],
            ]
            axes.errorbar(
                [place for place, _ in known], [found["value"] for _, found in known], ends,
                fmt="none", ecolor="black", elinewidth=0.8,
            )  # fmt: skip
            axes.axhline(0, color="black", linewidth=0.6)
            axes.set_title(title)
        alone = (
            "layer whose mixer runs alone"
            if units == "layers"
            else "layer; a bar for each key/value head whose mixer runs alone"
        )
        figure.axes[-1].set_xlabel(alone)
        step = -(-len(numbers) // 32)
        figure.axes[-1].set_xticks(numbers[::step])
        marks = [
            Patch(
                facecolor=colour, hatch="////", edgecolor="white", label=f"stays softmax (score {document['score']})"
            ),
            Patch(facecolor=GREY, label="converted"),
        ]
        figure.legend(handles=marks, loc="outside lower center", ncols=2)  # no place inside is free of bars for certain
        picture = io.BytesIO()
        figure.savefig(picture, dpi=150)
    return picture.getvalue()


def _places(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], float]:
    """Where the bar of each row stands, and how wide bars are: a layer takes 0.8 around its number."""
    most = 1 + max(row.get("head", 0) for row in rows)
    return [row["layer"] + 0.8 * ((row.get("head", 0) + 0.5) / most - 0.5) for row in rows], 0.8 / most
