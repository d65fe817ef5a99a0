"""The recipe schema: every problem is found, named with its line, and mended by the message."""

from __future__ import annotations

import copy
import pickle

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.errors import UsageError
from linearize.mixers.registry import FEATURE_MAPS, MIXERS, register_mixer
from linearize.recipe import Recipe, load_recipe, shipped_recipes


def problem(path, **overrides) -> str:
    with pytest.raises(UsageError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_default_is_favor_with_a_window_and_sinks_in_every_layer():
    recipe = load_recipe()
    assert recipe.mixer_spec() == {
        "name": "window",
        "feature_map": "favor",
        "feature_map_options": {"features": 256, "orthogonal": True, "hyperbolic": True},
        "window": 64,
        "sinks": 4,
    }
    assert recipe.keep_softmax == "none"
    assert recipe == Recipe()


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid_explained_and_round_trip(name):
    recipe = load_recipe(name)
    assert load_recipe(recipe.to_dict()) == recipe
    assert load_recipe(recipe) == recipe
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert "arXiv:" in text
    if recipe.train:
        assert f"# Run:      linearize run {name} -o OUT\n" in text
    else:
        command = "linearize convert MODEL -o OUT" + ("" if name == "default" else f" --recipe {name}")
        assert f"# Run:   {command}\n" in text


def test_unknown_key_names_its_line_and_the_key_that_was_meant(write):
    text = problem(write("version: 1\nmixer: window\n\nfeaturemap: hedgehog\n"))
    assert "unknown key 'featuremap' (line 4); recipes allow only documented keys" in text
    assert "did you mean 'feature_map'?" in text


def test_all_problems_are_reported_at_once_each_with_its_line(write):
    text = problem(write("mixer: linear\nwindow: 3\nsinks: -1\nfoo: 2\nfeature_map: favr\nkeep_softmax: 1,1\n"))
    assert "5 problems" in text
    for line in range(2, 7):
        assert f"(line {line})" in text


def test_a_feature_map_given_as_mixer_is_recognised(write):
    text = problem(write("mixer: hedge-hog\n"))
    assert "unknown mixer 'hedge-hog'" in text
    assert "did you mean 'hedgehog'" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mixer: linear\nwindow: 64\n", "use mixer: window"),
        ("mixer: linear\nsinks: 0\n", "use mixer: window"),
        ("window: 0\n", "at least 1, not 0"),
        ("sinks: -1\n", "at least 0, not -1"),
        ("window: '64'\n", "must be an integer, not '64'"),
        ("window: true\n", "must be an integer, not True"),
        ("window: 64.0\n", "must be an integer, not 64.0"),
        ("seed: -1\n", "at least 0"),
        ("version: 2\n", "reads version 1, not 2"),
        ("convert_sliding: 1\n", "true or false"),
        ("mixer: [window]\n", "must be a name"),
        ("feature_map: favor\nfeature_map_options: 3\n", "must be a mapping"),
        ("feature_map: favor\nfeature_map_options:\n  featurs: 3\n", "feature_map_options.featurs (line 3)"),
        ("feature_map: favor\nfeature_map_options: {features: many}\n", "like its default 256"),
        ("feature_map: favor\nfeature_map_options: {orthogonal: 1}\n", "like its default True"),
        ("feature_map: elu1\nfeature_map_options: {features: 3}\n", "has no option 'features'"),
        ("mixer_options: {decay: 1}\n", "has no option 'decay'"),
        ("window: 64\nwindow: 65\n", "key 'window' (line 2) is given already on line 1"),
        ("window: [1\n", "not valid YAML"),
        ("seed: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("- window\n", "must be a mapping"),
        ("{1: 2}\n", "unknown key '1'"),
    ],
)
def test_bad_recipes(write, text, said):
    assert said in problem(write(text))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("none", "none"),
        ("[]", "none"),
        ("7", (7,)),
        ("15, 0,7", (0, 7, 15)),
        ("[3, 1]", (1, 3)),
        ("every:4", "every:4"),
        ("25%", "25%"),
        ("12.5%", "12.5%"),
        ("auto:25%", "auto:25%"),
        ("auto:3", "auto:3"),
        ('"@my selection.json"', "@my selection.json"),
    ],
)
def test_keep_softmax_forms(write, text, normal):
    assert load_recipe(write(f"keep_softmax: {text}\n")).keep_softmax == normal
    assert load_recipe(None, {"keep_softmax": text}).keep_softmax == normal


@pytest.mark.parametrize(
    "text", ["every:0", "every:x", "0%", "101%", "-1", "1,,2", "[1, 1]", "[true]", "x", "1.5", "~", "{a: 1}"]
)
def test_keep_softmax_refuses(write, text):
    assert "keep_softmax" in problem(write(f"keep_softmax: {text}\n"))


