"""`train`, `run` and `recipes cp`: what is typed reaches the functions behind them, and typing errors come first."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

STAGE = {
    "stage": "transfer",
    "steps": 8,
    "tokens": 65536,
    "seconds": 312.0,
    "tokens_per_second": 210.1,
    "loss": {"first": 0.5, "last": 0.25},
    "held_out": {"before": {"perplexity": 101.2, "recall": 0.0}, "after": {"perplexity": 34.0, "recall": 0.5}},
    "peak_memory_bytes": 1_300_000_000,
}
CALIBRATE = {"stage": "calibrate", "steps": 0, "tokens": 1024, "seconds": 1.0, "loss": None, "held_out": {}}


@pytest.fixture
def called(monkeypatch):
    """The calls that the two functions get. They stand in for training itself, which has tests of its own."""
    calls: list[dict] = []

    def stand_in(name: str, function: str, answer):
        def function_(*arguments, **options):
            calls.append({"arguments": arguments, **options})
            return answer(arguments[1])

        module = ModuleType(name)
        setattr(module, function, function_)
        monkeypatch.setitem(sys.modules, name, module)

    summary = {"work": "OUT-training", "stages": [CALIBRATE, STAGE], "notes": ["9 of 10"]}
    stand_in("linearize.training.session", "train", lambda out: {"out": str(out), **summary})
    steps = [
        {"step": "convert", "done": False, "because": "the same as before"},
        {"step": "train", "done": True, "because": "the recipe's train has changed", "seconds": 312.0},
    ]
    stand_in("linearize.pipeline", "run", lambda out: {"out": str(out), "steps": steps, "training": summary})
    return calls


def test_train_passes_on_what_is_typed_and_shows_what_came_of_it(run, called, tmp_path):
    options = ["--set", "train.1.lr=3e-3", "--data", "my: text.txt", "--resume", "--device", "cpu", "-o", "OUT"]
    ran = run("train", tmp_path / "CKPT", "--recipe", "smollm2-135m/hybrid-25", *options)
    assert ran.code == 0, ran.err
    (call,) = called
    assert call["arguments"] == (str(tmp_path / "CKPT"), "OUT")
    assert (call["resume"], call["force"], call["device"]) == (True, False, "cpu")
    recipe = call["recipe"]
    assert (recipe.train[1].lr, recipe.data.source, recipe.keep_softmax[0]) == (3e-3, "my: text.txt", 8)
    shown = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert "transfer 8 65,536 210 0.5 -> 0.25 101.20 -> 34.00 0.00 -> 0.50 1.30 GB" in shown
    assert "calibrate 0 1,024 - - - - -" in shown
    assert "note: 9 of 10\n" in ran.out
    assert "OUT (metrics and checkpoints: OUT-training)" in ran.out
    assert ran.out.endswith("next: linearize eval OUT\n")


def test_train_writes_beside_the_checkpoint_s_name_and_prints_json(run, called):
    ran = run("train", "a/CKPT/", "--recipe", "smollm2-135m/hybrid-25", "--force", "--json")
    assert (ran.code, ran.json["out"], ran.json["stages"][1]) == (0, "CKPT-trained", STAGE)
    assert (called[0]["force"], called[0]["resume"]) == (True, False)


def test_run_passes_on_what_is_typed_and_shows_every_step(run, called):
    ran = run("run", "smollm2-135m/hybrid-25", "-o", "OUT", "--model", "~/m", "--data", "x.txt", "--set", "keep=5",
              "--device", "cpu")  # fmt: skip
    assert ran.code == 0, ran.err
    (call,) = called
    recipe, out = call["arguments"]
    assert (recipe.model, recipe.data.source, recipe.keep, out, call["resume"]) == ("~/m", "x.txt", 5, "OUT", False)
    assert call["device"] == "cpu"
    assert "convert  kept (the same as before)\n" in ran.out
    assert "train    done in 5 min (the recipe's train has changed)\n" in ran.out
    assert "101.20 -> 34.00" in ran.out
    assert run("run", "smollm2-135m/hybrid-25", "-o", "OUT", "--json").json["steps"][0]["done"] is False


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--set train.1.lrr=3", "error: --set train.1.lrr: unknown key 'train.1.lrr'; recipes allow only documented"),
        ("--set train.1.lr=0", "error: --set train.1.lr: must be more than 0, not 0"),
        ("--set train.9.lr=1", "Choose train.0 (calibrate), train.1 (transfer), train.2 (distill)"),
        ("--data x --set data.source=y", "data.source is given twice"),
        ("--data x --set data={held_out:2}", "--set data would replace what --data gives"),
        ("--set train.1.lr=1 --set train=[]", "--set train would replace what --set train.1.lr gives"),
        ("--set train.1.trains=lora", "stage transfer has no trains; distill and finetune have it"),
        ("--set train=[]", "has no section train"),
        ("--import no_such_module", "--import no_such_module failed"),
    ],
)
def test_what_is_mistyped_is_said_before_anything_is_begun(run, called, command, options, said):
    arguments = ["CKPT", "--recipe", "smollm2-135m/hybrid-25"] if command == "train" else ["smollm2-135m/hybrid-25"]
    ran = run(command, *arguments, "-o", "OUT", *options.split())
    assert (ran.code, ran.out, called) == (2, "", [])
    assert said in ran.err


def test_a_run_needs_a_model_and_train_a_recipe_with_stages(run, called, tmp_path):
    (tmp_path / "r.yaml").write_text("train: [{stage: calibrate}]\n")
    ran = run("run", tmp_path / "r.yaml", "-o", "OUT")
    assert (ran.code, "names no model. Add --model MODEL" in ran.err) == (2, True)
    assert run("run", tmp_path / "r.yaml", "-o", "OUT", "--model", "m").code == 0
    ran = run("train", "CKPT", "--recipe", "default")
    assert (ran.code, "the recipe default has no section train" in ran.err) == (2, True)
    assert run("train", "CKPT").code == 2


@pytest.mark.parametrize("command", ["train CKPT --recipe smollm2-135m/hybrid-25", "run smollm2-135m/hybrid-25 -o OUT"])
def test_the_command_after_an_interrupt_goes_on(run, called, monkeypatch, command):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["linearize.training.session"], "train", interrupted)
    monkeypatch.setattr(sys.modules["linearize.pipeline"], "run", interrupted)
    ran = run(*command.split())
    assert (ran.code, ran.err) == (130, f"interrupted; to run it again: linearize {command} --resume\n")
    assert run(*command.split(), "--resume").err.count("--resume") == 1


def test_a_typo_in_a_section_is_found_without_torch_in_less_than_a_second(fresh, tmp_path):
    (tmp_path / "r.yaml").write_text("train:\n  - stage: transfer\n    tokenss: 3\n")
    code = f"""
