"""Several mixers in one model: the key `layers` of a recipe, from its file to the converted model."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from linearize_evals.outcome import _window
from transformers import AutoModelForCausalLM

import linearize
from linearize.console import alike
from linearize.errors import UsageError
from linearize.inspection import inspect
from linearize.recipe import load_recipe
from linearize.training.card import _limits
from linearize.verification import judge
from tests.checkpoints import save
from tests.modeling.models import greedy, logits, tiny_llama, tokens
from tests.unit.test_plan import plan_of

TWO = "mixer: window\nwindow: 8\nlayers:\n  2-9: {mixer: linear, feature_map: elu1}\n  12,10: {window: 16}\n"


def problem(path, **overrides) -> str:
    with pytest.raises(UsageError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_each_block_stands_alone_and_has_one_normal_form(write):
    recipe = load_recipe(write(TWO))
    assert list(recipe.layers) == ["2-9", "10, 12"]
    assert recipe.mixer_spec(5) == {"name": "linear", "feature_map": "elu1", "feature_map_options": {}}
    # What the block leaves out is the mixer's default, not the recipe's value.
    assert recipe.mixer_spec(12) == load_recipe({"window": 16}).mixer_spec()
    assert (
        recipe.mixer_spec(11) == recipe.mixer_spec(0) == recipe.mixer_spec() == load_recipe({"window": 8}).mixer_spec()
    )
    assert load_recipe(recipe.to_dict()) == recipe == pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe)
    assert load_recipe(json.loads(json.dumps(recipe.conversion()))) == recipe
    assert load_recipe({"layers": {7: {"mixer": "linear"}}}).mixer_spec(7)["name"] == "linear"
    assert "layers" not in load_recipe().to_dict()


def test_all_problems_of_all_blocks_are_reported_at_once_each_with_its_line(write):
    text = problem(
        write(
            "window: 0\n"
            "layers:\n"
            "  2-9: {mixer: linear, window: 4, windw: 3}\n"
            "  9:\n"
            "    sinks: -1\n"
            "    feature_map_options: {featurs: 3}\n"
            "  x: {mixer: lineer}\n"
            "  5-3: 7\n"
            "  30: {mixer_options: {decay: 1}}\n"
        )
    )
    for said in (
        "has 11 problems",
        "  window (line 1): must be at least 1, not 0",
        "layers.2-9.window (line 3): mixer 'linear' has no window; use mixer: window, or leave window out",
        "unknown key 'layers.2-9.windw' (line 3); recipes allow only documented keys; did you mean 'window'?",
        "layers.9 (line 4): layer 9 stands in '2-9' already; name it once",
        "layers.9.sinks (line 5): must be at least 0, not -1",
        "layers.9.feature_map_options.featurs (line 6): feature_map 'favor' has no option 'featurs'",
        "layers.x (line 7): names no layers; write numbers and ranges, such as 2-9 or 10, 12",
        "layers.x.mixer (line 7): unknown mixer 'lineer'",
        "layers.5-3 (line 8): names no layers",
        "layers.5-3 (line 8): must be a mapping, not 7",
        "layers.30.mixer_options.decay (line 9): mixer 'window' has no option 'decay'",
    ):
        assert said in text, text


@pytest.mark.parametrize("layers", ["[1]", "3", "~", "{-1: {}}", "{'': {}}", "{2-: {}}", "{1.5: {}}", "{true: {}}"])
def test_what_names_no_layers_is_refused(write, layers):
    assert "layers" in problem(write(f"layers: {layers}\n"))


def test_a_short_key_does_not_ask_for_much(write):
    """Neither time nor memory, whoever wrote the recipe."""
    assert load_recipe({"layers": {"0-9999": {}}}).named(9999) == "0-9999"
    assert "names no layers" in problem({"layers": {",".join(["0-9999"] * 100_000): {}}})


def test_overrides_reach_into_blocks(write):
    file = write(TWO)
    recipe = load_recipe(file, {"layers.2-9.mixer": "window", "layers.10, 12.sinks": "0", "layers.0.mixer": "linear"})
    # The feature map belongs to both mixers, and stays.
    assert recipe.mixer_spec(2) == load_recipe({"feature_map": "elu1"}).mixer_spec()
    assert recipe.mixer_spec(10) == load_recipe({"window": 16, "sinks": 0}).mixer_spec()
    assert recipe.mixer_spec(0) == load_recipe({"mixer": "linear"}).mixer_spec()
    # Another mixer or map drops what belonged to the old one, in its block alone.
    changed = load_recipe(file, {"layers.12,10.mixer": "linear", "mixer": "linear"})
    assert changed.mixer_spec(12) == changed.mixer_spec(0) == load_recipe({"mixer": "linear"}).mixer_spec()
    assert changed.mixer_spec(3) == load_recipe(file).mixer_spec(3)
    options = load_recipe(file, {"layers.2-9.feature_map": "favor", "layers.2-9.feature_map_options.features": "16"})
    assert options.mixer_spec(2)["feature_map_options"]["features"] == 16
    assert load_recipe(file, {"layers": {}}).layers == {}
    assert load_recipe(file, {"layers.2-9": "{mixer: window}"}).mixer_spec(2)["window"] == 64
    assert "layers.2-9.mixr' (an override)" in problem(file, **{"layers.2-9.mixr": "linear"})
    assert "layer 3 stands in '2-9' already" in problem(file, **{"layers.3.mixer": "linear"})
    assert "layers.2-9 (an override): must be a mapping, not 4" in problem(file, **{"layers.2-9": "4"})


def test_the_plan_gives_each_layer_its_mixer_and_the_reason():
    plan = plan_of("llama", layers={"1": {"mixer": "linear"}})
    assert [layer["type"] for layer in plan.layers] == ["hybrid_sliding", "linear_attention", "hybrid_sliding"]
    assert [layer["because"] for layer in plan.layers] == [
        "full attention, and keep_softmax doesn't keep it",
        "full attention, and named by layers: 1",
        "full attention, and keep_softmax doesn't keep it",
    ]
    assert {name.partition("linearize.")[2] for name in plan.new_tensors if ".1." in name} == {"feature_map.omega"}
    assert [numbers for numbers, _, _ in alike(plan.layers)] == [[0, 2], [1]]


def test_layers_that_are_not_converted_can_not_be_named():
    with pytest.raises(UsageError) as caught:
        plan_of("llama", layers={"1-4": {}, "7": {}}, keep_softmax="1")
    said = str(caught.value)
    assert "layers.1-4 names layers 3-4; the model's layers with attention are 0-2" in said
    assert "layers.1-4 names layer 1, which stays as it is: kept by keep_softmax: 1" in said
    assert "layers.7 names layer 7;" in said
    with pytest.raises(UsageError, match=r"names layer 0, which stays as it is: sliding-window attention"):
        plan_of("gemma2", layers={"0": {}})


def test_a_mixed_model_is_converted_inspected_verified_and_loaded(tmp_path):
    base = save(tmp_path / "m")
    overrides = {"window": 4, "layers": {"1": {"mixer": "linear", "feature_map": "hedgehog"}}}
    expected = inspect(base, overrides=overrides)
    linearize.convert(base, tmp_path / "out", overrides=overrides)
    report = inspect(tmp_path / "out")
    assert report["recipe"] == load_recipe(None, overrides).conversion()
    for key in ("layers", "cache", "new_parameters"):
        assert report[key] == expected[key]
    names = [row["mixer"]["name"] for row in report["layers"]]
    assert names == ["window", "linear", "window"]
    assert len({row["state_bytes"] for row in report["layers"]}) == 2
    assert report["cache"][0]["after_bytes"] == sum(row["state_bytes"] for row in report["layers"])
    assert not judge(tmp_path / "out").faults
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    mixers = [type(layer.self_attn.linearize).__name__ for layer in model.model.layers]
    assert mixers == ["WindowMixer", "LinearMixer", "WindowMixer"]


def test_a_layer_that_a_selection_keeps_may_be_named():
    """Which ones it keeps isn't known to who writes the recipe."""
    layers = plan_of("llama", layers={"0-2": {"mixer": "linear"}}, keep_softmax="auto:34%").layers
    assert sorted(layer["type"] for layer in layers) == ["full_attention", "linear_attention", "linear_attention"]


