"""Every mixer but `heads` in all layers of SmolLM2-135M-Instruct: what it costs, untrained and after a short transfer.

    python benchmarks/mixers.py --data TRAIN --text HELD_OUT [--only NAME ...] [--tokens 30000]

TRAIN and HELD_OUT are texts (.jsonl.gz with a key "text"). Everything is written below mixers/, a folder for each
mixer; what is there is not made again. Each row: perplexity of HELD_OUT in pieces of 512 tokens, recall of lists of 32
pairs and of needles in 1024 tokens, bytes of state of a sequence, and speed of decoding after 1024 tokens beside
softmax attention's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import linearize
from demo import find_model
from linearize import bench
from linearize.mixers import MIXERS, AttentionShape, build_mixer
from linearize.recipe import load_recipe

WINDOW = {"mixer": "window", "window": 64, "sinks": 4}
ROWS: dict[str, dict[str, Any]] = {
    **{f"linear {name}": {"mixer": "linear", "feature_map": name} for name in ("elu1", "t2r", "hedgehog", "taylor")},
    "linear favor": {"mixer": "linear", "feature_map": "favor"},
    "linear cosformer": {"mixer": "linear", "feature_map": "cosformer"},
    **{
        name: {"mixer": name}
        for name in MIXERS
        if name not in {"linear", "window", "windowed", "length_switch", "heads"}
    },
    **{f"window 64 + 4 sinks, {name}": WINDOW | {"feature_map": name} for name in ("hedgehog", "favor")},
    "windowed 64 + 4 sinks, gated_deltanet": {
        "mixer": "windowed",
        "window": 64,
        "sinks": 4,
        "mixer_options": {"over": "gated_deltanet"},
    },
    "length_switch 512": {"mixer": "length_switch", "mixer_options": {"length": 512}},
}
ASKED = {
    "recall": {
        "tasks": ["linearize_mqar_lines", "linearize_niah_single"],
        "lengths": [1024],
        "pairs": [32],
        "samples": 2,
    },
    "text": {"tasks": ["linearize_perplexity"], "lengths": [512], "samples": 16},
}


def training(data: str, tokens: int) -> dict[str, Any]:
    transfer = {"stage": "transfer", "tokens": tokens, "length": 1024, "batch": 2, "lr": 1e-2}
    return {
        "data": {"source": data, "recall_share": 0.3, "separate": False, "held_out": 4},
        "train": [{"stage": "calibrate"}, transfer],
        "every": {"evaluate": 1000, "save": 1000},
    }


def mixer_of(row: dict[str, Any]) -> Any:
    """One mixer of a row, of SmolLM2's shape."""
    shape = AttentionShape(9, 3, 64, 64, hidden_size=576, scaling=0.125, max_length=8192)
    return build_mixer(load_recipe(row).mixer_spec(), shape, layer=0, seed=0)


def measure(name: str, out: Path, data: str, text: str, tokens: int) -> dict[str, Any]:
    """Both models of a mixer, made if they aren't there."""
    folder = out / "".join(letter if letter.isalnum() else "-" for letter in name)
    done = folder / "row.json"
    if done.exists():
        return json.loads(done.read_text())
    start, end = folder / "untrained", folder / "trained"
    if not start.exists():
        linearize.convert(find_model(), start, recipe=ROWS[name], dtype="bfloat16")
    learns = any(parameter.requires_grad for parameter in mixer_of(ROWS[name]).parameters())
    if learns and not end.exists():
        work = folder / "trained-training"
        linearize.train(start, end, recipe=ROWS[name] | training(data, tokens), resume=work.exists())
    row: dict[str, Any] = {"name": name}
    for model in (start, end) if learns else (start,):
        row[model.name] = {}
        for kind, options in ASKED.items():
            where = folder / f"{model.name}-{kind}"
            found = linearize.evaluate(
                model,
                where,
                teacher=find_model(),
                ablate=False,
                resume=where.exists(),
                dtype="bfloat16",
                **options | ({"text": text} if kind == "text" else {}),
            )
            row[model.name][kind] = {
                task: {side: entry[side] for side in ("teacher", "student")}
                for part in ("tasks", "text")
                for task, entry in found[part].items()
            }
    timed = bench.bench([end if learns else start], lengths=[1024], new_tokens=16, rounds=2, dtype="bfloat16")
    row["bench"] = {entry["attention"]: entry["rows"][0] for entry in timed["models"]}
    done.write_text(json.dumps(row, indent=1))
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| all layers | perplexity | mqar 32 pairs | niah 1024 tokens | state | decoding, x softmax |")
    print("|---|---|---|---|---|---|")

    def cells(found: dict[str, Any], side: str) -> list[str]:
        recall = [found["recall"][f"linearize_{task}"][side] for task in ("mqar_lines", "niah_single")]
        perplexity = found["text"]["linearize_perplexity"][side]["perplexity"]
        return [f"{perplexity:.1f}", *(f"{entry['accuracy']:.2f} ({entry['nll']:.2f})" for entry in recall)]

    if rows:
        print(f"| teacher | {' | '.join(cells(rows[0]['untrained'], 'teacher'))} | | 1 |")
    for row in rows:
        both = [cells(row[model], "student") for model in ("untrained", "trained") if model in row]
        softmax, own = row["bench"]["softmax"], row["bench"]["converted"]
        figures = [" → ".join(pair) for pair in zip(*both, strict=True)]
        figures += [f"{own['cache_bytes'] / 1e6:.2f} MB", f"{softmax['decode_ms'] / own['decode_ms']:.2f}"]
        print(f"| {row['name']} | {' | '.join(figures)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="text to train on")
    parser.add_argument("--text", required=True, help="held-out text")
    parser.add_argument("--tokens", type=int, default=30_000, help="of transfer (default: 30000)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--out", type=Path, default=Path("mixers"), help="folder to write (default: mixers)")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only or ROWS:
        rows.append(measure(name, arguments.out, arguments.data, arguments.text, arguments.tokens))
        print(f"{name}: done", flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()
