"""The processes of one run: how many there are, and what they say to each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from linearize.errors import LinearizeError, ModelError

PATIENCE = timedelta(days=7)  # a process waits for those that have more to do; torch would give up after minutes
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as launchers of every kind set them

Result = TypeVar("Result")


def start(device: str | None = None) -> PartialState:
    """Join the other processes that torchrun or `accelerate launch` started, if it did.

    The first call decides: later ones, here or in accelerate, get what it found.

    Args:
        device: what the models run on; None for this process's GPU, or the CPU where there is none.
    """
    cpu = str(device).partition(":")[0] == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    # accelerate looks for other processes on a CPU only where it is told to run there.
    return PartialState(cpu=cpu or (_launched() and not _accelerator()), timeout=PATIENCE)


def leave() -> None:
    """End a program of several processes, successfully, once all have come here; of one process, do nothing.

    The interpreter isn't taken down: gloo's threads abort a process at times that tries, and its launcher then kills
    the others. What was written through Python is flushed first.
    """
    state = PartialState()
    if state.num_processes > 1:
        state.wait_for_everyone()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _launched() -> bool:
    return "LOCAL_RANK" in os.environ or any(os.environ.get(name, "1") != "1" for name in SIZES)


def _accelerator() -> bool:
    """Whether there is one that several processes can use; Apple's has no such backend."""
    import torch

    return torch.accelerator.is_available() and getattr(torch.accelerator.current_accelerator(), "type", "") != "mps"


def same(value: Result) -> Result:
    """The first process's value, in all."""
    return broadcast_object_list([value])[0] if PartialState().num_processes > 1 else value


def first(work: Callable[[], Result]) -> Result:
    """What `work` gives in the first process, which alone does it; its error is an error in all."""
    main = PartialState().is_main_process
    return together(lambda: work() if main else None)[0]  # pyright: ignore[reportReturnType]


def everywhere(work: Callable[[], Result]) -> Result:
    """What `work` gives here, once it has given something in every process; an error in one is an error in all."""
    found: list[Result] = []
    together(lambda: found.append(work()))
    return found[0]


def together(work: Callable[[], Result]) -> list[Result]:
    """What `work` gives in each process, in their order.

    Raises:
        Exception: what `work` raises here, if it is the first process in which it fails.
        LinearizeError: it failed in another process, which all would wait for otherwise; of the same kind as there.
    """
    state = PartialState()
    if state.num_processes == 1:
        return [work()]
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    gathered: list[Any] = gather_object([(_failure(error), result)])
    for number, (failure, _) in enumerate(gathered):
        if failure is not None:
            raise _as_known_to_all(error if number == state.process_index else elsewhere(number, *failure))
    return [result for _, result in gathered]


def elsewhere(number: int, kind: type[LinearizeError], what: str, fix: str) -> LinearizeError:
    """The error of process `number`, for another one: the command line leaves it to that one to say it."""
    error = kind(f"process {number} failed: {what}", fix)
    error.elsewhere = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


def _as_known_to_all(error: Any) -> Any:
    """The same error; what ends a run (see `linearize.training.parallel`) has nobody to tell of it."""
    error.known_to_all = True
    return error


def _failure(error: Exception | None) -> tuple[type[LinearizeError], str, str] | None:
    """(kind, what, fix) of an error, for the other processes."""
    if isinstance(error, LinearizeError):
        return type(error), error.what, error.fix
    if isinstance(error, FloatingPointError):  # a model that overflows is no fault of this package
        return ModelError, str(error), ""
    return None if error is None else (LinearizeError, repr(error), "")
