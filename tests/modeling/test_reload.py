"""A converted checkpoint reloads as the model that was saved, or says why it can't."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import linearize
from linearize.errors import ModelError, UsageError
from tests.modeling.models import RECIPES, converted, tiny_llama, tokens

DUMP = """
import sys, torch
{before}
from transformers import AutoModelForCausalLM
{after}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]{kwargs}).eval()
ids = torch.load(sys.argv[2])
with torch.no_grad():
    logits = model(ids).logits
torch.save((logits, model.generate(ids, max_new_tokens=12, do_sample=False)), sys.argv[3])
"""


def fresh(folder, tmp_path, before="", after="", kwargs=""):
    """Logits and greedy tokens of a fresh process that has only the folder; stderr if it fails."""
    torch.save(tokens(2, 20), tmp_path / "ids.pt")
    script = DUMP.format(before=before, after=after, kwargs=kwargs)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "ids.pt"), str(tmp_path / "out.pt")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    return torch.load(tmp_path / "out.pt") if done.returncode == 0 else done.stderr


@pytest.mark.slow
def test_a_fresh_process_computes_the_same_bits(tmp_path):
    model = converted("window-sinks")
    model.save_pretrained(tmp_path / "saved")
    ids = tokens(2, 20)
    with torch.no_grad():
        expected = model(ids).logits
    generated = model.generate(ids, max_new_tokens=12, do_sample=False)
    ways = {
        "linearize first": {"before": "import linearize"},
        "transformers first": {"after": "import linearize"},
        "remote code": {"kwargs": ", trust_remote_code=True"},
    }
    for name, way in ways.items():
        got = fresh(tmp_path / "saved", tmp_path, **way)
        assert not isinstance(got, str), f"{name}: {got}"
        assert torch.equal(got[0], expected), name
        assert torch.equal(got[1], generated), name
    neither = fresh(tmp_path / "saved", tmp_path)
    assert isinstance(neither, str)
    assert "linearized_llama" in neither or "trust_remote_code" in neither


@pytest.mark.parametrize("recipe", RECIPES)
def test_reload_is_bit_equal(recipe, tmp_path):
    model = converted(recipe)
    model.save_pretrained(tmp_path)
    again = linearize.load(tmp_path)
    assert type(again) is type(model)
    ids = tokens(2, 30)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_new_model_from_the_config_has_the_same_mixers(tmp_path):
    """Draws depend on the recipe's seed and the layer alone, not on torch's global state."""
    a = linearize.linearize_(tiny_llama(), RECIPES["favor"])
    torch.manual_seed(123)
    b = AutoModelForCausalLM.from_config(a.config)
    for name, buffer in a.named_buffers():
        if ".linearize." in name:
            assert torch.equal(buffer, b.get_buffer(name)), name
    omega = [buffer for name, buffer in a.named_buffers() if name.endswith("omega")]
    assert not torch.equal(omega[0], omega[1])
    other = linearize.linearize_(tiny_llama(), {**RECIPES["favor"], "seed": 1})
    assert not torch.equal(omega[0], next(b for n, b in other.named_buffers() if n.endswith("omega")))


def test_mixer_weights_are_never_initialised_again(tmp_path):
    model = converted("window-hedgehog")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linearize." in name:
                parameter.fill_(0.1234)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for name, parameter in linearize.load(tmp_path).named_parameters():
        if ".linearize." in name:
            assert (parameter == 0.1234).all(), name


@pytest.mark.parametrize("change", ["missing", "extra", "base"])
def test_a_missing_or_unexpected_tensor_raises_and_is_named(change, tmp_path):
    converted("window-hedgehog").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gate = "model.layers.2.self_attn.linearize.gate"
    named = {"missing": gate, "extra": f"{gate}_too", "base": "model.layers.1.mlp.up_proj.weight"}[change]
    if change == "extra":
        tensors[named] = tensors[gate].clone()
    else:
        del tensors[named]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=named.replace(".", r"\.")):
        linearize.load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_tying_survives(tied, tmp_path, caplog):
    model = linearize.linearize_(tiny_llama(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    again = linearize.load(tmp_path)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert "newly initialized" not in caplog.text


def test_every_config_field_but_ours_survives(tmp_path):
    base = tiny_llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}, rms_norm_eps=3e-4)
    base.save_pretrained(tmp_path / "base")
    linearize.linearize_(base).save_pretrained(tmp_path / "converted")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("base", "converted"))
    ours = {"linearize", "auto_map", "architectures", "model_type"}
    assert {k: v for k, v in after.items() if k not in ours} == {k: v for k, v in before.items() if k not in ours}


def test_dtypes_and_device_maps(tmp_path):
    model = converted("window-favor")
    model.save_pretrained(tmp_path)
    half = linearize.load(tmp_path, dtype=torch.bfloat16)
    for name, x in [*half.named_parameters(), *half.named_buffers()]:
        if ".linearize." in name:
            assert x.dtype == torch.float32, name
            assert torch.equal(x, model.get_parameter(name) if "omega" not in name else model.get_buffer(name)), name
    assert half.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    ids = tokens(1, 12)
    assert torch.equal(linearize.load(tmp_path, device_map="auto")(ids).logits, model(ids).logits)
    split = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
    }
    split |= {"model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    offloaded = linearize.load(tmp_path, device_map=split, offload_folder=str(tmp_path / "offload"))
    with torch.no_grad():
        torch.testing.assert_close(offloaded(ids).logits, model(ids).logits)
        assert offloaded.generate(ids, max_new_tokens=5, do_sample=False).tolist() == (
            model.generate(ids, max_new_tokens=5, do_sample=False).tolist()
        )


def test_the_plain_class_of_the_family_stays_what_it_was(tmp_path):
    plain = tiny_llama()
    plain.save_pretrained(tmp_path / "plain")
    converted().save_pretrained(tmp_path / "converted")
    linearize.load(tmp_path / "converted")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(again) is LlamaForCausalLM
    assert torch.equal(again(tokens(1, 9)).logits, plain(tokens(1, 9)).logits)


def test_only_the_softmax_layers_follow_set_attn_implementation():
    model = converted("window-hedgehog")  # layer 1 is softmax
    model.set_attn_implementation("eager")
    names = [layer.self_attn.config._attn_implementation for layer in model.model.layers]
    assert names == ["linearize", "eager", "linearize"]


def test_softmax_path_is_untouched_with_biases():
    """All layers kept but one, and that one within its window: the model is the base model to rounding."""
    base = tiny_llama()
    ids = tokens(2, 30)
    expected = base(ids).logits
    model = linearize.linearize_(copy.deepcopy(base), mixer="window", window=64, keep_softmax=[0, 2])
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-5)


def test_lora_merged_equals_unmerged(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model = converted("window-hedgehog")
    model.save_pretrained(tmp_path / "base")
    ids = tokens(2, 25)
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], modules_to_save=["linearize"])
    tuned = get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    tuned.eval()
    unmerged = tuned(ids).logits
    tuned.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(linearize.load(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.equal(reloaded(ids).logits, unmerged)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, unmerged, atol=1e-5, rtol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(linearize.load(tmp_path / "merged")(ids).logits, merged(ids).logits)


def test_models_and_configs_pickle():
    model = converted("hedgehog")
    assert pickle.loads(pickle.dumps(model.config)).linearize == model.config.linearize
    assert pickle.loads(pickle.dumps(type(model))) is type(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda block: block.update(version=99), "block has version 99"),
        (lambda block: block.update(layers="x"), "no 'linearize' block with its layers"),
        (lambda block: block["layers"][0]["mixer"].update(name="windw"), "unknown mixer 'windw'"),
        (
            lambda block: block["layers"][0].update(module="model.layers.9.self_attn"),
            r"model\.layers\.9\.self_attn",
        ),
    ],
)
def test_a_config_from_elsewhere_is_refused_with_the_reason(change, message, tmp_path):
    converted("window-hedgehog").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config["linearize"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=message):
        linearize.load(tmp_path)


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        ({"rank": "x"}, "layer 0: mixer 'gla', option rank: must be like its default 16, not 'x'"),
        ({"rank": 0}, "layer 0: a mixer can't have rank=0"),
        ({"name": "windowed", "window": -4}, "option window: must be at least 1, not -4"),
    ],
)
def test_mixers_that_no_recipe_could_ask_for_are_named(mixer, said, tmp_path):
    linearize.linearize_(tiny_llama(), {"mixer": "gla"}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["linearize"]["layers"][0]["mixer"] = {"name": "gla"} | mixer
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (linearize.load, linearize.inspect):
        with pytest.raises(ModelError, match=said):
            read(tmp_path)


def test_converting_twice_is_refused():
    with pytest.raises(ModelError, match="converted already"):
        linearize.linearize_(converted())


def test_converting_twice_in_memory_is_refused_and_the_type_is_that_of_a_reload(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = linearize.linearize_(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), RECIPES["favor"])
    with pytest.raises(ModelError, match="converted already"):
        linearize.linearize_(model)
    model.save_pretrained(tmp_path / "out")
    assert model.config.model_type == linearize.load(tmp_path / "out").config.model_type == "linearized_llama"


def test_a_conversion_that_fails_leaves_the_model_as_it_was():
    model, ids = tiny_llama(), tokens(1, 12)
    before = model(ids).logits
    bad = {"layers": {"1": {"mixer": "gla", "mixer_options": {"rank": 0}}}}
    with pytest.raises(UsageError, match="layer 1: a mixer can't have rank=0"):
        linearize.linearize_(model, bad)
    assert torch.equal(model(ids).logits, before)
    linearize.linearize_(model, RECIPES["favor"])


def test_class_names_are_unique():
    """Model types that share a model class (Exaone and Llama) can be loaded in one process."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from linearize.modeling.classes import class_names

    owners: dict[str, set[str]] = {}
    for base in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for name in class_names(base):
            # A multimodal config shares its class with its text config, and is refused.
            owners.setdefault(name, set()).add(CONFIG_MAPPING_NAMES[base].replace("TextConfig", "Config"))
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}


