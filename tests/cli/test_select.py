"""`linearize select`, and what `convert` makes of its file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM

import linearize
from linearize.select_show import _with_interval
from linearize.selection_file import IN_MODEL
from linearize.target import MANIFEST
from tests.evals.engine import byte_tokenizer, tiny

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--samples", "2", "--length", "256", "--pairs", "4", "--dtype", "float32", "--device", "cpu"]
RECIPE = ["--feature-map", "elu1", "--window", "4"]


def save(folder, **config):
    values = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    tiny(**{**values, "max_position_embeddings": 1024, **config}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(tmp_path_factory.mktemp("select") / "base")


@pytest.fixture(scope="module")
def selection(base):
    """A file for `base` that chooses layers 1 and 3, as `select` writes it but for them."""
    document = linearize.select(
        base, 2, overrides={"feature_map": "elu1", "window": 4}, samples=2, length=256, pairs=[4], dtype="float32"
    )
    document["chosen"]["layers"] = [1, 3]
    file = base.parent / "chosen.json"
    file.write_text(json.dumps(document))
    return file


def test_a_selection_and_its_use(run, base, tmp_path):
    done = run(
        "select", base, "-o", tmp_path / "s.json", "--budget", "50%", *RECIPE, *SMALL, "--score", "greedy", "--json"
    )
    assert done.code == 0, done.err
    document = json.loads((tmp_path / "s.json").read_text())
    assert done.json == document | {"wrote": [str(tmp_path / "s.json"), str(tmp_path / "s.png")]}
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.json", "s.png"]
    assert (document["score"], document["budget"], document["count"], document["mixers"]) == (
        *("greedy", "50%", 2),
        "untrained",
    )
    assert [row["layer"] for row in document["layers"]] == [0, 1, 2, 3]
    assert sorted(row["rank"] for row in document["layers"]) == [1, 2, 3, 4]
    best = sorted(row["layer"] for row in document["layers"] if row["rank"] <= 2)
    assert document["chosen"]["layers"] == best == sorted(step["layer"] for step in document["greedy"])
    assert document["uniform"]["layers"] == [0, 2]
    assert all(len(each["layers"]) == 2 for each in document["random"])
    assert document["data"]["tokens"] > 2 * 2 * 200

    chosen = document["chosen"]["layers"]
    done = run("convert", base, "-o", tmp_path / "out", *RECIPE, "--keep-softmax", f"@{tmp_path / 's.json'}", "--json")
    assert done.code == 0, done.err
    block = json.loads((tmp_path / "out" / "config.json").read_text())["linearize"]
    assert block["recipe"]["keep_softmax"] == chosen
    assert [layer["layer"] for layer in block["layers"] if not layer.get("mixer")] == chosen
    kept = {layer["because"] for layer in block["layers"] if not layer.get("mixer")}
    assert kept == {"chosen by linearize select for score greedy, budget 50% (s.json)"}
    assert run("verify", tmp_path / "out").code == 0


def test_heads_and_their_use(run, base, tmp_path):
    options = ["--heads", "--budget", "3", *RECIPE, *SMALL]
    done = run("select", base, "-o", tmp_path / "s.json", *options, "--json")
    assert done.code == 0, done.err
    document = json.loads((tmp_path / "s.json").read_text())
    assert [(row["layer"], row["head"]) for row in document["heads"]] == [(n // 2, n % 2) for n in range(8)]
    best = {(row["layer"], row["head"]) for row in document["heads"] if row["rank"] <= 3}
    assert best == {(row["layer"], row["head"]) for row in document["heads"] if row["chosen"]}
    for kept in (document["chosen"], document["uniform"], *document["random"]):
        assert 2 * len(kept["layers"]) + sum(map(len, kept["heads"].values())) == 3
    shown = run("select", base, "-o", tmp_path / "s.json", *options).out
    for words in (" layer.head", "2 more heads have lower ranks", "evenly spread: heads"):
        assert words in shown

    document["chosen"] |= {"layers": [2], "heads": {"0": [1], "1": [0], "3": [0]}}
    (tmp_path / "s.json").write_text(json.dumps(document))
    mixed = {"feature_map": "elu1", "window": 4, "layers": {"0, 2": {"mixer": "gla"}}}
    convert = {"overrides": {"keep_softmax": f"@{tmp_path / 's.json'}"}}
    assert linearize.convert(base, tmp_path / "a", recipe=mixed, **convert).plan.recipe.keep_softmax == (2,)
    block = json.loads((tmp_path / "a" / "config.json").read_text())["linearize"]
    assert list(block["recipe"]["layers"]) == ["0", "1, 3"]
    why = "chosen by linearize select for score recall, budget 3 (s.json)"
    assert [layer["because"].removeprefix("full attention, and ") for layer in block["layers"]] == [
        *(f"key/value head {head} {why}" for head in (1, 0)),
        why,
        f"key/value head 0 {why}",
    ]
    mixers = [layer.get("mixer", {}) for layer in block["layers"]]
    assert [mixer.get("over") for mixer in mixers] == ["gla", "window", None, "window"]
    assert [mixer.get("keep") for mixer in mixers] == [[1], [0], None, [0]]
    assert mixers[3]["over_options"] | {"feature_map": "elu1", "window": 4} == mixers[3]["over_options"]
    again = linearize.convert(base, tmp_path / "b", recipe=block["recipe"]).plan
    assert [layer.get("mixer", {}) for layer in again.layers] == mixers
    assert again.recipe.conversion() == block["recipe"]
    assert run("verify", tmp_path / "a").code == 0
    done = run("select", tmp_path / "a", "-o", tmp_path / "t.json", "--heads")
    assert done.code == 2
    assert "keeps layers as softmax already" in done.err
    document["chosen"]["layers"] = []
    (tmp_path / "s.json").write_text(json.dumps(document))
    linearize.convert(base, tmp_path / "c", **convert)
    done = run("select", tmp_path / "c", "-o", tmp_path / "t.json", "--heads")
    assert done.code == 2
    assert "'heads' of layer 0, whose state grows already. Give the base model" in done.err
    done = run("convert", base, "-o", tmp_path / "d", "--mixer", "heads", "--keep-softmax", f"@{tmp_path / 's.json'}")
    assert done.code == 2
    assert "chooses heads of layer 0, whose mixer 'heads' keeps heads already. Give the recipe" in done.err


def test_heads_that_can_not_be_chosen_are_refused(run, base, tmp_path):
    single = save(tmp_path / "single", num_key_value_heads=1)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "sliding_window": 8}
    MistralForCausalLM(MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(
        sliding := tmp_path / "sliding"
    )
    for model, options, said in (
        (single, [], "every layer that can be converted has one key/value head"),
        (base, ["--mixer", "heads"], "'heads' of layer 0, whose state grows already. Choose another mixer"),
        (
            sliding,
            ["--set", "convert_sliding=true"],
            "heads of layer 0 can't be chosen: it has sliding-window attention",
        ),
        (base, ["--budget", "8"], "keeps 8 of the model's 8 key/value heads in convertible layers"),
    ):
        done = run("select", model, "-o", tmp_path / "s.json", "--heads", *options)
        assert done.code == 2
        assert said in done.err
    with pytest.raises(linearize.errors.UsageError, match="units can't be 'head'"):
        linearize.select(base, 1, units="head")


def test_what_kept_heads_lack_is_said(tmp_path):
    """gpt-oss has a learned sink beside q, k and v, in every other layer whose attention is full."""
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4, "head_dim": 16}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_experts_per_tok=2)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    small = {"overrides": {"feature_map": "elu1"}, "samples": 1, "length": 256, "pairs": [4], "dtype": "float32"}
    said = "heads kept in layers 1, 3 lack what their softmax does beside q, k and v: see inspect"
    assert said in linearize.select(tmp_path, 1, units="heads", **small)["notes"]
    assert said not in linearize.select(tmp_path, 1, **small)["notes"]


def test_the_documented_keys_are_those_of_a_selection(base, selection):
    text = (ROOT / "docs" / "selection.md").read_text()
    table = text.split("\n| key |")[1].split("\n\n")[0].splitlines()[2:]
    listed = {name for row in table for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    small = {"samples": 2, "length": 256, "pairs": [4], "dtype": "float32", "score": "greedy"}
    heads = linearize.select(base, 1, units="heads", overrides={"feature_map": "elu1", "window": 4}, **small)
    found, measures = {f"greedy.{key}" for key in heads["greedy"][0]}, {"kl", "recall_nll", "recall_accuracy", "tasks"}
    for document in (json.loads(selection.read_text()), heads):
        found |= set(document)
        for key in ("architecture", "data", "settings", "versions"):
            found |= {f"{key}.{inner}" for inner in document[key]}
        for key in (document["units"], "chosen", "uniform", "random", "linear"):
            value = document[key][0] if isinstance(document[key], list) else document[key]
            assert measures <= set(value)
            found |= {f"{key}.{inner}" for inner in set(value) - measures}
    assert listed == found


def test_the_table_shows_every_layer_and_hybrid(run, base, tmp_path):
    done = run("select", base, "-o", tmp_path / "s.json", "--budget", "1", *RECIPE, "--set", "seed=1", *SMALL)
    assert done.code == 0, done.err
    for words in (" kept", "evenly spread: 0", "random, mean of 3", "the teacher", "note: the mixers are untrained"):
        assert words in done.out
    options = "--set seed=1 --feature-map elu1 --window 4"  # without them, other mixers would be made
    assert f"next: linearize convert {base} -o OUT {options} --keep-softmax @{tmp_path / 's.json'}\n" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "budget can't be '0'"),
        (["--budget", "100%"], "budget can't be '100%'"),
        (["--budget", "some"], "budget can't be 'some'"),
        (["--score", "recal"], "did you mean 'recall'?"),
        (["--samples", "0"], "samples can't be 0"),
        (["--pairs", "many"], "--pairs takes whole numbers"),
        (["--window", "0"], "--window: must be at least 1"),
        (["-o", "selection.yaml"], "isn't the name of a .json file"),
        (["-o", "~nobody-of-that-name/s.json"], "home folder of a user who doesn't exist"),
        (["--set", "keep_softmaks=1"], "keep_softmaks"),
    ],
)
def test_wrong_options_are_named_before_a_model_is_looked_for(run, arguments, message, tmp_path):
    done = run("select", "no/such/model", "-o", tmp_path / "s.json", *arguments)
    assert done.code == 2
    assert message in done.err


def test_what_it_did_not_write_is_never_replaced(run, base, selection, tmp_path):
    """Nor found to be in the way when all is measured."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "photo.png").write_bytes(b"mine")
    (tmp_path / "folder.png").mkdir()
    for name, said in (
        ("config.json", f"would replace {tmp_path / 'config.json'}, which is no selection's"),
        ("photo.json", f"would replace {tmp_path / 'photo.png'}"),
        ("folder.json", f"{tmp_path / 'folder.png'} is in the way"),
        ("photo.png/s.json", f"{tmp_path / 'photo.png'} is in the way"),
    ):
        done = run("select", "no/such/model", "-o", tmp_path / name)
        assert done.code == 2
        assert said in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "folder.png", "photo.png"]
    (tmp_path / "s.json").write_text(selection.read_text())
    (tmp_path / "s.png").write_bytes(b"of before")
    done = run("select", base, "-o", tmp_path / "s.json", "--budget", "1", *RECIPE, *SMALL)
    assert done.code == 0, done.err
    assert (tmp_path / "s.png").read_bytes() != b"of before"


