"""`linearize eval` on tiny models: the figures it writes, what it keeps, and how it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from linearize_evals import builtin, loading, scoring, suites
from linearize_evals.settings import write_file
from transformers import GPT2Config, GPT2LMHeadModel

import linearize
from linearize.cli import main
from linearize.errors import UsageError
from tests.evals.engine import VOCAB, byte_tokenizer, tiny

GRID = {
    "tasks": ["linearize_niah_single", "linearize_perplexity"],
    "lengths": [256],
    "depths": [0.0, 1.0],
    "samples": 2,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """base, its conversion, and base with another tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name in ("base", "other"):
        tiny().save_pretrained(root / name)
    byte_tokenizer().save_pretrained(root / "base")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(root / "other")
    linearize.convert(root / "base", root / "student", overrides={"window": 8})
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARIZE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def scored(monkeypatch):
    """Tokens that models have scored, counted where it happens."""
    counts = []
    score = scoring._score
    monkeypatch.setattr(
        scoring, "_score", lambda *args: counts.append(sum(len(d.ids) for d in args[1])) or score(*args)
    )
    return counts


def figures(results):
    return {key: results[key] for key in ("tasks", "text", "ablations", "findings")}


def test_the_bypassed_student_scores_as_the_model_that_it_was_made_from(folders, tmp_path):
    itself = linearize.evaluate(folders / "student", tmp_path / "a", **GRID)
    named = linearize.evaluate(folders / "student", tmp_path / "b", teacher=folders / "base", **GRID)
    assert figures(itself) == figures(named)
    task, text = itself["tasks"]["linearize_niah_single"], itself["text"]["linearize_perplexity"]
    assert (task["documents"], len(task["cells"])) == (4, 2)
    assert text["teacher"]["nll"] != text["student"]["nll"]
    assert set(itself["ablations"]) == {"linear", "window"}
    assert itself["models"]["student"]["window"] == 8
    alone = linearize.evaluate(folders / "base", tmp_path / "c", teacher="none", **GRID)
    assert alone["text"]["linearize_perplexity"]["student"] == text["teacher"]
    assert alone["models"]["teacher"] is None
    assert alone["ablations"] is None


def test_what_is_written_is_what_is_returned(folders, tmp_path):
    out = tmp_path / "out"
    results = linearize.evaluate(folders / "student", out, generate=True, **GRID)
    assert json.loads((out / "results.json").read_text()) | {"out": str(out)} == results
    assert "niah_single" in (out / "report.html").read_text()
    for role in ("teacher", "student"):
        theirs = json.loads((out / role / "results.json").read_text())["results"]["linearize_niah_single"]
        ours = results["tasks"]["linearize_niah_single"]
        assert theirs["acc,none"] == ours[role]["accuracy"]
        assert theirs["gen_acc,none"] == ours["generation"][role]["accuracy"]
        samples = (out / role / "samples_linearize_niah_single.jsonl").read_text().splitlines()
        assert len({json.loads(line)["doc_hash"] for line in samples}) == 4


def test_a_teacher_is_scored_once_and_a_finished_run_not_again(folders, tmp_path, scored):
    teacher = folders / "base"
    first = linearize.evaluate(folders / "student", tmp_path / "a", teacher=teacher, ablate=False, **GRID)
    whole = sum(scored)
    linearize.evaluate(folders / "student", tmp_path / "b", teacher=teacher, ablate=False, **GRID)
    assert sum(scored) == 1.5 * whole
    again = linearize.evaluate(folders / "student", tmp_path / "a", teacher=teacher, ablate=False, resume=True, **GRID)
    assert sum(scored) == 1.5 * whole
    assert figures(again) == figures(first)


def test_a_bypassed_student_s_scores_serve_the_named_base_too(folders, tmp_path, scored):
    linearize.evaluate(folders / "student", tmp_path / "a", ablate=False, **GRID)
    whole = sum(scored)
    linearize.evaluate(folders / "student", tmp_path / "b", teacher=folders / "base", ablate=False, **GRID)
    assert sum(scored) == 1.5 * whole


