"""What is written while a stage runs: metrics.jsonl always, trackers through accelerate, and figures at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from linearize_evals.settings import write_file

from linearize.sink import disk_errors

METRICS = "metrics.jsonl"


class Metrics:
    """The lines of metrics.jsonl; `write` is for the first process alone.

    A line has `stage` (its number), `name`, `step` (from 1), `tokens`, and either `loss`, `lr`, `grad_norm`,
    `tokens_per_second`, `memory_bytes`, or `held_out`. Block-wise, it has `block` (from 1) and `blocks`, too; steps and
    tokens are then counted through all of them.
    """

    def __init__(self, folder: Path, tracker: Any = None, tokens: Sequence[int] = ()) -> None:
        """Args: the folder of the file; accelerate, if it has trackers; and the tokens of each stage."""
        self.path = folder / METRICS
        self.tracker = tracker
        self.before = [0, *accumulate(tokens)]  # trackers want steps that never go back

    def cut(self, stage: int, step: int) -> None:
        """Forget what came after `step` of `stage`, when training goes on from there."""
        kept = [line for line in read(self.path) if (line["stage"], line["step"]) <= (stage, step)]
        if not kept and not self.path.exists():
            return
        write_file(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, line: Mapping[str, Any]) -> None:
        with disk_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")
        if self.tracker is not None:
            step = self.before[line["stage"]] + line["tokens"] // line.get("blocks", 1)
            self.tracker.log(dict(_numbers(f"{line['name']}", line)), step=step)


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}/{key}", value)
        elif isinstance(value, (int, float)) and key not in ("stage", "step", "tokens"):
            yield f"{prefix}/{key}", value


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a process that died may have left half of a last one, or none at all."""
    lines = []
    if not path.exists():
        return lines
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def plot(path: Path, out: Path) -> bool:
    """Draw loss and held-out perplexity over tokens, a panel for each stage; False where matplotlib isn't there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = read(path)
    numbers = sorted({line["stage"] for line in lines if "loss" in line})
    if not numbers:
        return False
    figure = Figure(figsize=(5 * len(numbers), 3.6), layout="constrained")
    for axis, number in zip(figure.subplots(1, len(numbers), squeeze=False)[0], numbers, strict=True):
        own = [line for line in lines if line["stage"] == number]
        trained = [line for line in own if "loss" in line]
        axis.plot([line["tokens"] for line in trained], [line["loss"] for line in trained], linewidth=1, label="loss")
        axis.set(xlabel="tokens", ylabel="loss", title=trained[0]["name"], yscale="log")
        judged = [line for line in own if "perplexity" in line.get("held_out", {})]
        if judged:
            other = axis.twinx()
            points = [line["held_out"]["perplexity"] for line in judged]
            other.plot([line["tokens"] for line in judged], points, "o--", color="tab:orange", label="perplexity")
            other.set_ylabel("held-out perplexity", color="tab:orange")
    with disk_errors(out):
        figure.savefig(out, dpi=120)
    return True