def test_the_tokenizer_of_a_converted_checkpoint_is_the_bases(tmp_path):
    """AutoTokenizer chooses by model type where the files name no class, or one known to be wrong."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from linearize.modeling.classes import linearized_config_dict
    from tests.families import tiny_config

    vocabulary = {chr(c): i for i, c in enumerate(range(32, 127))} | {"12": 95, "Ġ": 96, "<unk>": 97}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    for base, named in (("olmo2", "GPT2Tokenizer"), ("phi3", "LlamaTokenizerFast"), ("gpt2", None), ("qwen3", None)):
        assert base in CONFIG_MAPPING
        ids = []
        for converted_too in (False, True):
            folder = tmp_path / f"{base}-{converted_too}"
            folder.mkdir()
            raw = tiny_config(base).to_dict()
            raw = linearized_config_dict(raw, base, [], {}) if converted_too else raw
            (folder / "config.json").write_text(json.dumps(raw))
            tokenizer.save(str(folder / "tokenizer.json"))
            side = {"tokenizer_class": named} if named else {}
            (folder / "tokenizer_config.json").write_text(json.dumps(side))
            loaded = AutoTokenizer.from_pretrained(folder)
            ids.append((type(loaded), loaded("a 12 b 1212")["input_ids"]))
        assert ids[0] == ids[1], base


def test_models_that_share_a_config_are_left_alone(tmp_path):
    config = tiny_llama().config
    teacher, student = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    expected = teacher(tokens(1, 9)).logits
    linearize.linearize_(student, mixer="linear")
    assert torch.equal(teacher(tokens(1, 9)).logits, expected)
    assert teacher.config.model_type == "llama"
    assert student.config.model_type == "linearized_llama"


def test_offloaded_mixers_are_fetched_and_offloaded_models_refused(tmp_path):
    from accelerate import cpu_offload, disk_offload

    for recipe in ("hedgehog", "window-sinks", "favor"):
        model = converted(recipe)
        expected = model(tokens(1, 12)).logits
        torch.testing.assert_close(cpu_offload(model, torch.device("cpu"))(tokens(1, 12)).logits, expected)
    base = tiny_llama()
    disk_offload(base, str(tmp_path), torch.device("cpu"))
    with pytest.raises(ModelError, match="offloaded"):
        linearize.linearize_(base)


def test_short_sequences_give_zero_gradients_rather_than_none():
    """Data-parallel training waits for the gradient of every parameter."""
    model = converted("window-sinks").train()
    model(tokens(2, 4), labels=tokens(2, 4), use_cache=False).loss.backward()
    mixers = {name: p.grad for name, p in model.named_parameters() if ".linearize." in name}
    assert all(gradient is not None for gradient in mixers.values())
    assert all((mixers[name] == 0).all() for name in mixers if "feature_map" in name)


def test_checkpointing_switched_on_before_conversion():
    base = tiny_llama().train()
    base.activation_checkpointing_enable()
    model = linearize.linearize_(base, RECIPES["window-hedgehog"])
    model(tokens(1, 12), labels=tokens(1, 12), use_cache=False).loss.backward()


def test_a_mixer_tensor_of_another_shape_is_never_initialised_again(tmp_path):
    converted("hedgehog").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.linearize.feature_map.q_weight"
    tensors[name] = tensors[name][..., :16].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"of another shape {name}".replace(".", r"\.")):
        linearize.load(tmp_path, ignore_mismatched_sizes=True)


def test_saving_writes_the_remote_code_before_an_upload_and_copies_no_source(tmp_path, monkeypatch):
    model = converted("hedgehog")
    type(model).register_for_auto_class("AutoModelForCausalLM")
    seen = []
    monkeypatch.setattr(
        type(model), "_upload_modified_files", lambda self, folder, *a, **k: seen.append(os.listdir(folder))
    )
    hub = types.SimpleNamespace(create_repo=lambda *a, **k: types.SimpleNamespace(repo_id="me/x"))
    monkeypatch.setattr("transformers.modeling_utils.hf_api", lambda: hub)
    model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/x")
    assert seen
    assert "modeling_linearized.py" in seen[0]
    assert [f for f in os.listdir(tmp_path / "out") if f.endswith(".py")] == ["modeling_linearized.py"]