def test_a_student_that_was_trained_in_place_is_no_teacher(folders, tmp_path):
    shutil.copytree(folders / "student", tmp_path / "student")
    model = linearize.load(tmp_path / "student")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.add_(0.1)
    model.save_pretrained(tmp_path / "student")
    with pytest.raises(UsageError, match=r"any more .*has to be named"):
        linearize.evaluate(tmp_path / "student", tmp_path / "out", **GRID)


def test_what_is_said_of_the_models_is_their_own(folders, tmp_path):
    """A teacher of another size, and a student that keeps a softmax layer, which no window bounds."""
    wide = tiny(num_hidden_layers=3)
    wide.save_pretrained(tmp_path / "wide")
    byte_tokenizer().save_pretrained(tmp_path / "wide")
    overrides = {"window": 8, "keep_softmax": [1]}
    linearize.convert(folders / "base", tmp_path / "hybrid", overrides=overrides)
    results = linearize.evaluate(tmp_path / "hybrid", tmp_path / "out", teacher=tmp_path / "wide", **GRID)
    teacher, student = results["models"]["teacher"], results["models"]["student"]
    assert teacher["parameters"] == wide.num_parameters()
    assert teacher["cache"][-1]["bytes"] == 1.5 * linearize.inspect(folders / "base")["cache"][-1]["before_bytes"]
    options = {**GRID, "dtype": "bfloat16", "teacher": tmp_path / "wide"}
    half = linearize.evaluate(tmp_path / "hybrid", tmp_path / "half", **options)["models"]
    assert half["teacher"]["cache"][-1]["bytes"] == teacher["cache"][-1]["bytes"] / 2
    assert half["teacher"]["cache_dtype"] == half["student"]["cache_dtype"] == "bfloat16"
    assert (student["window"], student["full_attention_layers"]) == (None, 1)
    assert student["parameters"] < teacher["parameters"]


