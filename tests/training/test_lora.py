"""LoRA: which modules get it, merged or kept apart, and what evaluation makes of either."""

from __future__ import annotations

import json

import pytest
import torch
from linearize_evals.loading import choose_teacher, load_model
from transformers import AutoModelForCausalLM

import linearize
from linearize.errors import UsageError
from linearize.modeling.compat import recompute_activations
from linearize.training import session
from linearize.training.schema import Lora
from linearize.training.trainable import (
    MIXER,
    add_lora,
    as_teacher,
    choose,
    groups,
    lora_modules,
    lora_targets,
    plain_name,
)
from linearize.verification import verify
from tests.families import tiny_model
from tests.modeling.test_families import WINDOW, recipe_for
from tests.training import engine
from tests.training.engine import DISTILL, FINETUNE, TRANSFER

LORA = {"r": 2, "alpha": 4}
IDS = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
# Sums of products in another order: x W + (x A) B against x (W + A B).
CLOSE = {"rtol": 0, "atol": 1e-5}


@torch.no_grad()
def logits(model):
    return model.eval()(IDS, use_cache=False).logits


@pytest.fixture
def made(tmp_path):
    return engine.checkpoint(tmp_path / "m")


def test_merged_and_kept_apart_are_one_model(made, tmp_path):
    from peft import PeftModel

    merged, kept = tmp_path / "merged", tmp_path / "kept"
    engine.train(made, merged, TRANSFER, DISTILL)
    engine.train(made, kept, TRANSFER, {**DISTILL, "lora": {**LORA, "merge": False}})
    assert engine.losses(merged) == engine.losses(kept)
    assert verify(merged) == verify(kept) == []
    expected = logits(linearize.load(merged, dtype="float32"))
    base = linearize.load(kept, dtype="float32")
    assert not torch.allclose(logits(base), expected, **CLOSE)
    found = PeftModel.from_pretrained(base, kept / "adapter")
    torch.testing.assert_close(logits(found), expected, **CLOSE)
    torch.testing.assert_close(logits(load_model(kept, device="cpu", dtype=torch.float32)), expected, **CLOSE)
    config = json.loads((kept / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(kept)
    assert config["target_modules"] == sorted(config["target_modules"])
    # The base's weights are linked where the adapter is apart.
    before, after = engine.weights(made), engine.weights(kept)
    assert all(torch.equal(before[name], after[name]) for name in before if MIXER not in name)


def test_evaluation_takes_the_student_as_its_teacher_where_only_mixers_were_trained(made, tmp_path):
    engine.train(
        made, tmp_path / "mixers", TRANSFER, {**FINETUNE, "trains": "mixers", "lora": {}}, teacher="owner/base"
    )
    assert choose_teacher(tmp_path / "mixers", None) == "self"
    merged, kept = DISTILL, {**DISTILL, "lora": {**LORA, "merge": False}}
    for name, stage in (("merged", merged), ("kept", kept)):
        engine.train(made, tmp_path / name, stage, teacher="owner/base")
        with pytest.raises(UsageError, match="--teacher owner/base, which it was made from"):
            choose_teacher(tmp_path / name, None)
    record = json.loads((tmp_path / "mixers" / "config.json").read_text())["linearize"]["training"]
    assert record["base_weights"] == "unchanged"


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt2", {"c_attn", "c_proj"}),
        ("phi3", {"qkv_proj", "o_proj"}),
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    ],
)
def test_auto_takes_the_projections_of_converted_layers(family, names):
    model = tiny_model(family)
    linearize.linearize_(model, recipe_for(model.config, WINDOW))
    attention = [layer["module"] for layer in model.config.linearize["layers"] if layer.get("mixer")]
    found = lora_targets(Lora(), *lora_modules(model))
    assert {name.rsplit(".", 1)[1] for name in found} == names
    assert {name.rsplit(".", 1)[0] for name in found} == set(attention)
    with torch.no_grad():
        before = model(IDS % 90, use_cache=False).logits
    add_lora(model, Lora(r=2), seed=0)
    trained = choose(model, "lora")
    lora = {name for name in trained if MIXER not in name}
    assert {plain_name(name.partition(".lora_")[0]) for name in lora} == set(found)
    assert all(parameter.dtype == torch.float32 for parameter in trained.values())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS % 90, use_cache=False).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_fused_projections_are_trained_and_merged(tmp_path, family):
    made = engine.family(tmp_path / "m", family)
    engine.train(made, tmp_path / "kept", {**DISTILL, "lora": {**LORA, "merge": False}})
    engine.train(made, tmp_path / "merged", DISTILL)
    assert verify(tmp_path / "merged") == []
    found, expected = (
        logits(load_model(tmp_path / name, device="cpu", dtype=torch.float32)) for name in ("kept", "merged")
    )
    torch.testing.assert_close(found, expected, **CLOSE)
    before, after = engine.weights(made), engine.weights(tmp_path / "merged")
    changed = {name for name in before if MIXER not in name and not torch.equal(before[name], after[name])}
    fused = {"gpt2": ("c_attn", "attn.c_proj"), "phi3": ("qkv_proj", "o_proj")}[family]
    assert changed
    assert all(name.endswith(tuple(f"{one}.weight" for one in fused)) for name in changed)


