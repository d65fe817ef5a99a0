"""`heads`: kept heads are softmax attention, the others the inner mixer alone; and what grows is said to grow."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from linearize import linearize_
from linearize.errors import UsageError
from linearize.inspection import inspect
from linearize.mixers import MIXERS, build_mixer, state_bytes
from linearize.mixers.heads import keeping_heads
from linearize.recipe import load_recipe
from tests.checkpoints import save
from tests.mixers.specs import SPECS, in_pieces, inputs_of, mixer_of, run, shape_of
from tests.mixers.test_windowed import softmax_loop

SAME = {"atol": 1e-10, "rtol": 1e-10}


@pytest.mark.parametrize("keep", [[0], [2, 1], [0, 1, 3]])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_groups_are_kept_whole_and_the_others_mixed_alone(keep, softcap):
    shape = dataclasses.replace(shape_of(8, 4, 8, 6), softcap=softcap)
    options = {"over": "linear", "over_options": {"feature_map": "hedgehog"}}
    mixer, x = mixer_of({"name": "heads", "keep": keep, **options}, shape), inputs_of(shape, 20)
    rest = [head for head in range(4) if head not in keep]
    query = [2 * head + i for head in rest for i in (0, 1)]
    expected = softmax_loop(x, shape, 20, 0)
    inner, _ = mixer.inner(x.q[:, :, query], x.k[:, :, rest], x.v[:, :, rest])
    expected[:, :, query] = inner.detach()
    torch.testing.assert_close(run(mixer, x)[0], expected, **SAME)
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(mixer, x, [6, 1, 1, 11, 1]), expected, **SAME)


def test_padding_may_be_anything():
    """It stays in the cache of the kept heads, and takes no part."""
    shape = shape_of()
    mixer = mixer_of({"name": "heads", "over": "linear", "over_options": {"feature_map": "elu1"}}, shape)
    x = inputs_of(shape, 20, batch=1)
    mask = (torch.arange(20) >= 6)[None]
    wild = type(x)(*(tensor.masked_fill(~mask.view(1, 20, *[1] * (tensor.dim() - 2)), torch.nan) for tensor in x))
    alone, _ = run(mixer, x.part(slice(None), slice(6, None)))
    with torch.no_grad():
        for lengths in ([20], [4, 1, 1, 4, 1, 9], [7, *[1] * 13]):
            torch.testing.assert_close(in_pieces(mixer, wild, lengths, mask)[:, 6:], alone, **SAME)


@pytest.mark.parametrize("keep", [[], [2], [-1], [0, 0], [0, 1], [True], ["0"]])
def test_what_can_not_be_kept_is_refused(keep):
    with pytest.raises(UsageError, match="can't have keep="):
        build_mixer({"name": "heads", "keep": keep}, shape_of(), layer=0, seed=0)


def test_a_state_that_grows_stands_under_no_other_mixer():
    growing = [name for name, entry in MIXERS.items() if getattr(entry.load(), "grows", False)]
    assert growing == ["heads"]
    with pytest.raises(UsageError, match="'heads', whose state grows"):
        build_mixer({"name": "windowed", "over": "heads"}, shape_of(), layer=0, seed=0)
    with pytest.raises(UsageError, match="can't stand over itself"):
        load_recipe({"mixer": "heads", "mixer_options": {"over": "heads"}})


@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith("heads")])
def test_a_new_mixer_is_the_one_whose_heads_are_kept_for_a_while(name):
    """Whatever it starts from: draws, and what is spread over a layer's heads. Also padded and packed."""
    shape, spec = shape_of(8, 4, 8, 8), SPECS[name]
    x, mask = inputs_of(shape, 80), torch.ones(2, 80, dtype=torch.bool)
    mask[1, :3] = False
    options = {key: value for key, value in spec.items() if key != "name"}
    keep, over = [1, 0], {"over": spec["name"], "over_options": options}
    mixer, whole = (
        build_mixer(each, shape, layer=2, seed=1).double() for each in ({"name": "heads", "keep": keep, **over}, spec)
    )
    one_row = x.part(slice(1))
    calls = ((x, {"mask": mask}), (one_row, {"cu_seqlens": torch.tensor([0, 5, 5, 80])}))
    for inputs, options in calls:
        expected = run(mixer, inputs, **options)[0]
        with keeping_heads(whole, shape, keep):
            torch.testing.assert_close(run(whole, inputs, **options)[0], expected, **SAME)
        assert not torch.allclose(run(whole, inputs, **options)[0], expected)


def test_heads_that_are_kept_for_a_while_take_no_state_and_leave_no_trace():
    shape = shape_of()
    mixer, x = mixer_of(SPECS["gla"], shape), inputs_of(shape, 5)
    with pytest.raises(RuntimeError, match="use_cache=False"), keeping_heads(mixer, shape, [0]):
        run(mixer, x, return_state=True)
    assert not mixer._forward_hooks
    with pytest.raises(UsageError, match=r"keep=\[0, 1\] in a layer of 2"), keeping_heads(mixer, shape, [0, 1]):
        pass


def test_its_state_can_be_sized_at_lengths_that_its_map_refuses():
    options = {"feature_map": "cosformer", "feature_map_options": {"length": 100}}
    spec = {"name": "heads", "over": "linear", "over_options": options}
    sizes = [state_bytes(spec, shape_of(), tokens=tokens) for tokens in (100, 101, 1000)]
    assert sizes[1] - sizes[0] == (16 + 24) * 2 + 1
    assert sizes[2] - sizes[0] == 900 * (sizes[1] - sizes[0])


def test_inspect_counts_the_kept_heads_at_every_length(tmp_path):
    """Of 2 key/value heads of 32 dims one stays, in bf16; the other one's state is constant."""
    options = {"over": "linear", "over_options": {"feature_map": "elu1"}}
    report = inspect(save(tmp_path / "m"), overrides={"mixer": "heads", "mixer_options": options})
    inner = 4 * (32 * 32 + 32 + 1)
    per_token = (32 + 32) * 2 + 1
    assert [row["grows"] for row in report["layers"]] == [True] * 3
    assert [row["state_bytes"] for row in report["layers"]] == [inner + per_token] * 3
    assert [row["after_bytes"] for row in report["cache"]] == [
        3 * (inner + row["tokens"] * per_token) for row in report["cache"]
    ]


def test_heads_of_sliding_layers_can_not_be_kept(tmp_path):
    """They would see more than their window."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "sliding_window": 4}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    recipe = {"mixer": "heads", "convert_sliding": True}
    with pytest.raises(UsageError, match="layer 0 has sliding-window attention"):
        linearize_(MistralForCausalLM(config), recipe)
