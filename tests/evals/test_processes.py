"""The same scores for one process and for two, work for all, and an error in one ends both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from linearize_evals import processes
from linearize_evals.store import Store

import linearize
from tests.evals.engine import byte_tokenizer, tiny

ROOT = Path(__file__).parents[2]


def torchrun(processes, arguments, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "evals")])}
    return subprocess.run(
        command + arguments, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=240
    )


def launch(tmp_path, processes, *arguments, fails=False):
    out = tmp_path / f"out{processes}"
    out.mkdir(exist_ok=True)
    done = torchrun(processes, [str(Path(__file__).with_name("launched.py")), str(out), *arguments])
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))], done.stderr


@pytest.mark.slow
def test_scores_do_not_depend_on_the_number_of_processes(tmp_path):
    (single,), _ = launch(tmp_path, 1)
    (first, second), _ = launch(tmp_path, 2)
    assert len(single["packed"]) == 13 == len({entry["doc_hash"] for entry in single["packed"]})
    assert first["packed"] == single["packed"]
    for process in (first, second):
        assert process["scores"] == single["scores"]
        assert process["plain"] == single["plain"]
        assert process["generated"] == single["generated"]
        assert process["one"] == single["one"]
    assert (single["tokens"], first["tokens"], second["tokens"]) == (13 * 60, 7 * 60, 6 * 60)
    assert (single["resumed"], first["resumed"], second["resumed"]) == (3, 2, 1)
    assert (first["same"], second["same"]) == (0, 0)
    assert first["first"] == "a wrong option. Leave it out."
    assert second["first"] == "process 0 failed: a wrong option. Leave it out."
    kept = Store(tmp_path / "out2", {"model": 1}).path.read_text().splitlines()
    assert len(kept) == 1 + 13 + 1 + 100 + 3  # the identity, every document once, a single one, lm-eval's requests


@pytest.mark.slow
def test_the_command_under_torchrun_gives_the_results_of_one_process(tmp_path):
    tiny().save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    linearize.convert(tmp_path / "base", tmp_path / "student", overrides={"window": 8})
    options = [
        "--tasks",
        "linearize_niah_single",
        "--lengths",
        "256",
        "--depths",
        "0,1",
        "--samples",
        "3",
        "--dtype",
        "float32",
    ]
    results = []
    for number in (1, 2):
        out = tmp_path / f"out{number}"
        command = ["-m", "linearize.cli", "eval", str(tmp_path / "student"), "-o", str(out), *options]
        done = torchrun(number, command, LINEARIZE_CACHE=str(tmp_path / f"cache{number}"))
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("report.html") == 1
        assert done.stderr.count("float32 on cpu") == 1
        results.append(json.loads((out / "results.json").read_text()))
    assert results[0]["tasks"] == results[1]["tasks"]
    assert results[0]["ablations"] == results[1]["ablations"]


@pytest.mark.parametrize(
    ("device", "environment", "accelerator", "cpu"),
    [
        (None, {}, None, False),
        (None, {"LOCAL_RANK": "0"}, None, True),
        (None, {"OMPI_COMM_WORLD_SIZE": "2"}, None, True),
        (None, {"LOCAL_RANK": "0"}, "mps", True),
        (None, {"LOCAL_RANK": "0"}, "cuda", False),
        ("cpu", {"LOCAL_RANK": "0"}, "cuda", True),
        ("cuda:1", {"LOCAL_RANK": "0"}, "cuda", False),
        (None, {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "True"}, "cuda", True),
    ],
)
def test_processes_on_a_cpu_find_each_other_and_wait(monkeypatch, device, environment, accelerator, cpu):
    for name in ("LOCAL_RANK", "ACCELERATE_USE_CPU", *processes.SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))
    asked = {}
    monkeypatch.setattr(processes, "PartialState", lambda **options: asked.update(options))
    processes.start(device)
    assert asked == {"cpu": cpu, "timeout": timedelta(days=7)}


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(tmp_path):
    _, errors = launch(tmp_path, 2, "fail", fails=True)
    assert "FloatingPointError" in errors
    assert "process 1 failed" in errors
