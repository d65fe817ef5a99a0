"""What training leaves behind is a converted checkpoint like any other, and holds just what was trained."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

import linearize
from linearize.errors import LinearizeError, ModelError, ResourceError, UsageError
from linearize.source import resolve
from linearize.training import output
from linearize.training.output import joined, write
from linearize.verification import judge, verify
from tests.checkpoints import SIDE_FILES, save, tree
from tests.modeling.models import logits, tokens
from tests.training.outputs import RECORD, converted, stored, trained, with_lora


def same_config_and_side_files(before, after):
    for name in SIDE_FILES:
        assert (after / name).read_bytes() == (before / name).read_bytes()
        assert not os.path.samefile(before / name, after / name)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, after)]
    assert configs[1]["linearize"].pop("training")["stages"] == RECORD["stages"]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(("kind", "shards"), [("llama", True), ("mixtral", False)])
def test_where_only_mixers_were_trained_the_other_weights_are_linked(tmp_path, kind, shards):
    checkpoint = converted(tmp_path, kind, shards=shards)
    before = tree(checkpoint)
    model = trained(checkpoint)
    done = write(model, checkpoint, tmp_path / "out", record=RECORD, base_changed=False)
    assert tree(checkpoint) == before
    assert judge(tmp_path / "out").to_dict() | {"out": ""} == {
        "out": "", "ok": True, "faults": [], "notes": [], "complete": True, "mend": "",
    }  # fmt: skip
    assert done["files"].keys() == tree(tmp_path / "out").keys()
    assert done["training"] == RECORD
    for path in checkpoint.glob("model-base*"):
        assert os.path.samefile(path, tmp_path / "out" / path.name)
    same_config_and_side_files(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nbase_model: owner/teacher\n")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(again, tokens(2, 20)), logits(model, tokens(2, 20)))


@pytest.mark.parametrize("held", ["auto", "float32"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"shards": True, "tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {"tie_word_embeddings": False, "dtype": "float16"}),
        ("gpt2", {"dtype": "float32"}),
        ("gemma2", {}),
        ("mixtral", {"shards": True}),
        ("mixtral", {"dtype": "float32"}),
    ],
)
def test_changed_weights_keep_their_files_names_and_dtypes(tmp_path, kind, options, held):
    checkpoint = converted(tmp_path, kind, **options)
    model = trained(checkpoint, everything=True, dtype=held)
    model.generation_config.temperature = -1.0  # there are published ones that transformers refuses to save
    write(model, checkpoint, tmp_path / "out", record=RECORD, base_changed=True)
    assert verify(tmp_path / "out") == []
    old, new = stored(checkpoint), stored(tmp_path / "out")
    assert old.keys() == new.keys()
    for key, (value, file) in old.items():
        assert (new[key][0].dtype, new[key][0].shape, new[key][1]) == (value.dtype, value.shape, file)
        assert not torch.equal(new[key][0], value)
    same_config_and_side_files(checkpoint, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == json.loads((checkpoint / "model.safetensors.index.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    state = model.state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)), name
    assert again.config.linearize["training"]["base_weights"] == "changed"


def test_what_training_left_alone_is_not_rounded(tmp_path):
    """An fp32 checkpoint that was trained in bf16: only what changed may lose digits."""
    checkpoint = converted(tmp_path, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    changed = "model.layers.1.self_attn.q_proj.weight"
    with torch.no_grad():
        model.get_parameter(changed).add_(0.5)
    write(model, checkpoint, tmp_path / "out", record=RECORD, base_changed=True)
    old, new = stored(checkpoint), stored(tmp_path / "out")
    assert [key for key in old if not torch.equal(old[key][0], new[key][0])] == [changed]
    assert torch.equal(new[changed][0], model.get_parameter(changed).float())


def test_a_checkpoint_without_the_base_models_prefix_and_with_a_tensor_that_nobody_reads(tmp_path):
    from safetensors.torch import load_file, save_file

    model = save(tmp_path / "m", "gpt2", dtype="float32")
    tensors = load_file(model / "model.safetensors")
    short = {key.removeprefix("transformer."): value for key, value in tensors.items() if key != "lm_head.weight"}
    short["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()  # an old causal mask
    save_file(short, model / "model.safetensors")
    linearize.convert(model, tmp_path / "c")
    live = trained(tmp_path / "c", everything=True)
    write(live, tmp_path / "c", tmp_path / "out", record=RECORD, base_changed=True)
    assert verify(tmp_path / "out") == []
    old, new = stored(tmp_path / "c"), stored(tmp_path / "out")
    same = [key for key in old if torch.equal(old[key][0], new[key][0])]
    assert [key for key in same if not key.endswith("omega")] == ["h.0.attn.bias"]  # FAVOR+ keeps its draw
    assert torch.equal(new["h.1.ln_1.weight"][0], live.transformer.h[1].ln_1.weight)


@pytest.mark.parametrize("base_changed", [False, True])
def test_a_folder_of_save_pretrained_whose_one_file_holds_mixers_too(tmp_path, base_changed):
    live = trained(converted(tmp_path))
    live.save_pretrained(tmp_path / "saved")
    model = trained(tmp_path / "saved", everything=base_changed)
    write(model, tmp_path / "saved", tmp_path / "out", record=RECORD, base_changed=base_changed)
    assert verify(tmp_path / "out") == []
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == {
        "model-base.safetensors", "model-linearize.safetensors",
    }  # fmt: skip
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(again, tokens(2, 20)), logits(model, tokens(2, 20)))


def test_a_model_is_its_own_teacher_only_while_its_weights_are_the_teachers(tmp_path):
    from linearize_evals.loading import choose_teacher

    checkpoint = converted(tmp_path)
    adapted = with_lora(checkpoint)
    ways = {
        "mixers": {"base_changed": False},
        "weights": {"base_changed": True},
        "adapter": {"base_changed": False, "adapter": adapted},
    }
    for name, options in ways.items():
        model = adapted.get_base_model() if name == "adapter" else trained(checkpoint)
        write(model, checkpoint, tmp_path / name, record=RECORD, **options)
    assert choose_teacher(checkpoint, None) == choose_teacher(tmp_path / "mixers", None) == "self"
    for name, match in {"weights": "training has changed", "adapter": r"has an adapter \(adapter/\)"}.items():
        with pytest.raises(UsageError, match=match + ".* Give --teacher owner/teacher, which it was made from"):
            choose_teacher(tmp_path / name, None)
        assert choose_teacher(tmp_path / name, "x") == "x"
    (tmp_path / "mixers" / "model-linearize.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="isn't as linearize wrote it any more"):
        choose_teacher(tmp_path / "mixers", None)


def test_force_replaces_a_trained_folder_but_nothing_of_the_users(tmp_path):
    checkpoint = converted(tmp_path)
    adapted = with_lora(checkpoint)
    base = adapted.get_base_model()
    write(base, checkpoint, tmp_path / "out", record=RECORD, adapter=adapted, base_changed=False)
    with pytest.raises(UsageError, match="--force"):
        write(base, checkpoint, tmp_path / "out", record=RECORD, adapter=adapted, base_changed=False)
    with pytest.raises(ModelError, match="holds an adapter"):
        output.check(tmp_path / "out", tmp_path / "again", base_changed=False)
    (tmp_path / "out" / "adapter" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="didn't write: adapter/"):
        output.check(checkpoint, tmp_path / "out", base_changed=False, force=True)
    (tmp_path / "out" / "adapter" / "mine.txt").unlink()
    write(trained(checkpoint), checkpoint, tmp_path / "out", record=RECORD, base_changed=False, force=True)
    assert verify(tmp_path / "out") == []
    assert not (tmp_path / "out" / "adapter").exists()


def test_weights_that_have_changed_once_stay_changed(tmp_path):
    checkpoint = converted(tmp_path)
    write(trained(checkpoint, everything=True), checkpoint, tmp_path / "one", record=RECORD, base_changed=True)
    more = {"base_weights": "unchanged", "teacher": str(tmp_path / "one"), "stages": [{"stage": "finetune"}]}
    write(trained(tmp_path / "one"), tmp_path / "one", tmp_path / "two", record=more, base_changed=False)
    record = json.loads((tmp_path / "two" / "config.json").read_text())["linearize"]["training"]
    assert record == {
        "base_weights": "changed", "teacher": "owner/teacher",
        "stages": [{"stage": "transfer", "tokens": 64}, {"stage": "finetune"}],
    }  # fmt: skip
    assert joined(None, more, base_changed=False) == more


def test_a_local_teacher_is_not_taken_for_a_hub_id_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    checkpoint = converted(tmp_path)
    done = write(trained(checkpoint), checkpoint, tmp_path / "out", record={**RECORD, "teacher": "models/base"},
                 base_changed=False)  # fmt: skip
    assert done["training"]["teacher"] == "./models/base"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write(trained(tmp_path / "out"), tmp_path / "out", tmp_path / "more", record=RECORD, base_changed=False)
    text = (tmp_path / "more" / "README.md").read_text()
    assert "base_model" not in text
    assert "# base, linearized" in text


def test_a_converted_folder_is_nobodys_teacher(tmp_path):
    checkpoint = converted(tmp_path)
    record = {**RECORD, "teacher": str(checkpoint)}
    done = write(trained(checkpoint), checkpoint, tmp_path / "out", record=record, base_changed=False)
    assert done["training"]["teacher"] is None
    assert "# A language model, linearized" in (tmp_path / "out" / "README.md").read_text()


def broken(model, name, value):
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    return model


MIXER = "model.layers.1.self_attn.linearize.feature_map_q.weight"


@pytest.mark.parametrize(
    ("name", "value", "stored_as"),
    [("mixer", float("nan"), "F32"), ("model.norm.weight", float("inf"), "F16"), ("model.norm.weight", 7e4, "F16")],
)
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(tmp_path, name, value, stored_as):
    checkpoint = converted(tmp_path, dtype="float16")
    model = trained(checkpoint, dtype="float32")
    name = next(key for key, _ in model.named_parameters() if ".linearize." in key) if name == "mixer" else name
    before = tree(tmp_path)
    with pytest.raises(ModelError, match=f"'{name}' of the trained model isn't finite in {stored_as}"):
        write(broken(model, name, value), checkpoint, tmp_path / "out", record=RECORD, base_changed=True)
    assert tree(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"m", "c"}


def test_refusals_before_a_weight_is_read(tmp_path, monkeypatch):
    checkpoint = converted(tmp_path)
    monkeypatch.setattr(output, "plain_state", None)

    def refused(error, match, **changes):
        arguments = {"checkpoint": checkpoint, "out": tmp_path / "out", "record": RECORD, "base_changed": True}
        with pytest.raises(error, match=match) as caught:
            write(None, **(arguments | changes))
        assert isinstance(caught.value, LinearizeError)

    refused(UsageError, "are the same folder", out=checkpoint)
    refused(UsageError, "is inside MODEL", out=checkpoint / "x")
    refused(ModelError, "isn't a converted model", checkpoint=tmp_path / "m")
    bytes_needed = sum(shard.bytes for shard in output.base_shards(resolve(checkpoint, allow_converted=True)))
    monkeypatch.setattr(output, "survey", lambda out, real=output.survey: replaced(real(out), bytes_needed))
    refused(ResourceError, r"needs .* free")
    assert {path.name for path in tmp_path.iterdir()} == {"m", "c"}


def replaced(destination, free_bytes):
    import dataclasses

    return dataclasses.replace(destination, free_bytes=free_bytes)


def test_a_disk_that_fills_up_while_experts_are_taken_apart(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    checkpoint = converted(tmp_path, "mixtral")
    model = trained(checkpoint, everything=True)

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(ResourceError, match="No space left"):
        write(model, checkpoint, tmp_path / "out", record=RECORD, base_changed=True)
    assert {path.name for path in tmp_path.iterdir()} == {"m", "c"}
