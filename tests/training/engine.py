"""A tiny converted model with a tokenizer, text, and trainings of a few steps."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

import linearize
from tests.evals.engine import VOCAB, byte_tokenizer, tiny
from tests.families import tiny_config

WORDS = ["red", "green", "blue", "small", "large", "old", "ship", "house", "river", "bird", "walks", "holds", "under"]
HEDGEHOG = {"mixer": "window", "feature_map": "hedgehog", "window": 6, "sinks": 1, "keep_softmax": [1]}
LENGTH, BATCH = 32, 2
CALIBRATE = {"stage": "calibrate", "rows": 2, "length": LENGTH}
STEPS = {"tokens": 4 * BATCH * LENGTH, "length": LENGTH, "batch": BATCH}
TRANSFER = {"stage": "transfer", **STEPS}
LORA = {"r": 2, "alpha": 4}
DISTILL = {"stage": "distill", **STEPS, "lr": 0.01, "lora": LORA}
FINETUNE = {"stage": "finetune", **STEPS, "lr": 0.01, "lora": LORA}
TIMING = ("tokens_per_second", "memory_bytes")

_ROOT = TemporaryDirectory(prefix="linearize-tests-")


def text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """Documents of 3 to 30 words, parted by an empty line."""
    source = random.Random(seed)
    made = (" ".join(source.choice(WORDS) for _ in range(source.randint(3, 30))) for _ in range(documents))
    path.write_text("\n\n".join(made))
    return path


@cache
def _made(changes: str) -> Path:
    settings = json.loads(changes)
    recipe = HEDGEHOG | settings.pop("recipe", {})
    folder = Path(_ROOT.name) / f"{len(list(Path(_ROOT.name).iterdir()))}"
    dtype = getattr(torch, settings.pop("dtype", "float32"))
    tiny(dtype=dtype, **settings).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    linearize.convert(folder / "base", folder / "converted", overrides=recipe)
    text(folder / "text.txt")
    return folder


def checkpoint(folder: Path, **changes: Any) -> Path:
    """`folder` with `base`, `converted` and `text.txt`; returns the second. Changes are of the config, or `recipe`."""
    made = _made(json.dumps(changes, sort_keys=True))
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder / "converted"


def family(folder: Path, model_type: str, **changes: Any) -> Path:
    """As `checkpoint`, for another family: its tiny model with the tokenizer of bytes."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type)
    for key, value in (
        {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2} | changes
    ).items():
        setattr(config, key, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    linearize.convert(folder / "base", folder / "converted", overrides={**HEDGEHOG, "keep_softmax": [0]})
    text(folder / "text.txt")
    return folder / "converted"


def recipe(checkpoint: Path, *stages: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A recipe that trains in float32 without looks, and saves at every second step."""
    data = {"source": str(checkpoint.parent / "text.txt"), "held_out": 2, **settings.pop("data", {})}
    every = {"evaluate": 0, "save": 2, **settings.pop("every", {})}
    return {"data": data, "train": list(stages), "every": every, "precision": "float32", **settings}


def train(
    checkpoint: Path, out: Path, *stages: dict[str, Any], device: str = "cpu", figure: bool = False, **settings: Any
) -> dict[str, Any]:
    """What `session.train` says; `resume`, `force` and other arguments of it go among the settings.

    A figure takes as long as everything else, and is drawn on demand.
    """
    from linearize.training import session

    names = ("resume", "force", "work", "note", "overrides", "teacher")
    options = {name: settings.pop(name) for name in names if name in settings}
    asked = recipe(checkpoint, *stages, **settings)
    with nullcontext() if figure else mock.patch.object(session, "plot"):
        return session.train(checkpoint, out, recipe=asked, device=device, **options)


def work(out: Path) -> Path:
    return Path(f"{out}-training")


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what time they took."""
    lines = [json.loads(line) for line in (work(out) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMING} for line in lines]


def losses(out: Path, stage: int | None = None) -> list[float]:
    return [line["loss"] for line in metrics(out) if "loss" in line and stage in (None, line["stage"])]


def checkpoints(out: Path) -> list[str]:
    folder = work(out) / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def weights(folder: Path) -> dict[str, Any]:
    """Every tensor that the files of a folder hold."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
