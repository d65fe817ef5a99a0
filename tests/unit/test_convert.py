"""Converting as a file operation: weights untouched, side files byte for byte, and the result loads."""

from __future__ import annotations

import dataclasses
import json
import os
import socket

import pytest

from linearize.conversion import convert
from linearize.errors import LinearizeError, ModelError, ResourceError, UsageError
from linearize.source import resolve
from linearize.verification import verify
from tests.checkpoints import SIDE_FILES, add_side_files, save, tree


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "bfloat16"), ("gpt2", "float32"), ("mixtral", "float16")])
@pytest.mark.parametrize("shards", [False, True])
def test_weights_stay_as_they_are(tmp_path, kind, dtype, shards):
    model = save(tmp_path / "m", kind, dtype=dtype, shards=shards)
    before = tree(model)
    source = resolve(model)
    result = convert(model, tmp_path / "out")
    assert tree(model) == before
    assert verify(tmp_path / "out") == []
    stored = resolve(tmp_path / "out", allow_converted=True).tensors
    mixers = {key for key in stored if ".linearize." in key}
    assert mixers == result.plan.new_tensors.keys()
    assert stored.keys() - mixers == source.tensors.keys()  # tensors in = tensors out
    for key, tensor in source.tensors.items():
        assert (stored[key].dtype, stored[key].shape) == (tensor.dtype, tensor.shape)
        assert os.path.samefile(model / tensor.file, tmp_path / "out" / stored[key].file)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.bytes for tensor in stored.values())
    assert not (tmp_path / "out" / "model.safetensors").exists()  # it would win over the index


def test_the_files_are_those_of_the_plan(tmp_path):
    model = save(tmp_path / "m", shards=True)
    add_side_files(model)
    plan = convert(model, tmp_path / "dry", dry_run=True).plan
    assert not (tmp_path / "dry").exists()
    result = convert(model, tmp_path / "out")
    # Others write to this disk at the same time.
    assert dataclasses.replace(result.plan, bytes_free=None) == dataclasses.replace(plan, bytes_free=None)
    header = 8 + 2048  # the plan counts tensors, the mixers' file has a header as well
    for file in plan.files:
        assert 0 <= (tmp_path / "out" / file.name).stat().st_size - file.bytes <= header * (file.how == "write")
    written = tree(tmp_path / "out").keys()
    rest = {
        "config.json",
        "model.safetensors.index.json",
        "modeling_linearized.py",
        "linearize-manifest.json",
    }
    assert written == {file.name for file in plan.files} | rest
    assert result.files.keys() == written - {"linearize-manifest.json"} | {"linearize-manifest.json"}


def test_side_files_travel_byte_for_byte(tmp_path):
    model = save(tmp_path / "m")
    add_side_files(model)
    (model / "README.md").write_text("of the source")
    convert(model, tmp_path / "out")
    for name, data in SIDE_FILES.items():
        assert (tmp_path / "out" / name).read_bytes() == data
        assert not os.path.samefile(tmp_path / "out" / name, model / name)  # editing one must not edit the other
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (model / "generation_config.json").read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()


