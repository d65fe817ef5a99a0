"""The results of an evaluation in the terminal: what the report shows, in a few lines."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linearize.console import say, size
from linearize_evals.compare import TOO_WEAK
from linearize_evals.phrases import SIDES, number, short


def print_results(results: Mapping[str, Any]) -> None:
    """Scores of both models by task, what is kept, findings, and where the report is."""
    teacher, student = results["models"]["teacher"], results["models"]["student"]
    say(f"teacher: {teacher['name']}" if teacher else "teacher: none")
    say(f"student: {student['name']}" + (f" ({student['mixers']})" if student["mixers"] else ""))
    if results["tasks"]:
        say("")
        say(f"{'recall, %':17}{'answers':>7}{'chance':>7}  {'teacher':14} {'student':14} kept")
        for name, task in results["tasks"].items():
            sides = " ".join(f"{_accuracy(task[side]):14}" for side in SIDES)
            say(f"{short(name):17}{task['answers']:7}{100 * task['chance']:7.0f}  {sides} {_kept(task)}")
    if results["text"]:
        say("")
        say(f"{'perplexity':32}{'tokens':>8}  {'teacher':>10}  {'student':>10}  {'ratio':>10}")
        for name, text in results["text"].items():
            groups = [(f"{short(name)}, {label} tokens", group) for label, group in text["by_label"].items()]
            if len(groups) == 1:
                groups = [(f"{short(name)}, length {group['length']}", group) for group in text["by_length"]]
            for label, group in groups:
                say(f"{label:32}{group['tokens']:8}  {_losses(group)}")
    for task, scores in (results["lm_eval"] or {}).items():
        for metric in scores["student"]:
            values = [scores.get(side, {}).get(metric) for side in SIDES]
            say(f"{task}, {metric}: " + ", ".join(_number(value, ".4g") for value in values))
    _print_memory(teacher, student)
    say("")
    for finding in results["findings"]:
        _say_wrapped(finding)
    folder = Path(results["out"])
    seconds = sum(results["seconds"].values())
    say("")
    say(f"wrote {shlex.quote(str(folder / 'report.html'))}, results.json, figures and samples in {seconds:.0f} s")


def _say_wrapped(finding: str) -> None:
    """A finding in lines that a person can read; whole where it goes into a file."""
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else len(finding) + 2
    for line in textwrap.wrap(f"* {finding}", width, subsequent_indent="  ", break_on_hyphens=False):
        say(line)


def _number(value: float | None, form: str) -> str:
    return number(value, form, none="-", minus="-")


def _accuracy(side: Mapping[str, Any] | None) -> str:
    return "-" if side is None else f"{100 * side['accuracy']:.1f} ({100 * side['low']:.0f}-{100 * side['high']:.0f})"


def _kept(task: Mapping[str, Any]) -> str:
    if task["gate"] == TOO_WEAK:
        return TOO_WEAK
    kept = task["retention"]
    if kept is None or kept["value"] is None:
        return "-"
    value, low, high = (_number(end and 100 * end, ".0f") for end in (kept["value"], kept["low"], kept["high"]))
    return f"{value} ({low} to {high})"


def _losses(group: Mapping[str, Any]) -> str:
    sides = [group[side] and group[side]["perplexity"] for side in SIDES]
    figures = [*sides, group["ratio"] and group["ratio"]["value"]]
    return "  ".join(f"{_large(figure):>10}" for figure in figures)


def _large(figure: float | None) -> str:
    return _number(figure, ".2f" if figure is None or figure < 1e6 else ".1e")


def _print_memory(teacher: Mapping[str, Any] | None, student: Mapping[str, Any]) -> None:
    if not student["cache"]:
        return
    say("")
    before = {point["tokens"]: point["bytes"] for point in (teacher or {}).get("cache", ())}
    for point in student["cache"]:
        first = f"{size(before[point['tokens']]):>12}" if point["tokens"] in before else f"{'-':>12}"
        say(f"cache at {point['tokens']:>8,} tokens: {first} {size(point['bytes']):>12}   ({student['cache_dtype']})")