def test_targets_are_suffixes_of_module_names():
    linear = ["a.0.attn.q_proj", "a.0.attn.o_proj", "a.1.attn.q_proj", "a.1.mlp.up_proj"]
    assert lora_targets(Lora(), linear, ["a.1.attn"]) == ["a.1.attn.q_proj"]
    asked = Lora(targets=("q_proj", "mlp.up_proj", "a.0.attn.q_proj"))
    assert lora_targets(asked, linear, []) == ["a.0.attn.q_proj", "a.1.attn.q_proj", "a.1.mlp.up_proj"]
    with pytest.raises(UsageError, match=r"'qproj' matches no module.*did you mean 'q_proj'"):
        lora_targets(Lora(targets=("q_proj", "qproj")), linear, [])
    with pytest.raises(UsageError, match="Choose auto, or some of o_proj, q_proj, up_proj"):
        lora_targets(Lora(targets=("xyz",)), linear, [])
    with pytest.raises(UsageError, match="no converted layer has projections"):
        lora_targets(Lora(), linear, ["a.2.attn"])


def test_neither_head_nor_embeddings_nor_mixers_are_targets():
    model = linearize.linearize_(engine.tiny(tie_word_embeddings=False), engine.HEDGEHOG)
    linear, converted = lora_modules(model)
    assert {name.rsplit(".", 1)[1] for name in linear} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert converted == ["model.layers.0.self_attn"]


def test_lora_is_drawn_from_the_seed_and_leaves_other_draws_alone():
    drawn = []
    for seed in (0, 0, 1):
        model = linearize.linearize_(engine.tiny(), engine.HEDGEHOG)
        torch.manual_seed(7)
        add_lora(model, Lora(r=2), seed=seed)
        first = model.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight").detach()
        drawn.append((first, float(torch.rand(()))))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert drawn[0][1] == drawn[1][1] == drawn[2][1]


def test_a_look_at_the_teacher_leaves_what_is_frozen_frozen():
    model = linearize.linearize_(engine.tiny(), engine.HEDGEHOG)
    adapter = add_lora(model, Lora(r=2, dropout=0.5), seed=0)
    for trains in ("lora", "mixers"):
        choose(model, trains)
        before = {name: p.requires_grad for name, p in model.named_parameters()}
        model.train()
        with as_teacher(model, adapter):
            assert not model.training
            assert not torch.is_grad_enabled()
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
        assert model.training
        with pytest.raises(KeyError), as_teacher(model, adapter):
            raise KeyError
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_mixers_may_have_a_rate_of_their_own():
    model = linearize.linearize_(engine.tiny(), engine.HEDGEHOG)
    add_lora(model, Lora(r=2), seed=0)
    parameters = choose(model, "lora")
    own, others = groups(parameters, 1e-4, 1e-2)
    assert (own["lr"], others["lr"]) == (1e-2, 1e-4)
    assert {id(p) for p in own["params"]} == {id(p) for name, p in parameters.items() if MIXER in name}
    assert len(own["params"]) + len(others["params"]) == len(parameters)
    assert [group["base_lr"] for group in groups(parameters, 1e-4, None)] == [1e-4, 1e-4]
    assert len(groups(choose(model, "mixers"), 1e-4, None)) == 1


def test_checkpointing_leaves_no_hook_behind():
    """Gradients of the embeddings, which nothing asks for, would be computed through all layers in later stages."""
    model = linearize.linearize_(engine.tiny(), engine.HEDGEHOG)
    hooks = len(model.get_input_embeddings()._forward_hooks)
    recompute_activations(model, True)
    assert model.model.gradient_checkpointing or any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    assert len(model.get_input_embeddings()._forward_hooks) == hooks
    recompute_activations(model, False)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_weights_in_bfloat16_are_trained_in_float32(tmp_path, monkeypatch):
    made = engine.checkpoint(tmp_path / "m", dtype="bfloat16")
    seen = []
    real = session.train_stage
    monkeypatch.setattr(session, "train_stage", lambda job, *args: seen.append(job.model) or real(job, *args))
    engine.train(made, tmp_path / "out", TRANSFER, DISTILL, precision="bfloat16")
    for model in seen[:1]:
        kinds = {name: p.dtype for name, p in model.named_parameters()}
        assert {kinds[name] for name in kinds if MIXER in name} == {torch.float32}
    assert verify(tmp_path / "out") == []
    before, after = engine.weights(made), engine.weights(tmp_path / "out")
    assert {name: value.dtype for name, value in before.items()} == {name: value.dtype for name, value in after.items()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(logits(model)).all()
