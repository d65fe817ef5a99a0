"""Two processes, with a copy of the model in each (DDP) or one that they share (FSDP2), train what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import linearize_recipes
import pytest
import torch
import yaml

from linearize.errors import UsageError
from linearize.recipe import load_recipe
from linearize.recipe_files import shipped_recipes
from linearize.training.parallel import launched
from tests.checkpoints import tree
from tests.evals.test_processes import torchrun
from tests.training import engine
from tests.training.engine import CALIBRATE, weights
from tests.training.launched_training import record

ROOT = Path(__file__).parents[2]
LAUNCHERS = Path(linearize_recipes.__path__[0]) / "accelerate"
BATCH, LENGTH, STEPS = 8, 32, 2
# Forwards of two rows: two a step in each of two processes, four in one.
SAME = {"tokens": STEPS * BATCH * LENGTH, "length": LENGTH, "batch": BATCH, "micro_batch": 2, "lr": 0.001}
TRANSFER = {"stage": "transfer", **SAME}
LORA = {"stage": "distill", **SAME, "lora": {"r": 2, "alpha": 4}}
DROPOUT = {"stage": "distill", **SAME, "lora": {"r": 2, "alpha": 4, "dropout": 0.2}}
KEPT = {"stage": "distill", **SAME, "lora": {"r": 2, "alpha": 4, "merge": False}}
MIXERS = {"stage": "finetune", **SAME, "trains": "mixers"}
AGAIN = {"gradient_checkpointing": True}
ALL = {"stage": "distill", **SAME, **AGAIN, "trains": "all", "teacher": "BASE", "ce": 0.25, "weight_decay": 0.1}
LOOKS = {"every": {"evaluate": 1, "save": 1}}  # at the same step
# name -> model, stages, settings
RUNS = {
    "stages": ("apart", [CALIBRATE, TRANSFER, LORA, MIXERS], {}),
    "all": ("tied", [{**MIXERS, **AGAIN}, LORA, ALL], LOOKS),
    "adapter": ("tied", [KEPT], {"data": {"source": "teacher", "teacher_tokens": 1500}}),
    "dropout": ("apart", [DROPOUT], {"every": {"evaluate": 0, "save": 1}}),
    "redraw": ("random", [{**LORA, "redraw": 1}], {}),
}
STOP = (0, STEPS)  # the stage and step after which "dropout" is stopped, before it is saved
MODES = ("copies", "shards")
# fp32 sums over rows in another order.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each run has written: its folder, with `one`, `copies` and `shards`."""
    root = tmp_path_factory.mktemp("runs")
    models = {
        "tied": engine.checkpoint(root / "tied"),
        "apart": engine.checkpoint(root / "apart", tie_word_embeddings=False),
        "random": engine.checkpoint(root / "random", recipe={"feature_map": "favor"}),
    }
    todo = []
    for name, (model, stages, settings) in RUNS.items():
        run = {"checkpoint": str(models[model]), "settings": settings}
        run["stages"] = json.loads(json.dumps(stages).replace("BASE", str(models[model].parent / "base")))
        (root / name).mkdir()
        if name != "dropout":  # each process draws its own
            found = record(root / name / "one", models[model], run["stages"], settings)
            torch.save(found, root / name / "one.0.pt")
        for mode in MODES:
            shard = {"settings": {**settings, "shard": mode == "shards"}}
            todo.append({**run, **shard, "out": str(root / name / mode)})
            if name == "dropout":
                todo.append({**run, **shard, "out": str(root / name / f"{mode}-resumed"), "stop": STOP})
    (root / "todo.json").write_text(json.dumps(todo))
    done = torchrun(2, ["-m", "tests.training.launched_training", str(root / "todo.json")])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr.replace("[W", "")
    return root


def recorded(path: Path, rank: int = 0):
    return torch.load(path.with_name(f"{path.name}.{rank}.pt"))


