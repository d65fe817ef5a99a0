"""Attention transfer of a model that doesn't fit in memory: a block of its layers at a time.

Each layer's mixer learns from its own inputs, and those don't depend on any mixer. So a few layers can be trained on
all rows before the next ones are loaded, if the hidden states between them wait on the disk. The mixers come out as
if the whole model had been there: same rows, same steps, same optimiser states.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.modeling.chain import Part
from linearize.modeling.observe import observing
from linearize.training.blocks import STATES, Blocks, is_blockwise, mixers
from linearize.training.calibrate import calibrate
from linearize.training.head import hidden_states
from linearize.training.loop import Job, Stage, steps_of
from linearize.training.memory import peak_memory, reset_peak
from linearize.training.objectives import Transfer
from linearize.training.packing import batch
from linearize.training.parallel import agree
from linearize.training.stored import File, Rows

Batch = tuple[Tensor, Tensor | None]


def calibrate_blocks(job: Job, checkpoint: str | Path, batches: list[Batch]) -> list[dict[str, Any]]:
    """`calibrate` of a model that is there as a skeleton."""
    size = min(stage.block for stage in job.recipe.train if is_blockwise(stage))
    walk = Blocks(job, checkpoint, size)
    states: list[Tensor | None] = [None] * len(batches)
    found: list[dict[str, Any]] = []
    for number in range(len(walk.bounds)):
        with walk.part(number) as part:
            given, turn = list(states), cycle(range(len(batches)))  # a calibration may go through the batches twice

            def forward(
                model: Any, *inputs: Any, part: Part = part, given: list = given, turn: Iterator[int] = turn
            ) -> None:
                at = next(turn)
                own = None if given[at] is None else given[at].clone()  # families may write into it
                states[at] = part.run(partial(hidden_states, model, *inputs), own)

            found += calibrate(part.model, batches, forward)
            agree(mixers(part.model).values())
    return found


def train_blocks(
    job: Job, number: int, settings: Any, checkpoint: str | Path, begin: int = 0, optimizer: Any = None
) -> dict[str, Any]:
    """Stage `number`, a transfer, block by block; returns its part of the summary.

    Args:
        checkpoint: the folder that the blocks are loaded from, if the job's model is a `skeleton`.
        begin: the step to go on from, counted over all blocks.
        optimizer: its state there.

    Raises:
        ModelError: as `train_stage`, or the layers of this model can't run block by block.
        ResourceError: the disk refuses.
    """
    walk = _Walk(job, number, settings, checkpoint)
    if not walk.blocks.loads:
        job.note(f"stage {number} ({settings.stage}) goes block by block, without a look at held-out rows")
    return walk.run(begin, optimizer)


class _Walk:
    """One pass over the rows for each block."""

    def __init__(self, job: Job, number: int, settings: Any, checkpoint: str | Path) -> None:
        self.job, self.number, self.settings = job, number, settings
        self.blocks = Blocks(job, checkpoint, settings.block)
        self.count = len(self.blocks.bounds)
        self.steps = steps_of(settings)
        self.world, self.rank = job.accelerator.num_processes, job.accelerator.process_index
        self.share = settings.batch // self.world  # rows of a step in this process
        self.folder = job.work / STATES
        self.rows = Rows(self.folder / f"rows-{self.rank}", settings.length)
        self.start: dict[str, Any] = {}  # where the stream is before the stage

    def run(self, begin: int, optimizer: Any) -> dict[str, Any]:
        job = self.job
        started = time.perf_counter()
        reset_peak(job.accelerator.device)
        if begin == 0:
            self._tidy()
        self._take_rows()
        now, step = divmod(begin, self.steps)
        known = [0, *(number for number in range(1, now + 1) if self._states(number).rows == self._own_rows)]
        if known[-1] < now:  # states that are lost are made again, without training
            for number in range(known[-1] + 1, self.count):
                self._states(number).remove()
        for number in range(known[-1], self.count):  # until `now`, each process for itself
            first = step if number == now else self.steps if number < now else 0
            self._block(number, first, optimizer if number == now else None)
            if now <= number < self.count - 1:
                self._save((number + 1) * self.steps)
            self._states(number).remove()
        job.data = self.rows.after
        job.save(self.number + 1, 0, job.data)
        self.rows.close()
        self._tidy()
        return {
            "stage": self.settings.stage,
            "steps": self.steps,
            "tokens": self.steps * self.settings.batch * self.settings.length,
            "blocks": self.count,
            "held_out": {},
            "seconds": round(time.perf_counter() - started, 1),
            "peak_memory_bytes": peak_memory(job.accelerator.device),
        }

    @property
    def _own_rows(self) -> int:
        return self.steps * self.share

    def _states(self, number: int) -> File:
        """What block `number` is given."""
        links = self.blocks.links
        name = f"{number}-{self.rank}.{str(links.dtype).removeprefix('torch.')}"
        return File(self.folder / name, (self.settings.length, *links.shape), links.dtype)

    def _tidy(self) -> None:
        self.job.accelerator.wait_for_everyone()
        if self.job.accelerator.is_local_main_process:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.job.accelerator.wait_for_everyone()

    def _take_rows(self) -> None:
        job, settings = self.job, self.settings
        stream = job.stream(settings.length)
        if job.data is not None:
            stream.load_state(job.data)
        self.start = stream.state()

        def tick(done: int) -> None:
            if job.progress is not None and job.main:
                job.progress(f"{self.number} rows", done * settings.length, total * settings.length, "")

        total = self.steps * settings.batch
        self.rows.fill(stream, total, settings.batch, tick)

    def _block(self, number: int, begin: int, optimizer: Any) -> None:
        """Train block `number` from step `begin` on, and store what it makes of the rows."""
        source = self._states(number) if number else None
        sink = self._states(number + 1) if number < self.count - 1 else None
        first = begin
        if sink is not None:
            trusted = begin if begin < self.steps else 0  # what was there when the checkpoint was written
            first = min(sink.rows // self.share, trusted)
            sink.open(first * self.share, cut=True)
        if source is not None:
            source.open(first * self.share)
        self.rows.open(first * self.settings.batch)
        with self.blocks.part(number) as part:
            forward = _Forward(part, source, sink, self.job.accelerator.device)
            stage = None
            if mixers(part.model) and begin < self.steps:
                stage = _Block(self, number, part, forward)
                if optimizer is not None:
                    stage.load_optimizer(optimizer)
            for step in range(first, self.steps):
                if stage is None or step < begin:
                    self._pass_on(part, forward)
                    continue
                stage.advance(step)
                done = step + 1
                if done < self.steps and done % self.job.recipe.every.save == 0:
                    if sink is not None:
                        sink.flush()
                    self.blocks.keep(part)
                    self._save(number * self.steps + done, stage.optimizer_state())
            if stage is not None:
                stage.unwrap()
        if sink is not None:
            sink.flush()
        for file in (source, sink):
            if file is not None:
                file.close()

    def _save(self, step: int, optimizer: Any = None) -> None:
        """Write a checkpoint, once the states that it promises are on the disk in every process."""
        self.job.accelerator.wait_for_everyone()
        self.job.save(self.number, step, self.start, optimizer)

    def _pass_on(self, part: Part, forward: Callable[..., None]) -> None:
        """A step's rows through the block, without training."""
        mine = self.rows.take(self.settings.batch)[self.rank :: self.world]
        size = self.settings.micro_batch
        with torch.no_grad(), observing(part.model, lambda given: None):
            for at in range(0, len(mine), size):
                inputs: Mapping[str, Tensor] = batch(mine[at : at + size])
                found = {key: value.to(self.job.accelerator.device) for key, value in inputs.items()}
                forward(found["input_ids"], found.get("position_ids"))


