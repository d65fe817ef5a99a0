"""Transfer block by block gives the mixers that transfer of the whole model gives, and never loads all of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import linearize
from linearize.errors import ModelError, ResourceError, UsageError
from linearize.family import load_config
from linearize.modeling import chain as chains
from linearize.modeling.chain import chain
from linearize.modeling.observe import observing
from linearize.target import Destination
from linearize.training import blocks, blockwise, session
from linearize.training.head import hidden_states
from linearize.training.metrics import Metrics
from linearize.verification import verify
from tests.families import tiny_model
from tests.modeling.test_families import CONVERTED, WINDOW, recipe_for
from tests.training import engine
from tests.training.engine import CALIBRATE, LENGTH, TRANSFER

ROOT = Path(__file__).resolve().parents[2]
# The same sums in the same order: there should be no difference at all.
TOLERANCE = 1e-5
STEPS, TOKENS = 5, 4 * LENGTH  # tokens of a step
STAGE = {**TRANSFER, "tokens": STEPS * TOKENS, "batch": 4, "micro_batch": 2, "lr": 0.05}
STAGES = [CALIBRATE, STAGE]
# Families whose layers hand on more than hidden states.
NO_CHAIN = {
    "dory", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "inkling2_loop_text", "inkling2_text", "zaya",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Drawing takes longer than a training of a few steps."""
    monkeypatch.setattr(session, "plot", lambda *args: False)


def by(block, *others):
    return [CALIBRATE, {**STAGE, "block": block}, *others]


def mixers(out):
    return {name: value for name, value in engine.weights(out).items() if ".linearize." in name}


def same(one, other, atol=TOLERANCE):
    assert one.keys() == other.keys() != set()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=atol, rtol=0, msg=name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Four layers, GQA, biases, a head of its own; the last layer but one keeps softmax."""
    config = {"num_hidden_layers": 4, "attention_bias": True, "tie_word_embeddings": False}
    return engine.checkpoint(tmp_path_factory.mktemp("llama"), **config, recipe={"keep_softmax": [2]})


@pytest.fixture(scope="module")
def whole(llama, tmp_path_factory):
    """A training of the whole model: where it is, and its summary."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, engine.train(llama, out, *STAGES)


@pytest.fixture
def watch(monkeypatch):
    """From its call on, loading the whole model is an error; returns a list that gets the layers of each load."""

    def start():
        seen = []

        def load_part(*args, **options):
            part = chains.load_part(*args, **options)
            names = [name for name, _ in part.model.named_parameters()]
            assert not any(parameter.is_meta for parameter in part.model.parameters())
            assert not any(name.startswith("lm_head") for name in names)
            seen.append(sorted({int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}))
            return part

        monkeypatch.setattr(blocks, "load_part", load_part)
        monkeypatch.setattr(linearize, "load", lambda *args, **kwargs: pytest.fail("the whole model was loaded"))
        return seen

    return start


@pytest.mark.parametrize("size", [1, 2, 3])
def test_mixers_are_those_of_the_whole_model(llama, whole, watch, tmp_path, size):
    loads, out = watch(), tmp_path / "out"
    summary = engine.train(llama, out, *by(size))
    same(mixers(out), mixers(whole[0]))
    start = mixers(llama)
    assert all(not torch.equal(value, start[name]) for name, value in mixers(out).items())
    apart, loads = loads[:2], loads[2:]
    assert apart == [[1], [2]]  # a converted layer and one with softmax, to see whether documents are kept apart
    assert loads == 2 * [list(range(begin, min(begin + size, 4))) for begin in range(0, 4, size)]
    assert verify(out) == []
    for path in llama.glob("model-base*"):
        assert os.path.samefile(path, out / path.name)
    assert not (engine.work(out) / "states").exists()
    for one, other in zip(summary["stages"], whole[1]["stages"], strict=True):
        assert (one["tokens"], one.get("steps")) == (other["tokens"], other.get("steps"))
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    found = [json.loads((engine.work(place) / "calibration.json").read_text()) for place in (out, whole[0])]
    assert found[0] == found[1]


def test_a_calibration_that_goes_through_its_batches_twice_is_that_of_the_whole_model(tmp_path):
    """Decays are set by distances, and outputs are scaled then."""
    none = dict.fromkeys(("feature_map", "window", "sinks"))
    made = engine.checkpoint(
        tmp_path / "made", num_hidden_layers=4, recipe={"mixer": "gla", "keep_softmax": [2], **none}
    )
    for out, stages in (("blocks", by(1)), ("whole", STAGES)):
        engine.train(made, tmp_path / out, *stages)
    found = [json.loads((engine.work(tmp_path / out) / "calibration.json").read_text()) for out in ("blocks", "whole")]
    assert found[0] == found[1]
    assert all(layer["error_after"] < layer["error_before"] for layer in found[0])
    same(mixers(tmp_path / "blocks"), mixers(tmp_path / "whole"))


