"""A training in several processes ends in all of them, with one message and one exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from torch import distributed

from linearize import errors
from linearize.errors import LinearizeError, ResourceError

POLL_S = 1.0  # between two looks for a failure elsewhere
PATIENCE_S = 10.0  # that a failed process waits for the others to hear of it
_LOST = ("Connection closed by peer", "Connection reset by peer")  # what gloo says when a process is gone
_RUNS = count()  # a failure is that of one training, the same one in all processes


@contextmanager
def one_end() -> Iterator[None]:
    """Within the block, an error in one process ends all, with its exit code.

    A process that waits for one that has failed would wait for ever, and can't be woken. So each has a thread that
    looks for failures elsewhere, and ends the process without a word: the one that failed says why.

    Raises:
        LinearizeError: it failed in another process first; with `elsewhere` set, since that one says it.
        ResourceError: another process is gone.
    """
    if not distributed.is_initialized():
        yield
        return
    end = _End()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if hasattr(error, "known_to_all"):
            raise
        _stay()
        first = end.tell(error) if isinstance(error, Exception) else end.told()
        if first is None or first is error:
            raise
        raise first from error
    finally:
        end.over.set()


def _stay() -> None:
    """Launchers terminate all processes as soon as one has ended: let this one say what it has to say."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _End:
    """What the processes tell each other of a failure, through the store that they found each other by."""

    def __init__(self) -> None:
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.store: Any = distributed.distributed_c10d._get_default_store()
        self.failure = f"linearize/failure/{next(_RUNS)}"
        self.over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, error: Exception) -> Exception:
        """Let all know of an error in this process; returns it, or what failed before it in another one."""
        error = _gone() if any(text in str(error) for text in _LOST) else error
        what, fix = (error.what, error.fix) if isinstance(error, LinearizeError) else (repr(error), "")
        kind = type(error).__name__ if isinstance(error, LinearizeError) else LinearizeError.__name__
        try:
            first = json.loads(self.store.compare_set(self.failure, "", json.dumps([self.rank, kind, what, fix])))
        except distributed.DistError:
            return _gone()
        with suppress(distributed.DistError):
            self._leave(first[0])
        return error if first[0] == self.rank else self._as_error(first)

    def told(self) -> LinearizeError | None:
        """What has failed in another process, if something has."""
        with suppress(distributed.DistError):  # the process that holds the store is gone
            if self.store.check([self.failure]):
                first = json.loads(self.store.get(self.failure))
                if first[0] != self.rank:
                    self._leave(first[0])
                    return self._as_error(first)
        return None

    def _leave(self, failed: int) -> None:
        """Say that this process leaves. Two wait until the others have: the one that failed, and the one that holds the
        store, which is the first where no launcher does."""
        self.store.set(f"{self.failure}/left/{self.rank}", "")
        holds = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if holds or self.rank == failed:
            others = [f"{self.failure}/left/{rank}" for rank in range(self.world) if rank not in (self.rank, failed)]
            until = time.monotonic() + PATIENCE_S
            while not self.store.check(others) and time.monotonic() < until:
                time.sleep(POLL_S / 10)
            time.sleep(POLL_S / 10 if self.rank == failed else POLL_S)  # until they, or it, have really left

    def _watch(self) -> None:
        while not self.over.wait(POLL_S):
            error = self.told()
            if error is not None:
                sys.stdout.flush()
                os._exit(error.exit_code)

    def _as_error(self, told: Any) -> LinearizeError:
        from linearize_evals import processes

        number, kind, what, fix = told
        return processes.elsewhere(number, getattr(errors, kind), what, fix)


def _gone() -> ResourceError:
    return ResourceError(
        "another process of this run has ended without saying why", "See whether there was too little memory for it"
    )
