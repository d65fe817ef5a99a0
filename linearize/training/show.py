"""Training in the terminal: bars while it runs, a table at its end."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from linearize import console
from linearize.console import printable, say, size

SCORES = {"perplexity": ".2f", "recall": ".2f"}


@contextlib.contextmanager
def progress() -> Iterator[Callable[..., None] | None]:
    """A callback `(what, done, total, text="")` that draws bars on stderr, or None where stderr is no terminal.

    A bar with a text counts tokens, and gets their speed; the text stands behind it: the loss, the memory.
    """
    if not sys.stderr.isatty():
        with console.progress("tokens") as nothing:
            yield nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            trains = bool(task.fields["text"])  # other bars count bytes
            return Text(f"{task.speed:,.0f} tokens/s" if trains and task.speed else "")

    columns = (
        TextColumn("{task.description:14}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,}"),
        Speed(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=120, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int, text: str = "") -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what), total=total, text="")
            bars.update(tasks[what], completed=done, total=total, text=printable(text))

        yield show


def print_training(summary: Mapping[str, Any], plugins: Sequence[str] = ()) -> None:
    """What `train` did: a line for each stage, notes, and where everything is."""
    print_stages(summary["stages"])
    for text in summary["notes"]:
        say(f"note: {text}")
    say("")
    seconds = sum(stage.get("seconds") or 0 for stage in summary["stages"])
    say(f"trained in {duration(seconds)}: {summary['out']} (metrics and checkpoints: {summary['work']})")
    imports = [word for module in plugins for word in ("--import", module)]
    say(f"next: {shlex.join(['linearize', 'eval', str(summary['out']), *imports])}")


def print_stages(stages: Sequence[Mapping[str, Any]]) -> None:
    """Loss and held-out scores before and after each stage, its speed and its memory."""
    rows = [("stage", "steps", "tokens", "tokens/s", "loss", "perplexity", "recall", "peak memory")]
    rows += [_row(stage) for stage in stages]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        say("  ".join([f"{row[0]:{len(first)}}", *others]))


def _row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    loss, held_out = stage.get("loss") or {}, stage.get("held_out") or {}
    before, after = held_out.get("before") or {}, held_out.get("after") or {}
    memory = stage.get("peak_memory_bytes")
    return (
        stage["stage"],
        _number(stage.get("steps"), ",d"),
        _number(stage.get("tokens"), ",d"),
        _number(stage.get("tokens_per_second"), ",.0f"),
        _change(loss.get("first"), loss.get("last"), ".4g"),
        *(_change(before.get(key), after.get(key), form) for key, form in SCORES.items()),
        size(memory) if memory else "-",
    )


def _change(before: float | None, after: float | None, form: str) -> str:
    if before is None and after is None:
        return "-"
    return f"{_number(before, form)} -> {_number(after, form)}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """A time for people: "41 s", "12 min", "3 h 20 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def print_run(document: Mapping[str, Any], plugins: Sequence[str] = ()) -> None:
    """What `run` did or kept, step by step, and where everything is."""
    steps = document["steps"]
    width = max((len(step["step"]) for step in steps), default=0)
    for step in steps:
        time = f" in {duration(step['seconds'])}" if step.get("seconds") else ""
        done = f"done{time}" if step["done"] else "kept"
        say(f"{step['step']:{width}}  {done}" + (f" ({step['because']})" if step.get("because") else ""))
    if document.get("training"):
        say("")
        print_stages(document["training"]["stages"])
    for text in document.get("notes", ()):
        say(f"note: {text}")
    imports = [word for module in plugins for word in ("--import", module)]
    say("")
    say(f"wrote {document['out']}")
    say(f"next: {shlex.join(['linearize', 'verify', str(Path(document['out']) / 'model'), *imports])}")