@pytest.mark.parametrize("text", ["auto", "auto:0", "auto:100%", "auto:every:4", '"@"'])
def test_keep_softmax_auto_needs_a_budget(write, text):
    assert "auto:25% or @selection.json" in problem(write(f"keep_softmax: {text}\n"))


def test_a_file_of_layers_needs_no_quotes_where_nothing_else_is_yaml():
    assert load_recipe(None, {"keep_softmax": "@a: b.json"}).keep_softmax == "@a: b.json"


def test_overrides_are_typed_as_yaml_and_may_be_dotted():
    overrides = {"feature_map": "favor", "feature_map_options.features": "128", "window": "32", "seed": 5}
    recipe = load_recipe(None, overrides)
    assert recipe.feature_map_options == {"features": 128, "orthogonal": True, "hyperbolic": True}
    assert (recipe.window, recipe.seed) == (32, 5)


def test_an_override_of_the_mixer_drops_what_belonged_to_the_old_one(write):
    file = write("mixer: window\nwindow: 128\nfeature_map: favor\nfeature_map_options: {features: 64}\n")
    recipe = load_recipe(file, {"mixer": "linear"})
    assert recipe.mixer_spec() == {
        "name": "linear",
        "feature_map": "favor",
        "feature_map_options": {"features": 64, "orthogonal": True, "hyperbolic": True},
    }
    assert load_recipe(file, {"feature_map": "elu1"}).feature_map_options == {}
    # What the user asks for in the same breath is not dropped.
    assert "mixer 'linear' has no window" in problem(file, mixer="linear", window=3)


def test_a_feature_map_stays_where_the_new_mixer_begins_with_the_same_one():
    """Those that begin with another one may not take it."""
    named = {"feature_map": "taylor", "feature_map_options": {"project_dim": 8}}
    kept = load_recipe({"mixer": "window", **named}, {"mixer": "linear"})
    assert (kept.feature_map, kept.feature_map_options) == ("taylor", {"project_dim": 8})
    for mixer in ("linear_bias", "key_normalised"):
        assert load_recipe({"mixer": "window", **named}, {"mixer": mixer}).feature_map == "hedgehog"
    assert (
        load_recipe({"mixer": "window", **named}, {"mixer": "linear_bias", "feature_map": "t2r"}).feature_map == "t2r"
    )


def test_bad_overrides():
    assert "unknown key 'windw' (an override)" in problem(None, windw="3")
    assert "seed needs a value" in problem(None, seed="")
    assert "not valid YAML" in problem(None, seed="[1")


def test_missing_recipes(tmp_path):
    assert "did you mean 'performer'?" in problem("performr")
    assert "there is no recipe file" in problem(str(tmp_path / "no.yaml"))
    assert "can't read" in problem(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"mixer: \xe9\n")
    assert "not UTF-8" in problem(tmp_path / "latin.yaml")
    with open(tmp_path / "big.yaml", "wb") as file:
        file.truncate(50_000_000)
    assert "too large" in problem(tmp_path / "big.yaml")


def test_recipes_are_checked_however_they_are_made():
    with pytest.raises(UsageError, match="no window"):
        Recipe(mixer="linear", window=3)
    with pytest.raises(UsageError, match="unknown mixer"):
        load_recipe({"mixer": "lstm"})


def test_recipes_are_frozen_and_copy():
    recipe = load_recipe("hybrid-25")
    with pytest.raises(ValueError, match="frozen"):
        recipe.window = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe


def test_a_mixer_of_your_own_takes_its_options_and_no_others():
    class Mine:
        pass

    register_mixer("mine", Mine, paper="none", options={"decay": 0.9, "window": 8})
    try:
        recipe = load_recipe({"mixer": "mine", "mixer_options": {"decay": 1}})
        assert recipe.mixer_spec() == {"name": "mine", "window": 8, "decay": 1}
        assert load_recipe(recipe.to_dict()) == recipe
        with pytest.raises(UsageError, match="has no feature_map"):
            load_recipe({"mixer": "mine", "feature_map": "elu1"})
    finally:
        del MIXERS["mine"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from([*Recipe.model_fields, "featuremap", "x"])
good = st.sampled_from([*MIXERS, *FEATURE_MAPS, "every:3", "25%", 1, 64, True])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(keys, values | good, max_size=5))
def test_any_mapping_is_a_recipe_or_a_usage_error(data):
    text = yaml.safe_dump(data, allow_unicode=True)
    try:
        recipe = load_recipe(yaml.safe_load(text))
    except UsageError:
        return
    assert load_recipe(recipe.to_dict()) == recipe
