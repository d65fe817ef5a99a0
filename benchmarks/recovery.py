"""What recovery training brings back: SmolLM2-135M-Instruct by mixers, kept layers, stages, tokens and data.

    python benchmarks/recovery.py sweep --data TRAIN    # learning rate, loss and length of transfer, 30k tokens each
    python benchmarks/recovery.py runs --data TRAIN --text HELD_OUT [--only NAME ...]
    python benchmarks/recovery.py table                                # of the runs that are there

TRAIN and HELD_OUT are texts (.jsonl.gz with a key "text"). Everything is written below recovery/, a folder for each
run; an interrupted run goes on, and what is there is not made again. A run begins where its parent ended.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import linearize
from demo import find_model

HEDGEHOG = {"mixer": "window", "feature_map": "hedgehog", "window": 64, "sinks": 4}
LAYERS: dict[str, dict[str, Any]] = {
    "a": HEDGEHOG,
    "b-even": HEDGEHOG | {"keep_softmax": [0, 4, 8, 11, 15, 19, 22, 26]},
    "b-chosen": HEDGEHOG | {"keep_softmax": [0, 3, 8, 13, 16, 18, 23, 27]},
    "c": {"mixer": "linear", "feature_map": "hedgehog"},
    "d": HEDGEHOG | {"feature_map": "favor"},
}
LENGTH, BATCH = 1024, 2
SWEEP = [
    *(("mse", lr, 1024) for lr in (3e-3, 1e-2, 3e-2)),
    ("mse", 1e-2, 512),
    ("normalized_l2", 1e-2, 1024),
    ("cosine", 1e-2, 1024),
]
RECALL_SHARES = {"": 0.0, "-recall": 0.3}


@dataclass(frozen=True)
class Run:
    """`tokens` of a stage on the model of `parent`, or, without a stage, a conversion."""

    layers: str
    parent: str = ""
    stage: str = ""
    tokens: int = 0
    recall_share: float = 0.0


def plan() -> dict[str, Run]:
    """Every run by name, parents first."""
    runs = {f"{layers}-0": Run(layers) for layers in LAYERS}
    for suffix, share in RECALL_SHARES.items():
        for thousands in (60, 250):
            for layers in LAYERS:
                runs[f"{layers}-t{thousands}{suffix}"] = Run(layers, f"{layers}-0", "transfer", thousands * 1000, share)
        for thousands in (100, 300):
            for layers in LAYERS:
                parent = f"{layers}-t60{suffix}"
                runs[f"{layers}-t60-d{thousands}{suffix}"] = Run(layers, parent, "distill", thousands * 1000, share)
    return runs


def recipe(run: Run, data: str, **changes: Any) -> dict[str, Any]:
    stage: dict[str, Any] = {"stage": run.stage, "tokens": run.tokens, "length": LENGTH, "batch": BATCH}
    stage["lr"] = 1e-2 if run.stage == "transfer" else 5e-4
    stages = [{"stage": "calibrate"}] if run.stage == "transfer" else []
    return {
        **LAYERS[run.layers],
        "data": {"source": data, "recall_share": run.recall_share, "separate": False, "held_out": 8},
        "train": [*stages, stage | changes],
        "every": {"evaluate": 30, "save": 15},
    }


def carry_out(name: str, run: Run, out: Path, data: str, text: str) -> dict[str, Any]:
    """Make the model of a run, judge it, and return both results."""
    model, evaluation, done = out / name, out / f"{name}-eval", out / f"{name}.json"
    if done.exists():
        return json.loads(done.read_text())
    trained: dict[str, Any] = {}
    if not run.stage:
        if not model.exists():
            linearize.convert(find_model(), model, recipe=LAYERS[run.layers], dtype="bfloat16")
    else:
        work = out / f"{name}-training"
        if not model.exists():
            trained = linearize.train(
                out / run.parent, model, recipe=recipe(run, data), resume=work.exists(), note=print
            )
        trained = json.loads((work / "summary.json").read_text())
    results = evaluate(model, evaluation, text)
    document = {"name": name, "training": trained, "evaluation": results}
    done.write_text(json.dumps(document, indent=1))
    return document


def evaluate(model: Path, out: Path, text: str) -> dict[str, Any]:
    """Recall and perplexity of a model and its teacher, cell by cell."""
    found: dict[str, Any] = {}
    asked = {
        "recall": {
            "tasks": ["linearize_mqar_lines", "linearize_niah_single"],
            "lengths": [512, 1024],
            "pairs": [16, 32],
            "samples": 4,
        },
        "text": {"tasks": ["linearize_perplexity"], "lengths": [512], "samples": 32, "text": text},
    }
    for kind, options in asked.items():
        folder = out / kind
        found[kind] = linearize.evaluate(
            model, folder, teacher=find_model(), ablate=False, resume=folder.exists(), dtype="bfloat16", **options
        )
    cells = {}
    for task, label in (("linearize_mqar_lines", "pairs"), ("linearize_niah_single", "length")):
        for cell in found["recall"]["tasks"][task]["cells"]:
            key = f"{task.removeprefix('linearize_')} {cell[label]}"
            sums = cells.setdefault(key, {"answers": 0, "teacher": [0.0, 0.0], "student": [0.0, 0.0]})
            sums["answers"] += cell["answers"]
            for side in ("teacher", "student"):
                for place, figure in enumerate(("accuracy", "nll")):
                    sums[side][place] += cell[side][figure] * cell["answers"]
    for sums in cells.values():
        for side in ("teacher", "student"):
            sums[side] = [round(value / sums["answers"], 4) for value in sums[side]]
    group = found["text"]["text"]["linearize_perplexity"]
    overall = {side: group[side]["perplexity"] for side in ("teacher", "student")}
    return {"cells": cells, "perplexity": overall}


def sweep(out: Path, data: str) -> None:
    """Transfer of 30k tokens: losses, learning rates and lengths, on the same text."""
    start = out / "a-0"
    if not start.exists():
        linearize.convert(find_model(), start, recipe=LAYERS["a"], dtype="bfloat16")
    run = Run("a", "a-0", "transfer", 30_000, 0.3)
    print(f"{'loss':16}{'lr':>8}{'length':>8}{'perplexity':>12}{'recall':>8}{'recall nll':>12}")
    for loss, lr, length in SWEEP:
        name = f"sweep-{loss}-{lr:g}-{length}"
        work = out / f"{name}-training"
        settings = recipe(run, data, loss=loss, lr=lr, length=length, batch=BATCH * LENGTH // length)
        if not (out / name).exists():
            linearize.train(start, out / name, recipe=settings, resume=work.exists())
        after = json.loads((work / "summary.json").read_text())["stages"][-1]["held_out"]["after"]
        figures = f"{after['perplexity']:12.2f}{after['recall']:8.2f}{after['recall_nll']:12.3f}"
        print(f"{loss:16}{lr:8g}{length:8}{figures}", flush=True)


def table(out: Path) -> None:
    """The finished runs as Markdown."""
    rows = [
        (name, json.loads((out / f"{name}.json").read_text())) for name in plan() if (out / f"{name}.json").exists()
    ]
    if not rows:
        raise SystemExit(f"there is no finished run in {out}")
    keys = list(rows[0][1]["evaluation"]["cells"])
    print("| run | perplexity | " + " | ".join(f"{key} (NLL)" for key in keys) + " | tokens/s | peak memory |")
    print("|---|---|" + "---|" * (len(keys) + 2))
    for name, found in [("teacher", rows[0][1]), *rows]:
        side = "teacher" if name == "teacher" else "student"
        evaluation = found["evaluation"]
        cells = [f"{evaluation['cells'][key][side][0]:.2f} ({evaluation['cells'][key][side][1]:.2f})" for key in keys]
        stages = found["training"].get("stages", []) if side == "student" else []
        speed = f"{stages[-1]['tokens_per_second']:.0f}" if stages else "-"
        memory = f"{stages[-1]['peak_memory_bytes'] / 1e9:.1f} GB" if stages else "-"
        print(f"| {name} | {evaluation['perplexity'][side]:.2f} | {' | '.join(cells)} | {speed} | {memory} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("sweep", "runs", "table"))
    parser.add_argument("--data", help="text to train on")
    parser.add_argument("--text", help="held-out text")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(plan())}")
    parser.add_argument("--out", type=Path, default=Path("recovery"), help="folder to write (default: recovery)")
    arguments = parser.parse_args()
    if arguments.what == "table":
        return table(arguments.out)
    if not arguments.data or (arguments.what == "runs" and not arguments.text):
        parser.error("--data is needed, and for runs --text")
    if arguments.what == "sweep":
        return sweep(arguments.out, arguments.data)
    runs = plan()
    for name in arguments.only or runs:
        found = carry_out(name, runs[name], arguments.out, arguments.data, arguments.text)
        print(f"{name}: {json.dumps(found['evaluation'])}", flush=True)
    return table(arguments.out)


if __name__ == "__main__":
    main()
