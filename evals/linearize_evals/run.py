"""`linearize eval`: teacher and student on the same documents, what was lost, and the report."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import linearize
from linearize.errors import ModelError, UsageError
from linearize_evals.batching import check_batch_size
from linearize_evals.phrases import SIDES
from linearize_evals.settings import (
    NONE,
    RESULTS,
    RUN,
    SCORES,
    SELF,
    Settings,
    cache_folder,
    check_begun,
    check_place,
    discard_unless_scored,
    earlier_dtype,
    versions,
    write_json,
)
from linearize_evals.suites import check_uses, chosen_tasks

SCHEMA = 1
# Documents of each cell without a branch. Whether the linear branch does anything is what users must know: 45 answers
# that don't change leave an interval of 8 points. That recall drops without the window shows in few.
ABLATION_SAMPLES = {"linear": 3, "window": 1}

Note = Callable[[str], None]


def evaluate(
    student: str | Path,
    out: str | Path | None = None,
    *,
    teacher: str | Path | None = None,
    suite: str = "quick",
    tasks: Sequence[str] = (),
    lengths: Sequence[int] | None = None,
    depths: Sequence[float] | None = None,
    pairs: Sequence[int] | None = None,
    samples: int | None = None,
    text: str | None = None,
    haystack: str | None = None,
    generate: bool | None = None,
    ablate: bool = True,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int | str = "auto",
    dtype: str | None = None,
    device: str | None = None,
    resume: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    note: Note | None = None,
) -> dict[str, Any]:
    """Say what a converted model can no longer recall, and write it to a folder.

    Args:
        student: the model that is judged: a folder, Hub id or GGUF file.
        out: folder for results.json, report.html, figures and samples; by default named after the student.
        teacher: the model that it was made from, "self" for the student's own weights with the mixers bypassed, or
            "none". By default "self", for a folder that is as linearize wrote it, with the base model's weights.
        suite: "quick", "recall" or "full".
        tasks: names of tasks, ours or lm-eval's, instead of the suite's.
        lengths, depths, pairs, samples: the grid, and documents in each cell, of every task of ours that has them.
        text, haystack: other text for the text tasks, and filler for the needle tasks.
        generate: generate answers as well; by default in the suite "full".
        ablate: score the student without each branch of its mixers, too.
        limit: documents of each of lm-eval's own tasks.
        seed: of the documents.
        batch_size: documents in a forward, or "auto".
        dtype, device: what to run in, and on.
        resume: go on with an interrupted run in `out`.
        progress: called with (what, tokens done, tokens in all).
        note: called with what a user should know before the end.

    Returns:
        What results.json holds (docs/results.md). In a run of several processes only in the first one, {} in others;
        such a program ends with `linearize_evals.processes.leave()`.

    Raises:
        LinearizeError: bad input, nothing comparable, or no resources; see its `exit_code`.
    """
    grid: dict[str, Any] = {"lengths": lengths, "depths": depths, "pairs": pairs, "samples": samples}
    ours, others = chosen_tasks(suite, tasks, **grid)
    check_uses(ours, others, text=text, haystack=haystack, limit=limit)
    check_batch_size(batch_size)
    folder = Path(out) if out is not None else Path(f"{_basename(student)}-eval")
    check_place(folder, [str(student), str(teacher or student)], resume=resume)
    from linearize_evals import processes
    from linearize_evals.loading import check_dtype, choose_device, choose_dtype, choose_teacher

    check_dtype(dtype)
    main = processes.start(device).is_main_process
    place = choose_device(device)
    compared = processes.first(lambda: choose_teacher(student, teacher))  # which may read every byte
    earlier = None
    if resume and dtype is None:  # what was measured to be faster may differ this time
        dtype = earlier = processes.first(lambda: earlier_dtype(folder))
    chosen, because = processes.same(choose_dtype(dtype, place))
    because = "as the run was begun" if earlier is not None else because
    settings = Settings(
        student=str(student),
        teacher=compared,
        suite="" if tasks else suite,
        tasks=ours,
        lm_eval=tuple(others),
        limit=limit,
        seed=seed,
        text=text,
        haystack=haystack,
        generate=not tasks and suite == "full" if generate is None else generate,
        ablate=ablate,
        dtype=str(chosen).removeprefix("torch."),
        device=place.type,
        batch_size=batch_size,
    )
    # The first process may begin to write there as soon as it has looked.
    processes.first(lambda: check_begun(folder, settings.decisive()))
    run = Run(settings, folder, place, chosen, main, progress if main else None, note if main else None)
    run.say(f"{settings.dtype} on {place.type}: {because}")
    return run.all()


def _basename(model: str | Path) -> str:
    return Path(os.path.abspath(model)).name.removesuffix(".gguf")


@dataclass
class Run:
    """A run whose settings make sense; `all` carries it out."""

    settings: Settings
    folder: Path
    device: Any
    dtype: Any
    main: bool  # the first process, which alone writes and tells
    progress: Callable[[str, int, int], None] | None
    note: Note | None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each model that was judged

    def say(self, text: str) -> None:
        self.notes.append(text)
        if self.note is not None:
            self.note(text)

    def all(self) -> dict[str, Any]:
        from linearize_evals import judging
        from linearize_evals.loading import check_tokenizers

        settings, begun = self.settings, time.perf_counter()
        with judging.quiet_libraries():
            tokenizer = linearize.load_tokenizer(settings.student)
            if settings.teacher not in (SELF, NONE):
                check_tokenizers(linearize.load_tokenizer(settings.teacher), tokenizer)
            asked = judging.build_tasks(settings, tokenizer, tokenizer.name_or_path)
            self.seconds["documents"] = time.perf_counter() - begun
            if self.main:
                write_json(self.folder / RUN, settings.decisive())
            try:
                found = self._score(tokenizer, asked)
            except Exception:  # an interrupted run is there to be resumed
                if self.main:
                    discard_unless_scored(self.folder)
                raise
        return self._results(found) if self.main else {}

    def _score(self, tokenizer: Any, asked: Any) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """(samples of our tasks, lm-eval's results) of teacher, student, and student without a branch."""
        from linearize_evals import processes
        from linearize_evals.loading import load_model

        found: dict[str, Any] = {}

        def load(name: str) -> Any:
            return processes.everywhere(lambda: load_model(name, device=self.device, dtype=self.dtype))

        def score(role: str, model: Any, tasks: Any = asked) -> None:
            found[role] = self._judge(role, model, tokenizer, tasks)

        if self.settings.teacher not in (SELF, NONE):
            model = load(self.settings.teacher)
            score("teacher", model)
            del model
        model = load(self.settings.student)
        if self.settings.teacher == SELF:
            with linearize.bypass(model):
                score("teacher", model)
        score("student", model)
        if self.settings.ablate:
            self._ablate(model, tokenizer, score)
        return found

    def _judge(self, role: str, model: Any, tokenizer: Any, tasks: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        from linearize_evals import processes
        from linearize_evals.fingerprint import fingerprint
        from linearize_evals.judging import judge
        from linearize_evals.lm import RecallLM
        from linearize_evals.loading import count_parameters
        from linearize_evals.store import Store

        begun = time.perf_counter()
        if role in SIDES:
            self._check_length(role, model, tasks)
            dtype = str(model.dtype).removeprefix("torch.")
            parameters = count_parameters(model)
            self.facts[role] = {"fingerprint": fingerprint(model), "dtype": dtype, "parameters": parameters}
        facts = self.facts[role if role in SIDES else "student"]  # an ablated student has the student's weights
        identity = {
            "role": "whole" if role in SIDES else role,
            "fingerprint": facts["fingerprint"],
            "dtype": facts["dtype"],
            "device": self.device.type,
            "versions": versions(),
        }
        # A teacher is judged once for all its students; a student's scores stay with the run that they belong to.
        place, mend = cache_folder(), {}
        if role != "teacher":
            place, mend = self.folder / SCORES, {"elsewhere": "choose another folder with -o"}
        store = processes.everywhere(lambda: Store(place, identity, **mend))
        lm = RecallLM(
            model,
            tokenizer,
            batch_size=self.settings.batch_size,
            store=store,
            progress=self.progress,
            label=role,
        )
        whole = self.folder / role if self.main and role in SIDES else None
        try:
            outcome = judge(lm, tasks, limit=self.settings.limit, folder=whole)
        except FloatingPointError as error:
            raise ModelError(f"the {role} can't be scored: {error}") from error
        self.seconds[role] = time.perf_counter() - begun
        return outcome

    def _check_length(self, role: str, model: Any, tasks: Any) -> None:
        """Say so where documents are longer than what a model was made for, and refuse what it can't take at all."""
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not most or tasks.longest <= most:
            return
        what = (
            f"documents of up to {tasks.longest} tokens are longer than the {most} positions (max_position_embeddings) "
            f"of the {role}"
        )
        from linearize_evals.loading import has_position_table

        if has_position_table(model, most):
            raise UsageError(what, f"Ask for --lengths (or --pairs) that stay within {most} tokens")
        self.say(f"{what}: expect it to fail there")

    def _ablate(self, model: Any, tokenizer: Any, score: Callable[..., None]) -> None:
        from linearize_evals.ablation import BRANCHES
        from linearize_evals.catalogue import FAMILIES
        from linearize_evals.judging import Asked, our_tasks

        recall = [name for name in self.settings.tasks if FAMILIES[name].kind == "recall"]
        branches = [name for name in BRANCHES if name in linearize.branches(model)]
        if not recall or not branches:
            return
        for branch in branches:
            few = Asked(our_tasks(self.settings, tokenizer, names=recall, most=ABLATION_SAMPLES[branch]), [])
            with linearize.ablate(model, branch):
                score(f"without {branch}", model, few)

    def _results(self, found: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
        """Compare, write results.json and the report, and return what the former holds."""
        from linearize_evals.outcome import outcome
        from linearize_evals.report import write_report

        begun = time.perf_counter()
        results = {
            "schema": SCHEMA,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": versions(),
            "settings": self.settings.to_dict(),
            **outcome(self.settings, found, self.facts),
            "notes": self.notes,
        }
        self.seconds["comparison"] = time.perf_counter() - begun
        results["seconds"] = {name: round(value, 1) for name, value in self.seconds.items()}
        write_json(self.folder / RESULTS, results)
        write_report(results, self.folder)
        return results | {"out": str(self.folder)}