def test_metrics_are_those_of_the_whole_model_cut_into_blocks(llama, whole, tmp_path):
    notes, out = [], tmp_path / "out"
    summary = engine.train(llama, out, *by(2), note=notes.append)
    own, other = engine.metrics(out), engine.metrics(whole[0])
    assert [line["step"] for line in own] == list(range(1, 2 * STEPS + 1))
    assert [line["tokens"] for line in own] == [TOKENS * line["step"] for line in own]
    assert [(line["block"], line["blocks"]) for line in own] == [(1, 2)] * STEPS + [(2, 2)] * STEPS
    for one, two, both in zip(own[:STEPS], own[STEPS:], other, strict=True):
        assert one["layers"] | two["layers"] == pytest.approx(both["layers"], rel=1e-5)
        assert max(one["grad_norm"], two["grad_norm"]) == pytest.approx(both["grad_norm"], rel=1e-4)
        assert one["lr"] == two["lr"] == both["lr"]
    assert sum("held-out rows" in note for note in notes) == 1
    assert summary["stages"][1]["blocks"] == 2


def test_trackers_see_steps_that_never_go_back(llama, tmp_path, monkeypatch):
    seen = []
    write = Metrics.write

    def logged(self, line):
        self.tracker = SimpleNamespace(log=lambda numbers, step: seen.append(step))
        write(self, line)

    monkeypatch.setattr(Metrics, "write", logged)
    engine.train(llama, tmp_path / "out", *by(2, {**STAGE, "tokens": TOKENS}))
    assert len(seen) == 2 * STEPS + 1
    assert seen == sorted(set(seen))


@pytest.mark.parametrize(
    ("family", "size", "separate"),
    [
        ("gemma", 1, True),  # scales its embeddings, which are its head, too
        ("mixtral", 3, True),  # experts stored one by one, held fused
        ("bamba", 2, False),  # layers without attention; all return tuples
    ],
)
def test_families(watch, tmp_path, family, size, separate):
    checkpoint = engine.family(tmp_path, family)
    data = {"separate": separate}
    engine.train(checkpoint, tmp_path / "whole", *STAGES, data=data)
    watch()
    engine.train(checkpoint, tmp_path / "out", *by(size), data=data)
    same(mixers(tmp_path / "out"), mixers(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTED)
def test_every_family_runs_layer_by_layer_or_is_refused(name, tmp_path):
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "m")
    linearize.convert(tmp_path / "m", tmp_path / "c", recipe=recipe_for(model.config, WINDOW))
    raw = json.loads((tmp_path / "c" / "config.json").read_text())
    learn = partial(chain, attention=[layer["module"] for layer in raw["linearize"]["layers"]])
    if name in NO_CHAIN:
        with pytest.raises(ModelError, match="can't run block by block"):
            learn(load_config(raw, name), dtype=torch.float32)
        return
    ids = torch.randint(2, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(6), torch.arange(5)]).repeat(2, 1)
    links, given = learn(load_config(raw, name), dtype=torch.bfloat16), None
    expected, found = [], []
    model = linearize.load(tmp_path / "c", dtype=torch.bfloat16).eval()
    with torch.no_grad(), observing(model, expected.append):
        hidden_states(model, ids, positions)
    for number in range(len(links.returns)):
        where = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
        part = chains.load_part(tmp_path / "c", links, number, number + 1, **where)
        with torch.no_grad(), observing(part.model, found.append):
            given = part.run(partial(hidden_states, part.model, ids, positions), given)
        if number + 1 < len(links.returns):
            assert (given.dtype, tuple(given.shape)) == (links.dtype, (2, 11, *links.shape))
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.layer == other.layer
        assert torch.equal(one.q, other.q)
        assert torch.equal(one.teacher, other.teacher)


# Interruptions.


class Stopped(BaseException):
    pass


@pytest.mark.parametrize(
    ("step", "lost"),
    [
        (3, ""),  # in the first block, after its only checkpoint
        (STEPS, ""),  # at the end of the first block, whose checkpoint is still to come
        (STEPS + 3, "*.float32"),  # hidden states
        (3 * STEPS + 3, "[0-9]*"),
        (STEPS + 3, "rows-0"),
        (3 * STEPS + 3, "*"),  # the rows, too
    ],
)
def test_what_was_stopped_goes_on_and_makes_again_what_is_lost(llama, whole, tmp_path, monkeypatch, step, lost):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        write = engine_write(step)
        patch.setattr("linearize.training.metrics.Metrics.write", write)
        with pytest.raises(Stopped):
            engine.train(llama, out, *by(1))
    assert (engine.work(out) / "states").is_dir()
    for path in list((engine.work(out) / "states").glob(lost or "nothing")):
        path.unlink()
    engine.train(llama, out, *by(1), resume=True)
    same(mixers(out), mixers(whole[0]))
    steps = [line["step"] for line in engine.metrics(out)]
    assert steps == [step for step in range(1, 4 * STEPS + 1) if (step - 1) // STEPS != 2]  # layer 2 isn't converted
    assert not (engine.work(out) / "states").exists()
    assert engine.checkpoints(out) == []


def engine_write(step):
    write = Metrics.write

    def write_and_stop(self, line):
        write(self, line)
        if line["step"] == step:
            raise Stopped

    return write_and_stop


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(llama, whole, tmp_path):
    """What it had not yet put on the disk is lost with it."""
    kills = [["step", 1, 4], ["save", 1, STEPS], ["saved", 1, STEPS + 2], ["step", 1, 2 * STEPS]]
    spec = {"checkpoint": str(llama), "folder": str(tmp_path), "stages": by(2), "settings": {}, "kills": kills}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.killed", json.dumps(spec)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0, *["killed"] * len(kills), 0], done.stderr[-3000:]
    same(mixers(tmp_path / "killed"), mixers(whole[0]))
    assert engine.metrics(tmp_path / "killed") == engine.metrics(tmp_path / "whole")


@pytest.mark.slow
def test_processes_share_the_rows(llama, whole, tmp_path):
    from tests.evals.test_processes import torchrun

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(engine.recipe(llama, *by(2))))
    command = f"-m linearize train {llama} --recipe {recipe} -o {tmp_path / 'out'} --device cpu"
    done = torchrun(2, command.split())
    assert done.returncode == 0, done.stderr[-3000:]
    # Gradients are summed in another order, and Adam moves a weight that has hardly any by its sign. Two processes
    # that hold the whole model differ from one by the same 1e-4.
    same(mixers(tmp_path / "out"), mixers(whole[0]), atol=1e-3)
    assert not (engine.work(tmp_path / "out") / "states").exists()