def test_every_config_field_survives(tmp_path):
    model = save(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    extra = {
        "vocab_size": 96,
        "a_custom_field": [1, {"é": None}],
        "rms_norm_eps": 1.25e-05,
        "auto_map": {"x": "y.z"},
    }
    (model / "config.json").write_text(json.dumps(config | extra))
    convert(model, tmp_path / "out", overrides={"keep_softmax": "1"})
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    ours = {"model_type", "architectures", "auto_map", "linearize"}
    assert {k: v for k, v in after.items() if k not in ours} == {
        k: v for k, v in (config | extra).items() if k not in ours
    }
    assert after["model_type"] == "linearized_llama"
    assert after["auto_map"]["AutoModelForCausalLM"] == "modeling_linearized.LinearizedLlamaForCausalLM"
    block = after["linearize"]
    assert block["recipe"]["keep_softmax"] == [1]
    assert [layer["type"] for layer in block["layers"]] == [
        "hybrid_sliding",
        "full_attention",
        "hybrid_sliding",
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_the_result_equals_the_live_conversion(tmp_path, kind):
    import torch
    from transformers import AutoModelForCausalLM

    from linearize import linearize_

    model = save(tmp_path / "m", kind, dtype="float32", shards=True)
    overrides = {"keep_softmax": "0", "seed": 3, "feature_map": "favor"}
    convert(model, tmp_path / "out", overrides=overrides)
    ids = torch.arange(3, 90)[None, :50]
    live = linearize_(AutoModelForCausalLM.from_pretrained(model), **overrides)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, live(ids).logits)


def test_a_config_that_asks_for_code_of_the_hub_is_written_without(tmp_path):
    from transformers import AutoModelForCausalLM

    model = save(tmp_path / "m")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"attn_implementation": "owner/kernel"}))
    convert(model, tmp_path / "out")
    assert "owner/kernel" not in (tmp_path / "out" / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_names_without_the_base_models_prefix(tmp_path):
    """GPT-2's own checkpoint says h.0.attn..., its causal language model transformer.h.0.attn...."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model = save(tmp_path / "m", "gpt2", dtype="float32")
    (model / "vocab.json").write_text("{}")
    convert(model, tmp_path / "out")
    tensors = load_file(model / "model.safetensors")
    short = {key.removeprefix("transformer."): value for key, value in tensors.items() if key != "lm_head.weight"}
    short |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}  # an old causal mask
    assert short.keys() != tensors.keys()
    save_file(short, model / "model.safetensors")
    result = convert(model, tmp_path / "out2")
    assert not result.plan.notes
    assert verify(tmp_path / "out2") == []
    ids = torch.arange(3, 60)[None]
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "out2"))
    with torch.no_grad():
        assert torch.equal(one(ids).logits, two(ids).logits)


def test_the_same_bytes_every_time(tmp_path):
    model = save(tmp_path / "m")
    convert(model, tmp_path / "a", overrides={"feature_map": "favor"})
    convert(model, tmp_path / "b", overrides={"feature_map": "favor"})
    convert(model, tmp_path / "c", overrides={"feature_map": "favor", "seed": 1})
    a, b, c = (tree(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model-linearize.safetensors"] != c["model-linearize.safetensors"]


def test_a_path_with_spaces_and_accents_and_no_network(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("the network was touched")

    save(tmp_path / "my models" / "é ü")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    convert("./my models/é ü", "out put/ñ", overrides={"mixer": "linear"})
    assert verify("out put/ñ") == []


def test_force_replaces_an_earlier_result(tmp_path):
    model = save(tmp_path / "m")
    convert(model, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(UsageError, match="--force"):
        convert(model, tmp_path / "out", overrides={"window": 8})
    assert tree(tmp_path / "out") == before
    convert(model, tmp_path / "out", overrides={"window": 8}, force=True)
    assert verify(tmp_path / "out") == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["linearize"]["recipe"]["window"] == 8


def test_a_source_that_changes_under_our_hands(tmp_path, monkeypatch):
    from linearize import conversion

    model = save(tmp_path / "m")
    source = resolve(model)
    with open(model / "model.safetensors", "ab") as file:
        file.write(b"x")
    monkeypatch.setattr(conversion, "resolve", lambda *args, **kwargs: source)
    with pytest.raises(ModelError, match=r"model\.safetensors has changed since it was checked"):
        convert(model, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"m"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"overrides": {"mixer": "hedge-hog"}}, UsageError),
        ({"overrides": {"keep_softmax": "0,17"}}, UsageError),
        ({"overrides": {"keep_softmax": "auto"}}, UsageError),
        ({"recipe": "no-such-recipe"}, UsageError),
        ({"dtype": "int3"}, UsageError),
        ({"model": "missing"}, LinearizeError),
        ({"out": "m"}, UsageError),
        ({"out": "."}, UsageError),
    ],
)
def test_after_a_refusal_nothing_is_written(tmp_path, monkeypatch, arguments, error):
    save(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = tree(tmp_path)
    arguments = {"model": "m", "out": "out"} | arguments
    with pytest.raises(error):
        convert(**arguments)
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_typo_is_found_before_the_model_is_looked_for():
    with pytest.raises(UsageError, match="did you mean 'hedgehog'"):
        convert("owner/never-downloaded", "out", overrides={"mixer": "hedge-hog"})


def test_too_little_space(tmp_path, monkeypatch):
    model = save(tmp_path / "m")
    real = os.statvfs

    def full(path):
        values = list(real(path))
        values[4] = 0  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(ResourceError, match="has 0 B free") as caught:
        convert(model, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_no_code_of_the_source_runs(tmp_path):
    model = save(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "evil.C"}}))
    convert(model, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out" / "evil.py").exists()
