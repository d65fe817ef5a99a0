"""One model on all tasks of a run, through lm-eval."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.errors import NetworkError, UsageError, first_line
from linearize_evals.builtin import task_folders
from linearize_evals.settings import Settings, write_file

RESAMPLINGS = 1000  # for lm-eval's standard errors of metrics that aren't means


@dataclass(frozen=True)
class Asked:
    """Tasks, built once and asked of every model: lm-eval `Task` objects."""

    ours: Sequence[Any]
    builtin: Sequence[Any]

    @property
    def longest(self) -> int:
        """Tokens of the longest document of ours."""
        return max((len(doc["ids"]) for task in self.ours for doc in task.test_docs()), default=0)


def build_tasks(settings: Settings, tokenizer: Any, folder: str | Path) -> Asked:
    """The tasks of a run with their documents, before a model is loaded.

    Args:
        folder: the tokenizer's, for lm-eval's tasks that load one by name.

    Raises:
        UsageError: a task can't be built.
    """
    return Asked(our_tasks(settings, tokenizer), _builtin_tasks(settings.lm_eval, folder))


def our_tasks(
    settings: Settings, tokenizer: Any, *, names: Sequence[str] | None = None, most: int | None = None
) -> list:
    """Tasks of ours, all or those of `names`; with at most `most` documents in each cell, which are the first ones."""
    from linearize_evals.catalogue import FAMILIES
    from linearize_evals.task import RecallTask

    tasks = []
    for name, options in settings.tasks.items():
        if names is not None and name not in names:
            continue
        samples = options.get("samples", FAMILIES[name].defaults["samples"])
        metadata = {
            **options,
            "samples": min(samples, most or samples),
            "seed": settings.seed,
            "text": settings.text,
            "haystack": settings.haystack,
            "tokenizer": tokenizer,
            "packed": True,
            "generate": settings.generate and most is None,
        }
        task = RecallTask({"task": name, "metadata": metadata})
        task.test_docs()
        tasks.append(task)
    return tasks


def _builtin_tasks(names: Sequence[str], folder: str | Path) -> list:
    if not names:
        return []
    from lm_eval.tasks import TaskManager

    paths: list[str | Path] = [*task_folders(names)]
    metadata: dict[str, Any] = {"pretrained": str(folder), "tokenizer": str(folder)}
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    try:
        return list(manager.load(list(names))["tasks"].values())
    except Exception as error:  # a task downloads its data, or needs a package of its own
        what = f"{', '.join(names)}: lm-eval can't build the task ({type(error).__name__}: {first_line(error)})"
        if isinstance(error, (ConnectionError, TimeoutError)) or "connect" in f"{type(error)} {error}".lower():
            raise NetworkError(what, "Connect to the network once, so that its data is cached") from error
        raise UsageError(what, "Install what it needs, or leave it out") from error


def judge(
    lm: Any, asked: Asked, *, limit: int | None = None, folder: Path | None = None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """The samples of our tasks, and lm-eval's results of its own.

    Args:
        lm: a `RecallLM`.
        limit: documents of each of lm-eval's own tasks.
        folder: where lm-eval's results and samples are written; None to write none.
    """
    from lm_eval.evaluator import simple_evaluate

    run: Any = simple_evaluate
    common: dict[str, Any] = {"model": lm, "task_manager": _no_tasks(), "log_samples": True}
    samples: dict[str, list[dict[str, Any]]] = {}
    results: dict[str, Any] = {}
    if asked.ours:
        found = run(tasks=list(asked.ours), bootstrap_iters=0, **common)
        if found is not None:
            samples = found["samples"]
            _write(found, folder, "results.json")
    if asked.builtin:
        found = run(tasks=list(asked.builtin), limit=limit, bootstrap_iters=RESAMPLINGS, **common)
        if found is not None:
            results = found
            _write(found, folder, "results_lm_eval.json")
    return samples, results


def _no_tasks() -> Any:
    """lm-eval asks for a manager even where all tasks are built, and would read every task of its own."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def _write(found: Mapping[str, Any], folder: Path | None, name: str) -> None:
    """lm-eval's results as it writes them itself, and a file of samples for each task."""
    if folder is None:
        return
    from lm_eval.utils import handle_non_serializable

    def dumps(value: Any, **form: Any) -> str:
        return json.dumps(value, default=handle_non_serializable, ensure_ascii=False, **form)

    write_file(folder / name, dumps({k: v for k, v in found.items() if k != "samples"}, indent=2) + "\n")
    for task, samples in found["samples"].items():
        lines = "".join(dumps(sample) + "\n" for sample in samples)
        write_file(folder / f"samples_{task}.jsonl", lines)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the progress bars and reports of lm-eval and transformers, in whose place this package has its own."""
    from lm_eval import evaluator
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("lm_eval")
    before, bars = logger.level, transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    commit = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = lambda: None  # of the working folder, which has no part in this
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = commit
        logger.setLevel(before)
        if bars:
            transformers_logging.enable_progress_bar()