# A model that is there as a whole, since something else needs it.


def test_a_later_stage_that_needs_the_whole_model_gets_it(llama, tmp_path):
    more = {"stage": "finetune", "tokens": TOKENS, "length": LENGTH, "batch": 4, "trains": "mixers"}
    for name, stages in (("whole", [*STAGES, more]), ("blocks", by(1, more))):
        notes = engine.train(llama, tmp_path / name, *stages)["notes"]
        assert any("saves no memory" in note for note in notes) == (name == "blocks")
    same(mixers(tmp_path / "blocks"), mixers(tmp_path / "whole"))
    with pytest.raises(UsageError, match=r"train.1.block: something else .* needs the whole model"):
        engine.train(llama, tmp_path / "sharded", *by(1, more), shard=True)
    assert not engine.work(tmp_path / "sharded").exists()


# Refusals.


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(llama, tmp_path, monkeypatch):
    free = []
    monkeypatch.setattr(blocks, "survey", lambda path: Destination(path, path, 0, free[-1], False))
    rows = STEPS * 4
    needed = rows * LENGTH * (2 * 64 * 4 + 8)  # two files of 64 fp32 values for each token, its id and position
    free.append(needed - 1)
    with pytest.raises(ResourceError, match=rf"^train.1.block: .* take {needed / 1000:.2f} kB"):
        engine.train(llama, tmp_path / "out", *by(1))
    assert not engine.work(tmp_path / "out").exists()
    free.append(needed)
    engine.train(llama, tmp_path / "out", *by(1))


def test_a_family_whose_layers_hand_on_more_than_hidden_states_is_refused(tmp_path):
    checkpoint = engine.family(tmp_path, "inkling2_text")
    with pytest.raises(ModelError, match=r"^train.1.block: .* layer 3 reads more of what earlier") as caught:
        engine.train(checkpoint, tmp_path / "out", *by(1), data={"separate": False})
    assert caught.value.fix == "Leave train.1.block out"
    assert not engine.work(tmp_path / "out").exists()


def test_families_whose_documents_see_each_other_are_refused(tmp_path):
    """OPT's masks don't look at positions; LFM2 has convolutions, in its second layer."""
    opt, cpu = engine.family(tmp_path, "opt"), torch.device("cpu")
    with pytest.raises(UsageError, match="the documents of a row see each other"):
        engine.train(opt, tmp_path / "out", *by(1))
    for family in ("lfm2", "gemma2", "mixtral"):
        model = tiny_model(family)
        model.save_pretrained(tmp_path / family / "m")
        checkpoint = tmp_path / family / "c"
        linearize.convert(tmp_path / family / "m", checkpoint, recipe=recipe_for(model.config, WINDOW))
        for dtype in (torch.float32, torch.bfloat16):
            refused = pytest.raises(UsageError, match="the documents of a row") if family == "lfm2" else nullcontext()
            with refused:
                blocks.check_apart(checkpoint, blocks.skeleton(checkpoint, dtype, cpu), cpu)


def test_states_that_are_shorter_than_they_were_are_an_error(llama, tmp_path, monkeypatch):
    """The disk lies: not what was lost, but what is gone while it is read."""
    shutil.copytree(llama, tmp_path / "c")
    shutil.copy(llama.parent / "text.txt", tmp_path)
    block = blockwise._Walk._block

    def cut(self, number, *args):
        if number == 1:
            os.truncate(self._states(1).path, 1000)
        block(self, number, *args)

    monkeypatch.setattr(blockwise._Walk, "_block", cut)
    with pytest.raises(ModelError, match="is shorter than it was"):
        engine.train(tmp_path / "c", tmp_path / "out", *by(1))
    monkeypatch.undo()
    engine.train(tmp_path / "c", tmp_path / "out", *by(1), resume=True)
