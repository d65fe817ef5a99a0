"""Plans: which layers keep softmax, what is written where, and what is refused before anything is written."""

from __future__ import annotations

import json

import pytest

from linearize.checkpoint import Checkpoint
from linearize.errors import ModelError, ResourceError, UsageError
from linearize.family import load_config
from linearize.keep_softmax import kept_layers, ranges
from linearize.plan import check_resources, make_plan
from linearize.recipe import load_recipe
from linearize.source import Source, resolve
from linearize.target import Destination, check_target, survey
from tests.checkpoints import config_of, save, write_safetensors


@pytest.mark.parametrize(
    ("spec", "convertible", "kept"),
    [
        ("none", range(8), []),
        ("0,7,3", range(8), [0, 3, 7]),
        ("5", range(8), [5]),
        ([0, 7], range(8), [0, 7]),
        ((1,), range(8), [1]),
        ("every:4", range(12), [0, 4, 8]),
        ("every:1", range(3), [0, 1, 2]),
        ("every:2", [1, 3, 5, 7], [1, 5]),  # positions among the convertible layers, not layer numbers
        ("25%", range(8), [0, 4]),
        ("25%", range(30), [0, 3, 7, 11, 15, 18, 22, 26]),  # 7.5 rounds up to 8
        ("50%", [1, 3, 5, 7], [1, 5]),
        ("1%", range(8), [0]),
        ("12.5%", range(8), [0]),
        ("100%", range(4), [0, 1, 2, 3]),
        ("0%", range(4), []),
        ("auto:25%", range(8), [0, 4]),  # a stand-in, until layers are measured
        ("auto:3", [1, 3, 5, 7], [1, 3, 5]),
    ],
)
def test_keep_softmax(spec, convertible, kept):
    assert sorted(kept_layers(spec, list(convertible), list(range(40)))) == kept


@pytest.mark.parametrize("spec", ["auto", "every:0", "every", "101%", "-1", "1;2", "", "all", "%", "1.5", "every:-1"])
def test_keep_softmax_forms_that_are_refused(spec):
    with pytest.raises(UsageError):
        kept_layers(spec, range(8), range(8))


def test_a_layer_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UsageError, match=r"names layers 8, 9; .* are 0-2, 5"):
        kept_layers("0,8,9", [0, 1, 2], [0, 1, 2, 5])
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def bare(config) -> Source:
    """A source of a config alone, for plans that need no weights."""
    return Source("m", "folder", None, config.to_dict(), Checkpoint())  # type: ignore[arg-type]


def plan_of(kind, config=None, **overrides):
    return make_plan(bare(config or config_of(kind)), load_recipe(None, overrides))


def test_every_layer_has_a_reason():
    layers = plan_of("llama", keep_softmax="1").layers
    assert [layer["type"] for layer in layers] == ["hybrid_sliding", "full_attention", "hybrid_sliding"]
    assert [layer["because"] for layer in layers] == [
        "full attention, and keep_softmax doesn't keep it",
        "kept by keep_softmax: 1",
        "full attention, and keep_softmax doesn't keep it",
    ]
    assert [layer["module"] for layer in layers] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert "mixer" not in layers[1]
    assert "shape" not in layers[1]


def test_sliding_layers_stay_unless_asked():
    layers = plan_of("gemma2").layers
    assert [layer["type"] for layer in layers] == ["sliding_attention", "hybrid_sliding"] * 2
    assert "constant size already" in layers[0]["because"]
    layers = plan_of("gemma2", convert_sliding=True, keep_softmax="0").layers
    assert [layer["type"] for layer in layers] == ["sliding_attention", *["hybrid_sliding"] * 3]
    # every:2 counts the convertible layers only: 1 and 3 are, so 1 is kept
    layers = plan_of("gemma2", keep_softmax="every:2").layers
    assert [layer["type"] for layer in layers][1:] == [
        "full_attention",
        "sliding_attention",
        "hybrid_sliding",
    ]


def test_nothing_left_to_convert():
    with pytest.raises(UsageError, match=r"keeps all 3 convertible layers \(0-2\)"):
        plan_of("llama", keep_softmax="every:1")
    with pytest.raises(UsageError, match=r"constant size already .* Set convert_sliding"):
        plan_of("mistral-sliding")
    assert all("mixer" in layer for layer in plan_of("mistral-sliding", convert_sliding=True).layers)


