"""`windowed` against its formula, and the options of the mixer that it stands over."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import linearize
from linearize.console import mixer_text
from linearize.errors import UsageError
from linearize.mixers import build_mixer, state_bytes
from linearize.recipe import load_recipe
from tests.mixers.specs import inputs_of, mixer_of, run, shape_of
from tests.modeling.models import logits, tiny_llama, tokens


def softmax_loop(x, shape, window, sinks):
    """(B, T, H, Dv): softmax over the last `window` tokens and the first `sinks`."""
    batch, length, heads, _ = x.q.shape
    out = torch.zeros(batch, length, heads, x.v.shape[3], dtype=torch.float64)
    for t in range(length):
        seen = [j for j in range(t + 1) if j > t - window or j < sinks]
        for h in range(heads):
            g = h // (heads // x.k.shape[2])
            score = shape.scaling * torch.einsum("bd,bjd->bj", x.q[:, t, h], x.k[:, seen, g])
            if shape.softcap:
                score = shape.softcap * torch.tanh(score / shape.softcap)
            out[:, t, h] = torch.einsum("bj,bjd->bd", score.exp() / score.exp().sum(1, True), x.v[:, seen, g])
    return out


@pytest.mark.parametrize("over", ["linear", "gla", "deltanet"])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_it_is_a_window_and_the_inner_mixer_weighed_by_the_gate(over, softcap):
    shape = dataclasses.replace(shape_of(), softcap=softcap)
    mixer, x = mixer_of({"name": "windowed", "over": over, "window": 5, "sinks": 2}, shape), inputs_of(shape, 40)
    with torch.no_grad():
        mixer.gate.copy_(torch.tensor([-1.0, 0.0, 2.0, 50.0]))
    near, inner = softmax_loop(x, shape, 5, 2), run(mixer.inner, x)[0]
    a = (1 / (1 + (-mixer.gate).exp()))[:, None]
    torch.testing.assert_close(run(mixer, x)[0], a * near + (1 - a) * inner, atol=1e-10, rtol=1e-10)
    mixer.ablated = "linear"
    torch.testing.assert_close(run(mixer, x)[0], near, atol=1e-10, rtol=1e-10)
    mixer.ablated = "window"
    torch.testing.assert_close(run(mixer, x)[0], inner, atol=0, rtol=0)


def test_the_state_is_that_of_the_window_and_of_the_inner_mixer():
    shape, spec = shape_of(), {"name": "windowed", "over": "gla", "window": 5, "sinks": 2}
    near = 4 * (5 + 2) * 2 * (16 + 24) + 5 + 8 * 2 + 8
    assert state_bytes(spec, shape, dtype=torch.float32) == near + state_bytes({"name": "gla"}, shape)


def test_calibration_reaches_the_inner_mixer():
    shape = shape_of()
    distance = torch.tensor([10.0, 10.0, 300.0, 300.0])
    mixer = build_mixer({"name": "windowed", "over": "gla"}, shape, layer=0, seed=0)
    alone = build_mixer({"name": "gla"}, shape, layer=0, seed=0)
    mixer.start(distance)
    alone.start(distance)
    torch.testing.assert_close(mixer.inner.decay.bias, alone.decay.bias)
    build_mixer({"name": "windowed", "over": "linear"}, shape, layer=0, seed=0).start(distance)


def test_options_of_the_inner_mixer_are_checked_and_filled_in():
    given = {"over": "linear", "over_options": {"feature_map": "favor", "feature_map_options": {"features": 8}}}
    recipe = load_recipe({"mixer": "windowed", "window": 8, "mixer_options": given})
    assert recipe.mixer_spec()["over_options"] == {
        "feature_map": "favor",
        "feature_map_options": {"features": 8, "orthogonal": True, "hyperbolic": True},
    }
    assert load_recipe(recipe.to_dict()) == recipe
    assert mixer_text(recipe.mixer_spec()).startswith("windowed 8, 4 sinks, over linear + favor(features=8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"over": "lineer"}, "mixer_options.over: unknown mixer 'lineer'"),
        ({"over": "windowed"}, "mixer_options.over: mixer 'windowed' can't stand over itself"),
        ({"over": 3}, "mixer_options.over: must be like its default"),
        (
            {"over": "gla", "over_options": {"rnk": 3}},
            "mixer_options.over_options.rnk: mixer 'gla' has no option 'rnk'",
        ),
        ({"over": "gla", "over_options": {"rank": "x"}}, "mixer_options.over_options.rank: must be like its default"),
        ({"over": "window", "over_options": {"window": 0}}, "mixer_options.over_options.window: must be at least 1"),
        ({"over": "linear", "over_options": {"feature_map": "favr"}}, "over_options.feature_map: unknown feature_map"),
        (
            {"over": "linear", "over_options": {"feature_map_options": {"x": 1}}},
            "mixer_options.over_options.feature_map_options.x: feature_map 'favor' has no option 'x'",
        ),
    ],
)
def test_wrong_options_of_the_inner_mixer_are_named(options, said):
    with pytest.raises(UsageError) as caught:
        load_recipe({"mixer": "windowed", "mixer_options": options})
    assert said in str(caught.value)
    with pytest.raises(UsageError) as caught:
        load_recipe({"layers": {"3": {"mixer": "windowed", "mixer_options": options}}})
    assert said in str(caught.value)
    assert "layers.3.mixer_options.over" in str(caught.value)


@pytest.mark.parametrize("over", ["windowed", "lstm"])
def test_what_can_not_stand_there_is_refused_when_it_is_built(over):
    with pytest.raises(UsageError, match=over):
        build_mixer({"name": "windowed", "over": over}, shape_of(), layer=0, seed=0)


def test_its_branches_can_be_ablated_in_a_model():
    options = {"over": "linear", "over_options": {"feature_map": "elu1"}}
    model = linearize.linearize_(tiny_llama(), mixer="windowed", window=4, mixer_options=options)
    assert linearize.branches(model) == {"linear", "window"}
    ids = tokens(1, 30)
    whole = logits(model, ids)
    with linearize.ablate(model, "window"):
        without = logits(model, ids)
    assert (whole - without).abs().max() > 1e-4
    torch.testing.assert_close(logits(model, ids), whole, atol=0, rtol=0)