def test_a_model_that_cannot_be_converted_is_judged_all_the_same(tmp_path):
    """Its layers all slide, so there is no plan for it, and nothing to say of its memory."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=VOCAB, num_key_value_heads=2, sliding_window=32, **sizes)
    model = MistralForCausalLM(config)
    model.save_pretrained(tmp_path / "sliding")
    byte_tokenizer().save_pretrained(tmp_path / "sliding")
    results = linearize.evaluate(tmp_path / "sliding", tmp_path / "out", teacher="none", **GRID)
    assert results["models"]["student"]["parameters"] == model.num_parameters()
    assert results["models"]["student"]["cache"] == []
    assert (tmp_path / "out" / "report.html").exists()


def test_a_named_task_has_its_own_grid_and_a_suite_its():
    assert suites.chosen_tasks("quick", ["linearize_niah_single"]) == ({"linearize_niah_single": {}}, [])
    ours, _ = suites.chosen_tasks("quick", (), lengths=[64])
    assert ours["linearize_niah_single"] == {**suites.SUITES["quick"]["linearize_niah_single"], "lengths": [64]}
    assert ours["linearize_mqar_lines"] == suites.SUITES["quick"]["linearize_mqar_lines"]
    assert list(suites.chosen_tasks("quick", ["linearize_recall"])[0]) == suites.GROUPS["linearize_recall"]


def test_an_interrupted_run_goes_on_where_it_stopped(folders, tmp_path, scored):
    whole = linearize.evaluate(folders / "student", tmp_path / "whole", batch_size=2, **GRID)
    tokens = sum(scored)
    scored.clear()
    shutil.rmtree(tmp_path / "cache")

    def stop(label, done, total):
        if label == "student" and done > total / 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        linearize.evaluate(folders / "student", out, batch_size=2, progress=stop, **GRID)
    assert not (out / "results.json").exists()
    resumed = linearize.evaluate(folders / "student", out, batch_size=2, resume=True, **GRID)
    assert sum(scored) == tokens
    assert figures(resumed) == figures(whole)


def test_a_damaged_score_is_named(folders, tmp_path, capsys):
    options = ["--tasks", "linearize_passkey", "--lengths", "256", "--samples", "1", "--teacher", "none"]
    command = ["eval", str(folders / "base"), "-o", str(tmp_path / "out"), *options]
    assert main(command) == 0
    (file,) = (tmp_path / "out" / "scores").glob("*.jsonl")
    head, first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([head, json.dumps(json.loads(first) | {"score": 5}), *rest]) + "\n")
    capsys.readouterr()
    assert main([*command, "--resume"]) == 2
    assert f"{file} holds a score that isn't one: 5" in capsys.readouterr().err


def test_another_seed_or_grid_is_not_joined(folders, tmp_path):
    out = tmp_path / "out"
    linearize.evaluate(folders / "base", out, teacher="none", **GRID)
    for change in ({"seed": 1}, {"lengths": [300]}, {"dtype": "float16"}):
        with pytest.raises(UsageError, match="begun with other settings"):
            linearize.evaluate(folders / "base", out, teacher="none", resume=True, **{**GRID, **change})
    with pytest.raises(UsageError, match="--resume"):
        linearize.evaluate(folders / "base", out, teacher="none", **GRID)


def test_lm_eval_s_own_tasks_run_beside_ours(folders, tmp_path, monkeypatch):
    questions = tmp_path / "questions.jsonl"
    rows = [{"q": f"question {n}", "choices": [" yes", " no", " maybe"], "gold": n % 3} for n in range(6)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "their_task.yaml").write_text(
        f"task: their_task\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {questions}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nmetric_list: [{metric: acc}]\n"
    )
    monkeypatch.setattr(builtin, "_root", lambda: tmp_path)
    results = linearize.evaluate(
        folders / "student",
        tmp_path / "out",
        tasks=["their_task", "linearize_passkey"],
        lengths=[256],
        samples=1,
        limit=5,
    )
    found = results["lm_eval"]["their_task"]
    assert 0 <= found["teacher"]["acc"] <= 1
    for side in ("teacher", "student"):
        assert sum(found["histogram"][side]["choices"]) == 5
    assert "linearize_passkey" in results["tasks"]


def test_all_of_lm_eval_s_tasks_are_found_without_reading_them_all():
    folders = builtin.task_folders(["hellaswag", "niah_single_1", "mmlu"])
    assert [folder.name for folder in folders] == ["hellaswag", "mmlu", "ruler"]
    with pytest.raises(UsageError, match="did you mean 'hellaswag'"):
        builtin.task_folders(["helaswag"])


def test_documents_longer_than_the_positions_are_noted_or_refused(folders, tmp_path):
    notes = []
    linearize.evaluate(
        folders / "base", tmp_path / "out", teacher="none", tasks=["linearize_passkey"], lengths=[600], depths=[0.5],
        samples=1, note=notes.append,
    )  # fmt: skip
    assert any("longer than the 512 positions" in note for note in notes)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_head=2, n_layer=1, n_positions=512)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UsageError, match="within 512 tokens"):
        linearize.evaluate(
            tmp_path / "gpt2", tmp_path / "o", teacher="none", tasks=["linearize_passkey"], lengths=[600], samples=1
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "linearize_niah_singel"], "did you mean 'linearize_niah_single'"),
        (["--tasks", "niah_single"], "did you mean 'linearize_niah_single'"),
        (["--tasks", "helaswag"], "did you mean 'hellaswag'"),
        (["--suite", "quik"], "did you mean 'quick'"),
        (["--lengths", "many"], "--lengths takes whole numbers"),
        (["--depths", "2"], "between 0 and 1"),
        (["--tasks", "linearize_mqar_lines", "--lengths", "512"], "no task that is asked has lengths"),
        (["--samples", "0"], "samples can't be 0"),
        (["--batch-size", "0"], "batch size can't be 0"),
        (["--dtype", "int8"], "'int8'"),
        (["--device", "tpu"], "--device tpu"),
        (["--tasks", ""], "an empty name"),
        (["--tasks", "linearize_niah_single", "--text", "missing.txt"], "uses --text"),
        (["--limit", "3"], "uses --limit"),
        (["--tasks", "linearize_niah_singl", "--lengths", "256"], "did you mean 'linearize_niah_single'"),
        (["--teacher", "OTHER"], "different tokenizers"),
        (["--lengths", "16"], "16"),
        (["--text", "missing.txt", "--tasks", "linearize_perplexity"], "missing.txt"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(folders, tmp_path, capsys, options, message):
    options = [str(folders / "other") if option == "OTHER" else option for option in options]
    assert main(["eval", str(folders / "student"), "-o", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_student_without_tokenizer_or_teacher_is_refused(folders, tmp_path, capsys):
    assert main(["eval", str(folders / "base")]) == 2
    assert "--teacher MODEL" in capsys.readouterr().err
    shutil.copytree(folders / "base", tmp_path / "bare")
    for file in (tmp_path / "bare").glob("*token*"):
        file.unlink()
    assert main(["eval", str(tmp_path / "bare"), "--teacher", "none"]) == 3
    assert "has no tokenizer" in capsys.readouterr().err


def test_a_run_that_fails_before_a_score_leaves_nothing(folders, tmp_path, capsys):
    """So that the mended command isn't refused for what the failed one left."""
    out, options = tmp_path / "out", ["--tasks", "linearize_passkey", "--lengths", "256", "--samples", "1"]
    shutil.copytree(folders / "base", tmp_path / "broken")
    model = linearize.load(tmp_path / "broken")
    model.lm_head.weight.data[:] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    for teacher in ("none", str(folders / "base")):
        command = ["eval", str(tmp_path / "broken"), "-o", str(out), *options, "--teacher", teacher]
        assert main(command) == 3
        assert "can't be scored" in capsys.readouterr().err
        assert not out.exists()


