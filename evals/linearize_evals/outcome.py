"""From the answers of the models to what results.json says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import linearize
from linearize.console import mixer_text
from linearize_evals.ablation import BRANCHES, contribution
from linearize_evals.answers import answers
from linearize_evals.compare import compare
from linearize_evals.diagnosis import choice_histogram, findings
from linearize_evals.settings import SELF, Settings

SIDES = ("teacher", "student")
Judged = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]  # role -> samples of ours, results of lm-eval


def outcome(
    settings: Settings, judged: Judged, fingerprints: Mapping[str, str], dtypes: Mapping[str, str]
) -> dict[str, Any]:
    """The keys models, tasks, text, ablations, lm_eval and findings of results.json."""
    found = {role: answers(samples) for role, (samples, _) in judged.items()}
    results: dict[str, Any] = {
        "models": models(settings, fingerprints, dtypes),
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


def models(settings: Settings, fingerprints: Mapping[str, str], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """What is known of teacher (None without one) and student besides their scores."""
    report = linearize.inspect(settings.student)
    rows = report["layers"] if report["converted"] else []
    student = _facts(settings.student, report, "student", fingerprints, dtypes) | {
        "window": _window(rows),
        "mixers": _mixers(rows),
        "full_attention_layers": sum(row["becomes"] == "full_attention" for row in rows) if rows else None,
    }
    if "teacher" not in fingerprints:
        return {"teacher": None, "student": student}
    if settings.teacher == SELF:
        teacher = _facts(f"{settings.student}, mixers bypassed", report, "teacher", fingerprints, dtypes)
        teacher["parameters"] -= report["new_parameters"]
    else:
        teacher = _facts(settings.teacher, linearize.inspect(settings.teacher), "teacher", fingerprints, dtypes)
    return {"teacher": teacher, "student": student}


def _facts(
    name: str, report: Mapping[str, Any], side: str, fingerprints: Mapping[str, str], dtypes: Mapping[str, str]
) -> dict[str, Any]:
    """Of a model that `inspect` described: a student that is converted has its states, all others their caches."""
    key = "after_bytes" if side == "student" and report["converted"] else "before_bytes"
    return {
        "name": name,
        "fingerprint": fingerprints[side],
        "dtype": dtypes[side],
        "parameters": report["parameters"],
        "cache_dtype": report["cache_dtype"],
        "cache": [{"tokens": row["tokens"], "bytes": row[key]} for row in report["cache"]],
    }


def _window(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The window beyond which only linear branches reach: of a model whose layers all have one, and the same."""
    windows = {(row["mixer"] or {}).get("window") for row in rows}
    return windows.pop() if len(windows) == 1 else None


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
