"""What a training says of itself at its end: in the terminal, in summary.json, and in the trained model's config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def record(recipe: Any, stages: Sequence[Mapping[str, Any]], teacher: str | None) -> dict[str, Any]:
    """What the trained model's config.json says of its training."""
    data = recipe.data
    asked = [stage.model_dump(mode="json") for stage in recipe.train]
    return {
        "teacher": teacher,
        "data": {"source": data.source, "recall_share": data.recall_share, "separate": data.separate},
        "stages": [
            settings | {"steps": done.get("steps"), "tokens": done.get("tokens")}
            for settings, done in zip(asked, stages, strict=True)
        ],
    }


def calibration(stage: Any, found: list[dict[str, Any]]) -> dict[str, Any]:
    """What a summary says of a calibration: the mean of its layers' errors before and after."""
    before, after = (sum(layer[key] for layer in found) / len(found) for key in ("error_before", "error_after"))
    loss = {"first": before, "last": after}
    return {"stage": "calibrate", "tokens": stage.rows * stage.length, "loss": loss, "held_out": {}}


def complete(summary: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Fill in what metrics.jsonl says of a stage, which may have run in several goes."""
    trained = [line for line in lines if "loss" in line]
    judged = [line for line in lines if "held_out" in line]
    if trained:
        count = trained[-1].get("blocks", 1)  # whose steps and tokens are counted one after another
        parts: dict[int, list[dict[str, Any]]] = {}
        for line in trained:
            parts.setdefault(line.get("block", 1), []).append(line)
        summary["steps"] = trained[-1]["step"] // count
        summary["tokens"] = trained[-1]["tokens"] // count
        first, last = (_loss(part[at] for part in parts.values()) for at in (0, -1))
        summary["loss"] = {"first": first, "last": last}
        summary["tokens_per_second"] = round(trained[-1]["tokens_per_second"] / count, 1)
        summary.setdefault("peak_memory_bytes", trained[-1]["memory_bytes"])
    if judged:
        summary["held_out"] = {"before": judged[0]["held_out"], "after": judged[-1]["held_out"]}
        teacher = next((line["teacher"] for line in judged if "teacher" in line), None)
        if teacher is not None:
            summary["held_out"]["teacher"] = teacher


def _loss(lines: Iterable[dict[str, Any]]) -> float:
    """The mean over the layers that lines of metrics tell of, or their only loss."""
    values = [value for line in lines for value in line.get("layers", {"": line["loss"]}).values()]
    return sum(values) / len(values)
