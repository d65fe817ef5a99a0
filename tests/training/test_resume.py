"""A training that is killed anywhere and resumed is the training that nobody killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linearize.cli import main
from linearize.errors import ModelError, ResourceError, UsageError
from linearize.modeling.observe import Observation
from linearize.swap import Lock
from linearize.training import loop, session, state
from linearize.training.metrics import Metrics
from tests.checkpoints import tree
from tests.training import engine
from tests.training.engine import CALIBRATE, DISTILL, FINETUNE, TRANSFER

ROOT = Path(__file__).resolve().parents[2]
DROPOUT = {"lora": {"r": 2, "alpha": 4, "dropout": 0.2}}
KEPT = {"lora": {"r": 2, "alpha": 4, "merge": False}}
RUNS = {
    # Mixers, then LoRA with dropout, then LoRA with cross-entropy; a share of recall rows; documents apart.
    "lora": (
        [CALIBRATE, TRANSFER, {**DISTILL, **DROPOUT, "ce": 0.2}, {**FINETUNE, **DROPOUT, "micro_batch": 2}],
        {"data": {"recall_share": 0.4}, "every": {"evaluate": 2, "save": 2}},
        [
            ["step", 1, 1],  # before any checkpoint of the stage
            ["step", 1, 3],
            ["saved", 2, 0],  # between stages
            ["save", 2, 2],
            ["step", 2, 3],
            ["step", 3, 4],
            ["publish"],
        ],
    ),
    # All weights, then LoRA around weights that have changed; one running text.
    "all": (
        [
            {**FINETUNE, "trains": "all", "lora": {}, "gradient_checkpointing": True, "weight_decay": 0.1},
            {**DISTILL, **KEPT, "teacher": "BASE", "mixer_lr": 0.02, "schedule": "wsd"},
            {**FINETUNE, "trains": "mixers", "lora": {}},
        ],
        {"data": {"separate": False}, "every": {"save": 1}, "keep": 1},
        [["step", 0, 3], ["save", 1, 0], ["saved", 1, 3], ["step", 2, 2]],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_bit_for_bit_those_of_an_uninterrupted_training(tmp_path, name):
    stages, settings, kills = RUNS[name]
    made = engine.checkpoint(tmp_path / "m")
    stages = json.loads(json.dumps(stages).replace("BASE", str(made.parent / "base")))
    spec = {"checkpoint": str(made), "folder": str(tmp_path / "runs"), "stages": stages, "settings": settings}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.killed", json.dumps({**spec, "kills": kills})],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0, *["killed"] * len(kills), 0], done.stderr[-3000:]
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    assert engine.losses(killed) == engine.losses(whole)
    assert len(engine.losses(whole)) == 4 * sum(stage != CALIBRATE for stage in stages)
    looks = [line for line in engine.metrics(whole) if "held_out" in line]
    assert [line for line in engine.metrics(killed) if "held_out" in line] == looks
    assert bool(looks) == ("evaluate" in settings["every"])
    assert without_path(killed) == without_path(whole)
    assert not (engine.work(killed) / "checkpoints").exists()


def without_path(out: Path) -> dict[str, str]:
    """The files of OUT, but for those that hold its name or the hashes of such."""
    named = ("adapter/adapter_config.json", "linearize-manifest.json")
    return {name: digest for name, digest in tree(out).items() if name not in named}


@pytest.fixture
def made(tmp_path):
    return engine.checkpoint(tmp_path / "m")


class Stop(Exception):
    pass


def at(monkeypatch, stage: int, step: int, action) -> None:
    """Do something when the line of metrics of a step has been written; called with what `Job` is there."""
    jobs = []
    real, write = session.train_stage, Metrics.write
    monkeypatch.setattr(session, "train_stage", lambda job, *args: jobs.append(job) or real(job, *args))

    def acted(self, line):
        write(self, line)
        if "loss" in line and (line["stage"], line["step"]) == (stage, step):
            action(jobs[-1])

    monkeypatch.setattr(Metrics, "write", acted)


def stop(job) -> None:
    raise Stop


def stopped(monkeypatch, made, out, *stages, stage: int = 0, step: int = 3, **settings) -> None:
    """A training that ends in an error after a step."""
    with monkeypatch.context() as patched:
        at(patched, stage, step, stop)
        with pytest.raises(Stop):
            engine.train(made, out, *stages, **settings)


def poison(job) -> None:
    with torch.no_grad():
        job.model.get_parameter("model.layers.0.self_attn.linearize.gate")[2] = float("nan")


@pytest.mark.parametrize("stage", [TRANSFER, DISTILL])
@pytest.mark.parametrize("look", [0, 3])
def test_a_nan_stops_with_its_layer_and_step_and_the_last_good_checkpoint(made, tmp_path, monkeypatch, stage, look):
    """Whether the next step or a look at the held-out rows finds it."""
    out = tmp_path / "out"
    settings = {"every": {"evaluate": look, "save": 2}}
    with monkeypatch.context() as patched:
        at(patched, 0, 3, poison)
        with pytest.raises(ModelError) as caught:
            engine.train(made, out, stage, **settings)
    step = 3 if look else 4
    assert f"stage 0 ({stage['stage']}), step {step}: converted layer 0 gave NaN or infinite values" in str(
        caught.value
    )
    kept = engine.work(out) / "checkpoints" / "000-000000002"
    assert f"the last good checkpoint is {kept}. Lower train.0.lr" in str(caught.value)
    assert caught.value.exit_code == 3
    assert engine.checkpoints(out) == [kept.name]
    assert not out.exists()
    engine.train(made, out, stage, **settings, resume=True)
    engine.train(made, tmp_path / "whole", stage, **settings)
    assert engine.losses(out) == engine.losses(tmp_path / "whole")
    assert tree(out)["model-linearize.safetensors"] == tree(tmp_path / "whole")["model-linearize.safetensors"]


def test_a_nan_in_a_calibration_or_in_the_weights_is_said(made, tmp_path, monkeypatch):
    """A softmax layer's NaN reaches the next layers; a gradient's is named by its parameter."""
    real = session.Session._job

    def broken(self, *args):
        job = real(self, *args)
        poison(job)
        return job

    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "_job", broken)
        with pytest.raises(ModelError, match=r"stage 0 \(calibrate\): converted layer 0"):
            engine.train(made, tmp_path / "a", CALIBRATE)

    def infinite(job):
        for name, parameter in job.model.named_parameters():
            if name.endswith("0.self_attn.q_proj.lora_A.default.weight"):
                parameter.register_hook(lambda gradient: gradient * float("inf"))

    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    with monkeypatch.context() as patched:
        at(patched, 0, 2, infinite)
        with pytest.raises(ModelError, match=f"step 3: the gradient of {name} is NaN"):
            engine.train(made, tmp_path / "b", DISTILL)


@pytest.mark.parametrize(
    ("module", "said"), [("model.layers.1.mlp.up_proj", "layer 1"), ("model.norm", "the decoder's end")]
)
def test_a_nan_that_no_mixer_sees_is_traced_to_its_layer(made, tmp_path, monkeypatch, module, said):
    """Layer 1 keeps softmax."""

    def break_it(job):
        with torch.no_grad():
            job.model.get_parameter(f"{module}.weight").fill_(float("inf"))

    with monkeypatch.context() as patched:
        at(patched, 0, 2, break_it)
        with pytest.raises(ModelError, match=f"step 3: the loss is NaN or infinite: {said} gives NaN"):
            engine.train(made, tmp_path / "out", {**FINETUNE, "trains": "mixers", "lora": {}})


def test_a_nan_loss_of_a_transfer_is_its_layer_s(made, tmp_path, monkeypatch):
    def student(self, real=Observation.student):
        return real(self) * (float("nan") if self.layer == 0 else 1)

    monkeypatch.setattr(Observation, "student", student)
    with pytest.raises(
        ModelError, match=r"stage 1 \(transfer\), step 1: the loss is NaN or infinite: layer 0; the last"
    ):
        engine.train(made, tmp_path / "out", {**FINETUNE, "trains": "mixers", "lora": {}}, TRANSFER)


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_an_interrupt_leaves_a_training_that_can_be_resumed(made, tmp_path, monkeypatch, capsys, how):
    recipe, out = tmp_path / "recipe.json", tmp_path / "out"
    recipe.write_text(json.dumps(engine.recipe(made, TRANSFER)))
    command = ["train", str(made), "--recipe", str(recipe), "-o", str(out), "--device", "cpu"]

    def interrupt(job):
        if how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        at(patched, 0, 3, interrupt)
        assert main(command) == 130
    assert capsys.readouterr().err.endswith(f"-o {out} --device cpu --resume\n")
    assert (out.exists(), engine.checkpoints(out)) == (False, ["000-000000002"])
    assert main([*command, "--resume", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert "resumed from 000-000000002: stage 0, step 2" in summary["notes"]
    assert summary["stages"][0]["steps"] == 4
    assert len(engine.losses(out)) == 4


def test_resuming_with_other_settings_is_refused_and_says_which(made, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(monkeypatch, made, out, TRANSFER)
    before = tree(engine.work(out))

    def refused(match, *stages, **settings):
        with pytest.raises(UsageError, match=match):
            engine.train(made, out, *stages, **settings, resume=True)
        assert tree(engine.work(out)) == before

    refused(r"other settings \(train.0.lr: 0.01 -> 0.02\)", {**TRANSFER, "lr": 0.02})
    refused(
        r"data.separate: true -> false; data.seed: 0 -> 3; seed: 0 -> 1",
        TRANSFER,
        data={"separate": False, "seed": 3},
        seed=1,
    )
    refused("train: changed|train: ", TRANSFER, CALIBRATE)
    other = engine.checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(UsageError, match=r"checkpoint: .*; weights: changed"):
        engine.train(other, out, TRANSFER, data={"source": str(made.parent / "text.txt")}, resume=True)
    with pytest.raises(UsageError, match="holds a training already"):
        engine.train(made, out, TRANSFER)
    # Whatever only says how often things happen may change.
    engine.train(made, out, TRANSFER, every={"save": 3, "log": 2}, keep=4, resume=True)
    for options in ({"resume": True, "force": True}, {}):  # never just "add --force", which wouldn't do
        with pytest.raises(UsageError, match="has come to its end"):
            engine.train(made, out, TRANSFER, **options)
    with pytest.raises(UsageError, match=r"there is no training in .* to go on with"):
        engine.train(made, tmp_path / "new", TRANSFER, resume=True)


def test_text_that_has_changed_is_refused(made, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(monkeypatch, made, out, TRANSFER)
    engine.text(made.parent / "text.txt", seed=8)
    with pytest.raises(UsageError, match="have changed since the run began"):
        engine.train(made, out, TRANSFER, resume=True)


def test_a_training_that_never_began_is_no_obstacle(made, tmp_path, monkeypatch):
    """What fails between the checks and the first step may be begun anew with other settings."""
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "_job", lambda *args: stop(None))
        with pytest.raises(Stop):
            engine.train(made, out, TRANSFER)
    assert (engine.work(out) / "run.json").is_file()
    engine.train(made, out, {**TRANSFER, "lr": 0.1})
    assert len(engine.losses(out)) == 4


def test_what_was_measured_is_not_measured_again(made, tmp_path, monkeypatch):
    """`precision: auto` times two products on a CPU: a resumed training takes what the first one chose."""
    import linearize_evals.loading as loading

    out = tmp_path / "out"
    asked = []

    def measured(dtype):
        return lambda asked_for, device: asked.append(asked_for) or (getattr(torch, asked_for or dtype), "faster")

    monkeypatch.setattr(loading, "choose_dtype", measured("bfloat16"))
    stopped(monkeypatch, made, out, TRANSFER, precision="auto")
    monkeypatch.setattr(loading, "choose_dtype", measured("float32"))
    engine.train(made, out, TRANSFER, precision="auto", resume=True)
    assert asked == [None, "bfloat16"]
    engine.train(made, tmp_path / "new", TRANSFER, precision="auto")
    assert asked[2:] == [None]


def test_weights_that_got_no_gradient_before_the_kill_are_trained_after_it(made, tmp_path, monkeypatch):
    """Those of an expert that no token was sent to, for example; here, of a layer that the first steps leave out."""

    def leave_out(job):
        layer = job.model.model.layers[1].mlp
        real = layer.forward
        layer.forward = lambda x: real(x) if counted["steps"] > 2 else torch.zeros_like(x)

    counted = {"steps": 0}
    step = loop.Stage._step

    def watched(self, number):
        counted["steps"] = number + 1
        if "forward" not in vars(self.job.model.model.layers[1].mlp):
            leave_out(self.job)
        return step(self, number)

    monkeypatch.setattr(loop.Stage, "_step", watched)
    stage = {**FINETUNE, "trains": "all", "lora": {}, "schedule": "constant"}
    stopped(monkeypatch, made, tmp_path / "out", stage)
    assert engine.checkpoints(tmp_path / "out") == ["000-000000002"]
    engine.train(made, tmp_path / "out", stage, resume=True)
    engine.train(made, tmp_path / "whole", stage)
    assert engine.losses(tmp_path / "out") == engine.losses(tmp_path / "whole")
    found, expected = engine.weights(tmp_path / "out"), engine.weights(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    before = engine.weights(made)["model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(found["model.layers.1.mlp.up_proj.weight"], before)


def test_one_training_at_a_time_works_in_a_folder(made, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(monkeypatch, made, out, TRANSFER)
    lock = Lock(engine.work(out) / ".lock", engine.work(out))
    try:
        with pytest.raises(ResourceError, match="is being written by process"):
            engine.train(made, out, TRANSFER, resume=True)
    finally:
        lock.release()
    engine.train(made, out, TRANSFER, resume=True)
    assert not (engine.work(out) / ".lock").exists()


def test_the_newest_checkpoints_are_kept_and_halves_are_none(tmp_path):
    parameters = {"a": torch.arange(6.0).view(2, 3).T}
    for step in range(1, 6):
        state.save(tmp_path, parameters, {"step": torch.tensor(step)}, {"stage": 0, "step": step}, keep=2)
    (tmp_path / ".000-000000006.part").mkdir()
    (tmp_path / ".000-000000006.part" / "position.json").write_text("{}")
    (tmp_path / "000-000000007").mkdir()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in state.checkpoints(tmp_path)] == ["000-000000004", "000-000000005"]
    last = state.checkpoints(tmp_path)[-1]
    stored, optimizer = state.read(last, {"a": torch.zeros(3, 2)})
    assert torch.equal(stored["a"], parameters["a"])
    assert optimizer == {"step": torch.tensor(5)}
    assert state.position(last) == {"stage": 0, "step": 5}
    with pytest.raises(ModelError, match="'b' differs"):
        state.read(last, {"a": torch.zeros(3, 2), "b": torch.zeros(1)})
    with pytest.raises(ModelError, match="'a' differs"):
        state.read(last, {"a": torch.zeros(2, 3)})
    state.save(tmp_path, parameters, None, {"stage": 1, "step": 0}, keep=1)
    assert [path.name for path in state.checkpoints(tmp_path)] == ["001-000000000"]
    assert state.read(state.checkpoints(tmp_path)[0], {"a": torch.zeros(3, 2)})[1] is None


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path, monkeypatch):
    state.save(tmp_path, {"a": torch.ones(2)}, None, {"stage": 0, "step": 1}, keep=1)
    before = tree(tmp_path)
    from safetensors import SafetensorError

    def full(*args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    def onto_full(optimizer, target, real=torch.save):
        """As torch does it, onto a device without space."""
        with open("/dev/full", "wb") as file:
            real(optimizer, file if not isinstance(target, os.PathLike) else "/dev/full")

    for name, stand_in in (("save_file", full), ("torch.save", onto_full)):
        with monkeypatch.context() as patched:
            patched.setattr(f"linearize.training.state.{name}", stand_in)
            with pytest.raises(ResourceError, match="No space left"):
                state.save(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(9)}, {"stage": 0, "step": 2}, keep=1)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["parameters.safetensors", "optimizer.pt", "position.json"])
def test_a_checkpoint_that_is_cut_off_is_named(made, tmp_path, monkeypatch, name):
    out = tmp_path / "out"
    stopped(monkeypatch, made, out, TRANSFER, every={"save": 1})
    assert engine.checkpoints(out) == ["000-000000001", "000-000000002"]
    last = engine.work(out) / "checkpoints" / "000-000000002"
    data = (last / name).read_bytes()
    (last / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=f"{last}.* can't be read") as caught:
        engine.train(made, out, TRANSFER, resume=True)
    assert "to go on from before" in str(caught.value)
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    engine.train(made, out, TRANSFER, resume=True)
    engine.train(made, tmp_path / "whole", TRANSFER)
    assert engine.losses(out) == engine.losses(tmp_path / "whole")
