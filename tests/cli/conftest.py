"""A tiny model on disk, and the command line run in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from linearize.cli import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys):
    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def fresh():
    """Runs code in a process of its own, and gives what it prints."""

    def fresh(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return fresh


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A 4-layer Llama of random weights in a folder whose path has a space and a letter beyond ASCII."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("cli") / "my models" / "é"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "LICENSE").write_text("as it was\n")
    return folder
