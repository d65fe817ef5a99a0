"""sha256 of files, streamed; several at a time, since hashing releases the interpreter lock."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 8 << 20
MAX_WORKERS = 4  # more only makes a spinning disk seek

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all)


class Meter:
    """Adds up bytes from several threads for one progress callback."""

    def __init__(self, what: str, total: int, progress: Progress | None) -> None:
        self.what, self.total, self.done = what, total, 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                self.done += count
                self._progress(self.what, self.done, self.total)

    def through(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same pieces, counted as they pass."""
        for piece in pieces:
            yield piece
            self.add(len(piece))


def chunks(file: BinaryIO, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """The rest of a file in pieces, each only good until the next is asked for: the buffer is reused."""
    buffer = memoryview(bytearray(size))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:count]


def sha256_of(path: Path, meter: Meter | None = None, stop: threading.Event | None = None) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for chunk in chunks(file):  # type: ignore[arg-type]
            digest.update(chunk)
            if meter:
                meter.add(len(chunk))
            if stop and stop.is_set():
                raise InterruptedError
    return digest.hexdigest()


def in_threads(work: Mapping[str, Callable[[threading.Event], object]]) -> dict[str, object]:
    """Run named jobs in a few threads; an exception (Ctrl-C as well) stops all of them before it goes on."""
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, min(MAX_WORKERS, os.cpu_count() or 1, len(work)))) as pool:
        futures = {name: pool.submit(job, stop) for name, job in work.items()}
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            stop.set()
            for future in futures.values():
                future.cancel()
            raise


def sha256_all(paths: Mapping[str, Path], what: str = "hash", progress: Progress | None = None) -> dict[str, str]:
    """name -> sha256 of several files."""
    meter = Meter(what, sum(path.stat().st_size for path in paths.values()), progress)
    jobs = {name: _hash_job(path, meter) for name, path in paths.items()}
    return {name: str(value) for name, value in in_threads(jobs).items()}


def _hash_job(path: Path, meter: Meter) -> Callable[[threading.Event], object]:
    return lambda stop: sha256_of(path, meter, stop)


def hashed(pieces: Iterable[bytes | memoryview], write: Callable[[bytes | memoryview], object]) -> tuple[int, str]:
    """Pass pieces on to `write`; returns (bytes, sha256)."""
    digest, count = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        write(piece)
        count += len(piece)
    return count, digest.hexdigest()
