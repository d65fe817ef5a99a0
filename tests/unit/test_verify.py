"""Every kind of damage to a converted folder is found and named; none hides another."""

from __future__ import annotations

import json
import shutil

import pytest

from linearize.conversion import convert
from linearize.errors import ModelError
from linearize.verification import judge, verify
from tests.checkpoints import add_side_files, save, tree

INDEX = "model.safetensors.index.json"
MIXERS = "model-linearize.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    model = save(root / "m", tie_word_embeddings=True)
    add_side_files(model)
    convert(model, root / "out", overrides={"keep_softmax": "1"})
    return root / "out"


@pytest.fixture
def out(whole, tmp_path):
    """A copy that may be damaged: the bytes of a linked file are the source's, too."""
    return shutil.copytree(whole, tmp_path / "out")


def found(out):
    return {(fault.file, fault.key): fault.what for fault in verify(out)}


def said(out):
    """All clauses: several faults may share a file."""
    return "; ".join(str(fault) for fault in verify(out))


def edit(out, name, change):
    """Change a JSON file, and its entry in the manifest with it, so that only what was meant is wrong."""
    value = json.loads((out / name).read_text())
    change(value)
    (out / name).write_text(json.dumps(value))
    accept(out, name)


def accept(out, *names):
    manifest = json.loads((out / "linearize-manifest.json").read_text())
    for name in names:
        manifest["files"].pop(name, None)
        if (out / name).exists():
            manifest["files"][name] = {"bytes": (out / name).stat().st_size, "sha256": tree(out)[name]}
    (out / "linearize-manifest.json").write_text(json.dumps(manifest))


