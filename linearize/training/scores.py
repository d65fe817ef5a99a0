"""The scores on a model card: tables of what `linearize eval` measured, and of nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from linearize.console import printable


def scores(results: Mapping[str, Any] | None) -> Iterator[str]:
    """The paragraphs of a card's section on scores, from what results.json holds (docs/results.md)."""
    if results is None:
        yield "Not measured yet. `linearize eval` does it."
        return
    settings, models = results["settings"], results["models"]
    teacher = models["teacher"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    yield (
        f"Measured by `linearize eval` on {inline(results['created'][:10])} in {models['student']['dtype']} on "
        f"{settings['device']}, seed {settings['seed']} ({inline(versions)}). In brackets: 95 % "
        "intervals; kept: what is left of the teacher's accuracy above chance. "
        + (f"Teacher: {code(short(teacher['name']))}." if teacher else "No teacher was run beside it.")
    )
    yield from _tables(results)
    if results["findings"]:
        yield "\n".join(f"- {inline(finding)}" for finding in results["findings"])


def _tables(results: Mapping[str, Any]) -> Iterator[str]:
    if results["tasks"]:
        heads = ["recall", "documents", "answers", "chance", "teacher", "this model", "kept"]
        rows = [
            [name, task["documents"], task["answers"], f"{task['chance']:.3f}"]
            + [_figure(task[side], "accuracy", ".3f") for side in ("teacher", "student")]
            + [_kept(task)]
            for name, task in results["tasks"].items()
        ]
        yield _table(heads, rows)
    if results["text"]:
        heads = ["perplexity", "tokens", "teacher", "this model", "ratio"]
        rows = [
            [name, text["tokens"]]
            + [_figure(text[side], "perplexity", ".2f") for side in ("teacher", "student")]
            + [_figure(text["ratio"], "value", ".3f")]
            for name, text in results["text"].items()
        ]
        yield _table(heads, rows)
    rows = [
        [task, metric] + [_with_error(found, side, metric) for side in ("teacher", "student")]
        for task, found in (results["lm_eval"] or {}).items()
        for metric in found["student"]
    ]
    if rows:
        yield _table(["lm-eval", "metric", "teacher", "this model"], rows)


def _kept(task: Mapping[str, Any]) -> str:
    kept = task["retention"]
    if task["gate"] != "ok" or kept is None or kept["value"] is None:
        return "" if task["gate"] in ("ok", "no teacher") else task["gate"]
    return _figure(kept, "value", ".3f")


def _figure(entry: Mapping[str, Any] | None, key: str, form: str) -> str:
    if entry is None or entry[key] is None:
        return ""
    ends = [entry.get("low"), entry.get("high")]
    interval = f" ({ends[0]:{form}} to {ends[1]:{form}})" if None not in ends else ""
    return f"{entry[key]:{form}}{interval}"


def _with_error(found: Mapping[str, Any], side: str, metric: str) -> str:
    value = found.get(side, {}).get(metric)
    error = found["stderr"].get(side, {}).get(metric)
    return "" if value is None else f"{value:.4g}" + (f" ± {error:.2g}" if error is not None else "")


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table without the columns that hold nothing."""
    kept = [i for i in range(len(heads)) if any(row[i] != "" for row in rows)]
    cells = [[heads[i] for i in kept], ["---"] * len(kept)]
    cells += [[inline(f"{row[i]:,}" if isinstance(row[i], int) else str(row[i])) for i in kept] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def short(name: str) -> str:
    """The last part of a local path, which is nobody's business; the whole of another name."""
    local = os.path.isabs(name) or os.path.lexists(name) or name.startswith(("~", "."))
    return os.path.basename(os.path.normpath(name)).removesuffix(".gguf") if local else name


def inline(text: str) -> str:
    """A stranger's text on one line, in which nothing is markup."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", printable(" ".join(text.split())))


def code(text: str) -> str:
    return f"`{printable(' '.join(text.split())).replace('`', '')}`"
