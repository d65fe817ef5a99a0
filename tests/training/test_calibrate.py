"""Calibration sets decays by distances, chooses what a search would, and scales by least squares."""

from __future__ import annotations

import math

import pytest
import torch

import linearize
from linearize.mixers.registry import MIXERS, register_mixer
from linearize.mixers.rfa import RFAMixer
from linearize.mixers.window import WindowMixer
from linearize.training.calibrate import calibrate
from linearize.training.head import hidden_states
from tests.modeling.models import converted, shaken, tiny_llama, tokens
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


def test_heads_that_share_a_value_choose_it_together():
    """Each of a pair would have another one: `log_tau` of rfa is one for the query heads of a key/value head."""
    model = converted_to({"mixer": "rfa", "mixer_options": {"features": 64}})
    grid, mixers = RFAMixer.grid["log_tau"], [layer.self_attn.linearize for layer in model.model.layers]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.view(4, 32, -1).mul_(torch.tensor([0.01, 30, 0.01, 30])[:, None, None])
            layer.self_attn.k_proj.weight.mul_(3)
        tables: list[list[torch.Tensor]] = [[], [], []]  # of each layer: for each value, errors (2 groups, 2 heads)
        for value in (0.0, *grid):
            for layer, mixer in enumerate(mixers):
                mixer.log_tau.fill_(value)
                student, teacher = outputs(model)[layer]
                tables[layer].append((student - teacher).square().sum(1).view(2, 2))
                mixer.log_tau.zero_()
    found, apart = calibrate(model, BATCHES), 0
    for report, table, mixer in zip(found, tables, mixers, strict=True):
        errors = torch.stack(table)
        best = errors.sum(2).argmin(0)
        assert mixer.log_tau.tolist() == [(0.0, *grid)[number] for number in best]
        apart += int((errors.argmin(0) != best[:, None]).sum())
        square = outputs(model)[report["layer"]][1].square().sum()
        assert report["error_after"] == pytest.approx(float(errors.sum(2).amin(0).sum() / square), rel=1e-4)
    assert apart


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


def converted_to(recipe):
    return shaken(linearize.linearize_(tiny_llama(), recipe))


RETNET = {"mixer": "retnet", "mixer_options": {"output_gate": False}}


@torch.no_grad()
def outputs(model) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """layer -> student and teacher, each (H, all numbers of all batches)."""
    found: dict[int, list[torch.Tensor]] = {}
    for ids, _ in BATCHES:
        for layer, q, k, v in attention_of(model, ids):
            pair = (model.model.layers[layer].self_attn.linearize(q, k, v)[0], softmax_attention(q, k, v, 32**-0.5))
            found.setdefault(layer, []).append(torch.stack(pair).double().permute(0, 3, 1, 2, 4).flatten(2))
    return {layer: tuple(torch.cat(own, 2)) for layer, own in found.items()}