def test_new_tensors_are_those_of_the_mixers():
    plan = plan_of("llama", mixer="linear", feature_map="hedgehog", keep_softmax="0,2")
    from linearize.mixers import AttentionShape, build_mixer

    layer = plan.layers[1]
    mixer = build_mixer(layer["mixer"], AttentionShape(**layer["shape"]), layer=1, seed=0)
    state = mixer.state_dict()
    assert {name: shape for name, (_, shape) in plan.new_tensors.items()} == {
        f"model.layers.1.self_attn.linearize.{name}": tuple(value.shape) for name, value in state.items()
    }
    assert {dtype for dtype, _ in plan.new_tensors.values()} == {"F32"}
    assert plan.new_parameters == sum(value.numel() for value in state.values()) > 0


def test_the_plan_is_json_and_needs_no_weights():
    text = json.dumps(plan_of("gpt2").to_dict())
    assert json.loads(text)["architecture"] == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llamma"}, "doesn't know model_type 'llamma'"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "bert"}, ""),
        ({"model_type": "gemma3", "text_config": {}}, "nests its decoder in a multimodal config"),
        ({"model_type": "bloom"}, "own code"),
        ({"num_attention_heads": 7, "head_dim": ..., "num_key_value_heads": ...}, "config"),
        ({"num_hidden_layers": "three"}, "config"),
    ],
)
def test_models_that_can_not_be_converted(changes, says):
    raw = {k: v for k, v in (config_of("llama").to_dict() | changes).items() if v is not ...}
    source = Source("m", "folder", None, raw)  # type: ignore[arg-type]
    with pytest.raises(ModelError) as caught:
        make_plan(source, load_recipe(None))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensors_must_fit_the_architecture(tmp_path):
    folder = save(tmp_path / "m")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(text) | {"vocab_size": 97}))
    with pytest.raises(ModelError) as caught:
        make_plan(resolve(folder), load_recipe(None))
    for key in ("lm_head", "model.embed_tokens"):
        assert f"'{key}.weight' has shape [96, 48], config.json asks for [97, 48]" in str(caught.value)
    (folder / "config.json").write_text(json.dumps(json.loads(text) | {"num_hidden_layers": 4}))
    with pytest.raises(ModelError) as caught:
        make_plan(resolve(folder), load_recipe(None))
    assert "'model.layers.3.self_attn.q_proj.weight' is part of the architecture, and stored nowhere" in str(
        caught.value
    )
    assert "and 1 more" in str(caught.value)


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"]
)
def test_no_key_of_the_config_switches_the_comparison_off_or_fetches_code(tmp_path, key):
    folder = save(tmp_path / "m", "mixtral")
    raw = json.loads((folder / "config.json").read_text()) | {key: "owner/kernel", "sub": {key: "owner/kernel"}}
    (folder / "config.json").write_text(json.dumps(raw))
    assert "owner/kernel" not in str(vars(load_config(raw, "m")))
    (folder / "tokenizer.json").write_text("{}")
    (note,) = make_plan(resolve(folder), load_recipe(None)).notes
    assert "is dropped: it may fetch code" in note  # and none of a comparison that failed
    _drop(folder / "model.safetensors", "model.norm.weight")
    with pytest.raises(ModelError, match=r"'model.norm.weight' is part of the architecture, and stored nowhere"):
        make_plan(resolve(folder), load_recipe(None))


def test_a_comparison_that_fails_is_a_note(tmp_path, monkeypatch):
    def broken(config):
        raise ImportError("no such table")

    monkeypatch.setattr("linearize.family._meta_model", broken)
    note = make_plan(resolve(save(tmp_path / "m")), load_recipe(None)).notes[-1]
    assert note.startswith("tensor names were not compared")
    assert "no such table" in note


