"""The results of an evaluation in the terminal: what the report shows, in a few lines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linearize.console import say, size
from linearize_evals.compare import TOO_WEAK
from linearize_evals.diagnosis import short


def print_results(results: Mapping[str, Any]) -> None:
    """Scores of both models by task, what is kept, findings, and where the report is."""
    teacher, student = results["models"]["teacher"], results["models"]["student"]
    say(f"teacher: {teacher['name']}" if teacher else "teacher: none")
    say(f"student: {student['name']}" + (f" ({student['mixers']})" if student["mixers"] else ""))
    if results["tasks"]:
        say("")
        say(f"{'recall':24}{'answers':>8}{'chance':>8}  {'teacher':18}  {'student':18}  kept of the teacher's")
        for name, task in results["tasks"].items():
            sides = "  ".join(f"{_accuracy(task[side]):18}" for side in ("teacher", "student"))
            say(f"{short(name):24}{task['answers']:8}{task['chance']:8.2f}  {sides}  {_kept(task)}")
    if results["text"]:
        say("")
        say(f"{'perplexity':32}{'tokens':>8}  {'teacher':>10}  {'student':>10}  ratio")
        for name, text in results["text"].items():
            groups = [(f"{short(name)}, {label} tokens", group) for label, group in text["by_label"].items()]
            if len(groups) == 1:
                groups = [(f"{short(name)}, length {group['length']}", group) for group in text["by_length"]]
            for label, group in groups:
                say(f"{label:32}{group['tokens']:8}  {_losses(group)}")
    for task, scores in (results["lm_eval"] or {}).items():
        for metric in scores["student"]:
            values = [scores.get(side, {}).get(metric) for side in ("teacher", "student")]
            say(f"{task}, {metric}: " + ", ".join("-" if value is None else f"{value:.4g}" for value in values))
    _print_memory(teacher, student)
    say("")
    for finding in results["findings"]:
        say(f"* {finding}")
    folder = Path(results["out"])
    seconds = sum(results["seconds"].values())
    say("")
    say(f"wrote {shlex.quote(str(folder / 'report.html'))}, results.json, figures and samples in {seconds:.0f} s")


def _accuracy(side: Mapping[str, Any] | None) -> str:
    return "-" if side is None else f"{side['accuracy']:.3f} ({side['low']:.2f}-{side['high']:.2f})"


def _kept(task: Mapping[str, Any]) -> str:
    if task["gate"] == TOO_WEAK:
        return TOO_WEAK
    kept = task["retention"]
    if kept is None or kept["value"] is None:
        return "-"
    interval = "" if kept["low"] is None else f" ({100 * kept['low']:.0f} to {100 * kept['high']:.0f} %)"
    return f"{100 * kept['value']:.0f} %{interval}"


def _losses(group: Mapping[str, Any]) -> str:
    sides = [group[side] for side in ("teacher", "student")]
    text = "  ".join(f"{'-' if side is None else format(side['perplexity'], '.2f'):>10}" for side in sides)
    ratio = group["ratio"]
    return text if ratio is None or ratio["value"] is None else f"{text}  {ratio['value']:.2f}"


def _print_memory(teacher: Mapping[str, Any] | None, student: Mapping[str, Any]) -> None:
    if not student["cache"]:
        return
    say("")
    before = {point["tokens"]: point["bytes"] for point in (teacher or {}).get("cache", ())}
    for point in student["cache"]:
        first = f"{size(before[point['tokens']]):>12}" if point["tokens"] in before else f"{'-':>12}"
        say(f"cache at {point['tokens']:>8,} tokens: {first} {size(point['bytes']):>12}   ({student['cache_dtype']})")