@torch.no_grad()
def distances(model) -> dict[int, list[float]]:
    """layer -> for each head, how many tokens back softmax looks, a query at a time."""
    found: dict[int, list[float]] = {}
    for ids, _ in BATCHES:
        for layer, q, k, _ in attention_of(model, ids):
            own = found.setdefault(layer, [0.0] * 4)
            for h in range(4):
                for t in range(24):
                    weights = (k[0, : t + 1, h // 2] @ q[0, t, h] * 32**-0.5).double().softmax(0)
                    own[h] += sum(float(weights[j]) * (t - j) for j in range(t + 1)) / (24 * len(BATCHES))
    return found


def test_half_lives_are_the_share_of_the_distance_that_leaves_the_least_error():
    """Of the heads that share a decay, each times its own factor."""
    model = converted_to(RETNET)
    expected, mixers = distances(model), [layer.self_attn.linearize for layer in model.model.layers]
    scales = [mixer.out_scale.clone() for mixer in mixers]
    errors: list[list[torch.Tensor]] = [[], [], []]  # of each layer: for each share, (2 groups,)
    means = [torch.tensor(expected[layer]).view(2, 2).mean(1) for layer in range(3)]
    for share in (1.0, 0.25, 0.0625):
        for mixer, mean in zip(mixers, means, strict=True):
            mixer.decay.rate_log.data = (math.log(2) / (mean * share).clamp_min(1)).log()
        for layer, (student, teacher) in outputs(model).items():
            left = student * least_squares(student, teacher)[:, None] - teacher
            errors[layer].append(left.square().sum(1).view(2, 2).sum(1))
    for mixer, scale in zip(mixers, scales, strict=True):
        mixer.out_scale.data.copy_(scale)
    chosen = set()
    for report in calibrate(model, BATCHES):
        layer = report["layer"]
        assert report["distance"] == pytest.approx(expected[layer], abs=0.051)
        shares = [(1.0, 0.25, 0.0625)[number] for number in torch.stack(errors[layer]).argmin(0)]
        assert report["share"] == shares
        half_life = (means[layer] * torch.tensor(shares)).clamp_min(1)
        rate = mixers[layer].decay.rate_log.exp()
        assert rate.tolist() == pytest.approx((math.log(2) / half_life).tolist(), rel=1e-4)
        square = outputs(model)[layer][1].square().sum()
        assert report["error_after"] == pytest.approx(
            float(torch.stack(errors[layer]).amin(0).sum() / square), rel=1e-3
        )
        chosen |= set(shares)
    assert len(chosen) > 1


@pytest.mark.parametrize(
    ("recipe", "passes"),
    [
        (RETNET, 2),
        ({"mixer": "deltanet"}, 1),
        ({"mixer": "rfa", "mixer_options": {"features": 8}}, 1),
        ({"mixer": "windowed", "mixer_options": {"over": "linear"}}, 1),
        ({"mixer": "heads", "mixer_options": {"over": "gla"}}, 2),
    ],
)
def test_only_decays_take_a_second_pass(recipe, passes):
    seen = []

    def forward(model, ids, positions):
        seen.append(ids)
        return hidden_states(model, ids, positions)

    calibrate(converted_to(recipe), BATCHES, forward)
    assert len(seen) == passes * len(BATCHES)


@pytest.mark.parametrize("over", ["gla", "windowed", "rfa"])
def test_beside_kept_heads_the_others_are_calibrated_as_in_the_whole_layer(over):
    """A start by distances, a grid, a scale: one of each at least. The second of two key/value heads is converted."""
    whole, part = converted_to({"mixer": over}), converted_to({"mixer": "heads", "mixer_options": {"over": over}})

    def pairs():
        for layer, other in zip(part.model.layers, whole.model.layers, strict=True):
            mine, theirs = layer.self_attn.linearize.inner.state_dict(), other.self_attn.linearize.state_dict()
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                yield value, theirs[name] if value.shape == theirs[name].shape else theirs[name][-len(value) :]

    for mine, theirs in pairs():
        mine.copy_(theirs)
    reports = calibrate(whole, BATCHES), calibrate(part, BATCHES)
    for theirs, mine in zip(*reports, strict=True):
        assert mine["distance"] == theirs["distance"][2:]
    for mine, theirs in pairs():
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def least_squares(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """(H,) factors of the student (H, ...), none below a tenth of what makes it as large as the teacher."""
    best = [
        torch.linalg.lstsq(own[:, None], other[:, None]).solution.item()
        for own, other in zip(student, teacher, strict=True)
    ]
    return torch.tensor(best).maximum(0.1 * (teacher.norm(dim=1) / student.norm(dim=1)).float())


def test_scales_are_least_squares_from_a_tenth_of_the_size_on():
    model = converted_to(RETNET)
    wild = {0: [1.0, 1e-4, 1e4, -1.0], 1: [1.0] * 4, 2: [1.0] * 4}  # what heads are multiplied by before
    for layer, factors in wild.items():
        model.model.layers[layer].self_attn.linearize.out_scale.data.mul_(torch.tensor(factors)[:, None])
    scales = {layer: model.model.layers[layer].self_attn.linearize.out_scale.clone() for layer in wild}
    as_it_was = outputs(model)
    found = calibrate(model, BATCHES)
    after = outputs(model)
    bounded = 0
    for report in found:
        layer = report["layer"]
        factors = (model.model.layers[layer].self_attn.linearize.out_scale / scales[layer]).mean(1).detach()
        student, teacher = after[layer]
        started = student / factors[:, None]
        expected = least_squares(started, teacher)
        bounded += int((expected > 1.001 * (started * teacher).sum(1) / started.square().sum(1)).sum())
        torch.testing.assert_close(factors, expected, rtol=1e-4, atol=0)
        assert report["scale"] == pytest.approx(expected.tolist(), rel=1e-3)
        for key, (own, teacher) in (("error_before", as_it_was[layer]), ("error_after", after[layer])):
            error = float((own - teacher).square().sum() / teacher.square().sum())
            assert report[key] == pytest.approx(error, rel=1e-4)
    assert 0 < bounded < 12


class Scaled(WindowMixer):
    """A window whose output has a scale for each head, too."""

    scale = "out_scale"

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.out_scale = torch.nn.Parameter(torch.full((shape.num_heads,), 0.7))

    def forward(self, q, k, v, **call):
        out, state = super().forward(q, k, v, **call)
        return out * self.out_scale[:, None], state


def test_a_grid_is_chosen_by_the_error_that_the_scale_leaves():
    options = {"feature_map": "hedgehog", "feature_map_options": {}, "window": 5, "sinks": 0}
    register_mixer("scaled", Scaled, paper="none", options=options)
    try:
        model = converted_to({"mixer": "scaled"})
        tables: dict[int, list[tuple[float, torch.Tensor, torch.Tensor]]] = {}
        own = {n: layer.self_attn.linearize.gate.clone() for n, layer in enumerate(model.model.layers)}
        for gate in (None, *GRID):
            for n, layer in enumerate(model.model.layers):
                layer.self_attn.linearize.gate.data.copy_(own[n] if gate is None else torch.full((4,), gate))
            for n, (student, teacher) in outputs(model).items():
                factor = least_squares(student, teacher)
                error = (student * factor[:, None] - teacher).square().sum(1)
                tables.setdefault(n, []).append((gate, factor, error))
        for n, layer in enumerate(model.model.layers):
            layer.self_attn.linearize.gate.data.copy_(own[n])
        before = {n: layer.self_attn.linearize.out_scale.clone() for n, layer in enumerate(model.model.layers)}
        calibrate(model, BATCHES)
        for n, table in tables.items():
            mixer = model.model.layers[n].self_attn.linearize
            for h in range(4):
                gate, factor, _ = min(table, key=lambda row: float(row[2][h]))
                assert mixer.gate[h].item() == (own[n][h].item() if gate is None else gate)
                assert (mixer.out_scale[h] / before[n][h]).item() == pytest.approx(factor[h].item(), rel=1e-4)
    finally:
        del MIXERS["scaled"]
