"""`linearize train`: checks, stages, checkpoints, and the trained model at the end."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from linearize_evals.settings import write_json

from linearize.training import blocks, blockwise, ending, models, output, parallel, place, sharding, state, summary
from linearize.training.calibrate import calibrate, calibrate_stage
from linearize.training.held_out import HeldOut
from linearize.training.loop import Job, train_stage
from linearize.training.metrics import Metrics, plot, read
from linearize.training.objectives import Runner
from linearize.training.schedule import tokens_of
from linearize.training.schema import SELF
from linearize.training.separate import check_separate
from linearize.training.stream import Stream, held_out
from linearize.training.trainable import MIXER, add_lora


def train(
    checkpoint: str | Path,
    out: str | Path,
    *,
    recipe: Any,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    force: bool = False,
    device: str | None = None,
    work: str | Path | None = None,
    teacher: str | None = None,
    progress: Callable[..., None] | None = None,
    note: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train a converted model by the stages of a recipe, and write the result as a converted model.

    Args:
        checkpoint: a folder that `convert` (or an earlier training) wrote.
        out: folder for the trained model; it appears whole or not at all.
        recipe: a `Recipe`, a YAML file, the name of a shipped recipe or a mapping; only its sections on training count.
        overrides: single recipe keys to change, e.g. `{"train.1.lr": 3e-3}`.
        resume: go on from the newest training checkpoint.
        force: replace an existing `out`.
        device: cpu, cuda or cuda:N; by default a GPU if there is one.
        work: folder for metrics.jsonl, training checkpoints and figures; by default `out` with "-training".
        teacher: the model that the checkpoint was converted from, for the trained model's card.
        progress: called with (what, tokens done, tokens in all, text).
        note: called with what a user should know before the end.

    Returns:
        A summary: `out`, `work`, `stages`, `notes`. In a run of several processes only in the first one, {} in others;
        such a program ends with `linearize_evals.processes.leave()`.

    Raises:
        UsageError, ModelError, ResourceError, NetworkError: see their `exit_code`; `out` is as it was.
    """
    from linearize_evals import processes
    from linearize_evals.loading import choose_device

    from linearize.recipe import check_training_keys, load_recipe

    check_training_keys(overrides or {})
    settings = parallel.launched(load_recipe(recipe, overrides or {}))
    folder = Path(work) if work is not None else Path(f"{out}-training")
    processes.start(device)
    where = choose_device(device)
    with ending.one_end(), ExitStack() as held:
        place.check_processes(settings)
        begun = processes.first(
            lambda: place.check(checkpoint, out, folder, settings, where, resume=resume, force=force, held=held)
        )
        session = Session(Path(checkpoint), Path(out), folder, settings, where, progress, note)
        return session.run(begun, force=force, teacher=teacher)


