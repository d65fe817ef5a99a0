"""`linearize run`: every step once, again where its inputs changed, and on from where it was interrupted."""

from __future__ import annotations

import json
import shutil
import sys
import types

import pytest
import torch
from linearize_evals import run as evals_run
from transformers import AutoModelForCausalLM

import linearize
from linearize import pipeline
from linearize.errors import ModelError, ResourceError, UsageError
from linearize.swap import Lock
from linearize.training.output import write
from linearize.verification import verify
from tests.checkpoints import tree
from tests.evals.engine import byte_tokenizer, tiny
from tests.evals.results_example import example_results

RECIPE = {
    "mixer": "window",
    "feature_map": "hedgehog",
    "window": 8,
    "data": {"source": "teacher", "held_out": 1},
    "train": [{"stage": "transfer", "tokens": 256, "length": 64, "batch": 2}],
    "eval": {"tasks": ["linearize_niah_single"], "lengths": [256], "depths": [0.5], "samples": 1},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


class Steps:
    """Stands in for training and evaluation: both leave the files of the real ones, and can be interrupted."""

    def __init__(self):
        self.calls = []
        self.interrupt = None
        self.changed = False

    def train(self, checkpoint, out, *, recipe, work, resume, force, **options):
        self.calls.append("train again" if resume else "train")
        assert resume == work.exists()
        work.mkdir(exist_ok=True)
        (work / "run.json").write_text("{}")
        if self.interrupt == "train":
            raise KeyboardInterrupt
        (work / "summary.json").write_text("{}")
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".linearize." in name:
                    parameter.add_(recipe.train[0].lr)
        stages = [{"stage": stage.stage, "tokens": stage.tokens} for stage in recipe.train]
        record = {"base_weights": "unchanged", "teacher": recipe.model, "stages": stages}
        done = write(model, checkpoint, out, record=record, base_changed=self.changed, force=force)
        return {"stages": stages, "out": done["out"]}

    def evaluate(self, student, out, *, resume, **options):
        self.calls.append("eval again" if resume else "eval")
        self.options = options
        assert resume == out.is_dir()
        out.mkdir(exist_ok=True)
        (out / "run.json").write_text("{}")
        if self.interrupt == "eval":
            raise KeyboardInterrupt
        results = example_results()
        results["settings"]["device"] = "cpu"
        (out / "results.json").write_text(json.dumps(results))
        (out / "report.html").write_text("")
        return results


@pytest.fixture
def steps(monkeypatch):
    made = Steps()
    session = types.ModuleType("linearize.training.session")
    session.train = made.train
    monkeypatch.setitem(sys.modules, session.__name__, session)
    monkeypatch.setattr("linearize.training.session", session, raising=False)
    monkeypatch.setattr(evals_run, "evaluate", made.evaluate)
    return made


def did(result):
    return [step["step"] for step in result["steps"] if step["done"]]


def reasons(result):
    return {step["step"]: step["because"] for step in result["steps"]}


def test_a_run_makes_everything_once(base, tmp_path, steps):
    told = []
    first = pipeline.run(RECIPE, tmp_path / "out", model=base, note=told.append)
    assert did(first) == ["convert", "train", "eval", "card"]
    assert steps.calls == ["train", "eval"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "run.json", "converted", "model", "training", "evaluation",
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert verify(tmp_path / "out" / "converted") == verify(tmp_path / "out" / "model") == []
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "1. transfer: 256 tokens" in card
    assert r"linearize\_niah\_single | 240 | 240" in card
    assert first["training"]["stages"] == [{"stage": "transfer", "tokens": 256}]
    assert first["results"]["out"] == str(tmp_path / "out" / "evaluation")
    json.dumps(first)
    before = tree(tmp_path / "out")
    again = pipeline.run(RECIPE, tmp_path / "out", model=base, note=told.append, resume=True)
    assert did(again) == []
    seconds = {step["step"]: step["seconds"] for step in first["steps"]}
    assert all(0 < one < 600 for one in seconds.values())
    assert set(reasons(again).values()) == {"made from the same before", "it says all of this already"}
    assert steps.calls == ["train", "eval"]
    assert tree(tmp_path / "out") == before
    assert again["training"] == first["training"]
    assert again["results"] == first["results"]
    assert "train: it wasn't there yet" in told
    assert "train: kept, made from the same before" in told


@pytest.mark.parametrize(
    ("changes", "made", "because"),
    [
        ({"window": 4}, ["convert", "train", "eval", "card"], "recipe.window: 8 -> 4"),
        ({"train.0.lr": 0.5}, ["train", "eval", "card"], "recipe.train.0.lr: 0.01 -> 0.5"),
        ({"data.recall_share": 0.3}, ["train", "card"], "recipe.data.recall_share: 0.0 -> 0.3"),
        ({"eval.samples": 2}, ["eval"], "recipe.eval.samples: 1 -> 2"),
        ({"every.save": 7, "keep": 1, "trackers": []}, [], None),
    ],
)
def test_a_changed_input_makes_its_step_and_what_reads_it_again(base, tmp_path, steps, changes, made, because):
    pipeline.run(RECIPE, tmp_path / "out", model=base)
    steps.calls.clear()
    result = pipeline.run(RECIPE, tmp_path / "out", model=base, overrides=changes)
    assert did(result) == made
    if because:
        assert reasons(result)[made[0]] == because
    assert all(call in ("train", "eval") for call in steps.calls)  # nothing goes on from what was trained otherwise
    assert verify(tmp_path / "out" / "model") == []


def test_a_copy_of_the_same_model_is_converted_but_not_trained_again(base, tmp_path, steps):
    shutil.copytree(base, tmp_path / "base")
    pipeline.run(RECIPE, tmp_path / "out", model=tmp_path / "base")
    shutil.rmtree(tmp_path / "base")
    shutil.copytree(base, tmp_path / "base", copy_function=shutil.copy)
    result = pipeline.run(RECIPE, tmp_path / "out", model=tmp_path / "base")
    assert did(result) == ["convert"]
    assert reasons(result)["convert"] == "model's files: changed"


def test_text_that_changed_is_trained_on_again(base, tmp_path, steps):
    text = tmp_path / "text.txt"
    text.write_text("One text.\n" * 9)
    pipeline.run(RECIPE, tmp_path / "out", model=base, data=str(text))
    text.touch()
    assert did(pipeline.run(RECIPE, tmp_path / "out", model=base, data=str(text))) == []
    text.write_text("Another text.\n" * 9)
    result = pipeline.run(RECIPE, tmp_path / "out", model=base, data=str(text))
    assert did(result)[0] == "train"
    assert reasons(result)["train"] == "data's files: changed"


def test_of_a_folder_only_the_text_counts_and_home_is_found(base, tmp_path, steps, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("One text.\n" * 9)
    with pytest.raises(UsageError, match="lies in the folder of its data"):
        pipeline.run(RECIPE, tmp_path / "texts" / "out", model=base, data="~/texts")
    assert not (tmp_path / "texts" / "out").exists()
    pipeline.run(RECIPE, tmp_path / "out", model=base, data="~/texts")
    (tmp_path / "texts" / "picture.png").write_text("x")
    assert did(pipeline.run(RECIPE, tmp_path / "out", model=base, data="~/texts")) == []
    (tmp_path / "texts" / "b.txt").write_text("More.")
    result = pipeline.run(RECIPE, tmp_path / "out", model=base, data="~/texts")
    assert reasons(result)["train"] == "data's files: changed"


@pytest.mark.parametrize("where", ["train", "eval"])
def test_what_was_interrupted_goes_on(base, tmp_path, steps, where):
    steps.interrupt = where
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(RECIPE, tmp_path / "out", model=base)
    steps.interrupt = None
    steps.calls.clear()
    result = pipeline.run(RECIPE, tmp_path / "out", model=base)
    assert steps.calls[0] == f"{where} again"
    assert reasons(result)[where] == "it was interrupted"
    assert reasons(result)["convert"] == "made from the same before"
    assert verify(tmp_path / "out" / "model") == []


def test_an_interrupted_training_with_other_settings_begins_anew(base, tmp_path, steps):
    steps.interrupt = "train"
    for lr in (0.01, 0.02):
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(RECIPE, tmp_path / "out", model=base, overrides={"train.0.lr": lr})
    steps.interrupt = None
    pipeline.run(RECIPE, tmp_path / "out", model=base, overrides={"train.0.lr": 0.02})
    assert steps.calls == ["train", "train", "train again", "eval"]


def test_a_training_that_was_killed_before_its_first_file_begins_anew(base, tmp_path, steps):
    steps.interrupt = "train"
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(RECIPE, tmp_path / "out", model=base)
    (tmp_path / "out" / "training" / "run.json").rename(tmp_path / "out" / "training" / ".run.json.1.part")
    steps.interrupt = None
    pipeline.run(RECIPE, tmp_path / "out", model=base)
    assert steps.calls == ["train", "train", "eval"]


def test_what_was_damaged_is_made_again(base, tmp_path, steps):
    pipeline.run(RECIPE, tmp_path / "out", model=base)
    steps.calls.clear()
    (tmp_path / "out" / "model" / "config.json").unlink()
    result = pipeline.run(RECIPE, tmp_path / "out", model=base)
    assert reasons(result)["train"] == "what it made is missing or damaged"
    assert steps.calls == ["train"]  # it had come to its end, and kept no checkpoint to go on from
    (tmp_path / "out" / "evaluation" / "results.json").write_text("{}")
    result = pipeline.run(RECIPE, tmp_path / "out", model=base)
    assert reasons(result)["eval"] == "what it made has been changed since"
    assert did(result) == ["eval"]


def test_results_stay_where_the_text_that_they_are_of_is_gone(base, tmp_path, steps):
    text = tmp_path / "text.txt"
    text.write_text("One text.\n" * 9)
    recipe = {**RECIPE, "eval": {"tasks": ["linearize_perplexity"], "text": str(text)}}
    pipeline.run(recipe, tmp_path / "out", model=base)
    before = tree(tmp_path / "out")
    text.unlink()
    with pytest.raises(UsageError, match="no text file"):
        pipeline.run(recipe, tmp_path / "out", model=base)
    assert tree(tmp_path / "out") == before


def test_a_model_whose_weights_have_changed_is_compared_with_what_it_was_made_from(base, tmp_path, steps):
    pipeline.run(RECIPE, tmp_path / "one", model=base)
    assert steps.options["teacher"] is None
    steps.changed = True
    pipeline.run(RECIPE, tmp_path / "two", model=base)
    assert steps.options["teacher"] == str(base)


def test_without_a_section_eval_nothing_is_scored(base, tmp_path, steps):
    result = pipeline.run({**RECIPE, "eval": None}, tmp_path / "out", model=base)
    assert steps.calls == ["train"]
    assert result["results"] is None
    assert reasons(result)["eval"] == "the recipe has no section eval"
    assert "Not measured yet" in (tmp_path / "out" / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "arguments", "error", "match"),
    [
        ({}, {"model": None}, UsageError, "names no model"),
        ({}, {"model": "./gone"}, ModelError, "no file or folder"),
        ({"train": []}, {}, UsageError, "no section train"),
        ({}, {"data": ""}, UsageError, "needs a value"),
        ({}, {"data": "base"}, UsageError, "holds no text"),
        ({}, {"device": "cuda:99"}, UsageError, "can't be used here"),
        ({"trackers": ["aim"]}, {}, UsageError, "isn't installed here"),
        ({"eval": {"tasks": ["linearize_perplexity"], "text": "gone.txt"}}, {}, UsageError, "no text file"),
        ({"eval": {"tasks": ["linearize_niah_single"], "haystack": "gone"}}, {}, UsageError, "no haystack"),
        ({"eval": {"teacher": "./gone"}}, {}, ModelError, "no file or folder"),
        ({}, {"data": "gone.txt"}, UsageError, r"gone\.txt"),
        ({"eval": {"tasks": ["linearize_nia_single"]}}, {}, UsageError, "did you mean"),
        ({"eval": {"suite": "quick", "text": "x.txt", "tasks": ["linearize_niah_single"]}}, {}, UsageError, "--text"),
        ({}, {"resume": True}, UsageError, "no run in"),
        ({}, {"out": "base/run"}, UsageError, "is inside MODEL"),
        ({"window": 0}, {}, UsageError, "window"),
        ({"keep_softmax": "auto:1"}, {}, UsageError, "choosing layers needs absent"),
    ],
)
def test_what_would_fail_later_is_refused_before_anything_is_written(
    base, tmp_path, steps, monkeypatch, changes, arguments, error, match
):
    shutil.copytree(base, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("linearize.selection.NEEDED", ("absent",))
    before = tree(tmp_path)
    arguments = {"out": "new/out", "model": "base"} | arguments
    with pytest.raises(error, match=match):
        pipeline.run({**RECIPE, **changes}, arguments.pop("out"), **arguments)
    assert tree(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"base"}
    assert steps.calls == []


def test_a_folder_of_something_else_and_one_that_another_run_writes_are_left_alone(base, tmp_path, steps):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="aren't a run's"):
        pipeline.run(RECIPE, tmp_path / "mine", model=base)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "run.json").write_text('{"student": "x"}')
    with pytest.raises(UsageError, match="isn't that of `linearize run`"):
        pipeline.run(RECIPE, tmp_path / "eval", model=base)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".run.json.1.part").touch()  # before its first line was written
    pipeline.run({**RECIPE, "eval": None}, tmp_path / "killed", model=base)
    for damaged in ('{"steps": {"train": {"inputs": 3}}, "version": 1}', '{"steps": {}, "version": 2}'):
        (tmp_path / "eval" / "run.json").write_text(damaged)
        with pytest.raises(UsageError, match=r"is damaged|has version 2"):
            pipeline.run(RECIPE, tmp_path / "eval", model=base)
    lock = Lock(tmp_path / ".out.linearize-run-lock", tmp_path / "out")
    with pytest.raises(ResourceError, match="is being written by"):
        pipeline.run(RECIPE, tmp_path / "out", model=base)
    lock.release()
    assert not (tmp_path / "out").exists()


