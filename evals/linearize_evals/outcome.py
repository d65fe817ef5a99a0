"""From the answers of the models to what results.json says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import linearize
from linearize.console import mixer_text
from linearize.errors import LinearizeError
from linearize_evals.ablation import BRANCHES, contribution
from linearize_evals.answers import answers
from linearize_evals.compare import compare
from linearize_evals.diagnosis import choice_histogram, findings
from linearize_evals.phrases import SIDES
from linearize_evals.settings import SELF, Settings

Judged = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]  # role -> samples of ours, results of lm-eval


def outcome(settings: Settings, judged: Judged, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The keys models, tasks, text, ablations, lm_eval and findings of results.json."""
    found = {role: answers(samples) for role, (samples, _) in judged.items()}
    results: dict[str, Any] = {
        "models": models(settings, facts),
        **compare(found.get("teacher"), found["student"]),
        "ablations": {
            branch: contribution(found["student"], found[f"without {branch}"])
            for branch in BRANCHES
            if f"without {branch}" in found
        }
        or None,
        "lm_eval": lm_eval_scores({side: judged[side][1] for side in SIDES if side in judged}),
    }
    return results | {"findings": findings(results)}


def models(settings: Settings, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What is known of teacher (None without one) and student besides their scores.

    Args:
        facts: fingerprint, dtype and parameters of each.
    """
    report = _described(settings.student, facts["student"])
    rows = report["layers"] if report["converted"] else []
    student = _facts(settings.student, report, facts["student"], own=True) | {
        "window": _window(rows),
        "mixers": _mixers(rows),
        "full_attention_layers": sum(row["becomes"] == "full_attention" for row in rows) if rows else None,
    }
    if "teacher" not in facts:
        return {"teacher": None, "student": student}
    itself = settings.teacher == SELF
    name = f"{settings.student}, mixers bypassed" if itself else settings.teacher
    described = report if itself else _described(settings.teacher, facts["teacher"])
    return {"teacher": _facts(name, described, facts["teacher"], own=not itself), "student": student}


def _described(model: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `inspect` says, with caches in the dtype that the model ran in.

    Of a model that runs, but can't be converted, that is next to nothing.
    """
    try:
        return linearize.inspect(model, cache_dtype=facts["dtype"])
    except LinearizeError:
        return {"converted": False, "layers": [], "cache": [], "cache_dtype": None}


def _facts(name: str, report: Mapping[str, Any], facts: Mapping[str, Any], *, own: bool) -> dict[str, Any]:
    """Of a model that `inspect` described; `own` if it ran as it is described."""
    key = "after_bytes" if own and report["converted"] else "before_bytes"
    cache = [{"tokens": row["tokens"], "bytes": row[key]} for row in report["cache"]]
    return {"name": name, **facts, "cache_dtype": report["cache_dtype"], "cache": cache}


def _window(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The window beyond which only linear branches reach: of a model whose layers all have one, and the same."""
    windows = {_reach(row["mixer"]) for row in rows}
    return windows.pop() if len(windows) == 1 else None


def _reach(mixer: Mapping[str, Any] | None) -> int | None:
    """The window of a layer's mixer; None without one, and where the mixer that it stands over has a wider one."""
    if not mixer or not mixer.get("window"):
        return None
    inner = mixer.get("over_options", {}).get("window") or 0
    return mixer["window"] if inner <= mixer["window"] and mixer.get("over") != "length_switch" else None


def _mixers(rows: Sequence[Mapping[str, Any]]) -> str:
    """For instance "22 x window 64 + favor, 4 sinks; 8 x full_attention"."""
    texts = [mixer_text(row["mixer"]) if row["mixer"] else row["becomes"] for row in rows]
    return "; ".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts))


def lm_eval_scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """lm-eval's metrics of its own tasks: {task: {side: {metric: value}, "stderr": ..., "histogram": ...}}."""
    scores: dict[str, Any] = {}
    for side, found in results.items():
        for task, metrics in found.get("results", {}).items():
            entry = scores.setdefault(task, {"stderr": {}, "histogram": {}})
            entry[side], entry["stderr"][side] = _split(metrics)
            histogram = choice_histogram(found["samples"].get(task, []))
            if histogram:
                entry["histogram"][side] = histogram
    return scores


def _split(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Values and standard errors of lm-eval's "acc,none" and "acc_stderr,none"."""
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, value in metrics.items():
        name, comma, kind = key.partition(",")
        if not comma or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        name = name if kind == "none" else f"{name} ({kind})"
        if "_stderr" in name:
            errors[name.replace("_stderr", "")] = value
        else:
            values[name] = value
    return values, errors
