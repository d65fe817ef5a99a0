"""Converted folders, and models of them that look trained, for tests of what training writes."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import linearize
from tests.checkpoints import add_side_files, save

RECORD = {"base_weights": "unchanged", "teacher": "owner/teacher", "stages": [{"stage": "transfer", "tokens": 64}]}


def trained(folder, *, everything=False, dtype="auto"):
    """The model of a converted folder with its mixers (or all weights) moved."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if everything or ".linearize." in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def converted(folder, kind="llama", **options):
    model = save(folder / "m", kind, **options)
    add_side_files(model)
    linearize.convert(model, folder / "c", overrides={"feature_map": "hedgehog", "window": 5, "keep_softmax": "0"})
    return folder / "c"


def stored(folder):
    """name -> (tensor, file) of everything that the folder's files hold."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert not found.keys() & file.keys()
            found |= {key: (file.get_tensor(key), path.name) for key in file.keys()}  # noqa: SIM118
    return found


def with_lora(checkpoint):
    peft = pytest.importorskip("peft")
    model = trained(checkpoint)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return adapted.eval()