def test_nothing_is_written_into_a_model_or_through_a_link(folders, tmp_path, capsys):
    student = folders / "student"
    assert main(["eval", str(student), "-o", str(student / "eval")]) == 2
    assert "lies in the folder of a model" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert main(["eval", str(student), "-o", str(tmp_path / "file" / "out")]) == 2
    assert "can't be a folder" in capsys.readouterr().err
    staged = tmp_path / f".page.{os.getpid()}.part"
    staged.symlink_to(tmp_path / "file")
    write_file(tmp_path / "page", "theirs")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_something_else_is_left_alone(folders, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["eval", str(folders / "student"), "-o", str(tmp_path)]) == 2
    assert "holds files that aren't an evaluation's" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command_prints_json_or_a_summary(folders, tmp_path, capsys):
    options = ["--tasks", "linearize_niah_single", "--lengths", "256", "--depths", "0,1", "--samples", "1"]
    assert main(["eval", str(folders / "student"), "-o", str(tmp_path / "a"), *options, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert main(["eval", str(folders / "student"), "-o", str(tmp_path / "b"), *options]) == 0
    out = capsys.readouterr().out
    for finding in results["findings"]:
        assert finding in out
    assert f"wrote {tmp_path / 'b' / 'report.html'}" in out


def test_tasks_path_prints_the_folder_of_task_files(capsys):
    assert main(["tasks-path"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "linearize_niah_single.yaml").is_file()


def test_tokenizers_with_equal_vocabularies_are_told_apart_by_what_they_do():
    other = byte_tokenizer(bos=True)
    with pytest.raises(UsageError, match="same text into different tokens"):
        loading.check_tokenizers(byte_tokenizer(), other)
