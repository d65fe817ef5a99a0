"""What a training refuses before it reads a weight, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import linearize
from linearize.cli import main
from linearize.errors import UsageError
from linearize.training import checks, output
from linearize.training.separate import check_separate
from tests.checkpoints import tree
from tests.families import tiny_model
from tests.modeling.test_families import WINDOW, recipe_for
from tests.training import engine
from tests.training.engine import CALIBRATE, DISTILL, FINETUNE, TRANSFER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return engine.checkpoint(tmp_path_factory.mktemp("errors") / "m")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs `linearize train`, which must end with an exit code and a message, and leave no file."""

    def read(*args, **options):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(linearize, "load", read)

    def refused(checkpoint, code: int, said: str, *stages, options=(), out: Path | None = None, **settings) -> None:
        file = tmp_path / "recipe.json"
        file.write_text(json.dumps(engine.recipe(checkpoint, *stages, **settings)))
        target = out or tmp_path / "out"
        before = tree(tmp_path)
        found = main(["train", str(checkpoint), "--recipe", str(file), "-o", str(target), "--device", "cpu", *options])
        err = capsys.readouterr().err
        assert said in err
        assert found == code, err
        assert tree(tmp_path) == before
        work = engine.work(tmp_path / "out")
        assert not work.is_dir() or any(work.iterdir())

    return refused


def free(monkeypatch, module, size: int) -> None:
    real = module.survey
    monkeypatch.setattr(module, "survey", lambda path: dataclasses.replace(real(path), free_bytes=size))


def without(monkeypatch, *packages: str) -> None:
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)


def test_recipes(made, refused):
    for key in ("window=8", "mixer=gla", "layers.0.mixer=gla", "keep_softmax=none"):
        refused(made, 2, f"{key.partition('=')[0]} can't be changed for a training", TRANSFER, options=("--set", key))
    refused(made, 2, "unknown key 'train.0.lrr'", {**TRANSFER, "lrr": 1})
    refused(made, 2, "train.0.micro_batch (line 1): must divide batch, 2", {**TRANSFER, "micro_batch": 5, "batch": 2})
    refused(made, 2, "has no section train")
    differ = {**FINETUNE, "lora": {"r": 3}}
    refused(made, 2, "stages of one training share their LoRA, and its settings differ", DISTILL, differ)


def test_lora_targets_that_match_nothing(made, refused):
    asked = {**DISTILL, "lora": {"targets": ["q_prj"]}}
    refused(made, 2, "lora.targets: 'q_prj' matches no module of the model. did you mean 'q_proj'?", TRANSFER, asked)
    for other in ("embed_tokens", "lm_head"):
        refused(made, 2, f"'{other}' matches no module", {**DISTILL, "lora": {"targets": [other]}})


def test_data(made, refused, tmp_path):
    missing = {"data": {"source": str(tmp_path / "nothing.txt")}}
    refused(made, 2, f"there is no text file '{tmp_path / 'nothing.txt'}' (data.source)", TRANSFER, **missing)
    (tmp_path / "few.txt").write_text("a few words\n")
    few = {"data": {"source": str(tmp_path / "few.txt")}}
    refused(made, 2, "holds less text than the 2 rows of 32 tokens that are held out", TRANSFER, **few)
    # The held-out rows are as long as the longest stage's.
    stages = [TRANSFER, {**TRANSFER, "length": 3000}]
    refused(made, 2, "holds less text than the 2 rows of 3000 tokens", *stages)
    sampled = {"data": {"source": "teacher", "teacher_tokens": 95}}
    refused(made, 2, "data.teacher_tokens: 2 rows of 32 tokens are held out, and 95 leave none", TRANSFER, **sampled)


def test_checkpoints(made, refused, tmp_path):
    refused(made.parent / "base", 3, "isn't a converted model. Convert it first", TRANSFER)
    refused(tmp_path / "nothing", 3, "nothing", TRANSFER)
    bare = tmp_path / "bare"
    shutil.copytree(made, bare)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    source = {"source": str(made.parent / "text.txt")}
    refused(bare, 3, f"{bare} has no tokenizer", TRANSFER, data=source)


def test_models_with_nothing_to_train(refused, tmp_path):
    recipe = {"mixer": "linear", "feature_map": "favor", "keep_softmax": "none", "window": None, "sinks": None}
    favor = engine.checkpoint(tmp_path / "favor", recipe=recipe)
    said = "trains mixers, and those of this model (linear with favor) have nothing to train"
    refused(favor, 2, f"train.1 (transfer) {said}", CALIBRATE, TRANSFER)
    refused(favor, 2, f"train.0 (distill) {said}", {**DISTILL, "trains": "mixers", "lora": {}})


def test_rows_longer_than_learned_positions(refused, tmp_path):
    gpt2 = engine.family(tmp_path / "gpt2", "gpt2", n_positions=48)
    said = "train.1.length: the model has learned 48 positions, and no more"
    refused(gpt2, 2, said, TRANSFER, {**DISTILL, "length": 49})


def test_a_family_that_can_not_be_checkpointed(made, refused, monkeypatch):
    from transformers import LlamaForCausalLM

    stage = {**DISTILL, "gradient_checkpointing": True}
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    refused(made, 2, "train.0.gradient_checkpointing: llama models can't do it", stage)


