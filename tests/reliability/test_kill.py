"""Killed (SIGKILL) at every file-system call of a conversion: OUT is the old folder, the new one, or not
there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linearize.conversion import convert
from tests.checkpoints import add_side_files, save

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks of one process, which needs os.fork")

LIMIT = 3000


def kill_everywhere(tmp_path, model):
    """Kill counts of conversions into a new OUT, over an old one, and where names can't be exchanged."""
    convert(model, tmp_path / "old", overrides={"mixer": "linear"})
    common = {"model": str(model), "out": str(tmp_path / "work" / "out"), "limit": LIMIT}
    over = common | {"old": str(tmp_path / "old"), "force": True}
    specs = [
        common | {"old": "", "force": False, "without_exchange": False},
        over | {"without_exchange": False},
        over | {"without_exchange": True},
    ]
    command = [sys.executable, str(Path(__file__).with_name("killer.py")), json.dumps(specs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert [result["wrong"] for result in results] == [[], [], []]
    counts = [result["kills"] for result in results]
    print(counts)
    assert all(sum(kills.values()) < LIMIT for kills in counts), "there are more calls than were tried"
    new, over, without_exchange = counts
    for kills in counts:
        assert kills["before"] >= 50
        assert kills["after"] >= 1
    # The old folder's files are removed one by one, after the swap.
    assert over["after"] > new["after"]
    # OUT is absent only between the two renames that replace a missing exchange, and then the next run brings
    # it back.
    assert over["absent"] == 0
    assert without_exchange["absent"] >= 1
    return sum(sum(kills.values()) for kills in counts)


def test_killed_at_any_moment_no_mixed_folder(tmp_path):
    model = save(tmp_path / "m", num_hidden_layers=1)
    (model / "tokenizer.json").write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool.jinja").write_text("x")
    assert kill_everywhere(tmp_path, model) >= 200


@pytest.mark.slow
def test_killed_at_any_moment_with_many_shards(tmp_path):
    model = save(tmp_path / "m", shards=True)
    add_side_files(model)
    assert kill_everywhere(tmp_path, model) >= 500
