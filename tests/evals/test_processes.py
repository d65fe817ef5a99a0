"""The same scores for one process and for two, and an error in one ends both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def launch(tmp_path, processes, *arguments, fails=False):
    out = tmp_path / f"out{processes}"
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "evals")])}
    command += [str(Path(__file__).with_name("launched.py")), str(out), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
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
        assert process["plain"] == pytest.approx(single["plain"], abs=1e-4)
        assert process["generated"] == single["generated"]
        assert process["one"] == single["one"]
    assert (single["tokens"], first["tokens"], second["tokens"]) == (13 * 60, 7 * 60, 6 * 60)
    kept = (tmp_path / "out2" / "kept.jsonl").read_text().splitlines()
    assert len(kept) == 1 + 13 + 1  # the identity, every document once, and the single one


@pytest.mark.slow
def test_an_error_in_one_process_ends_all(tmp_path):
    _, errors = launch(tmp_path, 2, "fail", fails=True)
    assert "FloatingPointError" in errors
    assert "process 1 failed" in errors
