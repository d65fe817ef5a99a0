"""Attention transfer of a model that doesn't fit in memory: a block of its layers at a time.

Each layer's mixer learns from its own inputs, and those don't depend on any mixer. So a few layers can be trained on
all rows before the next ones are loaded, if the hidden states between them wait on the disk. The mixers come out as
if the whole model had been there: same rows, same steps, same optimiser states.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.errors import ModelError, ResourceError, UsageError
from linearize.family import load_config
from linearize.modeling.chain import Chain, Part, chain, load_part
from linearize.modeling.classes import BLOCK
from linearize.modeling.observe import observing
from linearize.plan import human
from linearize.source import Source
from linearize.target import survey
from linearize.training import checks
from linearize.training.calibrate import calibrate
from linearize.training.head import hidden_states
from linearize.training.loop import Job, Stage, steps_of
from linearize.training.memory import peak_memory, reset_peak
from linearize.training.objectives import Transfer
from linearize.training.output import read_converted
from linearize.training.packing import batch
from linearize.training.parallel import agree, fill
from linearize.training.place import TEACHER_TEXT
from linearize.training.stored import TOKEN_BYTES, File, Rows
from linearize.training.trainable import MIXER

STATES = "states"  # the folder in the work folder
Batch = tuple[Tensor, Tensor | None]


def is_blockwise(stage: Any) -> bool:
    return getattr(stage, "block", None) is not None


def suffices(recipe: Any, text: Path) -> bool:
    """Whether a training can do without ever having the whole model in memory.

    Args:
        text: where the text that the teacher writes is, or will be.
    """
    stages = recipe.train
    writes = recipe.data.source == "teacher" and not text.exists()
    return not writes and any(map(is_blockwise, stages)) and all(_by_blocks(stage) for stage in stages)


def _by_blocks(stage: Any) -> bool:
    return is_blockwise(stage) or stage.stage == "calibrate"


def check(source: Source, work: Path, recipe: Any, device: Any) -> None:
    """Refuse what can be refused of block-wise stages before a weight is read.

    Args:
        source: the converted checkpoint.
        device: what the model will run on.

    Raises:
        UsageError: something else needs the model as a whole, and that is sharded.
        ModelError: the layers of this model can't run block by block.
        ResourceError: the disk of `work` is too small for the hidden states.
    """
    links = None
    for number, stage in enumerate(recipe.train):
        if not is_blockwise(stage):
            continue
        if recipe.shard and not suffices(recipe, work / TEACHER_TEXT):
            raise UsageError(
                f"train.{number}.block: with shard: true, no other stage may need the whole model, nor data.source",
                "Set one of the two to false, or train such stages in a run of their own",
            )
        try:
            links = links or _chain(source, _widest(recipe, device))
        except ModelError as error:
            raise ModelError(f"train.{number}.block: {error.what}", f"Leave train.{number}.block out") from error
        parts = blocks(source.config[BLOCK]["layers"], links, stage.block)
        rows = steps_of(stage) * stage.batch
        states = File(Path(), (stage.length, *links.shape), links.dtype).bytes * min(2, len(parts) - 1)
        needed = rows * (states + stage.length * TOKEN_BYTES)
        destination = survey(work)
        own = sum(path.stat().st_size for path in (work / STATES).glob("*")) if (work / STATES).is_dir() else 0
        if needed > destination.free_bytes + own:
            raise ResourceError(
                f"train.{number}.block: the hidden states between blocks take {human(needed)}, and {destination.disk} "
                f"has {human(destination.free_bytes + own)} free",
                f"Free some space, choose an OUT on another disk, or lower train.{number}.tokens",
            )


def _widest(recipe: Any, device: Any) -> torch.dtype:
    """The widest dtype that weights may be held in."""
    everything = any(getattr(stage, "trains", "") == "all" for stage in recipe.train)
    measured = recipe.precision == "auto" and getattr(device, "type", "cpu") == "cpu"
    return torch.float32 if everything or measured or recipe.precision == "float32" else torch.bfloat16


def _chain(source: Source, dtype: torch.dtype) -> Chain:
    attention = [layer["module"] for layer in source.config[BLOCK]["layers"]]
    return chain(load_config(source.config, source.name), attention, dtype)


def blocks(layers: list[dict[str, Any]], links: Chain, size: int) -> list[tuple[int, int]]:
    """Begin and end of the blocks of `size` layers, up to the last layer that has a mixer.

    Args:
        layers: those of config.json's `linearize` block.
    """
    modules = [layer["module"] for layer in layers if layer.get("mixer")]
    end = 1 + max(int(module.removeprefix(f"{links.layers}.").partition(".")[0]) for module in modules)
    return [(begin, min(begin + size, end)) for begin in range(0, end, size)]


def skeleton(checkpoint: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A converted model whose mixers are on `device`, and whose other weights (in `dtype`) are on the meta device.

    Raises:
        ModelError: the checkpoint lacks a mixer's tensor.
    """
    from safetensors import safe_open

    source = read_converted(checkpoint)
    model = checks.skeleton(source).to(dtype)
    wanted = {name for name in model.state_dict() if MIXER in name}
    tensors = {}
    for name in sorted(wanted & source.tensors.keys()):
        with safe_open(source.checkpoint.paths[source.tensors[name].file], framework="pt") as file:
            value = file.get_tensor(name)
            tensors[name] = value.to(device, torch.float32 if value.is_floating_point() else None)
    if missing := sorted(wanted - tensors.keys()):
        raise ModelError(f"{checkpoint} lacks '{missing[0]}'", "Convert the base model again")
    model.load_state_dict(tensors, strict=False, assign=True)
    return model.requires_grad_(False).eval()


