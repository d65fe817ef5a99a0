"""The optimiser steps of a stage: the same losses however it is interrupted, and whoever shares the work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.errors import ModelError
from linearize.modeling.compat import recompute_activations
from linearize.training import parallel, state
from linearize.training.finite import first_not_finite, is_finite
from linearize.training.held_out import HeldOut
from linearize.training.memory import peak_memory, reset_peak
from linearize.training.metrics import Metrics
from linearize.training.objectives import Logits, Runner, Transfer
from linearize.training.packing import batch
from linearize.training.place import CHECKPOINTS
from linearize.training.redraw import drawn, redraw
from linearize.training.schedule import factor, steps_of
from linearize.training.trainable import MIXER, choose, groups, plain_name


@dataclass
class Job:
    """What the stages of one training share.

    Attributes:
        model: the converted model; adapter: peft's wrapper of it, once it has LoRA.
        runner: what runs the model; teacher: what runs another model as the teacher, or None.
        recipe, accelerator, work: settings, processes, and the folder for metrics and checkpoints.
        stream: gives a stage of some length its rows.
        changed: names of what training has changed so far, as they are without LoRA around them.
        autocast: the dtype of products where weights are held in float32.
    """

    model: Any
    recipe: Any
    accelerator: Any
    work: Path
    stream: Callable[[int], Any]
    held_out: HeldOut
    metrics: Metrics
    note: Callable[[str], None]
    progress: Callable[..., None] | None = None
    runner: Any = None
    adapter: Any = None
    teacher: Any = None
    autocast: torch.dtype | None = None
    sharded: bool = False
    changed: set[str] = field(default_factory=set)
    data: dict[str, Any] | None = None  # where the stream is

    def __post_init__(self) -> None:
        if self.runner is None or self.runner.model is not self.model:
            self.runner = Runner(self.model)

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def checkpoints(self) -> Path:
        return self.work / CHECKPOINTS

    def trained(self) -> dict[str, Tensor]:
        """The parameters and buffers that training has changed so far, by their names in `changed`."""
        tensors = chain(self.model.named_parameters(), self.model.named_buffers())
        named = ((plain_name(name), tensor) for name, tensor in tensors)
        return {name: tensor for name, tensor in named if name in self.changed}

    def save(self, stage: int, step: int, data: dict[str, Any] | None, optimizer: Any = None) -> None:
        """Write a training checkpoint from which `step` of `stage` comes next; every process has to take part."""
        from linearize_evals import processes

        parameters = parallel.gather(self.trained(), keep=self.main)
        position = {"stage": stage, "step": step, "data": data, "changed": sorted(self.changed)}
        processes.first(lambda: state.save(self.checkpoints, parameters, optimizer, position, self.recipe.keep))


def train_stage(job: Job, number: int, settings: Any, begin: int = 0, optimizer_state: Any = None) -> dict[str, Any]:
    """Train stage `number` from step `begin` on; returns its part of the summary.

    Raises:
        ModelError: a loss isn't finite, naming layer and step; the last checkpoint stays.
    """
    return Stage(job, number, settings).run(begin, optimizer_state)


class Stage:
    """The optimiser steps of one stage."""

    def __init__(self, job: Job, number: int, settings: Any) -> None:
        self.job, self.number, self.settings = job, number, settings
        self.local = settings.stage == "transfer"
        self.steps = steps_of(settings)
        self.step_tokens = settings.batch * settings.length
        trains = "mixers" if self.local else settings.trains
        parameters = choose(job.model, trains)
        job.changed |= {plain_name(name) for name in parameters}
        job.changed.update(drawn(job.model) if settings.redraw else ())
        recompute_activations(job.model, getattr(settings, "gradient_checkpointing", False))
        ce = {"finetune": 1.0}.get(settings.stage, getattr(settings, "ce", 1.0))
        teacher = job.teacher if settings.stage == "distill" else None
        temperature = getattr(settings, "temperature", 1.0)
        self.logits = Logits(job.model, job.adapter, teacher, temperature, ce, job.autocast)
        self.transfer = Transfer(job.model, settings.loss, dtype=job.autocast) if self.local else None
        self.module = parallel.wrap(job.runner, job.accelerator, by_hand=self.local or job.sharded)
        self.parameters = parameters
        self.apart = parallel.apart(parameters.values(), self.module)
        self.optimizer: Any = torch.optim.AdamW(
            groups(self.parameters, settings.lr, getattr(settings, "mixer_lr", None)),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.stream = job.stream(settings.length)
        self._seconds, self._trained = 0.0, 0

    def run(self, begin: int, optimizer_state: Any) -> dict[str, Any]:
        job, every = self.job, self.job.recipe.every
        if optimizer_state is not None:
            self.load_optimizer(optimizer_state)
        if job.data is not None:
            self.stream.load_state(job.data)
        summary: dict[str, Any] = {"stage": self.settings.stage, "steps": self.steps, "held_out": {}}
        summary["tokens"] = self.steps * self.step_tokens
        reset_peak(self.job.accelerator.device)
        job.model.train(not self.local)
        if begin == 0:
            self._look(0, teacher=True)
        for step in range(begin, self.steps):
            self.advance(step)
            done = step + 1
            if done == self.steps or (every.evaluate and done % every.evaluate == 0):
                self._look(done)
            if done < self.steps and done % every.save == 0:
                job.save(self.number, done, self.stream.state(), self.optimizer_state())
        job.data = self.stream.state()
        self.unwrap()
        self.optimizer = None  # its memory is the next stage's
        job.save(self.number + 1, 0, job.data)
        memory = peak_memory(job.accelerator.device)
        return summary | {"seconds": round(self._seconds, 1), "peak_memory_bytes": memory}

    def advance(self, step: int) -> None:
        """Carry out a step, and tell of it."""
        started = time.perf_counter()
        losses, figures, norm = self._step(step)
        loss = float(losses.sum()) if not self.local else float(losses.mean())
        self._seconds, self._trained = self._seconds + time.perf_counter() - started, self._trained + 1
        self._tell(step + 1, losses, loss, figures, norm, self._trained * self.step_tokens / self._seconds)

    def _step(self, step: int) -> tuple[Tensor, Tensor | None, float]:
        """Losses (of each layer, or one), figures of the logits, and the gradient's norm; parameters are updated."""
        job, settings, accelerator = self.job, self.settings, self.job.accelerator
        world, rank = accelerator.num_processes, accelerator.process_index
        mine = self.stream.take(settings.batch)[rank::world]
        if step and settings.redraw and step % settings.redraw == 0:
            redraw(job.model, job.recipe.seed, self.number, step)
        # What a step draws (dropout) depends on its number alone, so that a resumed training draws the same.
        torch.manual_seed(hash((job.recipe.seed, self.number, step, rank)) % 2**63)
        rate = factor(
            settings.schedule, step, self.steps, warmup=settings.warmup, decay=settings.decay, least=settings.min_lr
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * rate
        losses: Any = 0.0
        figures: Any = None
        given: list[tuple[Tensor, Tensor | None]] = []
        for start in range(0, len(mine), settings.micro_batch):
            rows = mine[start : start + settings.micro_batch]
            inputs = {key: value.to(accelerator.device) for key, value in batch(rows).items()}
            given.append((inputs["input_ids"], inputs.get("position_ids")))
            share = len(rows) / settings.batch
            try:
                with parallel.accumulating(self.module, last=start + len(rows) == len(mine)):
                    if self.transfer is not None:
                        loss = self.module(self.transfer, *given[-1], share)
                    else:
                        loss, seen = self.module(self.logits, *given[-1], share * world)
                        loss.backward()
                        loss, figures = loss.detach()[None] / world, seen if figures is None else figures + seen
            except FloatingPointError as error:
                raise self._not_finite(step, str(error)) from error
            losses = losses + loss
        parallel.sum_gradients(self.apart, accelerator, mean=not self.local)
        losses = accelerator.reduce(losses, "sum")
        figures = None if figures is None else accelerator.reduce(figures, "sum")
        if not is_finite(losses):
            raise self._not_finite(step, f"the loss is NaN or infinite: {self._where(losses, given)}")
        norm = self._clip()
        if not math.isfinite(norm):
            bad = [name for name, p in self.parameters.items() if p.grad is not None and not is_finite(p.grad)]
            bad = parallel.of_all(bad)  # each process may have a part of the gradient
            raise self._not_finite(step, f"the gradient of {bad[0] if bad else 'a layer'} is NaN or infinite")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, figures, norm

    def _clip(self) -> float:
        """Limit the gradient's norm; in stage 1 each layer's, since each is trained for itself. Returns the largest."""
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            parts.setdefault(name.partition(MIXER)[0] if self.local else "", []).append(parameter)
        return float(torch.stack([parallel.clip(own, self.settings.clip) for own in parts.values()]).max())

    def _where(self, losses: Tensor, given: list[tuple[Tensor, Tensor | None]]) -> str:
        """Which layer a loss that isn't finite comes from."""
        if self.transfer is not None:
            return self.transfer.names[int((~losses.isfinite()).nonzero()[0])]
        found = parallel.of_all([self.module(first_not_finite, self.job.model, *one) for one in given])
        return next((text for text in found if text.startswith(("layer", "converted"))), found[0])

    def _not_finite(self, step: int, what: str) -> ModelError:
        kept = state.checkpoints(self.job.checkpoints)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint had been written yet"
        return ModelError(
            f"stage {self.number} ({self.settings.stage}), step {self._place(step + 1)['step']}: {what}; {last}",
            f"Lower train.{self.number}.lr, or start from another checkpoint",
        )

    def _tell(self, step: int, losses: Tensor, loss: float, figures: Tensor | None, norm: float, speed: float) -> None:
        job = self.job
        memory, place = peak_memory(job.accelerator.device), self._place(step)
        if job.progress is not None and job.main:
            part = f"block {place['block']} of {place['blocks']}, " if "block" in place else ""
            text = f"{part}loss {loss:.4g}, {memory / 1e9:.1f} GB"
            job.progress(f"{self.number} {self.settings.stage}", place["tokens"], self._tokens, text)
        if not job.main or (step % job.recipe.every.log and step != self.steps):
            return
        line: dict[str, Any] = {**place, "loss": loss, "lr": self.optimizer.param_groups[0]["lr"]}
        if self.transfer is not None:
            line["layers"] = dict(zip(self.transfer.names, losses.tolist(), strict=True))
        if figures is not None:
            divergence, crossed, count = figures.tolist()
            tokens = self.step_tokens
            line |= {"kl": divergence / tokens} if self.logits.ce < 1 else {}
            line |= {"cross_entropy": crossed / max(count, 1)}
        job.metrics.write(line | {"grad_norm": norm, "tokens_per_second": round(speed, 1), "memory_bytes": memory})

    @property
    def _tokens(self) -> int:
        return self.steps * self.step_tokens

    def _place(self, step: int) -> dict[str, Any]:
        return {
            "stage": self.number,
            "name": self.settings.stage,
            "step": step,
            "tokens": step * self.step_tokens,
        }

    def _look(self, step: int, teacher: bool = False) -> None:
        """Judge the student, and at the start its teacher."""
        job = self.job
        if not job.recipe.every.evaluate:
            return
        line: dict[str, Any] = self._place(step)
        try:
            line["held_out"] = job.held_out.look(self.module, self.logits)
            if teacher:
                line["teacher"] = job.held_out.look(self.module, self.logits, teacher=True)
        except FloatingPointError as error:
            raise self._not_finite(step - 1, str(error)) from error
        if job.main:
            job.metrics.write(line)
            shown = ", ".join(f"{key} {value:.4g}" for key, value in line["held_out"].items())
            job.note(f"stage {self.number} ({self.settings.stage}), step {step} of {self.steps}: {shown}")

    def optimizer_state(self) -> dict[str, Tensor]:
        """Moments and step counts, whole, but for parameters that have had no gradient yet; every process has to ask.

        torch's own way would give those a step of 1, or refuse them.
        """
        own = ((name, self.optimizer.state.get(parameter, {})) for name, parameter in self.parameters.items())
        flat = {f"{name}/{key}": value for name, values in own for key, value in values.items()}
        return parallel.gather(flat, keep=self.job.main)

    def load_optimizer(self, saved: dict[str, Tensor]) -> None:
        for place, value in saved.items():
            name, _, key = place.rpartition("/")
            parameter = self.parameters[name]
            value = value.to(parameter.device)
            self.optimizer.state[parameter][key] = parallel.spread_as(parameter, value) if value.dim() else value

    def unwrap(self) -> None:
        self.module = self.job.runner
        for parameter in self.job.model.parameters():
            parameter.grad = None
