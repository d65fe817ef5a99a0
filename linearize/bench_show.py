"""What `linearize bench` prints and draws."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linearize.console import printable, say, size

FILE, PLOT = "bench.json", "bench.png"


def print_bench(document: Mapping[str, Any]) -> None:
    """A table with a row for each model and length, and how it compares with the first model."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name, justify in (("model", "left"), ("attention", "left"), ("tokens", "right"), ("prefill tokens/s", "right"),
                          ("decode ms/token", "right"), ("cache", "right"), ("peak memory", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # pyright: ignore
    for number, (model, ratios) in enumerate(zip(document["models"], document["ratios"], strict=True)):
        for row, ratio in zip(model["rows"], ratios, strict=True):
            table.add_row(
                printable(Path(model["name"]).name),
                model["attention"],
                f"{row['tokens']:,}",
                f"{row['prefill_tokens_per_second']:,.0f}{_times(ratio['prefill_tokens_per_second'], number)}",
                f"{row['decode_ms']:.1f}{_times(ratio['decode_tokens_per_second'], number)}",
                f"{size(row['cache_bytes'])}{_times(ratio['cache_bytes'], number)}",
                "unknown" if row["peak_bytes"] is None else size(row["peak_bytes"]),
                end_section=row is model["rows"][-1],
            )
    console = Console()
    console.print(table)
    if len(document["models"]) > 1:
        say("in brackets: times faster or smaller than the first model")
    for name in document.get("wrote", ()):
        say(f"wrote {name}")


def _times(ratio: float, number: int) -> str:
    return f" ({ratio:.2f} x)" if number else ""


def write(document: dict[str, Any], folder: Path) -> list[str]:
    """Write bench.json and bench.png to `folder`, and name them.

    Raises:
        ResourceError: the disk refuses.
    """
    from linearize_evals.settings import write_file, write_json

    paths = [folder / FILE, folder / PLOT]
    write_json(paths[0], document)
    write_file(paths[1], draw(document))
    return [str(path) for path in paths]


def draw(document: Mapping[str, Any]) -> bytes:
    """A PNG of three panels over the length of the context: prefill speed, time of a token, bytes of the cache."""
    import matplotlib as mpl
    from linearize_evals.plots import LINES, STYLE
    from matplotlib.figure import Figure

    panels = (
        ("prefill_tokens_per_second", "prefill, tokens/s"),
        ("decode_ms", "decoding, ms/token"),
        ("cache_bytes", "cache, bytes"),
    )
    looks = {"softmax": LINES["teacher"], "converted": LINES["student"]}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.2), layout="constrained")
        for axes, (key, title) in zip(figure.subplots(1, 3), panels, strict=True):
            for number, model in enumerate(document["models"]):
                rows = model["rows"]
                look = looks[model["attention"]] | ({} if number < 2 else {"alpha": 0.5, "markerfacecolor": "none"})
                label = f"{printable(Path(model['name']).name)}, {model['attention']}"
                axes.plot([row["tokens"] for row in rows], [row[key] for row in rows], label=label, **look)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(title)
            axes.set_xlabel("tokens of context")
            ticks = [row["tokens"] for row in document["models"][0]["rows"]]
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        figure.axes[0].legend()
        picture = io.BytesIO()
        figure.savefig(picture, dpi=150)
    return picture.getvalue()
