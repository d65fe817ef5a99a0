"""Whether chosen softmax layers keep more recall than evenly spread ones: SmolLM2-135M-Instruct, 25 % and 10 % of them.

    linearize select MODEL --budget 25% --recipe hedgehog-window -o selection.json
    linearize select MODEL --heads --budget 9 --recipe hedgehog-window -o heads.json
    python benchmarks/selection.py runs --selection selection.json --heads heads.json --data TRAIN --text HELD_OUT
    python benchmarks/selection.py table --selection selection.json

Every hybrid is judged untrained, and after the same transfer of 0.3M tokens, three tenths of whose rows are recall
documents.
Students are compared answer by answer on the same documents. TRAIN and HELD_OUT are texts (.jsonl.gz, key "text").
Everything is written below selection/; what is there is not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from linearize_evals.answers import answers
from linearize_evals.intervals import difference

import linearize
from demo import find_model
from linearize.select_units import in_words

HEDGEHOG = {"mixer": "window", "feature_map": "hedgehog", "window": 64, "sinks": 4}
FEW = 3  # of 30 layers: 10 %
TOKENS = 300_000
TASKS = {"linearize_mqar_lines": {"pairs": [32]}, "linearize_niah_single": {"lengths": [1024]}}
DOCUMENTS = {"linearize_mqar_lines": 12, "linearize_niah_single": 24}
COMPARED = [
    ("selected-25", "uniform-25"),
    ("selected-10", "uniform-25"),
    ("heads-10", "uniform-25"),
    ("heads-10", "selected-10"),
]
Kept = list[int] | str  # layers, or the file that has the heads


def hybrids(selection: Path, few: Path | None = None, heads: Path | None = None) -> dict[str, Kept]:
    """What each hybrid keeps."""
    found = json.loads(selection.read_text())
    ranked = sorted(json.loads((few or selection).read_text())["layers"], key=lambda row: row["rank"])
    return {
        "selected-25": found["chosen"]["layers"],
        "uniform-25": found["uniform"]["layers"],
        "selected-10": sorted(row["layer"] for row in ranked[:FEW]),
    } | ({"heads-10": f"@{heads}"} if heads else {})


def carry_out(name: str, kept: Kept, out: Path, data: str, text: str) -> None:
    start, end = out / name, out / f"{name}-trained"
    if not start.exists():
        linearize.convert(find_model(), start, recipe=HEDGEHOG | {"keep_softmax": kept}, dtype="bfloat16")
    judge(start, out, text)
    if not end.exists():
        transfer = {"stage": "transfer", "tokens": TOKENS, "length": 1024, "batch": 2, "lr": 1e-2}
        recipe = {
            **json.loads((start / "config.json").read_text())["linearize"]["recipe"],
            "data": {"source": data, "recall_share": 0.3, "separate": False, "held_out": 8},
            "train": [{"stage": "calibrate"}, transfer],
            "every": {"evaluate": 75, "save": 25},
        }
        work = out / f"{name}-trained-training"
        linearize.train(start, end, recipe=recipe, resume=work.exists(), note=print)
    judge(end, out, text)


def judge(model: Path, out: Path, text: str) -> None:
    """Score the documents and a text, and keep the samples."""
    asked = {
        task: {"tasks": [task], "samples": DOCUMENTS[task], "depths": [0.0, 0.5, 1.0], **grid}
        for task, grid in TASKS.items()
    }
    asked["linearize_mqar_lines"].pop("depths")
    asked["linearize_niah_single"]["samples"] //= 3
    asked["text"] = {"tasks": ["linearize_perplexity"], "lengths": [512], "samples": 32, "text": text}
    for kind, options in asked.items():
        folder = out / f"{model.name}-eval" / kind
        if not (folder / "results.json").exists():
            linearize.evaluate(
                model, folder, teacher=find_model(), ablate=False, resume=folder.exists(), dtype="bfloat16", **options
            )


def table(out: Path, kept: dict[str, Kept]) -> None:
    print("| hybrid | keeps | perplexity | mqar_lines 32 pairs | niah_single 1024 tokens |\n|---|---|---|---|---|")
    names = [name + end for end in ("", "-trained") for name in kept if (out / f"{name}{end}-eval").exists()]
    for name in names:
        results = {
            kind: json.loads((out / f"{name}-eval" / kind / "results.json").read_text()) for kind in (*TASKS, "text")
        }
        cells = []
        for task in TASKS:
            found = results[task]["tasks"][task]["student"]
            cells.append(f"{found['accuracy']:.2f} ({found['low']:.2f} to {found['high']:.2f}), NLL {found['nll']:.2f}")
        perplexity = results["text"]["text"]["linearize_perplexity"]["student"]["perplexity"]
        spec = kept[name.removesuffix("-trained")]
        chosen = json.loads(Path(spec[1:]).read_text())["chosen"] if isinstance(spec, str) else {"layers": spec}
        layers = in_words(chosen)
        print(f"| {name} | {layers} | {perplexity:.2f} | {' | '.join(cells)} |")
    print("\n| first minus second | mqar_lines | niah_single |\n|---|---|---|")
    for end in ("", "-trained"):
        for first, second in COMPARED:
            if {first + end, second + end} <= set(names):
                cells = []
                for task in TASKS:
                    found = gain(answers_of(second + end, task, out), answers_of(first + end, task, out))
                    cells.append(f"{found['value']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})")
                print(f"| {first}{end}, {second}{end} | {' | '.join(cells)} |")


def answers_of(name: str, task: str, out: Path) -> dict[tuple[str, int], bool]:
    """Which answers were right, by document and span."""
    lines = (out / f"{name}-eval" / task / "student" / f"samples_{task}.jsonl").read_text().splitlines()
    found = answers({task: [json.loads(line) for line in lines]})
    return {(answer.document, answer.span): answer.correct for answer in found}


def gain(before: dict[tuple[str, int], bool], after: dict[tuple[str, int], bool]) -> dict[str, Any]:
    """Accuracy of `after` minus that of `before`, paired, with its interval over documents."""
    assert before.keys() == after.keys()
    documents = {document: number for number, document in enumerate(dict.fromkeys(key[0] for key in before))}
    sums = np.zeros((len(documents), 4))
    for key, right in before.items():
        sums[documents[key[0]]] += (1, right, after[key], right and not after[key])
    return difference(*sums.T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("runs", "table"))
    parser.add_argument("--selection", type=Path, required=True, help="what `linearize select` wrote")
    parser.add_argument("--few", type=Path, help="another one, to choose the 10 %% by")
    parser.add_argument("--heads", type=Path, help="one of --heads, of as many heads as the 10 %% of layers have")
    parser.add_argument("--data", help="text to train on")
    parser.add_argument("--text", help="held-out text")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("selection"), help="folder to write (default: selection)")
    arguments = parser.parse_args()
    kept = hybrids(arguments.selection, arguments.few, arguments.heads)
    if arguments.what == "runs":
        if not arguments.data or not arguments.text:
            parser.error("--data and --text are needed")
        for name in arguments.only or kept:
            carry_out(name, kept[name], arguments.out, arguments.data, arguments.text)
    table(arguments.out, kept)


if __name__ == "__main__":
    main()
