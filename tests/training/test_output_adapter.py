"""LoRA beside a trained model: kept in a folder of its own, or merged, and the same model either way."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import linearize
from linearize.training.output import write
from linearize.verification import verify
from tests.modeling.models import RECIPES, logits, tiny_llama, tokens
from tests.training.outputs import RECORD, converted, trained, with_lora

RELOAD = """
import sys, torch
import linearize
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
if sys.argv[2]:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, sys.argv[2]).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[3])).logits, sys.argv[4])
"""


@pytest.mark.parametrize("where", ["this process", pytest.param("a fresh process", marks=pytest.mark.slow)])
def test_a_kept_adapter_agrees_with_a_merged_one(tmp_path, where):
    tiny_llama().save_pretrained(tmp_path / "m")
    checkpoint = linearize.convert(tmp_path / "m", tmp_path / "c", recipe=RECIPES["window-hedgehog"]).out
    ids = tokens(2, 40)
    adapted = with_lora(checkpoint)
    expected = logits(adapted, ids)
    assert (expected - logits(trained(checkpoint), ids)).abs().max() > 0.1  # LoRA matters
    record = {**RECORD, "stages": [{"stage": "distill", "tokens": 8, "lora": {"merge": False}}]}
    kept, merged = tmp_path / "kept", tmp_path / "merged"
    write(adapted.get_base_model(), checkpoint, kept, record=record, adapter=adapted, base_changed=False)
    write(adapted.merge_and_unload(), checkpoint, merged, record=record, base_changed=True)
    assert verify(kept) == verify(merged) == []
    assert sorted(path.name for path in (kept / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    config = json.loads((kept / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(kept)
    assert os.path.samefile(kept / "model-base.safetensors", checkpoint / "model-base.safetensors")
    for folder, adapter in ((kept, kept / "adapter"), (merged, "")):
        if where == "this process":
            model = linearize.load(folder).eval()
            if adapter:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, adapter).eval()
            found = logits(model, ids)
        else:
            torch.save(ids, tmp_path / "ids.pt")
            command = [sys.executable, "-c", RELOAD, folder, adapter, tmp_path / "ids.pt", tmp_path / "logits.pt"]
            subprocess.run(list(map(str, command)), check=True)
            found = torch.load(tmp_path / "logits.pt")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("of", ["adapter", "model"])
def test_weights_and_an_adapter_from_a_full_state(tmp_path, of):
    """As it is gathered from several processes, whose own modules hold only a part."""
    checkpoint = converted(tmp_path, dtype="float32")
    adapted = with_lora(checkpoint)
    whole = adapted if of == "adapter" else adapted.get_base_model()
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    ids = tokens(1, 20)
    expected = logits(adapted, ids)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.zero_()
    write(adapted.get_base_model(), checkpoint, tmp_path / "out", record=RECORD, adapter=adapted, base_changed=True,
          state=state)  # fmt: skip
    assert verify(tmp_path / "out") == []
    from peft import PeftModel

    again = PeftModel.from_pretrained(linearize.load(tmp_path / "out"), tmp_path / "out" / "adapter").eval()
    torch.testing.assert_close(logits(again, ids), expected, rtol=0, atol=1e-5)


def test_evaluation_judges_a_kept_adapter_too(tmp_path):
    from linearize_evals.loading import load_model

    checkpoint = converted(tmp_path, dtype="float32")
    adapted = with_lora(checkpoint)
    write(adapted.get_base_model(), checkpoint, tmp_path / "out", record=RECORD, adapter=adapted, base_changed=False)
    loaded = load_model(tmp_path / "out", device="cpu", dtype=torch.float32)
    (tmp_path / "m" / "adapter").mkdir()  # in a folder that isn't linearize's it may be anything
    load_model(tmp_path / "m", device="cpu", dtype=torch.float32)
    assert not any("lora_" in name for name, _ in loaded.named_parameters())
    ids = tokens(2, 40)
    torch.testing.assert_close(logits(loaded, ids), logits(adapted, ids), rtol=0, atol=1e-5)


def test_lora_that_was_forgotten_is_an_error(tmp_path):
    checkpoint = converted(tmp_path)
    model = with_lora(checkpoint).get_base_model()
    with pytest.raises(ValueError, match=r"q_proj\.lora_A.*merge it first"):
        write(model, checkpoint, tmp_path / "out", record=RECORD, base_changed=True)
    assert not (tmp_path / "out").exists()


# What is there already, and what can't be written.
