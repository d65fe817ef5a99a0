"""What a conversion costs before any training: perplexity of SmolLM2-135M-Instruct under each mixer and start.

    python benchmarks/untrained.py [--text FILE] [--json FILE]

It explains two choices: a window with sinks in the default recipe, and where the gate of `window` mixers starts. The
last rows have the linear part zeroed, so that what the window alone gives is known.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

from linearize_evals.loading import choose_dtype

from demo import find_model

WINDOW_TOKENS = 512  # perplexity is taken in pieces of this length

ROWS: list[tuple[str, dict[str, Any], float | None]] = [
    *((f"linear, {name}", {"mixer": "linear", "feature_map": name}, None) for name in ("elu1", "hedgehog", "favor")),
    *(
        (f"window 64, {name}", {"feature_map": name, "sinks": 0}, None)
        for name in ("elu1", "t2r", "taylor", "hedgehog", "favor")
    ),
    *((f"window 64 + 4 sinks, {name}", {"feature_map": name, "sinks": 4}, None) for name in ("hedgehog", "favor")),
    *(
        (f"window 64 + 4 sinks, {name}, gate {gate:g}", {"feature_map": name, "sinks": 4}, gate)
        for name in ("hedgehog", "favor")
        for gate in (0.0, 2.0, 3.0, 4.0, 6.0)
    ),
    *(
        (
            f"window 64 + 4 sinks, {name}, 25% softmax",
            {"feature_map": name, "sinks": 4, "keep_softmax": "25%"},
            None,
        )
        for name in ("hedgehog", "favor")
    ),
]
ZEROED = [("window 64, linear part zeroed", {"sinks": 0}), ("window 64 + 4 sinks, linear part zeroed", {"sinks": 4})]


def perplexity(model: Any, ids: list[int]) -> float:
    """exp of the mean next-token loss, in pieces of WINDOW_TOKENS that don't see each other."""
    import torch

    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, WINDOW_TOKENS):
        piece = torch.tensor([ids[start : start + WINDOW_TOKENS]])
        if piece.shape[1] < 2:
            continue
        logits = model(piece).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
        count += piece.shape[1] - 1
    return math.exp(total / count)


def main() -> None:
    import torch

    import linearize

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("demo_text.txt"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gguf = find_model()
    tokenizer = linearize.load_tokenizer(gguf)
    base = linearize.load(gguf, dtype=choose_dtype(None, torch.device("cpu"))[0]).eval()
    ids = tokenizer(arguments.text.read_text(encoding="utf-8")).input_ids
    results: dict[str, float] = {}

    def measure(label: str, model: Any) -> None:
        with torch.inference_mode():
            results[label] = perplexity(model, ids)
        print(f"{label:52}{results[label]:10.1f}", flush=True)

    print(f"{arguments.text.name}, {len(ids)} tokens, {base.dtype}, torch {torch.__version__}")
    measure("teacher", base)
    for label, recipe, gate in ROWS:
        model = linearize.linearize_(copy.deepcopy(base), recipe)
        if gate is not None:
            for name, parameter in model.named_parameters():
                if name.endswith(".linearize.gate"):
                    parameter.data.fill_(gate)
        measure(label, model)
    for label, recipe in ZEROED:
        model = linearize.linearize_(copy.deepcopy(base), mixer="window", feature_map="relu", **recipe)
        with linearize.ablate(model, "linear"):
            measure(label, model)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
