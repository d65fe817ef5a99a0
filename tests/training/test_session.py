"""Whole trainings of a few steps, against loops written out and against what must not change."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import linearize
from linearize.training import loop, session
from linearize.training.metrics import Metrics
from linearize.training.objectives import Transfer
from linearize.training.stream import Stream
from linearize.training.trainable import MIXER, as_teacher
from linearize.verification import verify
from tests.evals.engine import byte_tokenizer
from tests.training import engine
from tests.training.engine import BATCH, CALIBRATE, DISTILL, FINETUNE, LENGTH, TRANSFER
from tests.training.formulas import attention_of, softmax_attention, written_out

MIXERS = {"trains": "mixers", "lora": {}}
ALL = {"trains": "all", "lora": {}}


@pytest.fixture
def made(tmp_path):
    return engine.checkpoint(tmp_path / "m")


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def rows_of(made, length: int, count: int, **data):
    """What a training of this length sees, in its order."""
    from linearize.recipe import load_recipe

    settings = load_recipe(engine.recipe(made, TRANSFER, data=data)).data
    return Stream(settings, byte_tokenizer(), length).take(count)


def documents(row) -> list[tuple[int, int]]:
    """Begin and end of the documents of a row."""
    begins = [i for i, position in enumerate(row.positions or range(len(row.ids))) if position == 0]
    return list(zip(begins, [*begins[1:], len(row.ids)], strict=True))


def plain_loop(model, parameters, rows, step_loss, lrs, clip: float) -> list[float]:
    """One AdamW step on each BATCH of rows."""
    optimizer = torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=False)
    found = []
    for step, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = step_loss(rows[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def mixers_of(model) -> list[torch.nn.Parameter]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(MIXER in name)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def same_mixers(folder, model, **tolerance) -> None:
    stored = engine.weights(folder)
    for name, value in model.state_dict().items():
        if MIXER in name:
            torch.testing.assert_close(stored[name], value, **tolerance, msg=name)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_distillation_is_that_of_a_plain_loop(made, tmp_path, micro_batch):
    """Every document alone through whole models, all logits at once, an optimiser without fusing."""
    settings = {"temperature": 2.0, "ce": 0.3, "clip": 0.5, "warmup": 0.5, "schedule": "constant"}
    stage = {**DISTILL, **MIXERS, **settings, "micro_batch": micro_batch}
    engine.train(made, tmp_path / "out", stage)

    student, teacher = load(made), load(made.parent / "base")
    parameters = mixers_of(student)

    def step_loss(rows):
        total = torch.zeros(())
        for row in rows:
            for begin, end in documents(row):
                ids = torch.tensor([row.ids[begin:end]])
                logits = student(ids, use_cache=False).logits[0]
                with torch.no_grad():
                    aim = teacher(ids, use_cache=False).logits[0]
                q, log_p = (aim / 2).softmax(-1), (logits / 2).log_softmax(-1)
                total = total + 0.7 * 4 * (q * (q.log() - log_p)).sum()
                total = total + 0.3 * F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        return total / (BATCH * LENGTH)

    expected = plain_loop(student, parameters, rows_of(made, LENGTH, 8), step_loss, [0.005, 0.01, 0.01, 0.01], 0.5)
    assert engine.losses(tmp_path / "out") == pytest.approx(expected, rel=1e-4)
    same_mixers(
        tmp_path / "out", student, rtol=0, atol=2e-4
    )  # Adam's first steps are of size lr, whatever the gradient


def test_a_transfer_is_that_of_a_plain_loop(made, tmp_path):
    stage = {**TRANSFER, "loss": "normalized_l2", "warmup": 0.0, "clip": None, "lr": 0.02}
    engine.train(made, tmp_path / "out", stage, data={"separate": False})
    student = load(made)
    parameters = mixers_of(student)

    def step_loss(rows):
        total = torch.zeros(())
        for row in rows:
            for layer, q, k, v in attention_of(student, torch.tensor([row.ids])):
                aim = softmax_attention(q, k, v, scale=48**-0.5)
                out = student.model.layers[layer].self_attn.linearize(q, k, v)[0]
                total = total + written_out("normalized_l2", out, aim).mean() / BATCH
        return total

    lrs = [0.02 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 3)) / 2) for step in range(4)]
    rows = rows_of(made, LENGTH, 8, separate=False)
    expected = plain_loop(student, parameters, rows, step_loss, lrs, math.inf)
    assert engine.losses(tmp_path / "out") == pytest.approx(expected, rel=1e-4)
    same_mixers(tmp_path / "out", student, rtol=0, atol=2e-4)
    lines = engine.metrics(tmp_path / "out")
    assert [line["lr"] for line in lines] == pytest.approx(lrs)
    assert [line["layers"] for line in lines] == [{"layer 0": loss} for loss in engine.losses(tmp_path / "out")]


def test_what_is_frozen_never_changes_and_what_is_trained_does(made, tmp_path, monkeypatch):
    """By stage: which parameters have a gradient at an optimiser step, and which have other bytes at its end."""
    changed, graded = [], []

    def watched(job, number, settings, *args):
        before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        names = {p: name for name, p in job.model.named_parameters()}
        step = torch.optim.AdamW.step

        def seen(self, *step_args, **options):
            graded[-1] |= {name for p, name in names.items() if p.grad is not None}
            assert job.model.training == (settings.stage != "transfer")  # whose teacher has no dropout
            return step(self, *step_args, **options)

        graded.append(set())
        with monkeypatch.context() as patched:
            patched.setattr(torch.optim.AdamW, "step", seen)
            summary = loop.train_stage(job, number, settings, *args)
        changed.append({name for name, p in job.model.named_parameters() if not torch.equal(p, before[name])})
        return summary

    monkeypatch.setattr(session, "train_stage", watched)
    stages = [CALIBRATE, TRANSFER, DISTILL, {**DISTILL, **MIXERS}, {**FINETUNE, "lora": DISTILL["lora"]}]
    engine.train(made, tmp_path / "out", *stages, {**FINETUNE, **ALL})
    transfer, lora, mixers, tuned, everything = changed
    assert {name.split(MIXER)[0] for name in transfer} == {"model.layers.0.self_attn"}
    assert transfer == {name for name in mixers if MIXER in name} == mixers
    assert {name for name in lora - transfer if ".lora_" not in name} == set()
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in lora - transfer} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    assert len(lora - transfer) == 8
    assert transfer <= lora == tuned
    assert "model.embed_tokens.weight" in everything
    assert tuned < everything
    assert graded == changed


def test_tokens_are_counted_right(made, tmp_path, monkeypatch):
    """Steps are rounded up; each row of the stream is seen once, in order; the stream goes on in the next stage."""
    seen = []
    real = loop.batch
    monkeypatch.setattr(loop, "batch", lambda rows: seen.extend(rows) or real(rows))
    stages = [{**TRANSFER, "tokens": 3 * 4 * 32 + 1, "batch": 4, "micro_batch": 2}, {**TRANSFER, "tokens": 1}]
    summary = engine.train(made, tmp_path / "out", *stages, data={"recall_share": 0.3})
    assert [(stage["steps"], stage["tokens"]) for stage in summary["stages"]] == [(4, 512), (1, 64)]
    assert [line["tokens"] for line in engine.metrics(tmp_path / "out")] == [128, 256, 384, 512, 64]
    assert seen == rows_of(made, LENGTH, 4 * 4 + 2, recall_share=0.3)
    assert all(len(row.ids) == LENGTH for row in seen)


def test_the_first_step_takes_effect_and_is_saved(made, tmp_path, monkeypatch):
    kept = {}
    save = session.state.save

    def keep(folder, parameters, optimizer, position, keep):
        kept[position["stage"], position["step"]] = {name: value.clone() for name, value in parameters.items()}
        return save(folder, parameters, optimizer, position, keep)

    monkeypatch.setattr(session.state, "save", keep)
    engine.train(made, tmp_path / "out", {**TRANSFER, "tokens": 128}, every={"save": 1})
    before = load(made).state_dict()
    assert list(kept) == [(0, 1), (1, 0)]
    assert all(MIXER in name for name in kept[0, 1])
    for name, value in kept[0, 1].items():
        assert not torch.equal(value, before[name])
        assert not torch.equal(value, kept[1, 0][name])
        assert torch.equal(kept[1, 0][name], engine.weights(tmp_path / "out")[name])


@pytest.mark.parametrize("stage", [DISTILL, {**FINETUNE, **MIXERS, "gradient_checkpointing": True}])
def test_in_the_middle_of_training_the_teacher_is_the_base_model_bit_for_bit(made, tmp_path, monkeypatch, stage):
    base, ids = load(made.parent / "base"), torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = base(ids, use_cache=False).logits
    jobs, looks = [], []
    real = session.train_stage
    monkeypatch.setattr(session, "train_stage", lambda job, *args: jobs.append(job) or real(job, *args))
    write = Metrics.write

    def look(self, line):
        job = jobs[-1]
        assert job.model.training
        required = [p.requires_grad for p in job.model.parameters()]
        with as_teacher(job.model, job.adapter):
            looks.append(torch.equal(job.model(ids, use_cache=False).logits, expected))
        with torch.no_grad():
            assert not torch.allclose(job.model(ids, use_cache=False).logits, expected)
        assert [p.requires_grad for p in job.model.parameters()] == required
        assert job.model.training
        write(self, line)

    monkeypatch.setattr(Metrics, "write", look)
    lora = {"lora": {"r": 2, "alpha": 4, "dropout": 0.1}} if stage is DISTILL else {}
    engine.train(made, tmp_path / "out", {**stage, **lora})
    assert looks == [True] * 4


def test_gradient_checkpointing_changes_no_loss(made, tmp_path):
    for on in (False, True):
        stages = [{**kind, "gradient_checkpointing": on} for kind in (DISTILL, {**FINETUNE, **ALL})]
        engine.train(made, tmp_path / f"out{on}", *stages)
    assert engine.losses(tmp_path / "outTrue") == pytest.approx(engine.losses(tmp_path / "outFalse"), rel=1e-6)


def test_tied_embeddings_stay_tied_and_every_weight_is_trained(made, tmp_path):
    engine.train(made, tmp_path / "out", {**FINETUNE, **ALL})
    assert verify(tmp_path / "out") == []
    before, after = engine.weights(made), engine.weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    model = load(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in after


def test_another_teacher_s_larger_head_is_cut(tmp_path):
    """Models of one family and tokenizer have heads of several sizes, padded with rows that stand for no token."""
    small = engine.checkpoint(tmp_path / "m")
    large = engine.checkpoint(tmp_path / "large", vocab_size=320, seed=3)
    for student, teacher in ((small, large), (large, small)):
        out = tmp_path / f"out-{student.parent.name}"
        engine.train(student, out, {**DISTILL, **MIXERS, "teacher": str(teacher.parent / "base")})
        assert all(math.isfinite(loss) for loss in engine.losses(out))


def test_a_second_training_goes_on_from_the_first(made, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    engine.train(made, first, CALIBRATE, TRANSFER, teacher="owner/base")
    engine.train(first, second, {**FINETUNE, **MIXERS}, data={"source": str(made.parent / "text.txt")})
    record = json.loads((second / "config.json").read_text())["linearize"]["training"]
    assert [stage["stage"] for stage in record["stages"]] == ["calibrate", "transfer", "finetune"]
    assert [(stage["steps"], stage["tokens"]) for stage in record["stages"]] == [(None, 64), (4, 256), (4, 256)]
    assert (record["base_weights"], record["teacher"]) == ("unchanged", "owner/base")
    assert verify(second) == []
    engine.train(made, tmp_path / "whole", CALIBRATE, TRANSFER, {**FINETUNE, **MIXERS})
    # The second training begins its stream anew, and so sees other rows than the third stage of one training.
    assert engine.losses(tmp_path / "whole")[:4] == engine.losses(first)
    assert engine.losses(tmp_path / "whole", 2) != engine.losses(second)


def test_a_calibration_alone_is_a_training(made, tmp_path):
    summary = engine.train(made, tmp_path / "out", CALIBRATE, figure=True)
    (stage,) = summary["stages"]
    assert not (engine.work(tmp_path / "out") / "loss.png").exists()
    assert stage["loss"]["last"] < stage["loss"]["first"]
    before, after = engine.weights(made), engine.weights(tmp_path / "out")
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "model.layers.0.self_attn.linearize.gate"
    ]
    report = json.loads((engine.work(tmp_path / "out") / "calibration.json").read_text())
    assert [layer["layer"] for layer in report] == [0]


def test_looks_without_held_out_rows_show_recall_alone(made, tmp_path):
    settings = {"data": {"held_out": 0}, "every": {"evaluate": 3}, "figure": True}
    summary = engine.train(made, tmp_path / "out", TRANSFER, **settings)
    held_out = summary["stages"][0]["held_out"]
    assert held_out.keys() == {"before", "after", "teacher"}
    assert all(look.keys() == {"recall", "recall_nll"} for look in held_out.values())
    assert [line["step"] for line in engine.metrics(tmp_path / "out") if "held_out" in line] == [0, 3, 4]


def test_looks_are_at_the_student_as_it_is_used(made, tmp_path):
    """Perplexity of the held-out rows, of the model that was written and of its teacher, from whole logits."""
    stage = {**DISTILL, "lora": {"r": 2, "alpha": 4, "dropout": 0.5}}
    summary = engine.train(made, tmp_path / "out", stage, every={"evaluate": 4}, figure=True)
    assert (engine.work(tmp_path / "out") / "loss.png").read_bytes().startswith(b"\x89PNG")
    held_out = summary["stages"][0]["held_out"]
    from linearize.recipe import load_recipe
    from linearize.training.stream import held_out as held_out_rows

    rows = held_out_rows(load_recipe(engine.recipe(made, TRANSFER)).data, byte_tokenizer(), LENGTH)
    for key, folder in (("after", tmp_path / "out"), ("before", made), ("teacher", made.parent / "base")):
        model, total, count = load(folder), 0.0, 0
        for row in rows:
            for begin, end in documents(row):
                ids = torch.tensor([row.ids[begin:end]])
                with torch.no_grad():
                    logits = model(ids, use_cache=False).logits[0]
                total += float(F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))
                count += end - begin - 1
        assert held_out[key]["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4), key
    assert len(rows) == 2


def test_names_of_layers_are_those_of_losses():
    model = linearize.linearize_(engine.tiny(num_hidden_layers=4), engine.HEDGEHOG)
    assert Transfer(model, "mse").names == ["layer 0", "layer 2", "layer 3"]


def test_trackers_hear_of_every_line_at_steps_that_never_go_back(made, tmp_path, monkeypatch):
    heard = []

    class Tracker:
        def log(self, values, step):
            heard.append((step, values))

    real = session.Metrics
    monkeypatch.setattr(session, "Metrics", lambda folder, tracker, tokens: real(folder, Tracker(), tokens))
    engine.train(made, tmp_path / "out", CALIBRATE, TRANSFER, TRANSFER, every={"evaluate": 4})
    steps = [step for step, _ in heard]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1], len(heard)) == (64, 64 + 2 * 256, 2 * 6)
    assert heard[1][1].keys() == {
        "transfer/loss", "transfer/lr", "transfer/layers/layer 0", "transfer/grad_norm",
        "transfer/tokens_per_second", "transfer/memory_bytes",
    }  # fmt: skip
    assert {"transfer/held_out/perplexity", "transfer/teacher/recall"} <= heard[0][1].keys()


def test_all_weights_are_trained_in_float32_with_products_in_bfloat16(made, tmp_path, monkeypatch):
    kinds = set()
    real = loop.Stage._step

    def watched(self, step):
        seen = []
        handle = self.job.model.model.layers[1].mlp.register_forward_hook(
            lambda module, args, out: seen.append(out.dtype)
        )
        found = real(self, step)
        handle.remove()
        kinds.add((self.settings.stage, *set(seen), *{p.dtype for p in self.job.model.parameters()}))
        return found

    monkeypatch.setattr(loop.Stage, "_step", watched)
    stages = [TRANSFER, {**FINETUNE, **ALL}]
    summary = engine.train(made, tmp_path / "out", *stages, precision="bfloat16")
    assert kinds == {(name, torch.bfloat16, torch.float32) for name in ("transfer", "finetune")}
    assert summary["notes"][0] == "bfloat16 products, float32 weights, since a stage trains all of them"
    engine.train(made, tmp_path / "exact", *stages)
    assert engine.losses(tmp_path / "out") == pytest.approx(engine.losses(tmp_path / "exact"), rel=0.05)
    assert engine.losses(tmp_path / "out") != engine.losses(tmp_path / "exact")
