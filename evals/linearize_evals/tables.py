"""The tables of the report: captions, headers, and rows of words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from linearize.plan import human
from linearize_evals.compare import TOO_WEAK
from linearize_evals.phrases import NONE, SIDES, number, short

Table = dict[str, Any]  # {"caption", "headers", "rows": lists of strings, "plain": whether it holds words, not figures}


def _table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]], plain: bool = False) -> Table:
    """A table whose columns without any entry are left out."""
    listed = [list(row) for row in rows]
    kept = [i for i, header in enumerate(headers) if (i == 0 or any(row[i] not in ("", NONE) for row in listed))]
    return {
        "caption": caption,
        "headers": [headers[i] for i in kept],
        "rows": [[row[i] for i in kept] for row in listed],
        "plain": plain,
    }


def recall_table(tasks: Mapping[str, Any]) -> Table:
    headers = ["task", "documents", "answers", "chance", "teacher", "student", "difference", "retention"]
    rows = []
    for name, task in tasks.items():
        weak = task["gate"] == TOO_WEAK
        kept = task["retention"]
        rows.append(
            [
                short(name),
                str(task["documents"]),
                str(task["answers"]),
                f"{task['chance']:.3f}",
                *(_score(task[side]) for side in SIDES),
                TOO_WEAK if weak else _interval(task["difference"], "+.3f"),
                TOO_WEAK if weak else _interval(kept, ".3f") if not (kept and kept["reason"]) else kept["reason"],
            ]
        )
    return _table(
        "Accuracy of recall, and what is left of it"
        if any(task["teacher"] for task in tasks.values())
        else "Accuracy of recall",
        headers,
        rows,
    )


def pairs_table(tasks: Mapping[str, Any]) -> Table:
    headers = [
        "task",
        "teacher nats/token",
        "student nats/token",
        "only the teacher right",
        "only the student right",
        "McNemar p",
    ]
    rows = [
        [
            short(name),
            *(number(task[side] and task[side]["nll"], ".3f") for side in SIDES),
            *(NONE if task[key] is None else str(task[key]) for key in ("lost", "gained")),
            _p_value(task["mcnemar"]),
        ]
        for name, task in tasks.items()
    ]
    return _table("The same answers: their loss, and who has them right", headers, rows)


def generation_table(tasks: Mapping[str, Any]) -> Table:
    rows = []
    for name, task in tasks.items():
        if made := task["generation"]:
            sides = [
                [_score(made[side]), number(made[side]["scored"], ".3f"), _interval(made[side]["difference"], "+.3f")]
                if made[side]
                else [NONE] * 3
                for side in SIDES
            ]
            rows.append([short(name), str(made["answers"]), *sides[0], *sides[1]])
    headers = ["task", "answers", *(f"{side} {what}" for side in SIDES for what in ("generated", "scored", "change"))]
    return _table("Answers generated through the cache, beside the scoring of the same answers", headers, rows)


def perplexity_table(text: Mapping[str, Any]) -> Table:
    headers = ["text", "tokens", "teacher", "student", "student / teacher", "share of the rise"]
    headers += ["teacher accuracy", "student accuracy"]
    rows = []
    for name, whole in text.items():
        parts = [(short(name), whole)]
        if len(whole["by_label"]) > 1:
            parts += [(f"{short(name)}: {label}", part) for label, part in whole["by_label"].items()]
        if len(whole["by_length"]) > 1:
            parts += [(f"{short(name)}: {part['length']} tokens", part) for part in whole["by_length"]]
        for title, part in parts:
            right = part.get("accuracy") or {}
            rows.append(
                [
                    title,
                    str(part["tokens"]),
                    *(_score(part[side], "perplexity", ".2f") for side in SIDES),
                    _interval(part["ratio"], ".3f"),
                    _interval(part.get("gap_share"), ".2f"),
                    *(_score(right.get(side)) for side in SIDES),
                ]
            )
    return _table(
        "Perplexity; a hit is a token that completes a pair of tokens seen earlier in the text", headers, rows
    )


def ablation_tables(ablations: Mapping[str, Any]) -> Iterator[Table]:
    headers = ["task", "answers", "whole", "without", "difference", "whole, nats/token", "without, nats/token"]
    headers.append("rise, nats/token")
    for branch, runs in ablations.items():
        rows = [
            [
                short(name),
                str(run["n"]),
                number(run["full"], ".3f"),
                number(run["without"], ".3f"),
                _interval({"value": run["full"] - run["without"], "low": run["low"], "high": run["high"]}, "+.3f"),
                number(run["nll_full"], ".3f"),
                number(run["nll_without"], ".3f"),
                _interval({"value": _rise(run), "low": run["nll_low"], "high": run["nll_high"]}, "+.3f"),
            ]
            for name, run in (runs or {}).items()
        ]
        yield _table(f"Without the {branch} branch", headers, rows)


def _rise(run: Mapping[str, Any]) -> float | None:
    full, without = run["nll_full"], run["nll_without"]
    return None if full is None or without is None else without - full


def lm_eval_tables(scores: Mapping[str, Any]) -> Iterator[Table]:
    rows, histograms = [], []
    for task, found in scores.items():
        metrics = dict.fromkeys(metric for side in SIDES for metric in found.get(side) or {})
        rows += [[task, metric, *(_metric(found, side, metric) for side in SIDES)] for metric in metrics]
        for side in SIDES:
            if histogram := (found.get("histogram") or {}).get(side):
                histograms.append([task, side, *(_counts(histogram[key]) for key in ("choices", "gold"))])
    yield _table("Scores (± standard error)", ["task", "metric", *SIDES], rows)
    yield _table(
        "Which choice is the most likely, and which is right", ["task", "model", "chosen", "right"], histograms
    )


def _metric(found: Mapping[str, Any], side: str, metric: str) -> str:
    value = (found.get(side) or {}).get(metric)
    error = ((found.get("stderr") or {}).get(side) or {}).get(metric)
    if not isinstance(value, int | float):
        return NONE if value is None else str(value)
    return f"{value:.4g} ± {error:.2g}" if isinstance(error, int | float) else f"{value:.4g}"


def _counts(counts: Sequence[int]) -> str:
    total = sum(counts) or 1
    return ", ".join(f"{chr(ord('A') + i)} {100 * count / total:.0f} %" for i, count in enumerate(counts))


def cache_table(models: Mapping[str, Any]) -> Table:
    sizes = {side: {p["tokens"]: p["bytes"] for p in (models.get(side) or {}).get("cache") or []} for side in SIDES}
    lengths = sorted({tokens for points in sizes.values() for tokens in points})
    rows = [[str(tokens), *(_size(sizes[side].get(tokens)) for side in SIDES)] for tokens in lengths]
    return _table("Cache or state of one sequence, in the dtype that the model ran in", ["tokens", *SIDES], rows)


def _size(count: int | None) -> str:
    return NONE if count is None else human(count)


def setting_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    models = {side: results["models"].get(side) or {} for side in SIDES}
    keys = [key for key in dict.fromkeys(key for side in SIDES for key in models[side]) if key != "cache"]
    rows = [[key, *(_words(models[side].get(key)) for side in SIDES)] for key in keys]
    yield _table("Models", ["model", *SIDES], rows, plain=True)
    for caption, key in (("Settings", "settings"), ("Versions", "versions"), ("Seconds", "seconds")):
        rows = [[name, _words(value)] for name, value in results[key].items()]
        yield _table(caption, ["name", "value"], rows, plain=True)


def _words(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(entry)}" for key, entry in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list | tuple) else str(value)


def _p_value(p: float | None) -> str:
    return "< 0.0001" if p is not None and p < 1e-4 else number(p, ".4f")


def _score(side: Mapping[str, Any] | None, value: str = "accuracy", form: str = ".3f") -> str:
    return _interval(side and {"value": side[value], "low": side["low"], "high": side["high"]}, form)


def _interval(found: Mapping[str, Any] | None, form: str) -> str:
    if not found or found["value"] is None:
        return NONE
    value = number(found["value"], form)
    if found["low"] is None or found["high"] is None:
        return value
    return f"{value} [{number(found['low'], form)}, {number(found['high'], form)}]"