class Session:
    """A training whose settings make sense; `run` carries it out."""

    def __init__(
        self, checkpoint: Path, out: Path, work: Path, recipe: Any, device: Any, progress: Any, note: Any
    ) -> None:
        from accelerate import Accelerator

        trackers = list(recipe.trackers)
        self.checkpoint, self.out, self.work, self.recipe = checkpoint, out, work, recipe
        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="no",  # whatever the launcher says: the recipe does
            log_with=trackers or None,
            project_dir=str(work) if trackers else None,
        )
        self.device, self._note = device, note
        self.progress = progress if self.accelerator.is_main_process else None
        self.sharded = recipe.shard and self.accelerator.num_processes > 1
        self.by_blocks = False  # whether the whole model is never in memory
        self.notes: list[str] = []
        self.longest = max(stage.length for stage in recipe.train)

    def note(self, text: str) -> None:
        if self._note is not None and self.accelerator.is_main_process:
            self._note(text)

    def keep(self, text: str) -> None:
        """Tell, and say again in the summary."""
        self.notes.append(text)
        self.note(text)

    def run(self, begun: Path | None, *, force: bool, teacher: str | None) -> dict[str, Any]:
        from linearize_evals import processes

        import linearize

        with models.quiet_libraries():
            runner = self._load()
            tokenizer = processes.everywhere(lambda: linearize.load_tokenizer(self.checkpoint))
            text = self._text(runner, tokenizer)
            job = self._job(runner, tokenizer, text)
            stages = self._stages(job, begun)
            result = self._write(job, stages, force, teacher)
            if self.recipe.trackers:
                self.accelerator.end_training()
        return result if self.accelerator.is_main_process else {}

    def _load(self) -> Runner:
        from linearize_evals import processes

        held, self.autocast, text = models.precision(self.recipe, self.work, self.device)
        self.keep(text)
        self.by_blocks = processes.same(blocks.suffices(self.recipe, self.work / place.TEACHER_TEXT))
        if self.by_blocks:
            self.sharded = False
            self.keep("the model is loaded block by block, and held-out rows aren't looked at")
            model = processes.everywhere(lambda: blocks.skeleton(self.checkpoint, held, self.device))
            if self.recipe.data.separate:
                processes.everywhere(lambda: blocks.check_apart(self.checkpoint, model, self.device))
            return Runner(model)
        if any(map(blocks.is_blockwise, self.recipe.train)):
            self.keep("`block` saves no memory: a stage, or data.source: teacher, needs the whole model")
        if self.recipe.shard:
            world = self.accelerator.num_processes
            self.keep(f"weights are spread over {world} processes" if world > 1 else "one process, nothing is sharded")
        return self._runner(self.checkpoint, held)

    def _runner(self, name: str | Path, dtype: torch.dtype) -> Runner:
        """A frozen model that keeps documents apart, if it has to."""
        from linearize_evals import processes

        runner = models.frozen(name, dtype, self.device, self.accelerator, sharded=self.sharded)
        if self.recipe.data.separate:
            processes.everywhere(lambda: runner(check_separate, runner.model))
        return runner

    def _text(self, runner: Runner, tokenizer: Any) -> Path | None:
        """Text sampled from the teacher, where the recipe has no other."""
        data, path = self.recipe.data, self.work / place.TEACHER_TEXT
        if data.source != "teacher":
            return None
        self.note(f"{data.teacher_tokens:,} tokens sampled from the teacher, since there is no other data")
        models.sampled(runner, tokenizer, data, self.longest, path, sharded=self.sharded, progress=self.progress)
        return path

    def _job(self, runner: Runner, tokenizer: Any, text: Path | None) -> Job:
        recipe, accelerator = self.recipe, self.accelerator
        if recipe.trackers:
            accelerator.init_trackers("linearize", config={"recipe": json.dumps(recipe.to_dict())})

        def stream(length: int) -> Stream:
            return Stream(recipe.data, tokenizer, length, teacher_text=text, longest=self.longest)

        looks = recipe.every.evaluate and not self.by_blocks
        rows = held_out(recipe.data, tokenizer, self.longest, teacher_text=text) if looks else []
        return Job(
            model=runner.model,
            runner=runner,
            recipe=recipe,
            accelerator=accelerator,
            work=self.work,
            stream=stream,
            held_out=HeldOut(rows, tokenizer if looks else None),
            metrics=Metrics(self.work, accelerator if recipe.trackers else None, list(map(tokens_of, recipe.train))),
            note=self.note,
            progress=self.progress,
            autocast=self.autocast,
            sharded=self.sharded,
        )

    def _stages(self, job: Job, begun: Path | None) -> list[dict[str, Any]]:
        """Run the stages, from where the checkpoint `begun` stands."""
        first, step, optimizer = 0, 0, None
        if begun is not None:
            where = state.position(begun)
            first, step = where["stage"], where["step"]
            for stage in self.recipe.train[: first + (1 if step else 0)]:
                self._adapt(job, stage)
            optimizer = self._restore(job, begun, where)
            self.keep(f"resumed from {begun.name}: stage {first}, step {step}")
        if job.main:
            job.metrics.cut(first if step else first - 1, step if step else 1 << 60)
        summaries = []
        for number, stage in enumerate(self.recipe.train):
            if number >= first:
                self._adapt(job, stage)
                summaries.append(self._stage(job, number, stage, step, optimizer))
                step, optimizer = 0, None
            else:
                summaries.append(self._earlier(stage))
        return summaries

    def _earlier(self, stage: Any) -> dict[str, Any]:
        """The summary of a stage that had ended before this process began; what has metrics is completed later."""
        if stage.stage == "calibrate":
            return summary.calibration(stage, json.loads((self.work / place.CALIBRATION).read_text(encoding="utf-8")))
        return {"stage": stage.stage, "held_out": {}}

    def _stage(self, job: Job, number: int, stage: Any, step: int, optimizer: Any) -> dict[str, Any]:
        if stage.stage == "calibrate":
            return self._calibrate(job, number, stage)
        if blocks.is_blockwise(stage):
            return blockwise.train_blocks(job, number, stage, self.checkpoint, step, optimizer)
        if getattr(stage, "teacher", SELF) != SELF:
            job.teacher = self._runner(stage.teacher, self.autocast or job.model.dtype)
            job.teacher.eval()
        done = train_stage(job, number, stage, step, optimizer)
        job.teacher = None
        gc.collect()
        return done

    def _adapt(self, job: Job, stage: Any) -> None:
        """Put LoRA on the model before the first stage that trains it."""
        if getattr(stage, "trains", "") == "lora" and job.adapter is None:
            job.adapter = add_lora(job.model, stage.lora, seed=self.recipe.seed)

    def _restore(self, job: Job, begun: Path, where: dict[str, Any]) -> Any:
        job.changed = set(where["changed"])
        job.data = where["data"]
        own = job.trained()
        values, optimizer = state.read(begun, own)
        parallel.fill(own, values)
        return optimizer

    def _calibrate(self, job: Job, number: int, stage: Any) -> dict[str, Any]:
        def find(batches: list[Any]) -> list[dict[str, Any]]:
            if self.by_blocks:
                return blockwise.calibrate_blocks(job, self.checkpoint, batches)
            return job.runner(calibrate, job.model, batches)

        return calibrate_stage(job, number, stage, find)

    def _write(self, job: Job, stages: list[dict[str, Any]], force: bool, teacher: str | None) -> dict[str, Any]:
        """The trained model in OUT, a figure, and the summary; the first process writes."""
        from linearize_evals import processes

        merge = all(stage.lora.merge for stage in self.recipe.train if getattr(stage, "trains", "") == "lora")
        merged = job.adapter is not None and merge
        if merged:
            sharding.merge(job.adapter)
        # A sharded model's tensors are collected by all.
        tensors = parallel.gather(job.model.state_dict(), keep=job.main) if self.sharded else None

        def write() -> dict[str, Any]:
            return self._published(job, stages, tensors, force=force, teacher=teacher, merged=merged)

        return processes.first(write)

    def _published(
        self, job: Job, stages: list[dict[str, Any]], tensors: Any, *, force: bool, teacher: str | None, merged: bool
    ) -> dict[str, Any]:
        lines = read(job.metrics.path)
        for number, done in enumerate(stages):
            summary.complete(done, [line for line in lines if line["stage"] == number])
        changed = any(MIXER not in name and ".lora_" not in name for name in job.changed)
        written = output.write(
            job.model,
            self.checkpoint,
            self.out,
            record=summary.record(self.recipe, stages, teacher),
            adapter=None if merged else job.adapter,
            base_changed=changed or merged,
            state=tensors,
            force=force,
            progress=self.progress,
        )
        plot(job.metrics.path, self.work / "loss.png")
        for path in state.checkpoints(job.checkpoints):
            state.remove(path)
        notes = [*self.notes, *written["notes"]]
        document = {"out": str(self.out), "work": str(self.work), "stages": stages, "notes": notes}
        write_json(self.work / place.DONE, document)
        return document
