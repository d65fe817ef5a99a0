"""Calibration chooses what a search through every value would, and never what is worse than before."""

from __future__ import annotations

import pytest
import torch

import linearize
from linearize.mixers.window import WindowMixer
from linearize.training.calibrate import calibrate
from tests.modeling.models import converted, tiny_llama, tokens
from tests.training.formulas import attention_of, softmax_attention

GRID = WindowMixer.grid["gate"]
BATCHES = [(tokens(1, 24, seed=seed), None) for seed in (3, 4, 5)]


@torch.no_grad()
def errors(model, gates=None) -> dict[int, torch.Tensor]:
    """layer -> (H,) squared errors of heads over all batches, with the mixers' gates or others."""
    found: dict[int, torch.Tensor] = {}
    for ids, _ in BATCHES:
        for layer, q, k, v in attention_of(model, ids):
            mixer = model.model.layers[layer].self_attn.linearize
            before = mixer.gate.clone()
            if gates is not None:
                mixer.gate.fill_(gates)
            out = mixer(q, k, v)[0]
            mixer.gate.copy_(before)
            own = (out - softmax_attention(q, k, v, scale=32**-0.5)).double().square().sum((0, 1, 3))
            found[layer] = found.get(layer, torch.zeros(4, dtype=torch.float64)) + own
    return found


@torch.no_grad()
def squares(model) -> dict[int, float]:
    found: dict[int, float] = {}
    for ids, _ in BATCHES:
        for layer, q, k, v in attention_of(model, ids):
            teacher = softmax_attention(q, k, v, scale=32**-0.5)
            found[layer] = found.get(layer, 0.0) + float(teacher.double().square().sum())
    return found


@pytest.mark.parametrize("recipe", ["window-hedgehog", "window-sinks", "window-favor"])
def test_gates_are_those_of_a_search_through_the_grid(recipe):
    model = converted(recipe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    as_it_was, table = errors(model), {gate: errors(model, gate) for gate in GRID}
    found = calibrate(model, BATCHES)
    after = errors(model)
    assert [layer["layer"] for layer in found] == list(as_it_was)
    moved = 0
    for layer, report in zip(as_it_was, found, strict=True):
        gate = model.model.layers[layer].self_attn.linearize.gate
        for head in range(4):
            own = before[f"model.layers.{layer}.self_attn.linearize.gate"][head].item()
            candidates = {own: float(as_it_was[layer][head])} | {g: float(table[g][layer][head]) for g in GRID}
            assert gate[head].item() == min(candidates, key=candidates.__getitem__)
            assert after[layer][head] <= as_it_was[layer][head] * (1 + 1e-9)
            moved += gate[head].item() != own
        total = squares(model)[layer]
        assert report["error_before"] == pytest.approx(float(as_it_was[layer].sum()) / total, rel=1e-4)
        assert report["error_after"] == pytest.approx(float(after[layer].sum()) / total, rel=1e-4)
        assert len(report["distance"]) == 4
    assert moved
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"gate"}


def test_a_gate_that_no_value_of_the_grid_betters_stays():
    model = converted("window-hedgehog")
    calibrate(model, BATCHES)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = calibrate(model, BATCHES)
    assert all(layer["error_before"] == layer["error_after"] for layer in again)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_mixer_without_choices_is_measured_alone():
    model = linearize.linearize_(tiny_llama(), {"mixer": "linear", "feature_map": "elu1"})
    found = calibrate(model, BATCHES)
    assert [layer["layer"] for layer in found] == [0, 1, 2]
    assert all(layer["error_before"] == layer["error_after"] > 0 for layer in found)
