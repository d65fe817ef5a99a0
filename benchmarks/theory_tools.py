"""What the theory_*.py files share: q, k, v of a real model, slopes on log-log axes, and the look of figures."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from linearize_evals.plots import STYLE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from torch import Tensor

import linearize
from demo import find_model
from ops_timing import machine

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
TEXT = Path(__file__).with_name("demo_text.txt")
# Okabe & Ito's palette, with a marker and a dash each, so that lines can be told without their colour.
LOOKS: list[dict[str, Any]] = [
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#009E73", "marker": "^", "linestyle": "-."},
    {"color": "#CC79A7", "marker": "D", "linestyle": ":"},
    {"color": "#E69F00", "marker": "v", "linestyle": "-"},
    {"color": "#56B4E9", "marker": "P", "linestyle": "--"},
    {"color": "#000000", "marker": "x", "linestyle": "-."},
    {"color": "#767676", "marker": "*", "linestyle": ":"},
]


class Heads(NamedTuple):
    """One layer's q, k (T, H, D), scaled by the square root of the softmax's factor, and v (T, H, Dv); each query head
    with keys and values of its own. float64."""

    q: Tensor
    k: Tensor
    v: Tensor


def capture(layers: Sequence[int], tokens: int) -> dict[int, Heads]:
    """What `layers` of SmolLM2-135M-Instruct see in the first `tokens` tokens of the demo's text (float32 model)."""
    from linearize.modeling.observe import Observation, observing

    gguf = find_model()
    ids = linearize.load_tokenizer(gguf)(TEXT.read_text(encoding="utf-8")).input_ids[:tokens]
    model = linearize.linearize_(linearize.load(gguf, dtype=torch.float32).eval(), "linear-elu1")
    found: dict[int, Heads] = {}

    def observer(given: Observation) -> None:
        if given.layer in layers:
            q, k, v = (x[0].double() for x in (given.q, given.k, given.v))
            group = q.shape[1] // k.shape[1]
            root = abs(given.scaling) ** 0.5
            found[given.layer] = Heads(q * root, *(x.repeat_interleave(group, 1) for x in (k * root, v)))

    with torch.no_grad(), observing(model, observer):
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """a of the least-squares line log y = a log x + b."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def versions() -> str:
    """The machine and what ran on it, in one line."""
    import transformers

    facts = machine("cpu")
    return (
        f"{facts['device']}, {facts['threads']} thread(s), Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {facts['date']}"
    )


@contextmanager
def figure(name: str, panels: int = 1, *, width: float = 4.3, height: float = 3.6) -> Iterator[tuple[Figure, Any]]:
    """A figure and its axes, written to docs/figures/NAME.svg; its legend is that of all panels, below them."""
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(width * panels, height), layout="constrained")
        axes = drawn.subplots(1, panels, squeeze=False)[0]
        yield drawn, axes
        entries: dict[str, Any] = {}
        for one in axes:
            entries |= dict(zip(*reversed(one.get_legend_handles_labels()), strict=True))
            one.grid(axis="y", color="#e0e0e0", linewidth=0.6)
            one.set_axisbelow(True)
        columns = min(len(entries), 3 * panels)
        drawn.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, fontsize=8)
        FIGURES.mkdir(parents=True, exist_ok=True)
        drawn.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
        print(f"wrote docs/figures/{name}.svg")


def lines(axes: Axes, x: Sequence[float], rows: dict[str, Any], first: int = 0, **settings: Any) -> None:
    """A line for each name: y, or (low, y, high), drawn as a band."""
    for number, (name, values) in enumerate(rows.items()):
        look = LOOKS[(first + number) % len(LOOKS)]
        y = np.asarray(values, dtype=float)
        if y.ndim == 2:
            axes.fill_between(x, y[0], y[2], color=look["color"], alpha=0.13, linewidth=0)
            y = y[1]
        axes.plot(x, y, label=name, markersize=4, linewidth=1.3, **look)
    axes.set(**settings)


def logarithmic(axes: Axes, ticks: Sequence[float] = (), *, y: bool = True, x: bool = True) -> None:
    """Logarithmic axes with plain numbers at `ticks` of x (powers of two) and at powers of ten of y."""
    if x:
        axes.set_xscale("log", base=2)
        labels = [f"{tick / 1024:g}k" if tick >= 1024 else f"{tick:g}" for tick in ticks]
        axes.set_xticks(list(ticks), labels)
        axes.xaxis.set_minor_locator(NullLocator())
    if y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
