"""Random features drawn anew during training: saved, resumed, and the same whoever shares the work."""

from __future__ import annotations

import pytest
import torch

from linearize.errors import UsageError
from linearize.training import loop, state
from linearize.training.redraw import drawn, redraw
from tests.training import engine
from tests.training.engine import DISTILL, TRANSFER
from tests.training.test_resume import Stop, at, stop

FAVOR = {"feature_map": "favor", "feature_map_options": {"features": 8}}
STAGES = ({**TRANSFER, "redraw": 2}, {**DISTILL, "redraw": 3})


@pytest.fixture
def made(tmp_path):
    return engine.checkpoint(tmp_path / "m", num_hidden_layers=3, recipe={**FAVOR, "keep_softmax": [1]})


def omegas(folder):
    return {name: value for name, value in engine.weights(folder).items() if name.endswith(".omega")}


def same(one, other):
    assert one.keys() == other.keys() != set()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_was_drawn_last_is_what_the_result_holds(made, tmp_path, monkeypatch):
    """Steps count from 0: every second of four is step 2, every third step 3."""
    steps, real = [], loop.redraw
    monkeypatch.setattr(loop, "redraw", lambda model, *place: steps.append(place) or real(model, *place))
    engine.train(made, tmp_path / "out", *STAGES)
    assert steps == [(0, 0, 2), (0, 1, 3)]
    before, after = omegas(made), omegas(tmp_path / "out")
    assert before.keys() == after.keys()
    assert len(after) == 2
    assert all((after[name] != before[name]).all() for name in after)
    assert not torch.equal(*after.values()), "each layer has a draw of its own"
    engine.train(made, tmp_path / "none", TRANSFER)
    same(omegas(tmp_path / "none"), before)


@pytest.mark.parametrize("place", [(0, 3), (1, 1), (1, 4)])
def test_a_resumed_training_is_the_one_that_nobody_stopped(made, tmp_path, monkeypatch, place):
    """Stopped between two draws, before the second stage's first, and after the last."""
    with monkeypatch.context() as patched:
        at(patched, *place, stop)
        with pytest.raises(Stop):
            engine.train(made, tmp_path / "out", *STAGES)
    kept = state.checkpoints(engine.work(tmp_path / "out") / "checkpoints")
    assert all(name in state.position(kept[-1])["changed"] for name in omegas(made))
    engine.train(made, tmp_path / "out", *STAGES, resume=True)
    engine.train(made, tmp_path / "whole", *STAGES)
    assert engine.losses(tmp_path / "out") == engine.losses(tmp_path / "whole")
    same(engine.weights(tmp_path / "out"), engine.weights(tmp_path / "whole"))


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_block_by_block_draws_the_same(made, tmp_path, checkpoints):
    engine.train(made, tmp_path / "whole", STAGES[0])
    blocks = {**STAGES[0], "block": 1}
    engine.train(made, tmp_path / "out", blocks, every={"save": checkpoints})
    same(omegas(tmp_path / "out"), omegas(tmp_path / "whole"))
    assert not torch.equal(*omegas(tmp_path / "out").values())


def test_only_what_is_random_is_drawn_and_by_its_place_alone():
    import linearize
    from tests.modeling.models import tiny_llama

    def model(**recipe):
        return linearize.linearize_(tiny_llama(), recipe)

    found = []
    for place in ((0, 1, 5), (0, 1, 5), (0, 1, 6), (0, 2, 5), (1, 1, 5)):
        rfa = model(mixer="rfa", mixer_options={"features": 8})
        before = {name: p.clone() for name, p in rfa.named_parameters()}
        redraw(rfa, *place)
        assert all(torch.equal(p, before[name]) for name, p in rfa.named_parameters())
        found.append(torch.stack(list(drawn(rfa).values())))
    assert len(found[0]) == 3
    assert torch.equal(found[0], found[1])
    assert all((found[0] != other).all() for other in found[2:])
    assert not drawn(model(mixer="linear", feature_map="taylor"))
    assert len(drawn(model(mixer="window", feature_map="favor", keep_softmax=[0]))) == 2


def test_a_model_without_random_features_is_refused_before_anything_is_read(tmp_path):
    made = engine.checkpoint(tmp_path / "m")
    with pytest.raises(UsageError, match=r"train\.1\.redraw: no mixer of this model has random features"):
        engine.train(made, tmp_path / "out", TRANSFER, {**DISTILL, "redraw": 5})
    assert not engine.work(tmp_path / "out").exists()