@pytest.mark.parametrize(("kind", "key"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_more_layers_than_tensors_are_refused_before_a_model_is_built(tmp_path, monkeypatch, kind, key):
    monkeypatch.setattr("linearize.modeling.probe.probe", None)
    folder = save(tmp_path / "m", kind)
    text = (folder / "config.json").read_text()
    for depth, says in ((4000, "tensors are stored"), (10**7, "more than 4096")):
        raw = {k: v for k, v in json.loads(text).items() if k != "layer_types"}
        (folder / "config.json").write_text(json.dumps(raw | {key: depth}))
        with pytest.raises(ModelError, match=f"has {key} .*{says}"):
            make_plan(resolve(folder), load_recipe(None))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma2"])
def test_tensors_of_every_family_are_compared_after_renaming(tmp_path, kind):
    folder = save(tmp_path / "m", kind)
    plan = make_plan(resolve(folder), load_recipe(None))
    assert all("soft-capping" in note or "no tokenizer" in note for note in plan.notes)  # none of a failed comparison
    header = dict(resolve(folder).tensors)
    lost = next(key for key in header if "down_proj" in key or "w2" in key or "mlp.c_proj.weight" in key)
    _drop(folder / "model.safetensors", lost)
    with pytest.raises(ModelError, match=r"stored nowhere|don't fill its shape"):
        make_plan(resolve(folder), load_recipe(None))


def _drop(path, key):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors[key]
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_tensor_that_the_architecture_ignores_is_a_note(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"].clone()}
    save_file(tensors | extra, folder / "model.safetensors")
    assert not make_plan(resolve(folder), load_recipe(None)).notes  # an old buffer, which loading drops in silence
    extra = {"model.layers.9.x": tensors["model.norm.weight"].clone()}
    save_file(tensors | extra, folder / "model.safetensors")
    (note,) = make_plan(resolve(folder), load_recipe(None)).notes
    assert "'model.layers.9.x': stored, kept, and ignored" in note


def destination(out, source=None, **changes):
    return Destination(**({**vars(survey(out))} | changes))


def test_bytes_needed_depend_on_the_disk(tmp_path):
    folder = save(tmp_path / "m", shards=True)
    source = resolve(folder)
    same = make_plan(source, load_recipe(None), survey(tmp_path / "out"))
    other = make_plan(source, load_recipe(None), destination(tmp_path / "out", device=-1))
    shards = sum(header.file_bytes for header in source.shards.values())
    assert {file.how for file in same.files if "base" in file.name} == {"link"}
    assert {file.how for file in other.files if "base" in file.name} == {"copy"}
    slack = 4096 * len(source.shards)
    assert other.bytes_needed - same.bytes_needed == shards + slack
    (mixers,) = (file for file in same.files if file.name == "model-linearize.safetensors")
    assert mixers.bytes == 4 * same.new_parameters


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(tmp_path):
    folder = save(tmp_path / "m")
    small = destination(tmp_path / "out", free_bytes=900_000)
    plan = make_plan(resolve(folder), load_recipe(None), small)
    with pytest.raises(ResourceError, match=r"needs 1\.\d\d MB and the disk of .* has 900\.00 kB free"):
        check_resources(plan, small)
    check_resources(plan, destination(tmp_path / "out", free_bytes=plan.bytes_needed))


def test_targets_that_are_refused(tmp_path, monkeypatch):
    model = save(tmp_path / "m")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    monkeypatch.chdir(tmp_path)

    def refused(out, says, force=False, source=model):
        with pytest.raises(UsageError, match=says) as caught:
            check_target(survey(out), source, force=force)
        assert caught.value.exit_code == 2

    for force in (False, True):
        refused(model, "are the same folder", force)
        refused("m", "are the same folder", force)
        refused(tmp_path / "link", "are the same folder", force)
        refused(model / "out", "is inside MODEL", force)
        refused(tmp_path / "link" / "a" / "b", "is inside MODEL", force)
        refused(tmp_path, "is inside OUT", force)
        refused(tmp_path / "file", "is a file", force)
        refused(tmp_path / "file" / "out", "is below the file", force)
        refused("", "no name", force)
        refused("/", "can't be /", force)
    refused(tmp_path / "full", "exists and isn't empty")
    refused(tmp_path / "full", "isn't a converted model", True)
    (tmp_path / "full" / ".git").mkdir()
    refused(tmp_path / "full", "is a git repository", True)
    (tmp_path / "full" / ".git").rmdir()
    monkeypatch.setenv("HOME", str(tmp_path / "full" / "me"))
    refused(tmp_path / "full", "holds your home folder", True)
    refused("/proc", "root of a disk", True, source=model)
    (tmp_path / "empty").mkdir()
    check_target(survey(tmp_path / "empty"), model, force=False)
    check_target(survey(tmp_path / "none" / "yet"), model, force=False)
    gguf = tmp_path / "x.gguf"
    gguf.write_text("")
    check_target(survey(tmp_path / "new"), gguf, force=False)
    refused(tmp_path, "is inside OUT", source=gguf)


def test_a_source_tensor_with_a_mixers_name(tmp_path):
    folder = save(tmp_path / "m", num_hidden_layers=1)
    source = resolve(folder)
    key = next(iter(make_plan(source, load_recipe(None)).new_tensors))
    write_safetensors(folder / "model.safetensors", {key: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x")
    with pytest.raises(ModelError, match="mixer tensors"):
        resolve(folder)
