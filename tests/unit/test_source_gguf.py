"""GGUF: dequantised by transformers, saved clean, converted; described without reading a weight."""

from __future__ import annotations

import numpy as np
import pytest

from linearize.conversion import convert
from linearize.errors import ModelError, UsageError
from linearize.inspection import inspect
from linearize.source import resolve
from linearize.verification import verify
from tests.checkpoints import tree

gguf = pytest.importorskip("gguf", reason="the gguf extra isn't installed")

HIDDEN, HEADS, KV, LAYERS, VOCAB, MLP = 64, 4, 2, 2, 96, 96


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama in Q8_0 with a byte-level tokenizer."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny ü.Q8_0.gguf")


def write_gguf(path, drop=(), resize=()):
    """`drop` names tensors to leave out, `resize` those to write with a row too many."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(33 + i) for i in range(VOCAB - 3)] + ["!!", "<s>", "</s>"])
    writer.add_token_types([1] * (VOCAB - 2) + [3, 3])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    rng = np.random.default_rng(0)

    def add(name, *shape):
        if name in drop:
            return
        shape = (shape[0] + (name in resize), *shape[1:])
        weight = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weight)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        for name, rows in (
            ("attn_q", HIDDEN),
            ("attn_k", HIDDEN * KV // HEADS),
            ("attn_v", HIDDEN * KV // HEADS),
        ):
            add(f"blk.{i}.{name}.weight", rows, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", MLP, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", MLP, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, MLP)
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("dtype", "stored"), [(None, "F32"), ("bfloat16", "BF16")])
def test_a_gguf_model_is_dequantised_and_converted(model, tmp_path, dtype, stored):
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    before = tree(model.parent)
    result = convert(model if dtype else model.parent, tmp_path / "out", dtype=dtype, overrides={"keep_softmax": "0"})
    assert verify(tmp_path / "out") == []
    assert tree(model.parent) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no scratch folder is left
    assert any("dequantised from tiny ü.Q8_0.gguf" in note for note in result.plan.notes)
    (base,) = (file for file in result.plan.files if "base" in file.name)
    assert (base.how, base.origin, result.plan.source.gguf) == ("write", model.name, model)
    tensors = resolve(tmp_path / "out", allow_converted=True).tensors
    assert {tensor.dtype for key, tensor in tensors.items() if ".linearize." not in key} == {stored}
    config = GgufConfig(dequantize=True)
    direct = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, quantization_config=config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for key, value in direct.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value.to(getattr(torch, dtype or "float32")).float())
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # what the umask says, for all


def test_describing_and_planning_write_nothing_and_read_no_weight(model, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    report = inspect(model)
    assert (report["origin"], report["family"], report["num_layers"]) == ("gguf", "llama", LAYERS)
    plan = convert(model, tmp_path / "out", dry_run=True).plan
    assert not list(tmp_path.iterdir())
    per_layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV // HEADS + 3 * HIDDEN * MLP + 2 * HIDDEN
    count = 2 * VOCAB * HIDDEN + HIDDEN + LAYERS * per_layer
    assert plan.source.loaded_bytes == 4 * count == report["weight_bytes"]
    assert report["parameters"] == count
    assert plan.bytes_needed > 4 * count
    assert plan.memory_bytes > 500_000_000 + 8 * count  # two of its fp32 weights, at the worst


@pytest.mark.parametrize("cut", [0, 4, 100, -1000])
def test_a_damaged_gguf_file(model, tmp_path, cut):
    (tmp_path / "x.gguf").write_bytes(model.read_bytes()[:cut])
    with pytest.raises(ModelError) as caught:
        convert(tmp_path / "x.gguf", tmp_path / "out")
    assert "x.gguf can't be read as a GGUF model" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_wrong_dtypes(model, tmp_path):
    with pytest.raises(UsageError, match="can't be stored as 'int3'"):
        convert(model, tmp_path / "out", dtype="int3")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"drop": ["blk.1.ffn_down.weight"]}, "it lacks tensor 'model.layers.1.mlp.down_proj.weight'"),
        ({"resize": ["blk.0.ffn_up.weight"]}, "'model.layers.0.mlp.up_proj.weight' of another shape"),
    ],
)
def test_a_gguf_file_that_lacks_weights_is_never_completed_with_random_ones(tmp_path, changes, says):
    path = write_gguf(tmp_path / "x.gguf", **changes)
    with pytest.raises(ModelError) as caught:
        convert(path, tmp_path / "out")
    assert says in str(caught.value)
    assert "x.gguf isn't a whole model" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]
