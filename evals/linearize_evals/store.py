"""Scores on disk: what was computed is kept, so that a run can go on where it stopped, and a teacher is scored once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from linearize.errors import ResourceError, UsageError
from linearize_evals.document import Document

SUFFIX = ".jsonl"


def document_key(document: Document, mode: str) -> str:
    """What a score depends on besides the model: the tokens, where the answers are, and how they were asked for."""
    spans = [[span.start, span.end] for span in document.spans]
    return hashlib.sha256(json.dumps([mode, document.ids, spans]).encode()).hexdigest()


def request_key(kind: str, arguments: Any, occurrence: int, max_length: int) -> str | None:
    """As `document_key`, for a request of one of lm-eval's own tasks; None if its arguments can't be written as JSON.

    Args:
        occurrence: 0, 1, ... of equal requests in one call: answers that are sampled may differ.
        max_length: of the model, by which long texts are cut into windows.
    """
    try:
        text = json.dumps([kind, arguments, occurrence, max_length], sort_keys=True)
    except TypeError:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


class Store:
    """Scores of one model, in one file that only grows: a line that says which model, then a line for each document.

    Several processes may share it: each appends under a lock, and sees what was there when it opened the file.

    Args:
        folder: made if need be.
        identity: what the scores depend on besides the documents: fingerprint, dtype, device, versions. It names the
            file, whose first line holds it.
        elsewhere: how a user chooses another folder, for messages.

    Raises:
        UsageError: the file belongs to another identity, or isn't such a file.
        ResourceError: the disk refuses.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: Mapping[str, Any],
        *,
        elsewhere: str = "set LINEARIZE_CACHE to another folder",
    ) -> None:
        self._elsewhere = elsewhere
        head = json.dumps({"identity": identity}, sort_keys=True)
        self.path = Path(folder) / (hashlib.sha256(head.encode()).hexdigest()[:32] + SUFFIX)
        self._scores: dict[str, Any] = {}
        with self._disk_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(f"{self.path}.lock")
            with self._lock:
                self._open(head)

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: str) -> Any:
        """The score kept under a key, or None."""
        return self._scores.get(key)

    def append(self, scores: Iterable[tuple[str, Any]]) -> None:
        """Keep scores (anything that JSON can hold), on disk when this returns.

        Raises:
            ResourceError: the disk is full, or refuses.
        """
        new = {key: value for key, value in scores if key not in self._scores}
        if not new:
            return
        text = "".join(json.dumps({"key": key, "score": value}) + "\n" for key, value in new.items())
        with self._disk_errors(), self._lock, open(self.path, "r+b") as file:
            size = _cut_torn_line(file)
            try:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
        self._scores.update(new)

    def remember(self, scores: Iterable[tuple[str, Any]]) -> None:
        """Find scores that another process has kept in the file since it was opened here."""
        self._scores.update(scores)

    def _open(self, head: str) -> None:
        with open(self.path, "a+b") as file:  # makes it, and doesn't empty it
            if not _cut_torn_line(file):
                file.write(f"{head}\n".encode())
                return
        lines = self.path.read_bytes().split(b"\n")[:-1]
        found = self._parse(lines[0], 1)
        if "identity" not in found:
            raise self._refused("doesn't begin with the model that its scores are of")
        if found != json.loads(head):
            other = {key for key, value in found["identity"].items() if value != json.loads(head)["identity"].get(key)}
            raise self._refused(f"holds scores of another model (another {', '.join(sorted(other)) or 'identity'})")
        for number, line in enumerate(lines[1:], 2):
            entry = self._parse(line, number)
            if "key" not in entry or "score" not in entry:
                raise self._refused(f"has no score in line {number}")
            self._scores[entry["key"]] = entry["score"]

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise self._refused(f"is damaged in line {number}")
        return entry

    def _refused(self, what: str) -> UsageError:
        return UsageError(f"the score cache {self.path} {what}", f"Delete it, or {self._elsewhere}")

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            mend = "Free some space" if error.errno == errno.ENOSPC else "Check the disk"
            what = f"the score cache {self.path}: {error.strerror or error}"
            raise ResourceError(what, f"{mend}, or {self._elsewhere}") from error


def _cut_torn_line(file: Any) -> int:
    """Cut off a last line that a killed process left without its end; returns the size, and stands at the end."""
    size = file.seek(0, os.SEEK_END)
    keep = size
    while keep:
        start = max(0, keep - 65536)
        file.seek(start)
        at = file.read(keep - start).rfind(b"\n")
        if at >= 0:
            keep = start + at + 1
            break
        keep = start
    if keep != size:
        file.truncate(keep)
    file.seek(keep)
    return keep