def rewrite(out, name, change):
    """Change the tensors of a shard through the safetensors library, with manifest and index size made to
    fit."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(out / name)
    change(tensors)
    save_file(tensors, out / name, metadata={"format": "pt"})
    accept(out, name)


def test_a_whole_folder_has_no_fault(whole):
    assert verify(whole) == []


@pytest.mark.parametrize("position", [0.01, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("name", ["model-base.safetensors", MIXERS])
def test_a_flipped_bit(out, name, position):
    data = bytearray((out / name).read_bytes())
    data[int(position * len(data))] ^= 0x10
    (out / name).write_bytes(data)
    assert any(file == name for file, _ in found(out))


def test_a_truncated_shard(out):
    data = (out / MIXERS).read_bytes()
    (out / MIXERS).write_bytes(data[:-1])
    assert said(out).startswith(f"{MIXERS} is truncated: it has {len(data) - 1} of {len(data)} bytes")
    assert {file for file, _ in found(out)} == {MIXERS}  # what follows from it isn't reported again


def test_missing_extra_and_changed_files_are_all_named(out):
    (out / "tokenizer.json").unlink()
    (out / "LICENSE").write_text("mine")
    (out / "merges.txt").write_bytes((out / "merges.txt").read_bytes().upper())
    (out / "extra.bin").write_text("x")
    (out / "sub").mkdir()
    (out / "sub" / "extra").write_text("x")
    (out / ".gitattributes").write_text("hidden files are the user's own")
    (out / "modeling_linearized.py").unlink()
    faults = found(out)
    assert faults["tokenizer.json", ""] == "is missing"
    assert "has 4 bytes" in faults["LICENSE", ""]
    assert "sha256 differs" in faults["merges.txt", ""]
    assert faults["extra.bin", ""] == faults["sub/extra", ""] == "isn't in the manifest"
    assert ("modeling_linearized.py", "") in faults
    assert not any(file.startswith(".") for file, _ in faults)


def test_a_hostile_manifest(out):
    manifest = json.loads((out / "linearize-manifest.json").read_text())
    manifest["files"] |= {"../x": {}, "/etc/passwd": {}, "a/../../x": {}, "b": 7}
    (out / "linearize-manifest.json").write_text(json.dumps(manifest))
    what = said(out)
    for name in ("../x", "/etc/passwd", "a/../../x", "b"):
        assert f'lists "{name}"' in what
    (out / "linearize-manifest.json").write_text("[]")
    assert found(out) == {("linearize-manifest.json", ""): "isn't a JSON object"}


def test_a_lost_a_foreign_and_a_reshaped_mixer_tensor(out):
    import torch

    gone = "model.layers.0.self_attn.linearize.gate"
    wrong = "model.layers.2.self_attn.linearize.gate"
    foreign = "model.layers.1.self_attn.linearize.gate"

    def change(tensors):
        del tensors[gone]
        tensors[wrong] = torch.zeros(9)
        tensors[foreign] = torch.zeros(4)

    rewrite(out, MIXERS, change)
    edit(
        out,
        INDEX,
        lambda index: (index["weight_map"].pop(gone), index["weight_map"].update({foreign: MIXERS})),
    )
    faults = found(out)
    assert faults[INDEX, gone] == "belongs to a mixer, and is stored nowhere"
    assert "is F32 [9], its mixer needs F32 [4]" in faults[MIXERS, wrong]
    assert faults[MIXERS, foreign] == "belongs to no mixer of config.json"


def test_a_mixer_tensor_of_another_dtype(out):
    import torch

    key = "model.layers.0.self_attn.linearize.gate"
    rewrite(out, MIXERS, lambda tensors: tensors.update({key: tensors[key].to(torch.bfloat16)}))
    assert "is BF16 [4], its mixer needs F32 [4]" in found(out)[MIXERS, key]


def test_an_index_that_disagrees_with_the_headers(out):
    def change(index):
        index["metadata"]["total_size"] += 1
        index["weight_map"]["ghost"] = MIXERS

    edit(out, INDEX, change)
    faults = found(out)
    assert "total_size" in faults[INDEX, ""]
    assert "which lacks it" in faults[INDEX, "ghost"]
    edit(out, INDEX, lambda index: index["weight_map"].update({"ghost": "../elsewhere.safetensors"}))
    assert "points to '../elsewhere.safetensors'" in said(out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_nan_and_infinity_are_counted_per_tensor(out, dtype):
    import torch

    def change(tensors):
        for key in tensors:
            tensors[key] = tensors[key].to(getattr(torch, dtype))
        tensors["model.norm.weight"][5] = float("nan")
        tensors["model.norm.weight"][7] = -float("nan")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = -float("inf")
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.finfo(getattr(torch, dtype)).max
        tensors["model.layers.0.mlp.up_proj.weight"][0, 1] = torch.finfo(getattr(torch, dtype)).smallest_normal / 2

    rewrite(out, "model-base.safetensors", change)
    edit(out, INDEX, lambda index: index["metadata"].pop("total_size"))
    assert found(out) == {
        ("model-base.safetensors", "model.norm.weight"): "holds 2 NaN values",
        ("model-base.safetensors", "model.layers.1.mlp.up_proj.weight"): "holds 1 infinite values",
    }


def test_nan_past_the_first_chunk(tmp_path, monkeypatch):
    import torch
    from safetensors.torch import save_file

    from linearize import scan
    from linearize.headers import read_header

    monkeypatch.setattr(scan, "CHUNK_BYTES", 64)
    weight = torch.zeros(101)
    weight[[0, 15, 16, 100]] = float("nan")
    save_file({"a": torch.zeros(3, dtype=torch.uint8), "b": weight}, tmp_path / "x.safetensors")
    path = tmp_path / "x.safetensors"
    digest, bad = scan.scan_file(path, read_header(path))
    assert bad == {"b": (4, 0)}
    assert digest == tree(tmp_path)["x.safetensors"]


def test_a_file_that_is_read_in_driblets():
    import io

    from linearize.scan import _pieces

    class Dribble(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:3])

    pieces = [bytes(piece) for piece in _pieces(Dribble(bytes(range(20))), 18, memoryview(bytearray(8)))]
    assert [len(piece) for piece in pieces] == [8, 8, 2]
    assert b"".join(pieces) == bytes(range(18))


@pytest.mark.parametrize(("dtype", "nan", "infinite"), [("F8_E4M3", 2, 0), ("F8_E5M2", 6, 2)])
def test_eight_bit_floats(dtype, nan, infinite):
    from linearize.scan import count_bad

    assert count_bad(memoryview(bytes(range(256))), dtype) == (nan, infinite)
    assert count_bad(memoryview(bytes(range(256))), "U8") == (0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, "has model_type 'llama', not 'linearized_llama'"),
        ({"architectures": ["LlamaForCausalLM"]}, "has architectures ['LlamaForCausalLM']"),
        ({"auto_map": {}}, "has auto_map {}"),
        ({"linearize": None}, "no linearize block"),
        ({"vocab_size": 95}, "has shape [96, 48], config.json asks for [95, 48]"),
        ({"num_hidden_layers": 4}, "leaves out layer 'model.layers.3.self_attn'"),
        ({"num_attention_heads": "x"}, "isn't a valid 'llama' config"),
    ],
)
def test_a_config_that_does_not_fit(out, change, says):
    edit(out, "config.json", lambda config: config.update(change))
    assert says in said(out)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda block: block.update(version=2), "version 2"),
        (lambda block: block.update(base_model_type="llamma"), "which transformers doesn't know"),
        (lambda block: block["layers"].pop(), "leaves out layer 'model.layers.2.self_attn'"),
        (lambda block: block["layers"].append(block["layers"][0]), "lists layer 'model.layers.0.self_attn'"),
        (lambda block: block["layers"].append(7), "lists layer None"),
        (lambda block: block["layers"][0].update(module="x"), "lists layer 'x'"),
        (lambda block: block["layers"][0]["shape"].update(num_heads=8), "another attention shape"),
        (lambda block: block["layers"][0]["mixer"].update(name="nope"), "a part that isn't registered"),
        (lambda block: block["layers"][0]["mixer"].update(nope=1), "mixers that can't be built"),
        (lambda block: block.update(layers=None), "no linearize block with its layers"),
    ],
)
def test_a_linearize_block_that_does_not_fit(out, change, says):
    edit(out, "config.json", lambda config: change(config["linearize"]))
    assert says in said(out)


def test_tied_weights_that_differ(out):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(out, "model-base.safetensors", change)
    size = 96 * 48 * 2

    def more(index):
        index["weight_map"]["lm_head.weight"] = "model-base.safetensors"
        index["metadata"]["total_size"] += size

    edit(out, INDEX, more)
    assert verify(out) == []
    rewrite(out, "model-base.safetensors", lambda tensors: tensors["lm_head.weight"].add_(1))
    ((file, key), what), *_ = found(out).items()
    assert (file, key) == ("model-base.safetensors", "lm_head.weight")
    assert what == "differs from 'model.embed_tokens.weight', to which config.json ties it"


def test_an_untied_model_without_its_head(out):
    edit(out, "config.json", lambda config: config.update(tie_word_embeddings=False))
    assert found(out) == {("config.json", "lm_head.weight"): "is part of the architecture, and stored nowhere"}


def test_damage_everywhere_is_reported_everywhere(out):
    (out / "config.json").write_text("{")
    (out / INDEX).unlink()
    (out / MIXERS).unlink()
    (out / "LICENSE").unlink()
    assert {file for file, _ in found(out)} == {"config.json", INDEX, MIXERS, "LICENSE"}


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ModelError, match="there is no folder"):
        verify(tmp_path / "none")
    assert [str(fault) for fault in verify(tmp_path)] == ["config.json is missing"]
    assert "Give the folder" in judge(tmp_path).mend


def test_a_model_that_never_was_converted(tmp_path):
    verdict = judge(save(tmp_path / "m"))
    assert [fault.what for fault in verdict.faults] == ["has no linearize block, so the folder isn't a converted model"]
    assert "linearize convert" in verdict.mend
    assert "again" not in verdict.mend


def test_what_save_pretrained_writes_is_whole_though_its_hashes_are_not_checked(whole, tmp_path):
    from transformers import AutoModelForCausalLM

    import linearize  # noqa: F401  registers the converted model types

    AutoModelForCausalLM.from_pretrained(whole, dtype="auto").save_pretrained(tmp_path / "saved")
    verdict = judge(tmp_path / "saved")
    assert verdict.faults == ()
    assert verdict.to_dict()["notes"] == ["hashes not checked: there is no manifest"]
    assert not verdict.to_dict()["complete"]
    rewrite_one_byte_too_few(tmp_path / "saved" / "model.safetensors")
    assert judge(tmp_path / "saved").mend.startswith("Copy the folder again")


def rewrite_one_byte_too_few(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_a_comparison_that_could_not_be_made_is_said(whole, monkeypatch):
    from linearize import family

    def fail(*args):
        raise LookupError("no such table")

    assert judge(whole).to_dict()["complete"]
    monkeypatch.setattr(family, "_match", fail)
    verdict = judge(whole).to_dict()
    assert verdict["ok"]
    assert not verdict["complete"]
    assert verdict["notes"] == ["tensor names were not compared with the architecture (LookupError: no such table)"]


def test_a_model_card_that_the_user_adds_is_a_note(out):
    (out / "README.md").write_text("mine")
    verdict = judge(out)
    assert verdict.faults == ()
    assert verdict.notes == ("README.md was added: it isn't in the manifest",)
    assert verdict.to_dict()["complete"]


@pytest.mark.parametrize("change", [{"name": "mine"}, {"feature_map": "mine"}])
def test_a_part_that_is_not_registered(out, change):
    from transformers import AutoModelForCausalLM

    from linearize.inspection import inspect

    edit(out, "config.json", lambda config: config["linearize"]["layers"][0]["mixer"].update(change))
    verdict = judge(out)
    (fault,) = verdict.faults
    assert "isn't registered" in fault.what
    assert "'mine'" in fault.what
    assert verdict.mend == "Import the module that registers it (command line: --import)"
    for use in (inspect, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ModelError, match=r"'mine'.*Import the module that registers it .command line: --import"):
            use(out)