def difference(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["stages", "all", "adapter", "redraw"])
def test_gradients_losses_and_weights_are_those_of_one_process(runs, name, mode):
    one, two = runs / name / "one", runs / name / mode
    steps = list(zip(recorded(one)["gradients"], recorded(two)["gradients"], strict=True))
    assert len(steps) == STEPS * sum(stage != CALIBRATE for stage in RUNS[name][1])
    for expected, found in steps:
        assert found.keys() == expected.keys()
        torch.testing.assert_close(list(found.values()), list(expected.values()), **CLOSE)
        assert all(gradient.any() for key, gradient in found.items() if "lora_A" not in key), "a gradient is lost"
    lines = list(zip(engine.metrics(one), engine.metrics(two), strict=True))
    for expected, found in lines:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=1e-5)), key
    assert difference(weights(one), weights(two)) < 1e-5
    assert tree(one).keys() == tree(two).keys()
    if name == "adapter":
        assert difference(weights(one / "adapter"), weights(two / "adapter")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_counted_over_all_processes(runs, mode):
    two = runs / "stages" / mode
    shares = [recorded(two, rank)["tokens"] for rank in (0, 1)]
    assert shares == [[STEPS * BATCH * LENGTH // 2] * 3] * 2
    told = {line["stage"]: line["tokens"] for line in engine.metrics(two)}
    assert told == dict.fromkeys((1, 2, 3), STEPS * BATCH * LENGTH)
    summary = json.loads((engine.work(two) / "summary.json").read_text())
    assert [stage["tokens"] for stage in summary["stages"]] == [64, *[STEPS * BATCH * LENGTH] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one", *MODES])
def test_a_frozen_parameter_never_changes(runs, mode):
    transfer, lora, mixers = recorded(runs / "stages" / mode)["changed"]
    assert all(".linearize." in name for name in transfer + mixers)
    assert {part for name in lora for part in ("linearize", "lora_") if part in name} == {"linearize", "lora_"}
    assert all(".linearize." in name or ".lora_" in name for name in lora)
    every = {name for name, _ in weights(runs / "tied" / "base").items()}
    changed = recorded(runs / "all" / mode)["changed"][2]
    assert every - {"lm_head.weight"} <= set(changed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_training_is_bit_for_bit_one_that_was_not_interrupted(runs, mode):
    whole, resumed = runs / "dropout" / mode, runs / "dropout" / f"{mode}-resumed"
    assert engine.metrics(resumed) == engine.metrics(whole)
    named = "linearize-manifest.json"
    assert {**tree(resumed), named: ""} == {**tree(whole), named: ""}
    assert difference(recorded(whole)["gradients"][-1], recorded(resumed)["gradients"][-1]) == 0


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_one_message_and_its_code(tmp_path):
    """Under `accelerate launch` with the file for FSDP2, which shards without `shard: true` in the recipe."""
    made = engine.checkpoint(tmp_path / "m")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"version": 1, **engine.recipe(made, TRANSFER)}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHERS / "fsdp2.yaml")]
    launch += ["--num_processes", "2", "--main_process_port", "0", "-m", "tests.training.launched_training", "fail"]
    command = ["train", str(made), "-o", str(tmp_path / "out"), "--recipe", str(tmp_path / "recipe.yaml")]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "evals")])}
    done = subprocess.run(launch + command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("weights are spread over 2 processes") == 1
    assert done.stderr.count("error: this process fails. Mend it.") == 1
    assert "interrupted" not in done.stderr
    assert "bug" not in done.stderr
    codes = [line.split()[2] for line in done.stderr.splitlines() if line.strip().startswith("exitcode")]
    assert set(codes) == {"3"}, done.stderr[-3000:]
    assert not (tmp_path / "out").exists()


def test_the_launcher_s_fsdp_is_shard_and_what_it_can_t_have_is_refused(monkeypatch):
    recipe = load_recipe("default")
    assert launched(recipe) is recipe
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert launched(recipe).shard
    assert "ACCELERATE_USE_FSDP" not in os.environ
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UsageError, match=r"DeepSpeed can't train a conversion\. Use FSDP2"):
        launched(recipe)


@pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP")])
def test_files_for_the_launcher_are_no_recipes(name, kind):
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(LAUNCHERS / f"{name}.yaml")).distributed_type == kind
    assert not [recipe for recipe in shipped_recipes() if recipe.startswith(LAUNCHERS.name)]