class _Forward:
    """Runs a block on the next rows: takes their hidden states from a file, and puts what comes out into another."""

    def __init__(self, part: Part, source: File | None, sink: File | None, device: torch.device) -> None:
        self.part, self.source, self.sink, self.device = part, source, sink, device

    def __call__(self, input_ids: Tensor, position_ids: Tensor | None) -> None:
        given = None if self.source is None else self.source.read(len(input_ids)).to(self.device)
        model = self.part.model
        found = self.part.run(partial(hidden_states, model, input_ids, position_ids), given)
        if self.sink is not None:
            self.sink.write(found)


class _Block(Stage):
    """The optimiser steps of one block: those of the stage, on fewer layers."""

    def __init__(self, walk: _Walk, number: int, part: Part, forward: _Forward) -> None:
        own = replace(walk.job, model=part.model, stream=lambda length: walk.rows, sharded=False)
        super().__init__(own, walk.number, walk.settings)
        self.transfer = Transfer(part.model, walk.settings.loss, forward)
        self._block, self._blocks = number, walk.count

    def _place(self, step: int) -> dict[str, Any]:
        place = super()._place(self._block * self.steps + step)
        return {**place, "block": self._block + 1, "blocks": self._blocks}

    @property
    def _tokens(self) -> int:
        return self._blocks * super()._tokens
