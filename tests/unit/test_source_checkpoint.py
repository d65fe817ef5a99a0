"""A folder from a stranger: what is refused (in one sentence that names the file), travels, or stays."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from linearize.checkpoint import is_plain_name
from linearize.errors import ModelError, UsageError
from linearize.source import resolve
from tests.checkpoints import SIDE_FILES, add_side_files, save, write_safetensors

INDEX = "model.safetensors.index.json"


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (value | changes).items() if v is not ...}))


def refused(folder, *says, error=ModelError):
    """The folder is refused in one sentence that says all of this, with the exit code of its kind."""
    with pytest.raises(error) as caught:
        resolve(folder)
    message = str(caught.value)
    for text in says:
        assert text in message
    assert "\n" not in message
    assert caught.value.exit_code == error.exit_code
    return message


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/abs",
        "C:\\x",
        "a/../../x",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        "C:x",
        "a\0b",
        "a\nb",
        "x" * 256,
        7,
        None,
    ],
)
def test_names_in_an_index_must_be_plain(tmp_path, name):
    assert not is_plain_name(name)
    folder = save(tmp_path / "m", shards=True)
    index = json.loads((folder / INDEX).read_text())
    key = next(iter(index["weight_map"]))
    index["weight_map"][key] = name
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, f"{INDEX} points to", "isn't a file name inside the folder")


def test_plain_names():
    assert all(is_plain_name(name) for name in ["model.safetensors", "é 1.safetensors", "a-b_c..d", ".hidden"])


@pytest.mark.parametrize("single", [True, False])
def test_a_link_out_of_the_folder_is_refused(tmp_path, single):
    folder = save(tmp_path / "m", shards=not single)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shutil.move(shard, tmp_path / "elsewhere.safetensors")
    shard.symlink_to("../elsewhere.safetensors")
    refused(folder, f"{shard.name} is a link that leads outside the folder")
    shard.unlink()
    shard.symlink_to("gone")
    refused(folder, f"{shard.name} is missing")


def test_a_side_file_that_links_out_of_the_folder_is_refused(tmp_path):
    folder = save(tmp_path / "m")
    (folder / "vocab.txt").symlink_to("/etc/passwd")
    refused(folder, "vocab.txt is a link that leads outside the folder")
    (folder / "vocab.txt").unlink()
    shutil.move(folder / "config.json", tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    refused(folder, "config.json is a link that leads outside the folder")


def test_links_of_a_hub_cache_are_fine(tmp_path):
    repo = tmp_path / "models--a--b"
    folder = save(tmp_path / "m")
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, repo / "blobs" / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    source = resolve(snapshot)
    assert source.tensors.keys() == resolve(folder).tensors.keys()
    other = tmp_path / "models--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_bytes(b"{}")
    (snapshot / "tokenizer.json").symlink_to(other / "x")
    refused(snapshot, "tokenizer.json is a link that leads outside the folder")


def test_links_within_the_folder_and_to_the_folder_are_fine(tmp_path):
    folder = save(tmp_path / "m")
    os.rename(folder / "model.safetensors", folder / "real.safetensors")
    (folder / "model.safetensors").symlink_to("real.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert resolve(tmp_path / "link").tensors


def test_a_pipe_is_not_opened(tmp_path):
    folder = save(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "model.safetensors isn't a regular file")


def test_missing_and_extra_shards_are_all_named(tmp_path):
    folder = save(tmp_path / "m", shards=True)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / shards[1]).unlink()
    shutil.copy(folder / shards[0], folder / "model-00001-of-00099.safetensors")
    (folder / shards[2]).write_bytes((folder / shards[2]).read_bytes()[:-3])
    message = refused(folder, f"{shards[1]} is missing", "model-00001-of-00099.safetensors isn't in")
    assert f"{shards[2]} is truncated" in message


def test_shards_and_a_single_file_are_ambiguous(tmp_path):
    folder = save(tmp_path / "m", shards=True)
    shutil.copy(save(tmp_path / "n") / "model.safetensors", folder)
    refused(folder, "model.safetensors and model-00001-of-", "unclear which is the model")


def test_shards_without_their_index(tmp_path):
    folder = save(tmp_path / "m", shards=True)
    (folder / INDEX).unlink()
    refused(folder, f"{INDEX} is missing", "model-00001-of-")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_a_damaged_index(tmp_path, content):
    folder = save(tmp_path / "m", shards=True)
    (folder / INDEX).write_text(content)
    refused(folder, INDEX)


def test_index_and_headers_must_agree(tmp_path):
    folder = save(tmp_path / "m", shards=True)
    index = json.loads((folder / INDEX).read_text())
    weight_map = index["weight_map"]
    moved, lost = [key for key, file in weight_map.items() if list(weight_map.values()).count(file) > 1][:2]
    here, there = weight_map[moved], next(file for file in weight_map.values() if file != weight_map[moved])
    weight_map[moved] = there
    weight_map["ghost"] = here
    del weight_map[lost]
    (folder / INDEX).write_text(json.dumps(index))
    message = refused(folder, f"tensor '{moved}' is here, but {INDEX} places it in {there}")
    assert f"tensor 'ghost' is placed in {here}, which lacks it" in message
    assert f"tensor '{lost}' is here, but {INDEX} lacks it" in message


def test_a_tensor_in_two_shards(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    shutil.copy(save(tmp_path / "n") / "config.json", folder)
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    for i in (1, 2):
        write_safetensors(folder / f"model-0000{i}-of-00002.safetensors", header, b"x")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "model-00002-of-00002.safetensors: tensor 'a' is in model-00001-of-00002.safetensors as well")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00002.bin", "x.pth"])
def test_pickle_weights_are_refused_with_the_mend(tmp_path, name):
    folder = save(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, name, "pickle weights only", "save_pretrained")


def test_what_a_folder_is_instead_of_a_model(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    refused(folder, "is empty")
    (folder / "inner").mkdir()
    (folder / "inner" / "config.json").write_text("{}")
    refused(folder, "has no config.json", "Did you mean", "inner")
    (folder / "params.json").write_text("{}")
    refused(folder, "params.json", "publisher's own format")
    (folder / "model_index.json").write_text("{}")
    refused(folder, "diffusers")
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "is a PEFT adapter (adapter_config.json, no config.json)", "merge_and_unload")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    refused(folder, "has no weights (model.safetensors or")
    (folder / "x.gguf").write_text("")
    (folder / "y.gguf").write_text("")
    refused(folder, "2 GGUF files")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": ...}, "no model_type"),
        ({"model_type": 3}, "no model_type"),
        ({"model_type": "linearized_llama"}, "converted already"),
        ({"linearize": {"version": 1}}, "converted already"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized (quantization_config, method 'gptq')"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized"),
        ({"compression_config": {"x": 1}}, "quantized"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, says):
    folder = save(tmp_path / "m")
    edit_json(folder / "config.json", **changes)
    refused(folder, says)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
def test_a_damaged_config(tmp_path, content):
    folder = save(tmp_path / "m")
    (folder / "config.json").write_bytes(content)
    refused(folder, "config.json")


def test_code_of_the_source_is_dropped_and_said(tmp_path):
    folder = save(tmp_path / "m")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "evil.C"})
    (folder / "evil.py").write_text("raise SystemExit")
    source = resolve(folder)
    assert any("auto_map" in note for note in source.notes)
    assert source.checkpoint.left_behind["evil.py"].startswith("code of the source")


def test_what_travels_and_what_stays(tmp_path):
    folder = save(tmp_path / "m")
    add_side_files(folder)
    stays = [
        "README.md",
        "consolidated.safetensors",
        "x.bin",
        "model.onnx",
        "x.gguf",
        "a.py",
        ".gitattributes",
        "x.mp4",
    ]
    for name in stays:
        (folder / name).write_bytes(b"x")
    (folder / "original").mkdir()
    (folder / "LICENSES").mkdir()  # not the file that its name looks like
    (folder / "tokenizer.model.v3").write_bytes(b"x")
    stays.append("LICENSES")
    source = resolve(folder)
    assert source.side_files.keys() == SIDE_FILES.keys() | {"generation_config.json", "tokenizer.model.v3"}
    assert source.checkpoint.left_behind.keys() == {*stays, "original"}
    for name in (*stays, "original"):
        assert any(note.startswith(f"{name} stays behind") for note in source.notes)


def test_a_tokenizer_that_will_not_be_there_is_said(tmp_path):
    folder = save(tmp_path / "m")
    assert resolve(folder).notes == ("it has no tokenizer files, so the converted model will have none",)
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.T", null]}}')
    (note,) = resolve(folder).notes
    assert "its tokenizer asks for custom code" in note
    (folder / "tokenizer_config.json").write_text("{}")
    assert not resolve(folder).notes


def test_mixer_tensors_without_their_config(tmp_path):
    folder = save(tmp_path / "m")
    header = {"m.linearize.gate": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    write_safetensors(folder / "model.safetensors", header, b"x")
    refused(folder, "mixer tensors ('m.linearize.gate')", "no linearize block")


def test_paths_that_are_not_models(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"")
    refused(tmp_path / "x.safetensors", "is a file", "Give the folder that holds it")
    refused(tmp_path / "none", "there is no file or folder")
    for name in ["./none", "a/b/c", "my model", "modèle", "/none/x", "none.gguf", "~/none-at-all", "~nosuchuser/x"]:
        refused(name, "there is no file or folder")
    for name in ["", " ", "a\0b"]:
        refused(name, "name is empty", error=UsageError)
    with pytest.raises(UsageError, match="applies to a Hub id"):
        resolve(save(tmp_path / "m"), revision="main")