def test_a_mixer_that_overflows_is_no_bug(run, base, tmp_path):
    model = linearize.load(base)
    model.model.layers[1].self_attn.k_proj.weight.data.fill_(1e30)  # softmax bears it, powers of keys don't
    model.save_pretrained(tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    done = run("select", tmp_path / "m", "-o", tmp_path / "s.json", "--budget", "1", "--feature-map", "taylor", *SMALL)
    assert done.code == 3
    assert "can't be measured: converted layer 1 gave NaN" in done.err


def test_intervals_are_shown_as_they_are():
    shown = [_with_interval({"value": 1.0, "low": low, "high": 10.1234}) for low in (0.5, -0.25, None)]
    assert shown == ["1.000 [.500, 10.123]", "1.000 [-.250, 10.123]", "1.000"]


def test_samples_of_no_pairs_are_refused(base):
    with pytest.raises(linearize.errors.UsageError, match="no pairs"):
        linearize.select(base, 1, pairs=[], samples=2, length=256)


@pytest.mark.parametrize("budget", ["4", "90%", "7"])
def test_a_budget_that_leaves_nothing_to_convert_is_refused_before_a_weight_is_read(run, base, tmp_path, budget):
    done = run("select", base, "-o", tmp_path / "s.json", "--budget", budget)
    assert done.code == 2
    assert "4 convertible layers" in done.err
    assert "at most 3" in done.err


def test_converted_checkpoints(run, base, tmp_path):
    """One that keeps nothing is measured with the mixers that it has; others are refused."""
    run("convert", base, "-o", tmp_path / "c", *RECIPE)
    done = run("select", tmp_path / "c", "-o", tmp_path / "s.json", "--budget", "1", *SMALL, "--json")
    assert done.code == 0, done.err
    fresh = linearize.select(
        base, 1, overrides={"feature_map": "elu1", "window": 4}, samples=2, length=256, pairs=[4], dtype="float32"
    )
    assert done.json["layers"] == fresh["layers"]
    assert done.json["architecture"] == fresh["architecture"]
    assert done.json["recipe"] == fresh["recipe"]
    assert (done.json["converted"], fresh["converted"]) == (True, False)
    shown = run("select", tmp_path / "c", "-o", tmp_path / "s.json", "--budget", "1", "--score", "kl", *SMALL).out
    assert "next: linearize convert BASE -o OUT --recipe RECIPE --keep-softmax @" in shown  # c itself is refused
    assert "often fails" in shown
    assert "use score kl" not in shown
    done = run("select", tmp_path / "c", "-o", tmp_path / "s.json", *RECIPE)
    assert done.code == 2
    assert "converted already, so no recipe applies" in done.err
    run("convert", base, "-o", tmp_path / "kept", *RECIPE, "--keep-softmax", "1")
    done = run("select", tmp_path / "kept", "-o", tmp_path / "s.json")
    assert done.code == 2
    assert "keeps layers as softmax already" in done.err
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config["linearize"]["training"] = {"base_weights": "changed"}
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    done = run("select", tmp_path / "c", "-o", tmp_path / "s.json")
    assert done.code == 2
    assert "no longer its own teacher" in done.err


def test_nothing_is_written_when_it_is_interrupted(run, base, tmp_path, monkeypatch):
    import linearize.select_measure

    monkeypatch.setattr(linearize.select_measure.Bench, "sweep", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    done = run("select", base, "-o", tmp_path / "s.json", "--budget", "1", *RECIPE, *SMALL)
    assert done.code == 130
    assert "interrupted; to run it again: linearize select" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_selection_in_a_recipe_and_in_memory(base, selection, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f'feature_map: elu1\nwindow: 4\nkeep_softmax: "@{selection}"\n')
    assert linearize.load_recipe(recipe).keep_softmax == f"@{selection}"
    model = linearize.linearize_(linearize.load(base), recipe)
    assert model.config.linearize["recipe"]["keep_softmax"] == [1, 3]
    report = linearize.inspect(base, recipe=recipe)
    assert report["recipe"]["keep_softmax"] == [1, 3]
    assert report["notes"] == []
    others = linearize.inspect(base, recipe=recipe, overrides={"window": 5})["notes"]
    assert others == [f"{selection} was measured with other mixers, and what a layer loses depends on its mixer"]


def test_layers_that_a_selection_keeps_are_no_longer_named(base, selection, tmp_path):
    """What config.json records can be converted with again."""
    blocks = {"0, 3": {"mixer": "linear"}, "1": {"mixer": "gla"}, "2": {"mixer": "retnet"}}
    first = linearize.convert(base, tmp_path / "a", recipe={"layers": blocks, "keep_softmax": f"@{selection}"})
    assert list(first.plan.recipe.layers) == ["0", "2"]
    recorded = json.loads((tmp_path / "a" / "config.json").read_text())["linearize"]["recipe"]
    again = linearize.convert(base, tmp_path / "b", recipe=recorded)
    assert [layer.get("mixer") for layer in again.plan.layers] == [layer.get("mixer") for layer in first.plan.layers]


def test_a_selection_that_does_not_fit_is_refused(run, base, selection, tmp_path):
    def refusal(change, model=base):
        document = json.loads(selection.read_text())
        change(document)
        (tmp_path / "bad.json").write_text(json.dumps(document))
        done = run("convert", model, "-o", tmp_path / "out", "--keep-softmax", f"@{tmp_path / 'bad.json'}")
        assert done.code == 2
        assert not (tmp_path / "out").exists()
        return done.err

    other = save(tmp_path / "other", num_hidden_layers=3)
    heads = save(tmp_path / "heads", num_key_value_heads=4)
    assert "of 4 layers with attention (0-3), and this one has 3 layers" in refusal(lambda one: None, other)
    assert "heads have other shapes" in refusal(lambda one: None, heads)
    assert "'gpt2', and this one is of type 'llama'" in refusal(
        lambda one: one["architecture"].update(model_type="gpt2")
    )
    assert "chooses layers 9" in refusal(lambda one: one["chosen"].update(layers=[1, 9]))
    assert "version 3" in refusal(lambda one: one.update(version=3))
    assert "isn't a selection" in refusal(lambda one: one.update(chosen=[1]))
    assert "isn't a selection" in refusal(lambda one: one["chosen"].update(layers=["1"]))
    for heads in ({"0": []}, {"0": 1}, {"first": [0]}, {"00": [0]}, {"0": [-1]}, {"1": [0]}, [0]):
        assert "isn't a selection" in refusal(lambda one, heads=heads: one["chosen"].update(heads=heads))
    assert "chooses layers 9" in refusal(lambda one: one["chosen"].update(heads={"9": [0]}))
    for keep in ([7], [0, 1], [0, 0]):
        said = refusal(lambda one, keep=keep: one["chosen"].update(heads={"0": keep}))
        assert f"bad.json chooses heads {keep} of layer 0, which has 2 key/value heads" in said
    assert "isn't a selection" in refusal(lambda one: one.pop("architecture"))
    assert "isn't a selection" in refusal(lambda one: one.update(recipe=None))
    for text, message in (("{", "isn't JSON"), ("[]", "isn't a selection")):
        (tmp_path / "bad.json").write_text(text)
        assert message in run("convert", base, "-o", tmp_path / "out", "--keep-softmax", f"@{tmp_path}/bad.json").err
    for name, said in (("nowhere.json", "can't be read"), ("~nobody-of-that-name/s.json", "user who doesn't exist")):
        assert said in run("convert", base, "-o", tmp_path / "out", "--keep-softmax", f"@{name}").err


def test_auto_selects_while_it_converts(run, base, tmp_path, monkeypatch):
    """The same folder each time; a dry run says what would be measured."""
    import linearize.select_samples

    draw = linearize.select_samples.draw
    small = {"samples": 2, "length": 256, "pairs": [4]}
    monkeypatch.setattr(linearize.select_samples, "draw", lambda *args, **options: draw(*args, **options | small))
    options = [base, *RECIPE, "--keep-softmax", "auto:2"]
    done = run("convert", *options, "-o", tmp_path / "a", "--dry-run")
    assert done.code == 0, done.err
    assert "note: which layers auto:2 keeps is measured when it is converted, with the whole model in mem" in done.out
    listed, measured = (linearize.inspect(base, overrides={"keep_softmax": spec}) for spec in ([0, 2], "auto:2"))
    assert measured["memory_bytes"] > listed["memory_bytes"] + 4 * listed["parameters"]
    assert not (tmp_path / "a").exists()
    for out in ("a", "b"):
        done = run("convert", *options, "-o", tmp_path / out, "--json")
        assert done.code == 0, done.err
    chosen = json.loads((tmp_path / "a" / IN_MODEL).read_text())
    block = json.loads((tmp_path / "a" / "config.json").read_text())["linearize"]
    assert block["recipe"]["keep_softmax"] == chosen["chosen"]["layers"]
    assert {layer["because"] for layer in block["layers"] if not layer.get("mixer")} == {
        f"chosen by linearize select for score {chosen['score']}, budget 2 ({IN_MODEL})"
    }
    assert done.json["plan"]["recipe"]["keep_softmax"] == chosen["chosen"]["layers"]
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    assert run("verify", tmp_path / "a").code == 0
    assert done.json["notes"] == chosen["notes"] != []
    (tmp_path / "a" / MANIFEST).unlink()  # as where a model was saved over it
    assert run("convert", base, "-o", tmp_path / "a", *RECIPE, "--force").code == 0
    with pytest.raises(linearize.errors.UsageError, match=r"auto:2 has to measure .*\"@selection\.json"):
        linearize.linearize_(linearize.load(base), keep_softmax="auto:2")
    done = run("convert", base, "-o", tmp_path / "c", "--keep-softmax", "auto:4")
    assert done.code == 2
    assert "so nothing is left to convert" in done.err
