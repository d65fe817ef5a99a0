"""The layers that a selection finds, and what it measures of them, against models whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import linearize
from linearize.select_measure import Bench
from linearize.select_samples import Samples
from linearize.select_scores import FLOOR, damage, greedy, ranking, ratio
from linearize.select_units import as_json, in_words, parted
from linearize.selection import choose
from tests.select import lookup


@pytest.mark.parametrize(("place", "echo"), [(1, 3), (2, 0)])
@pytest.mark.parametrize(("score", "expected"), [("recall", "place"), ("ratio", "place"), ("kl", "echo")])
def test_the_planted_layer_is_chosen(place, echo, score, expected):
    bench = Bench(lookup.converted(place, echo), lookup.samples())
    found = choose(bench, score, 1)
    assert found["chosen"]["layers"] == [{"place": place, "echo": echo}[expected]]
    assert found["teacher"]["tasks"]["lookup"]["accuracy"] == 1
    rows = {row["layer"]: row for row in found["layers"]}
    assert rows[place]["recall_accuracy"]["value"] > 0.6
    assert rows[place]["recall_nll"]["low"] > 1
    assert all(rows[layer]["recall_nll"]["value"] < 0.1 for layer in rows if layer != place)
    assert rows[echo]["kl"]["value"] > 5 * max(rows[layer]["kl"]["value"] for layer in rows if layer != echo)
    assert [layer for layer in rows if rows[layer]["chosen"]] == found["chosen"]["layers"]
    assert (found["chosen"]["tasks"]["lookup"]["accuracy"] == 1) == (expected == "place")
    assert found["uniform"]["layers"] == [0]


@pytest.mark.parametrize(("place", "head"), [(1, 1), (1, 0), (0, 1)])
def test_the_planted_head_is_chosen(place, head):
    """And where both heads of a layer are chosen, the whole layer."""
    bench = Bench(lookup.converted(place, 3, heads=2, head=head), lookup.samples(), kind="heads")
    found = choose(bench, "recall", 1)
    assert found["chosen"]["layers"] == []
    assert found["chosen"]["heads"] == {str(place): [head]}
    assert found["chosen"]["tasks"]["lookup"]["accuracy"] == 1
    rows = {(row["layer"], row["head"]): row["recall_nll"] for row in found["heads"]}
    assert len(rows) == 8
    assert rows.pop((place, head))["low"] > 1
    assert all(each["value"] < 0.1 for each in rows.values())
    both = as_json([(3, 1), (place, 0), (place, 1)], bench.heads, "heads")
    assert both == {"layers": [place], "heads": {"3": [1]}}
    assert in_words(both) == f"{place}, heads 3.1"


def test_greedy_restores_first_what_loses_most_and_then_what_is_left():
    bench = Bench(lookup.converted(1, 3), lookup.samples())
    found = choose(bench, "greedy", 2)
    assert [step["layer"] for step in found["greedy"]] == [1, 3]
    assert {row["layer"]: row["rank"] for row in found["layers"]} | {1: 1, 3: 2} == {
        row["layer"]: row["rank"] for row in found["layers"]
    }
    assert found["greedy"][1]["kl"]["value"] < 0.1 * found["greedy"][0]["kl"]["value"]


def reference(base, hybrid, samples: Samples):
    """KL of each text, loss and share of right answers of each document: two models, one row at a time, in float64."""
    kl, nll, right = [], [], []
    with torch.no_grad():
        for ids in samples.texts:
            p, q = (each(torch.tensor([ids])).logits[0].double().log_softmax(-1) for each in (base, hybrid))
            kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
        for document in samples.recall["lookup"]:
            q = hybrid(torch.tensor([document.ids])).logits[0].double().log_softmax(-1)
            losses, greedy = [], []
            for span in document.spans:
                at = range(span.start, span.end)
                losses.append(-sum(float(q[t - 1, document.ids[t]]) for t in at) / len(at))
                greedy.append(all(int(q[t - 1].argmax()) == document.ids[t] for t in at))
            nll.append(sum(losses) / len(losses))
            right.append(sum(greedy) / len(greedy))
    return np.array(kl), np.array(nll), np.array(right)


@pytest.mark.parametrize("chained", [True, False])
def test_what_is_measured_is_what_conversions_of_their_own_give(chained, monkeypatch):
    """Texts of several lengths in a batch; and where layers are a chain, those before the swapped one don't run."""
    if not chained:
        monkeypatch.setattr("linearize.select_measure._chain", lambda model: None)
    samples, base = lookup.samples(), lookup.model(1, 3)
    runs = []
    bench = Bench(lookup.converted(1, 3), samples, tick=runs.append)
    assert sum(runs) == bench.runs
    outcomes = bench.sweep()
    assert sum(runs) == bench.runs + bench.sweep_runs
    assert bench.sweep_runs == bench.runs / 4 * (4 + 3 + 2 + 1 + 3 if chained else 16)
    outcomes = {tuple(sorted({0, 1, 2, 3} - {layer})): outcome for layer, outcome in outcomes.items()}
    outcomes[(1,)] = bench.hybrid([1])
    outcomes[()] = bench.hybrid([])
    for kept, outcome in outcomes.items():
        hybrid = lookup.converted(1, 3, keep_softmax=list(kept) or "none")
        kl, nll, right = reference(base, hybrid, samples)
        np.testing.assert_allclose(outcome.kl, kl, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(outcome.nll["lookup"], nll, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(outcome.accuracy["lookup"], right)
    assert (bench.teacher.kl == 0).all()


@pytest.mark.parametrize("chained", [True, False])
def test_what_is_measured_of_heads_is_what_mixer_heads_gives(chained, monkeypatch):
    if not chained:
        monkeypatch.setattr("linearize.select_measure._chain", lambda model: None)
    samples, base = lookup.samples(), lookup.model(1, 3, heads=2, head=1)
    runs = []
    bench = Bench(lookup.converted(1, 3, heads=2, head=1), samples, kind="heads", tick=runs.append)
    sweep = bench.sweep()
    assert sum(runs) == bench.runs + bench.sweep_runs
    assert list(sweep) == bench.units
    cases = {((0, 0), (0, 1), (2, 1), (3, 0)): None, ((1, 1),): None}
    cases |= {tuple(unit for unit in bench.units if unit != alone): sweep[alone] for alone in [(1, 1), (3, 0)]}
    window = {"over": "window", "over_options": {key: lookup.RECIPE[key] for key in ("feature_map", "window", "sinks")}}
    for kept, outcome in cases.items():
        whole, some = parted(kept, bench.heads)
        blocks = {str(n): {"mixer": "heads", "mixer_options": {"keep": keep, **window}} for n, keep in some.items()}
        hybrid = lookup.converted(1, 3, heads=2, head=1, keep_softmax=whole or "none", layers=blocks)
        kl, nll, right = reference(base, hybrid, samples)
        outcome = outcome or bench.hybrid(kept)
        np.testing.assert_allclose(outcome.kl, kl, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(outcome.nll["lookup"], nll, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(outcome.accuracy["lookup"], right)


@pytest.mark.parametrize("kind", ["layers", "heads"])
def test_a_model_is_as_it_was_after_a_measurement(kind):
    model, ids = lookup.converted(1, 3, heads=2), torch.tensor([lookup.samples().texts[0]])
    with torch.no_grad():
        before = model(ids).logits
        names = [name for name, _ in model.named_modules()]
        bench = Bench(model, lookup.samples(), kind=kind)
        bench.sweep()
        bench.hybrid(bench.units[:1])
        assert torch.equal(model(ids).logits, before)
        assert [name for name, _ in model.named_modules()] == names
        bench._tick = interrupted = lambda runs: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):  # what Ctrl-C does in the middle
            bench.hybrid(bench.units[:1])
        assert torch.equal(model(ids).logits, before)
        with pytest.raises(KeyboardInterrupt):
            Bench(model, lookup.samples(), tick=interrupted)
        assert torch.equal(model(ids).logits, before)


def losses(**values):
    return {name: {"value": value, "low": None, "high": None} for name, value in values.items()}


def test_scores():
    damages = {
        0: losses(kl=0.5, recall_nll=0.2),
        1: losses(kl=0.001, recall_nll=0.1),
        2: losses(kl=0.1, recall_nll=-0.3),
        3: losses(kl=0.001, recall_nll=0.1),
    }
    assert ranking("kl", damages) == [0, 2, 1, 3]
    assert ranking("recall", damages) == [0, 1, 3, 2]
    assert ranking("ratio", damages) == [1, 3, 0, 2]
    assert ranking("greedy", damages) == [0, 1, 3, 2]
    assert [ratio(each) for each in damages.values()] == [0.4, 0.1 / FLOOR, 0, 0.1 / FLOOR]


def test_greedy_tries_every_candidate_beside_those_that_it_has():
    gain = {0: 1.0, 1: 0.4, 2: 0.5}
    tried = []

    def measure(kept):
        tried.append(tuple(kept))
        both = 0.7 if {0, 1} <= set(kept) else 0.0  # together they are worth more
        return losses(kl=3 - sum(gain[layer] for layer in kept) - both, recall_nll=0.0)

    order, steps = greedy([2, 1, 0], 2, measure)
    assert [step["layer"] for step in steps] == order == [0, 1]
    assert tried == [(2,), (1,), (0,), (0, 2), (0, 1)]


def test_intervals_are_of_paired_differences():
    """Documents differ by far more than what a layer costs each of them."""
    from linearize.select_measure import Outcome

    base = np.array([0.1, 5.0, 2.0, 9.0, 0.5, 3.0])
    cost = np.array([0.10, 0.12, 0.11, 0.09, 0.10, 0.08])
    right = np.ones(6)
    teacher = Outcome(np.zeros(6), {"a": base, "b": base}, {"a": right, "b": right})
    found = damage(teacher, Outcome(cost, {"a": base + 2 * cost, "b": base}, {"a": right, "b": right * 0}))
    assert found["recall_nll"]["value"] == pytest.approx(0.1)
    assert 0.08 < found["recall_nll"]["low"] < 0.1 < found["recall_nll"]["high"] < 0.12
    assert found["kl"] == pytest.approx(found["recall_nll"])
    assert found["recall_accuracy"] == {"value": 0.5, "low": None, "high": None}  # all documents alike
    assert found["tasks"]["b"] == {"accuracy": 0.0, "nll": pytest.approx(base.mean())}


def test_samples_have_as_many_of_everything():
    good = lookup.samples()
    with pytest.raises(ValueError, match="as many texts"):
        Samples(good.texts[1:], good.recall)
    with pytest.raises(ValueError, match="two tokens"):
        Samples(((1,), *good.texts[1:]), good.recall)


def test_a_model_that_is_not_converted_is_refused():
    with pytest.raises(linearize.errors.UsageError, match="isn't converted"):
        Bench(lookup.model(1, 3), lookup.samples())