import sys, time
from linearize.cli import main
for command in (["train", "owner/name", "--recipe"], ["run"]):
    assert main([*command, {str(tmp_path / "r.yaml")!r}, "-o", {str(tmp_path / "out")!r}]) == 2
assert not {{"torch", "transformers", "huggingface_hub", "accelerate", "datasets", "peft"}} & set(sys.modules)
assert time.process_time() < 1
"""
    fresh(code)
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_cp_copies_a_recipe_with_its_reasons_and_never_overwrites(run, tmp_path):
    from linearize.recipe import shipped_recipes

    name, mine = "smollm2-135m/hybrid-25", tmp_path / "mine.yaml"
    original = shipped_recipes()[name].read_bytes()
    ran = run("recipes", "cp", name, mine)
    assert (ran.code, ran.out, mine.read_bytes()) == (0, f"wrote {mine}\n", original)
    mine.write_text("window: 3\n")
    ran = run("recipes", "cp", name, mine)
    assert (ran.code, f"there is a file {mine} already" in ran.err, mine.read_text()) == (2, True, "window: 3\n")
    assert run("recipes", "cp", name, tmp_path, "--json").json == {
        "recipe": name,
        "path": str(tmp_path / "hybrid-25.yaml"),
    }
    assert (tmp_path / "hybrid-25.yaml").read_bytes() == original
    ran = run("recipes", "cp", name, tmp_path / "no" / "r.yaml")
    assert (ran.code, "No such file or directory" in ran.err) == (2, True)
    for other, said in ((tmp_path / "no", "there is no recipe"), (tmp_path, "Is a directory"), (__file__, "YAML")):
        ran = run("recipes", "cp", other, tmp_path / "copy.yaml")
        assert (ran.code, said in ran.err, (tmp_path / "copy.yaml").exists()) == (2, True, False), ran.err
    ran = run("recipes", "cp", "smollm2-135m/hybrid-52", mine)
    assert (ran.code, "did you mean 'smollm2-135m/hybrid-25'?" in ran.err) == (2, True)


def test_a_recipe_that_trains_converts_and_leaves_its_training_out_of_the_checkpoint(run, model, tmp_path):
    out = tmp_path / "out"
    ran = run("convert", model, "-o", out, "--recipe", "llama3-8b/hedgehog-window", "--json")
    assert ran.code == 0, ran.err
    block = json.loads((out / "config.json").read_text())["linearize"]
    assert block["recipe"] == ran.json["plan"]["recipe"]
    assert not {"model", "data", "train", "every", "eval"} & set(block["recipe"])
    assert run("recipes", "cat", "llama3-8b/hedgehog-window", "--json").json["train"][1]["tokens"] == 20_000_000


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "linearize", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("Usage: linearize train [OPTIONS] CHECKPOINT")) == (0, True)
