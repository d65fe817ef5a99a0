"""What inspect says, against numbers worked out by hand, before and after a conversion."""

from __future__ import annotations

import json

import pytest

from linearize.conversion import convert
from linearize.errors import UsageError
from linearize.inspection import inspect
from tests.checkpoints import save, tree


def test_a_model_before_and_after(tmp_path):
    model = save(tmp_path / "m")
    before = inspect(model, overrides={"keep_softmax": "1", "mixer": "linear", "feature_map": "elu1"})
    assert tree(tmp_path).keys() == {f"m/{name}" for name in tree(model)}
    json.dumps(before)
    assert (before["family"], before["architecture"], before["converted"]) == (
        "llama",
        "LlamaForCausalLM",
        False,
    )
    assert before["num_layers"] == 3
    assert before["weight_bytes"] == 2 * before["parameters"] == before["dtypes"]["BF16"]
    assert [row["becomes"] for row in before["layers"]] == [
        "linear_attention",
        "full_attention",
        "linear_attention",
    ]
    assert (
        before["layers"][0] | {"heads": 4, "key_value_heads": 2, "head_dim": 32, "v_head_dim": 32}
        == before["layers"][0]
    )
    # Softmax: keys and values of 2 heads of 32 dims in bf16, in 3 layers.
    per_token = 2 * (32 + 32) * 2
    assert [row["before_bytes"] for row in before["cache"]] == [3 * t * per_token for t in (1024, 8192, 32768, 131072)]
    # Linear: S, 32 x 32, and z, 32, per key head, in fp32, whatever the length; and the kept layer.
    state = before["layers"][0]["state_bytes"]
    assert 2 * (32 * 32 + 32) * 4 <= state <= 2 * (32 * 32 + 32) * 4 + 64
    assert [row["after_bytes"] for row in before["cache"]] == [
        t * per_token + 2 * state for t in (1024, 8192, 32768, 131072)
    ]

    convert(model, tmp_path / "out", overrides={"keep_softmax": "1", "mixer": "linear", "feature_map": "elu1"})
    after = inspect(tmp_path / "out")
    assert after["converted"]
    for key in (
        "family",
        "architecture",
        "layers",
        "cache",
        "new_parameters",
        "recipe",
        "tied",
        "num_layers",
    ):
        assert after[key] == before[key]


def test_parameters_and_disk(tmp_path):
    report = inspect(save(tmp_path / "m"), overrides={"feature_map": "hedgehog"})
    result = convert(tmp_path / "m", tmp_path / "out", overrides={"feature_map": "hedgehog"})
    assert report["new_parameters"] == result.plan.new_parameters > 0
    assert report["disk"]["bytes_needed"] == result.plan.bytes_needed
    assert report["disk"]["bytes_needed_on_another_disk"] > report["disk"]["bytes_needed"]
    assert report["memory_bytes"] > 500_000_000


def test_a_sliding_cache_stops_growing(tmp_path):
    report = inspect(save(tmp_path / "m", "gemma2"))
    sliding = [row for row in report["layers"] if row["type"] == "sliding_attention"]
    assert len(sliding) == 2
    per_token = 2 * (32 + 32) * 2
    full = [131072 * per_token * 2 + 8 * per_token * 2]
    assert [row["before_bytes"] for row in report["cache"]][-1:] == full
    assert report["cache"][0]["after_bytes"] == report["cache"][-1]["after_bytes"]


def test_a_wrong_recipe(tmp_path):
    with pytest.raises(UsageError):
        inspect(save(tmp_path / "m"), overrides={"keep_softmax": "9"})


def test_a_converted_model_takes_no_recipe_and_loses_no_file(tmp_path):
    convert(save(tmp_path / "m"), tmp_path / "out")
    assert inspect(tmp_path / "out")["notes"] == []
    for options in ({"overrides": {"window": 8}}, {"recipe": "performer"}):
        with pytest.raises(UsageError, match="is converted already"):
            inspect(tmp_path / "out", **options)
