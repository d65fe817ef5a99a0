"""Batches of documents of about one length, and what to do when one doesn't fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from linearize.errors import ResourceError, UsageError, first_line, out_of_memory

SHORTEST = 0.9  # of the longest document in a batch: padding costs at most a tenth
TOKENS = {"cpu": 2048}  # in a batch; benchmarks on two cores gain nothing beyond
TOKENS_ELSEWHERE = 32768

Result = TypeVar("Result")


def check_batch_size(batch_size: int | str) -> None:
    """Refuse what is neither "auto" nor a number of documents.

    Raises:
        UsageError: if so.
    """
    if batch_size != "auto" and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise UsageError(f"the batch size can't be {batch_size!r}", "Use a whole number of at least 1, or auto")


def plan_batches(
    lengths: Sequence[int],
    batch_size: int | str = "auto",
    device: str = "cpu",
    rows: Sequence[int] | None = None,
    *,
    equal: bool = False,
) -> list[list[int]]:
    """Indices of documents in batches, the longest first, so that memory runs out at once or never.

    Args:
        lengths: tokens of each document.
        batch_size: documents in a batch, or "auto": as many as fit into a number of tokens that suits the device.
        rows: sequences that each document takes, 1 by default.
        equal: only documents of one length share a batch.

    Raises:
        UsageError: a batch size that is neither.
    """
    check_batch_size(batch_size)
    shortest = 1.0 if equal else SHORTEST
    budget = TOKENS.get(device, TOKENS_ELSEWHERE)
    batches: list[list[int]] = []
    longest = taken = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        count = rows[index] if rows else 1
        if batch_size == "auto":
            full = (taken + count) * longest > budget
        else:
            full = bool(batches) and len(batches[-1]) >= int(batch_size)
        if not batches or full or lengths[index] < shortest * longest:
            batches.append([])
            longest, taken = lengths[index], 0
        batches[-1].append(index)
        taken += count
    return batches


def in_batches(
    batches: Sequence[Sequence[int]], run: Callable[[Sequence[int]], list[Result]]
) -> Iterator[tuple[list[int], list[Result]]]:
    """Run batch after batch, as (indices, results); one that runs out of memory is halved, and so are those after it.

    Raises:
        ResourceError: a single document is too much.
    """
    waiting = [list(batch) for batch in reversed(batches)]
    most: int | None = None
    while waiting:
        batch = waiting.pop()
        if most is not None and len(batch) > most:
            waiting.append(batch[most:])
            batch = batch[:most]
        try:
            results = run(batch)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if len(batch) == 1:
                raise ResourceError(
                    f"memory ran out with a single document in the batch ({first_line(error)})",
                    "Ask for shorter documents, or load the model in bfloat16",
                ) from error
            results = None
        if results is None:  # outside the handler, whose traceback keeps the tensors alive
            most = len(batch) // 2
            waiting.append(batch)
            import torch

            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        else:
            yield batch, results
