"""Trainings whose gradients are written down, in one process or, started as a program, in each of several.

`launched_training.py SPEC` with the path of a JSON list of runs trains them one after another; each is what `record`
takes. `launched_training.py fail ARGUMENT...` is the command line, but one process fails at its second step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from linearize.training import held_out, loop, parallel, session
from tests.training import engine


class Stop(BaseException):
    """Ends a training in all processes at once, as a signal does."""


def parameters(job: Any) -> dict[str, torch.Tensor]:
    """Whole copies, by the names that they have without LoRA."""
    named = {loop.plain_name(name): parameter for name, parameter in job.model.named_parameters()}
    return {name: value.clone() for name, value in parallel.gather(named, keep=True).items()}


def record(
    out: Path,
    checkpoint: Path,
    stages: list[dict[str, Any]],
    settings: dict[str, Any],
    stop: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Train, stopping and resuming after a step of a stage if so asked.

    Returns:
        `gradients` of each step, whole, as they are before they are clipped; for each stage `changed`, the names of
        parameters that it has changed, and `tokens`, how many this process has been given.
    """
    found: dict[str, Any] = {"gradients": [], "changed": [], "tokens": []}
    real_clip, real_stage, real_batch = loop.Stage._clip, session.train_stage, loop.batch

    def clip(self: Any) -> float:
        own = {loop.plain_name(name): parameter.grad for name, parameter in self.parameters.items()}
        gradients = parallel.gather(own, keep=True)
        found["gradients"].append({name: value.clone() for name, value in gradients.items()})
        return real_clip(self)

    def train_stage(job: Any, *args: Any) -> Any:
        before = parameters(job)
        found["tokens"].append(0)
        done = real_stage(job, *args)
        after = parameters(job)
        found["changed"].append([name for name in before if not torch.equal(before[name], after[name])])
        return done

    def batch(rows: Any) -> Any:
        inputs = real_batch(rows)
        if found["tokens"]:
            found["tokens"][-1] += inputs["input_ids"].numel()
        return inputs

    patches = (
        (loop.Stage, "_clip", clip),
        (session, "train_stage", train_stage),
        (loop, "batch", batch),
        # Or Adam makes whole steps of gradients that are nothing but rounding.
        (torch.optim, "AdamW", partial(torch.optim.AdamW, eps=0.01)),
        (held_out, "PAIRS", (8,)),  # a look takes longer than all else
        (held_out, "SAMPLES", 1),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        if stop is not None:
            try:
                with mock.patch.object(loop.Stage, "advance", stopping(*stop)):
                    engine.train(checkpoint, out, *stages, **settings)
            except Stop:
                pass
        engine.train(checkpoint, out, *stages, **settings, resume=stop is not None)
    return found


def stopping(stage: int, step: int) -> Any:
    real = loop.Stage.advance

    def advance(self: Any, number: int) -> None:
        real(self, number)
        if (self.number, number + 1) == (stage, step):
            raise Stop

    return advance


def main(spec: Path) -> None:
    from linearize_evals import processes

    rank = processes.start("cpu").process_index
    for run in json.loads(spec.read_text()):
        gc.freeze()  # what has been imported; to go through it after each stage takes longer than the stage
        out = Path(run.pop("out"))
        found = record(out, Path(run.pop("checkpoint")), **run)
        torch.save(found, out.with_name(f"{out.name}.{rank}.pt"))
    processes.leave()


def fail(arguments: list[str]) -> int:
    from linearize import cli
    from linearize.errors import ModelError

    real = loop.Stage.advance

    def advance(self: Any, number: int) -> None:
        if os.environ["RANK"] == "1" and number == 1:
            raise ModelError("this process fails", "Mend it")
        real(self, number)

    with mock.patch.object(loop.Stage, "advance", advance):
        return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(fail(sys.argv[2:]) if sys.argv[1] == "fail" else main(Path(sys.argv[1])))