class Blocks:
    """The blocks of a job's model, which is there as a whole or (as a `skeleton`) but for its mixers."""

    def __init__(self, job: Job, checkpoint: str | Path, size: int) -> None:
        self.job, self.checkpoint = job, checkpoint
        source = read_converted(checkpoint)
        self.links = _chain(source, job.model.dtype)
        self.bounds = blocks(source.config[BLOCK]["layers"], self.links, size)
        self.loads = any(parameter.is_meta for parameter in job.model.parameters())

    @contextmanager
    def part(self, number: int) -> Iterator[Part]:
        """Have block `number` in memory; what its mixers have learnt goes to the job's model."""
        bounds = self.bounds[number]
        if not self.loads:
            part = Part(self.job.model, self.links, *bounds)
            try:
                yield part
            finally:
                part.bring_back()
            return
        model, device = self.job.model, self.job.accelerator.device
        part = load_part(self.checkpoint, self.links, *bounds, dtype=model.dtype, device=device)
        own = mixers(part.model)
        fill(own, {name: parameter for name, parameter in mixers(model).items() if name in own})
        yield part
        self.keep(part)
        part.model.to("meta")  # now, and not when the cycles of a model happen to be collected

    def keep(self, part: Part) -> None:
        """Give the job's model what the mixers of a part have learnt."""
        if self.loads:
            fill(mixers(self.job.model), mixers(part.model))


def mixers(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if MIXER in name}


def calibrate_blocks(job: Job, checkpoint: str | Path, batches: list[Batch]) -> list[dict[str, Any]]:
    """`calibrate` of a model that is there as a skeleton."""
    size = min(stage.block for stage in job.recipe.train if is_blockwise(stage))
    walk = Blocks(job, checkpoint, size)
    states: list[Tensor | None] = [None] * len(batches)
    found: list[dict[str, Any]] = []
    for number in range(len(walk.bounds)):
        with walk.part(number) as part:
            turn = iter(range(len(batches)))

            def forward(model: Any, *inputs: Any, part: Part = part, turn: Iterator[int] = turn) -> None:
                at = next(turn)
                states[at] = part.run(lambda: hidden_states(model, *inputs), states[at])

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
        reset_peak()
        if begin == 0:
            self._tidy()
        self._take_rows()
        now, step = divmod(begin, self.steps)
        known = [0, *(number for number in range(1, now + 1) if self._states(number).rows == self._own_rows)]
        for number in range(known[-1], self.count):  # states that are lost are made again, without training
            first = step if number == now else self.steps if number < now else 0
            self._block(number, first, optimizer if number == now else None)
            if now <= number < self.count - 1:
                job.save(self.number, (number + 1) * self.steps, self.start)
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
                    stage._load_optimizer(optimizer)
            for step in range(first, self.steps):
                if stage is None or step < begin:
                    self._pass_on(part, forward)
                    continue
                stage.advance(step)
                done = step + 1
                if done < self.steps and done % self.job.recipe.every.save == 0:
                    self._flush(sink)
                    self.blocks.keep(part)
                    state = stage._optimizer_state()
                    self.job.save(self.number, number * self.steps + done, self.start, state)
            if stage is not None:
                stage._unwrap()
        self._flush(sink)
        for file in (source, sink):
            if file is not None:
                file.close()

    def _flush(self, sink: File | None) -> None:
        """A checkpoint promises that what came before it is on the disk, in every process."""
        if sink is not None:
            sink.flush()
        self.job.accelerator.wait_for_everyone()

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
        found = self.part.run(lambda: hidden_states(model, input_ids, position_ids), given)
        if self.sink is not None:
            assert found is not None
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
