"""Help and typing errors cost next to nothing: no heavy module is loaded for them."""

from __future__ import annotations

import pytest

HEAVY = {
    "torch", "transformers", "pydantic", "rich", "numpy", "huggingface_hub", "triton", "yaml",
    "lm_eval", "scipy", "matplotlib", "accelerate", "datasets", "peft",
}  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [[], ["convert"], ["inspect"], ["verify"], ["eval"], ["train"], ["run"], ["doctor"], ["recipes", "cp"], ["select"]],
)
def test_help_loads_nothing_heavy_and_takes_less_than_half_a_second(fresh, command):
    code = f"""
import sys, time
from linearize.cli import main
assert main({[*command, "--help"]}) == 0
assert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)
print("CPU", time.process_time())
"""
    output = fresh(code)
    assert "Usage: linearize" in output
    assert float(output.split("CPU")[-1]) < 0.5


def test_a_typo_in_the_recipe_is_found_before_the_model_or_the_network_in_less_than_a_second(fresh, tmp_path):
    # The model is a Hub id, and any socket is an error.
    code = f"""
import socket, sys, time
def refuse(*args, **kwargs): raise SystemExit("network used")
socket.socket.connect = socket.getaddrinfo = refuse
from linearize.cli import main
assert main(["convert", "owner/name", "-o", {str(tmp_path / "out")!r}, "--mixer", "hedge-hog"]) == 2
assert not {{"torch", "transformers", "huggingface_hub"}} & set(sys.modules)
assert time.process_time() < 1
"""
    fresh(code)
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_the_package_s(fresh):
    from linearize import __version__

    assert fresh("from linearize.cli import main; main(['--version'])").strip() == f"linearize {__version__}"
