"""What SmolLM2-135M-Instruct recalls, and what three untrained conversions of it have lost.

    python benchmarks/recall.py teacher    # every family, beside figures measured with other code
    python benchmarks/recall.py students   # suite quick: hedgehog + window, every 4th layer softmax, FAVOR+ alone

Everything is written below recall/, one evaluation a folder; what was scored before is not scored again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from linearize_evals.compare import TOO_WEAK
from linearize_evals.intervals import wilson

import linearize
from demo import find_model

# Tasks that share a grid, and the accuracy that another script measured for this model on documents of the same kind.
NEEDLES = {"lengths": [512, 1024, 2048], "samples": 10}
TEACHER: list[tuple[dict[str, Any], dict[str, list[float]]]] = [
    (
        {"lengths": [256, 512, 1024, 2048, 4096], "depths": [0.0, 0.25, 0.5, 0.75, 1.0], "samples": 2},
        {"niah_single": [1.00, 1.00, 1.00, 1.00, 1.00]},
    ),
    (
        NEEDLES,
        {
            "niah_multikey": [1.00, 0.90, 0.50],
            "niah_multiquery": [0.88, 0.88, 0.75],
            "niah_multivalue": [0.5, 0.6, 0.33],
        },
    ),
    ({"pairs": [8, 16, 32, 64, 128], "samples": 8}, {"mqar_lines": [0.98, 1.00, 1.00, 0.98, 0.99]}),
    ({"pairs": [16, 64, 128], "samples": 8}, {"mqar_json": [1.00, 0.96, 0.95]}),
]
STUDENTS: dict[str, dict[str, Any]] = {
    "hedgehog-window": {"recipe": "hedgehog-window"},
    "every-4th-softmax": {"recipe": "hedgehog-window", "overrides": {"keep_softmax": "every:4"}},
    "favor-alone": {"recipe": "performer"},
    "default": {"recipe": "default"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("teacher", "students"))
    parser.add_argument("--out", type=Path, default=Path("recall"), help="folder to write (default: recall)")
    arguments = parser.parse_args()
    if arguments.what == "teacher":
        teacher_table(arguments.out)
    else:
        students(arguments.out)


def teacher_table(out: Path) -> None:
    print(f"{'task':18}{'tokens':>8}{'pairs':>7}  {'accuracy':24}{'before':>8}  agrees")
    for number, (grid, expected) in enumerate(TEACHER):
        names = [f"linearize_{name}" for name in expected]
        folder = out / f"teacher-{number}"
        results = linearize.evaluate(find_model(), folder, teacher="none", tasks=names, resume=True, **grid)
        for name, figures in expected.items():
            cells = by_size(results["tasks"][f"linearize_{name}"]["cells"])
            for (size, (right, answers)), before in zip(cells.items(), figures, strict=True):
                low, high = wilson(right, answers)
                accuracy = f"{right / answers:.2f} ({low:.2f}-{high:.2f}), {answers}"
                agrees = "yes" if low - 0.005 <= before <= high + 0.005 else "no"
                print(f"{name:18}{size[0]:8}{size[1] or '-':>7}  {accuracy:24}{before:8.2f}  {agrees}", flush=True)
        print(f"({results['settings']['dtype']}, {results['seconds']['student']:.0f} s)", flush=True)


def by_size(cells: list[dict[str, Any]]) -> dict[tuple[int, int | None], tuple[float, int]]:
    """(right answers, answers) of cells of one length and number of facts, whatever the depth."""
    sums: dict[tuple[int, int | None], tuple[float, int]] = {}
    for cell in cells:
        right, answers = sums.get((cell["length"], cell["pairs"]), (0.0, 0))
        found = cell["student"]["accuracy"] * cell["answers"]
        sums[cell["length"], cell["pairs"]] = (round(right + found, 6), answers + cell["answers"])
    return sums


def students(out: Path) -> None:
    for name, recipe in STUDENTS.items():
        folder = out / name
        if not folder.exists():
            linearize.convert(find_model(), folder, **recipe)
        results = linearize.evaluate(folder, out / f"{name}-eval", teacher=find_model(), resume=True)
        print(f"\n{name}: {results['models']['student']['mixers']}")
        for task, found in results["tasks"].items():
            kept = found["retention"]
            text = TOO_WEAK if found["gate"] == TOO_WEAK else interval(kept)
            sides = "  ".join(f"{side} {interval(found[side], 'accuracy')}" for side in ("teacher", "student"))
            print(f"  {task:24}{sides}  kept {text}")
        for task, found in results["text"].items():
            for label, group in found["by_label"].items():
                sides = "  ".join(f"{side} {group[side]['perplexity']:.2f}" for side in ("teacher", "student"))
                print(f"  {task:24}{label} tokens: perplexity {sides}")
        print(f"  seconds: {results['seconds']}")
        for finding in results["findings"]:
            print(f"  * {finding}")


def interval(found: dict[str, Any], key: str = "value") -> str:
    if found["low"] is None:
        return f"{found[key]:.3f}"
    return f"{found[key]:.3f} ({found['low']:.2f} to {found['high']:.2f})"


if __name__ == "__main__":
    main()
