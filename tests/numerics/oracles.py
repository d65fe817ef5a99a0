"""Naive loops of flash-linear-attention, run in a process of their own: `python oracles.py FOLDER JOBS OUT`.

The files are loaded by path: importing the package as a whole would choose GPU kernels, here and in transformers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def folder() -> Path:
    """Where fla-core and einops lie, as files."""
    return Path(os.environ.get("LINEARIZE_ORACLES", ROOT / ".venv-test" / "oracles"))


def run(path: Path, job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The output, the state after it (if any) and the gradients of sum(output * weight) of one call."""
    spec = importlib.util.spec_from_file_location(f"naive_{job['op']}", path / "fla" / "ops" / job["op"] / "naive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    leaves = {n: x.requires_grad_() for n, x in job["tensors"].items()}
    given = {n: x.transpose(1, 2) if job["heads_first"] and n != "initial_state" else x for n, x in leaves.items()}
    result = getattr(module, job["function"])(**given, **job["options"])
    out, state = result if isinstance(result, tuple) else (result, None)
    out = out.transpose(1, 2) if job["heads_first"] else out
    grads = torch.autograd.grad((out * job["weight"]).sum(), list(leaves.values()))
    found = {f"d{n}": x for n, x in zip(leaves, grads, strict=True)} | {"out": out.detach()}
    return found if state is None else found | {"state": (state[0] if isinstance(state, tuple) else state).detach()}


def main() -> None:
    path, jobs, out = map(Path, sys.argv[1:])
    sys.path.append(str(path))  # for einops
    torch.save({name: run(path, job) for name, job in torch.load(jobs).items()}, out)


if __name__ == "__main__":
    main()
