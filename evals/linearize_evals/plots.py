"""Figures of a run. Colours are safe for the colour-blind, and every cell and line can be told without its colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter, NullLocator

from linearize_evals.branches import window_of
from linearize_evals.compare import TOO_WEAK
from linearize_evals.phrases import short

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text: small files, and readable aloud
    "svg.hashsalt": "linearize",  # the same results give the same bytes
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "hatch.linewidth": 0.5,
}
# Okabe & Ito's palette; dashes and markers say the same.
LINES: dict[str, dict[str, Any]] = {
    "teacher": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "student": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
}
GREY = "#767676"
UP_TO_ONE = (-0.04, 1.06)


@dataclass(frozen=True)
class Picture:
    """A figure with its file name (without suffix), the task it belongs to, and what it shows in words."""

    name: str
    task: str
    alt: str
    figure: Figure


def pictures(results: Mapping[str, Any]) -> list[Picture]:
    """All figures that the results have the data for."""
    window = window_of(results)
    found: list[Picture] = []
    with mpl.rc_context(STYLE):
        for task, measured in results["tasks"].items():
            found += _grid(task, measured)
            found += _by_distance(task, measured, window)
        for task, text in results["text"].items():
            found += _by_position(task, text, window)
        found += _cache(results["models"])
    return found


def _sides(group: Mapping[str, Any]) -> list[str]:
    return [side for side in LINES if group.get(side)]


def _axes(width: float = 4.5, height: float = 3.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _grid(task: str, measured: Mapping[str, Any]) -> Iterator[Picture]:
    """Heat maps where two axes vary, lines where one does, nothing for a single cell."""
    cells = measured["cells"]
    varies = [axis for axis in ("depth", "pairs", "length") if len({cell[axis] for cell in cells}) > 1]
    if "depth" in varies and "pairs" in varies:
        for pairs in sorted({cell["pairs"] for cell in cells}):
            some = [cell for cell in cells if cell["pairs"] == pairs]
            yield from _heat_maps(f"{task}_pairs{pairs}", task, some, "depth", f", {pairs} pairs")
    elif "depth" in varies:
        yield from _heat_maps(task, task, cells, "depth")
    elif "pairs" in varies:
        if len({cell["pairs"] for cell in cells}) == len(cells):  # the length follows from the pairs
            yield _cells_line(task, cells, "pairs")
        else:
            yield from _heat_maps(task, task, cells, "pairs")
    elif "length" in varies:
        yield _cells_line(task, cells, "length")


ROWS = {"depth": "depth of the fact (0 = start)", "pairs": "facts in the context"}


def _heat_maps(
    name: str, task: str, cells: Sequence[Mapping[str, Any]], rows: str, suffix: str = ""
) -> Iterator[Picture]:
    sides = _sides(cells[0])
    for side in sides:
        values = {_place(cell, rows): cell[side]["accuracy"] for cell in cells}
        title = f"{short(task)}, {side}: accuracy{suffix}"
        yield Picture(f"{name}_{side}", task, title, _heat_map(values, rows, title, "cividis"))
    if len(sides) == 2:
        values = {_place(cell, rows): cell["difference"] and cell["difference"]["value"] for cell in cells}
        title = f"{short(task)}: student − teacher{suffix}"
        figure = _heat_map(values, rows, title, "PuOr", signed=True)
        yield Picture(f"{name}_difference", task, title, figure)


def _place(cell: Mapping[str, Any], rows: str) -> tuple[Any, Any]:
    return cell[rows], cell["length"]


def _heat_map(
    values: Mapping[tuple[Any, Any], float | None], rows: str, title: str, colours: str, signed: bool = False
) -> Figure:
    """`values` by (row, length); a value of None is a cell whose teacher is too weak."""
    heights, lengths = (sorted({place[axis] for place in values}) for axis in (0, 1))
    figure, axes = _axes(1.3 + 0.58 * max(len(lengths), 4), 1.2 + 0.42 * max(len(heights), 3))
    colour_of = mpl.colormaps[colours]
    for (row, length), value in values.items():
        x, y = lengths.index(length), heights.index(row)
        if value is None:
            fill, words, size = "#e4e4e4", TOO_WEAK.replace(" ", "\n", 1), 6.5
        else:
            fill = colour_of((value + 1) / 2 if signed else value)
            words = f"{value:+.2f}" if signed and round(value, 2) else f"{abs(value):.2f}"
            words, size = words.replace("-", "−"), 8
        hatch = "////" if value is None else None
        axes.add_patch(
            Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=fill, edgecolor="#bdbdbd" if hatch else "white", hatch=hatch)
        )
        box = {"facecolor": "#e4e4e4", "edgecolor": "none", "pad": 0.6} if hatch else None
        axes.text(x, y, words, ha="center", va="center", size=size, color=_ink(fill), bbox=box, linespacing=0.95)
    axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(heights) - 0.5, -0.5), title=title)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(heights)), [f"{height:g}" for height in heights])
    axes.set(xlabel="length (tokens)", ylabel=ROWS[rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _ink(fill: Any) -> str:
    """Black or white, whichever is readable on `fill` (relative luminance of WCAG 2)."""
    rgb = np.array(to_rgb(fill))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return "black" if linear @ [0.2126, 0.7152, 0.0722] > 0.18 else "white"


def _cells_line(task: str, cells: Sequence[Mapping[str, Any]], axis: str) -> Picture:
    figure, axes = _axes()
    places = [cell[axis] for cell in cells]
    _lines(axes, places, cells)
    if any(cell["chance"] for cell in cells):
        chances = [cell["chance"] for cell in cells]
        axes.plot(places, chances, color=GREY, linestyle=":", marker="x", markersize=4, label="chance")
    xlabel = "facts in the context" if axis == "pairs" else "length (tokens)"
    title = f"{short(task)}: accuracy by {'number of facts' if axis == 'pairs' else 'length'}"
    _finish(axes, places, title=title, xlabel=xlabel, ylabel="accuracy", ylim=UP_TO_ONE)
    return Picture(f"{task}_{axis}", task, f"{title}, with 95 % intervals", figure)


def _lines(axes: Axes, places: Sequence[float], groups: Sequence[Mapping[str, Any]], value: str = "accuracy") -> None:
    """One line for each side, with the intervals as bars, a little apart so that both are seen."""
    for side in _sides(groups[0]):
        values = np.array([group[side][value] for group in groups], dtype=float)
        ends = np.array([[group[side][end] for group in groups] for end in ("low", "high")], dtype=float)
        bars = np.abs(ends - values)
        at = np.array(places) * (0.985 if side == "teacher" else 1.015)
        axes.errorbar(at, values, yerr=bars, capsize=2.5, markersize=4.5, linewidth=1.4, label=side, **LINES[side])


def _finish(axes: Axes, ticks: Sequence[float], **settings: Any) -> None:
    """Titles, a logarithmic axis with these ticks and no others, and the legend."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [_thousands(tick) for tick in ticks], rotation=45 if len(ticks) > 9 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(**settings)
    axes.grid(axis="y", color="#e0e0e0", linewidth=0.6)
    axes.set_axisbelow(True)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Below the figure, in the order of LINES, then the rest."""
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [*(side for side in LINES if side in entries), *(name for name in entries if name not in LINES)]
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend([entries[name] for name in names], names, loc="outside lower center", ncols=4, fontsize=8)


def _thousands(tokens: float) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def _mark_window(axes: Axes, window: int | None) -> None:
    if window:
        axes.axvline(window, color="black", linestyle="--", linewidth=1, label=f"window of {window} tokens")


def _by_distance(task: str, measured: Mapping[str, Any], window: int | None) -> Iterator[Picture]:
    bins = measured["by_distance"]
    if len(bins) < 2:
        return
    figure, axes = _axes()
    middles = [b["up_to"] / 2**0.5 for b in bins]  # of (up_to / 2, up_to] on a logarithmic axis
    _lines(axes, middles, bins)
    _mark_window(axes, window)
    title = f"{short(task)}: accuracy by distance"
    edges = sorted({edge for b in bins for edge in (max(b["over"], 1), b["up_to"])})
    _finish(axes, edges, title=title, xlabel="distance back to the fact (tokens)", ylabel="accuracy", ylim=UP_TO_ONE)
    marked = f"; the window of {window} tokens is marked" if window else ""
    yield Picture(f"{task}_distance", task, f"{title} back to the needed fact, with 95 % intervals{marked}", figure)


def _by_position(task: str, text: Mapping[str, Any], window: int | None) -> Iterator[Picture]:
    bins = text["by_position"]
    if len(bins) < 2:
        return
    figure, axes = _axes()
    for side in _sides(text):
        edges = [bins[0]["from"], *(b["to"] for b in bins)]
        values = np.array([b[side]["perplexity"] for b in bins], dtype=float)
        middles = [(b["from"] + b["to"]) / 2 for b in bins]
        look = LINES[side]
        axes.plot(middles, values, linewidth=1.4, markersize=4, label=side, **look)
        ends = np.array([[b[side][end] for b in bins] for end in ("low", "high")], dtype=float)
        axes.fill_between(middles, *ends, color=look["color"], alpha=0.15, linewidth=0)
        axes.set_xlim(edges[0], edges[-1])
    _mark_window(axes, window)
    title = f"{short(task)}: perplexity by position"
    axes.set(title=title, xlabel="position in the text (tokens)", ylabel="perplexity (lower is better)")
    axes.grid(axis="y", color="#e0e0e0", linewidth=0.6)
    _legend(axes)
    yield Picture(f"{task}_position", task, f"{title}, with 95 % intervals", figure)


def _cache(models: Mapping[str, Any]) -> Iterator[Picture]:
    caches = {side: models[side]["cache"] for side in LINES if (models.get(side) or {}).get("cache")}
    if not caches or max(len(points) for points in caches.values()) < 2:
        return
    figure, axes = _axes()
    for side, points in caches.items():
        places, megabytes = zip(*((point["tokens"], point["bytes"] / 1e6) for point in points), strict=True)
        axes.plot(places, megabytes, linewidth=1.4, markersize=4.5, label=side, **LINES[side])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda megabytes, _place: f"{megabytes:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    ticks = sorted({point["tokens"] for points in caches.values() for point in points})
    title = "Memory of the context in one sequence"
    _finish(axes, ticks, title=title, xlabel="context (tokens)", ylabel="cache or state (MB)")
    yield Picture("cache", "", f"{title}, by its length", figure)
