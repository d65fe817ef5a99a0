"""The largest errors of the equalities that conversion promises, on tiny models and on SmolLM2-135M-Instruct.

    python benchmarks/exactness.py [--model FOLDER]

Every row compares two ways to compute the same logits; the figure is the largest absolute difference. The yardstick is
the second row: how far one rounding of the embeddings (a relative 2^-24) moves the logits of the same model. Without
--model only the tiny models run (those of the tests: fp32, grouped heads, biases, windows of 5 to 7).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import linearize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.modeling.models import RECIPES, converted, tokens


def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, **kwargs).logits.float()


def in_pieces(model: Any, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    cache, out, start = DynamicCache(config=model.config), [], 0
    for length in lengths:
        out.append(logits(model, ids[:, start : start + length], cache=cache, use_cache=True))
        start += length
    return torch.cat(out, 1)


def compare(model: Any, vocabulary: int, length: int) -> dict[str, float]:
    ids = tokens(2, length) % vocabulary
    whole = logits(model, ids, use_cache=False)
    pad = length // 3
    padded = torch.cat([torch.zeros(2, pad, dtype=torch.long), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    parts = [ids[:1, :pad], ids[:1, pad:]]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = logits(model, ids[:1], position_ids=positions, use_cache=False)
    separate = torch.cat([logits(model, part, use_cache=False) for part in parts], 1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        reloaded = linearize.load(folder, dtype=model.dtype).eval()
    embedded = model.get_input_embeddings()(ids).detach()
    noise = embedded * 2.0**-24 * torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0)).sign()
    with torch.inference_mode():
        rounded, plain = (model(inputs_embeds=x, use_cache=False).logits for x in (embedded + noise, embedded))
    errors = {
        "one rounding of the embeddings": rounded - plain,
        "token by token = one forward": in_pieces(model, ids, [1] * length) - whole,
        "prefill, then steps = one forward": in_pieces(model, ids, [length - 9, *[1] * 9]) - whole,
        "chunks of 7 = one forward": in_pieces(model, ids, [7] * (length // 7) + [length % 7][: length % 7]) - whole,
        "left-padded = alone": logits(model, padded, attention_mask=mask)[:, pad:] - whole,
        "batch of 2 = each alone": torch.cat([logits(model, row[None], use_cache=False) for row in ids]) - whole,
        "packed = separate": packed - separate,
        "reloaded = saved": logits(reloaded, ids, use_cache=False) - whole,
    }
    return {"largest logit": float(whole.abs().max()), **{k: float(v.abs().max()) for k, v in errors.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a base model, measured in fp32 under three recipes")
    arguments = parser.parse_args()
    worst: dict[str, float] = {}
    for name in RECIPES:
        for key, value in compare(converted(name).eval(), 96, 129).items():
            worst[key] = max(worst.get(key, 0.0), value)
    print(f"tiny models, worst of {len(RECIPES)} recipes, 129 tokens, torch {torch.__version__}")
    for key, value in worst.items():
        print(f"  {key:36}{value:.1e}")
    for recipe in ("default", "hedgehog-window", "performer") if arguments.model else ():
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
        print(f"{arguments.model.name}, {recipe}, 300 tokens")
        for key, value in compare(linearize.linearize_(base, recipe), base.config.vocab_size, 300).items():
            print(f"  {key:36}{value:.1e}")


if __name__ == "__main__":
    main()