def test_several_processes_are_told_to_train_alone(base, tmp_path, steps, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="accelerate launch -m linearize train"):
        pipeline.run(RECIPE, tmp_path / "out", model=base)


def test_a_card_is_replaced_only_where_nothing_would_be_lost(base, tmp_path, steps):
    pipeline.run({**RECIPE, "eval": None}, tmp_path / "out", model=base)
    before = tree(tmp_path / "out" / "model")
    (tmp_path / "out" / "model" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt, which linearize didn't write"):
        pipeline.run(RECIPE, tmp_path / "out", model=base)
    (tmp_path / "out" / "model" / "notes.txt").unlink()
    assert tree(tmp_path / "out" / "model") == before
    weights = tmp_path / "out" / "model" / "model-linearize.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))  # as long as before: only its hash tells
    with pytest.raises(ModelError, match="isn't as linearize wrote it any more"):
        pipeline.run(RECIPE, tmp_path / "out", model=base)
    weights.write_bytes(sound)
    (tmp_path / "out" / "model" / "README.md").unlink()  # a card is no reason to train again
    assert did(pipeline.run(RECIPE, tmp_path / "out", model=base)) == ["card"]


@pytest.mark.slow
def test_the_whole_path_on_a_tiny_model(base, tmp_path, monkeypatch):
    """With the real training and evaluation."""
    pytest.importorskip("linearize.training.session")
    monkeypatch.setenv("LINEARIZE_CACHE", str(tmp_path / "cache"))
    recipe = {
        **RECIPE,
        "data": {"source": "teacher", "teacher_tokens": 2000, "held_out": 2},
        "train": [
            {"stage": "calibrate", "rows": 1, "length": 64},
            *RECIPE["train"],
            {"stage": "distill", "tokens": 128, "length": 64, "batch": 2, "lora": {"r": 2}},
        ],
    }
    result = linearize.run(recipe, tmp_path / "out", model=base, overrides={"eval.dtype": "float32"})
    assert did(result) == ["convert", "train", "eval", "card"]
    assert verify(tmp_path / "out" / "model") == []
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    recall = result["results"]["tasks"]["linearize_niah_single"]["student"]
    assert f"{recall['accuracy']:.3f} ({recall['low']:.3f} to {recall['high']:.3f})" in card
    assert result["results"]["models"]["teacher"]["name"] == str(base)  # LoRA was merged
    assert did(linearize.run(recipe, tmp_path / "out", model=base, overrides={"eval.dtype": "float32"})) == []


@pytest.mark.slow
def test_a_training_that_was_interrupted_ends_with_the_same_bytes(base, tmp_path):
    """With the real training."""
    pytest.importorskip("linearize.training.session")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"Line {n} says {n * n}. " * 9}) + "\n" for n in range(40)))
    recipe = {**RECIPE, "eval": None, "precision": "float32", "every": {"evaluate": 0, "save": 1}}
    recipe["train"] = [{**RECIPE["train"][0], "tokens": 512}]

    def run(out, **options):
        return pipeline.run(recipe, tmp_path / out, model=base, data=str(text), **options)

    def stop(what, done, total, *text):
        if text and done >= 256:
            raise KeyboardInterrupt

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", progress=stop)
    result = run("parts")
    assert reasons(result)["train"] == "it was interrupted"
    assert any("resumed from" in note for note in result["training"]["notes"])
    whole, parts = (tree(tmp_path / out / "model") for out in ("whole", "parts"))
    assert whole["model-linearize.safetensors"] == parts["model-linearize.safetensors"]