OVER = {"mixer_options": {"over": "linear"}}
DEEP = {"mixer_options": {"over": "window", "over_options": {"window": 9}}}


@pytest.mark.parametrize(
    ("overrides", "window", "words"),
    [
        ({"window": 4}, 4, "In converted layers, tokens older than the window (4 tokens) reach"),
        ({"window": 4, "layers": {"1": {"mixer": "windowed", "window": 4, **OVER}}}, 4, "older than the window (4 tok"),
        ({"window": 4, "layers": {"1": {"window": 5}}}, None, "tokens older than the window (4, 5 tokens) reach"),
        ({"window": 4, "layers": {"1": {"mixer": "linear"}}}, None, "earlier tokens (with a window, tokens older than"),
        ({"mixer": "windowed", "window": 4, **DEEP}, None, "tokens older than the window (4 tokens)"),
        ({"mixer": "linear"}, None, "In converted layers, earlier tokens reach"),
        ({"mixer": "heads"}, None, "In converted heads of converted layers, earlier tokens reach"),
    ],
)
def test_a_window_is_spoken_of_only_where_every_layer_has_it(overrides, window, words):
    """By the evaluation: answers within it are taken to be seen exactly. By the model card: what is older is lost."""
    layers = plan_of("llama", **overrides).layers
    assert _window(layers) == window
    assert words in next(iter(_limits({"layers": layers}, None)))


def test_a_mixed_model_decodes_as_without_a_cache():
    model = linearize.linearize_(tiny_llama(), layers={"0": {"mixer": "linear"}, "2": {"window": 5}}, window=3)
    ids = tokens(2, 30)
    assert logits(model, ids).isfinite().all()
    expected = greedy(model, ids, use_cache=False)
    assert greedy(model, ids) == greedy(model, ids, cache_implementation="static") == expected
