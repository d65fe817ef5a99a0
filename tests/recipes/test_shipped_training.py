"""Every shipped recipe that trains: planned and run for three steps of each stage on a tiny stand-in of its family."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import linearize
from linearize.recipe import load_recipe, shipped_recipes
from linearize.recipe_files import find_recipe
from tests.evals.engine import VOCAB, byte_tokenizer

STEPS, LENGTH = 3, 96
FAMILIES = {"smollm2-135m": ("llama", 30), "llama3-8b": ("llama", 2), "llama3-70b": ("llama", 2)}
FAMILIES |= {"qwen3-8b": ("qwen3", 2), "mistral-7b": ("mistral", 2)}
TRAINING = [name for name in shipped_recipes() if load_recipe(name).train]


def stand_in(family: str, layers: int):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        sliding_window=None,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_a_shipped_recipe_runs_on_a_stand_in_of_its_family(name, tmp_path):
    model = stand_in(*FAMILIES[name.partition("/")[0]])
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    rng = random.Random(0)
    lines = [json.dumps({"text": "".join(rng.choices("abc de. fgh\n", k=400))}) for _ in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = load_recipe(name)
    changes = {"data.source": str(tmp_path / "text.jsonl"), "data.held_out": 2, "precision": "float32"}
    for number, stage in enumerate(recipe.train):
        changes[f"train.{number}.length"] = LENGTH
        if stage.stage != "calibrate":
            changes[f"train.{number}.tokens"] = STEPS * LENGTH * stage.batch
    converted = linearize.convert(tmp_path / "base", tmp_path / "converted", recipe=recipe).out
    summary = linearize.train(converted, tmp_path / "out", recipe=find_recipe(name), overrides=changes)
    trained = [stage for stage in summary["stages"] if stage["stage"] != "calibrate"]
    assert [stage["steps"] for stage in trained] == [STEPS] * len(trained)
    assert [stage["tokens"] for stage in trained] == [
        STEPS * LENGTH * one.batch for one in recipe.train if one.stage != "calibrate"
    ]
    assert linearize.verify(tmp_path / "out") == []
    before, after = linearize.load(converted), linearize.load(tmp_path / "out")
    changed = {name for name, p in after.named_parameters() if not torch.equal(p, before.get_parameter(name))}
    assert changed, "three steps changed nothing"
    lora = any(getattr(stage, "trains", "") == "lora" for stage in recipe.train)
    assert any(".linearize." not in name for name in changed) == lora