def test_teachers(made, refused, tmp_path):
    refused(made, 3, "nobody", {**DISTILL, "teacher": str(tmp_path / "nobody")})
    other = tmp_path / "other"
    shutil.copytree(made.parent / "base", other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 999
    (other / "tokenizer.json").write_text(json.dumps(content))
    refused(made, 2, "teacher and student have different tokenizers", TRANSFER, {**DISTILL, "teacher": str(other)})


def test_disks(made, refused, monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        free(patched, output, 1000)
        refused(made, 4, "Free some space, or choose an OUT on another disk", TRANSFER)
    # Mixers of one layer: 8 query and 2 key heads of 48 x 48, 8 gates; each with two moments, three checkpoints.
    needed = 3 * 12 * (10 * 48 * 48 + 8)
    with monkeypatch.context() as patched:
        free(patched, checks, needed - 1)
        refused(made, 4, f"{tmp_path / 'out'}-training needs {needed / 1000:.2f} kB for training checkpoints", TRANSFER)
    with monkeypatch.context() as patched:
        # LoRA of q, k, v, o of a layer with 64 hidden dims.
        free(patched, checks, needed + 3 * 12 * 2 * (3 * 64 + 96 * 2 + 384 * 2 + 64) - 1)
        refused(made, 4, "for training checkpoints", DISTILL)
    with monkeypatch.context() as patched:
        free(patched, checks, 10**6)
        refused(made, 4, "for training checkpoints", {**FINETUNE, "trains": "all", "lora": {}})


def test_devices(made, refused):
    for device, said in (("cuda:9", "--device cuda:9 can't be used here"), ("tpu", "--device tpu can't be used here")):
        refused(made, 2, said, TRANSFER, options=["--device", device])


def test_packages(made, refused, monkeypatch):
    with monkeypatch.context() as patched:
        without(patched, "peft")
        refused(made, 2, "LoRA needs the package peft", DISTILL)
    with monkeypatch.context() as patched:
        without(patched, "lm_eval")
        refused(made, 2, "or switch them off with --set every.evaluate=0", TRANSFER, every={"evaluate": 1})
    if importlib.util.find_spec("clearml") is None:
        refused(made, 2, "trackers: 'clearml' isn't installed here", TRANSFER, trackers=["clearml"])


def test_folders_in_use(made, refused, tmp_path):
    out, work = tmp_path / "out", tmp_path / "out-training"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    refused(made, 2, f"{out} exists and isn't empty", TRANSFER)
    refused(made, 2, "--force would delete", TRANSFER, options=["--force"])
    shutil.rmtree(out)
    work.mkdir()
    (work / "mine.txt").write_text("mine")
    refused(made, 2, f"{work} holds files that aren't a training's. Choose another folder with -o", TRANSFER)
    refused(made, 2, f"there is no training in {work} to go on with", TRANSFER, options=["--resume"])
    shutil.rmtree(work)
    work.write_text("a file")
    refused(made, 2, f"{work} can't be a folder", TRANSFER)
    work.unlink()
    refused(made, 2, "the same folder", TRANSFER, out=made)
    refused(made, 2, "converted", TRANSFER, out=made / "inside")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.json"]


def test_work_and_out_are_apart(made, tmp_path):
    for work in (tmp_path / "out", tmp_path / "out" / "work", tmp_path):
        with pytest.raises(UsageError, match="can't lie in one another"):
            engine.train(
                made, tmp_path / "out" / "model" if work == tmp_path else tmp_path / "out", TRANSFER, work=work
            )
    with pytest.raises(UsageError, match="lies in the folder of a model"):
        engine.train(made, tmp_path / "out", TRANSFER, work=made / "work")


@pytest.mark.parametrize("family", ["opt", "gpt_oss", "lfm2"])
def test_families_whose_documents_see_each_other_are_refused(family):
    """Those of OPT and GPT-OSS make masks without looking at positions; LFM2 has convolutions."""
    model = tiny_model(family)
    with pytest.raises(
        UsageError, match=f"in {family} models the documents of a row see each other. Set data.separate"
    ):
        check_separate(model)
    assert not model.training


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt2", "mixtral"])
def test_families_that_keep_documents_apart_pass(family):
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        check_separate(tiny_model(family).to(dtype))
    model = tiny_model(family).train()
    linearize.linearize_(model, recipe_for(model.config, WINDOW))
    check_separate(model)
    assert model.training
    assert not model._linearize_switch.bypassed


def test_a_training_asks_whether_documents_are_apart(tmp_path):
    opt = engine.family(tmp_path / "m", "opt")
    with pytest.raises(UsageError, match="see each other"):
        engine.train(opt, tmp_path / "out", TRANSFER)
    engine.train(opt, tmp_path / "out", TRANSFER, data={"separate": False})
    assert len(engine.losses(tmp_path / "out")) == 4


@pytest.mark.slow
def test_nothing_but_the_core_is_needed_to_train_mixers(made, tmp_path):
    """Neither the evaluation's packages nor peft, datasets or matplotlib."""
    code = f"""
import sys
for name in ("lm_eval", "peft", "datasets", "matplotlib", "scipy"):
    sys.modules[name] = None
sys.path[:0] = [{str(ROOT)!r}]
from tests.training import engine
from pathlib import Path
engine.train(Path({str(made)!r}), Path({str(tmp_path / "out")!r}), engine.CALIBRATE, engine.TRANSFER)
"""
    environment = {**os.environ, "PYTHONWARNINGS": "error::FutureWarning"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(engine.losses(tmp_path / "out")) == 4
