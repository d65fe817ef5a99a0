"""`linearize bench`: what it measures, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

import linearize
from linearize import bench
from linearize.training.memory import peak_memory, reset_peak


@pytest.fixture(scope="module")
def converted(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "c"
    linearize.convert(model, out, overrides={"feature_map": "hedgehog", "window": 8, "keep_softmax": "none"})
    return out


def test_a_converted_model_is_measured_beside_itself_under_softmax(run, converted, tmp_path):
    done = run("bench", converted, "--lengths", "96,24", "--new-tokens", "3", "--rounds", "2", "--dtype", "float32",
               "-o", tmp_path / "b", "--json")  # fmt: skip
    assert done.code == 0, done.err
    softmax, own = done.json["models"]
    assert (softmax["attention"], own["attention"]) == ("softmax", "converted")
    assert [row["tokens"] for row in own["rows"]] == [24, 96]
    config = linearize.load(converted).config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size
    per_token //= config.num_attention_heads
    # The last token that was decoded isn't in the cache.
    assert [row["cache_bytes"] for row in softmax["rows"]] == [(24 + 3) * per_token, (96 + 3) * per_token]
    assert own["rows"][0]["cache_bytes"] == own["rows"][1]["cache_bytes"] > 0
    for row in softmax["rows"] + own["rows"]:
        assert row["prefill_tokens_per_second"] > 0
        assert row["decode_tokens_per_second"] == pytest.approx(1000 / row["decode_ms"])
    ratio = done.json["ratios"][1][1]["decode_tokens_per_second"]
    assert ratio == pytest.approx(softmax["rows"][1]["decode_ms"] / own["rows"][1]["decode_ms"])
    assert json.loads((tmp_path / "b" / "bench.json").read_text())["models"] == done.json["models"]
    assert (tmp_path / "b" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_times_are_medians_in_turns(monkeypatch, converted):
    """Of every token of every round; a slow first token or round doesn't count."""
    seconds = iter([*[0.0] * 2, *(float(n) for n in (1, 9, 3, 5, 2, 9, 7, 7))])
    order = []

    def measure(one, length, new_tokens, batch, device):
        order.append((one.attention, length))
        value = next(seconds)
        return bench.Sample(value, [value, 2 * value, 100.0][:new_tokens], 10, None)

    monkeypatch.setattr(bench, "_measure", measure)
    document = bench.bench([converted], lengths=[16, 32], new_tokens=2, rounds=2, batch=3, dtype="float32")
    assert order[2:6] == [("softmax", 16), ("converted", 16)] * 2
    first = document["models"][0]["rows"][0]  # prefills of 1 and 3 s; tokens of 1, 2, 3 and 6 s
    assert first["prefill_tokens_per_second"] == 3 * 16 / 2
    assert first["decode_ms"] == 2500
    assert first["peak_bytes"] is None


def test_the_peak_is_what_was_added_while_it_ran():
    """Not what was there, or had been there before."""
    cpu = torch.device("cpu")
    torch.ones(300 << 20, dtype=torch.uint8)
    if not reset_peak(cpu):
        pytest.skip("this system doesn't let a process reset its peak")
    before = peak_memory(cpu)
    held = torch.ones(64 << 20, dtype=torch.uint8)
    del held
    assert 60e6 < peak_memory(cpu) - before < 200e6


def test_models_are_compared_with_the_first(run, model, converted):
    done = run("bench", model, converted, "--alone", "--lengths", "16", "--new-tokens", "1", "--rounds", "1")
    assert done.code == 0, done.err
    assert done.out.count("softmax") == 1
    assert "x)" in done.out
    assert "first model" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "many"], "--lengths takes whole numbers"),
        (["--lengths", "0"], "--lengths can't be 0"),
        (["--rounds", "0"], "--rounds can't be 0"),
        (["--new-tokens", "-1"], "--new-tokens can't be -1"),
    ],
)
def test_wrong_options_are_named_before_a_model_is_read(run, arguments, message):
    done = run("bench", "no/such/model", *arguments)
    assert done.code == 2
    assert message in done.err


def test_a_folder_that_can_not_be_written_is_named_before_a_model_is_read(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        done = run("bench", "no/such/model", "-o", out)
        assert done.code == 2
        assert f"{tmp_path / 'file'} isn't one that can be written to" in done.err


def test_a_missing_model_is_named(run, tmp_path):
    done = run("bench", tmp_path / "nothing")
    assert done.code == 3
    assert "nothing" in done.err


def test_more_tokens_than_a_map_takes_are_no_bug(run, model, tmp_path):
    options = {"mixer": "linear", "feature_map": "cosformer", "feature_map_options": {"length": 20}}
    linearize.convert(model, tmp_path / "c", overrides=options)
    done = run("bench", tmp_path / "c", "--lengths", "32", "--rounds", "1", "--device", "cpu")
    assert done.code == 2
    assert "a sequence of 32 tokens is too long for this feature map, which takes 20. Give it shorter ones" in done.err
