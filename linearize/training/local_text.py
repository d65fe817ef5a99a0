"""Documents of local files, each read when it is asked for."""

from __future__ import annotations

import glob
import gzip
import json
import os
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from linearize.errors import ResourceError, UsageError, did_you_mean, first_line

SUFFIXES = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")
SPOOL_BYTES = 256 << 20  # of decompressed lines that are held in memory before they go to a temporary file


def find(source: str) -> list[Path] | None:
    """The files that `data.source` names, in order; None if it must be the name of a data set.

    Raises:
        UsageError: there is no such file, or none with text in it.
    """
    path, kinds = Path(os.path.expanduser(source)), ", ".join(SUFFIXES)
    if os.path.isfile(path):  # unlike `is_file`, it takes a name that is too long for a disk for no file's
        if not source.endswith(SUFFIXES):
            raise UsageError(f"'{source}' (data.source) isn't text that can be read", f"Give a {kinds} file")
        return [path]
    if os.path.isdir(path):
        inside = ((each.relative_to(path), each) for each in path.rglob("*") if each.name.endswith(SUFFIXES))
        found = [
            each
            for name, each in sorted(inside, key=lambda pair: pair[0].as_posix())
            if each.is_file() and not any(step.startswith(".") for step in name.parts)
        ]
        if not found:
            raise UsageError(f"the folder '{source}' (data.source) holds no text", f"Give a folder of {kinds} files")
        return found
    if source.endswith(SUFFIXES) or source.startswith((".", "/", "~")):
        raise UsageError(f"there is no text file '{source}' (data.source)", f"Give a {kinds} file")
    return None


def part(path: Path, column: str, spool: Spool) -> Lines | Text | Parquet:
    """The documents of one file: `first()` reads one, `len()` counts them, after which `read(number)` gives each."""
    with _readable(path):
        if path.name.endswith(".parquet"):
            return Parquet(path, column)
        return Text(path) if path.name.endswith((".txt", ".txt.gz")) else Lines(path, column, spool)


class Lines:
    """A .jsonl file: a document a line, read from where an index says that it begins.

    A compressed one is decompressed once, into `spool`.
    """

    def __init__(self, path: Path, column: str, spool: Spool) -> None:
        self._path, self._column = path, column
        self._spool = spool if path.name.endswith(".gz") else None
        self._starts: array[int] | None = None
        self.size = path.stat().st_size

    def first(self) -> str | None:
        with _readable(self._path), _open(self._path) as file:
            line = next((line for line in file if line.strip()), None)
        return None if line is None else self._text(line, 0)

    def __len__(self) -> int:
        if self._starts is None:
            with _readable(self._path), _open(self._path) as file:
                self._starts = array("Q", self._index(file))
        return len(self._starts)

    def _index(self, file: IO[bytes]) -> Iterator[int]:
        at = 0
        for line in file:
            if line.strip():
                yield at if self._spool is None else self._spool.write(line)
            at += len(line)

    def read(self, number: int) -> str:
        assert self._starts is not None
        start = self._starts[number]
        if self._spool is not None:
            return self._text(self._spool.line(start), number)
        with _readable(self._path), open(self._path, "rb") as file:
            file.seek(start)
            return self._text(file.readline(), number)

    def _text(self, line: bytes, number: int) -> str:
        where = f"document {number + 1} of {self._path}"
        try:
            row = json.loads(line)
        except ValueError as error:
            why = getattr(error, "msg", first_line(error))  # without its line, which counts from this document
            raise UsageError(f"{where} isn't JSON ({why})", "Check the file") from None
        if not isinstance(row, dict):
            raise UsageError(f"{where} isn't a JSON object with a key '{self._column}'", "Check the file")
        return value_of(row, self._column, where)


class Text:
    """A .txt file: one document, read whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = path.stat().st_size

    def first(self) -> str | None:
        return self.read(0).strip() or None

    def __len__(self) -> int:
        return 1

    def read(self, number: int) -> str:
        with _readable(self._path), _open(self._path) as file:
            return file.read().decode("utf-8-sig")


class Parquet:
    """A .parquet file. Counting it makes `datasets` copy it to its cache, which is mapped into memory."""

    def __init__(self, path: Path, column: str) -> None:
        self._path, self._column = path, column
        self._table: Table | None = None
        self.size = path.stat().st_size

    def first(self) -> str | None:
        rows = self._load(streaming=True)
        with _readable(self._path):
            row = next(iter(rows), None)
        return None if row is None else value_of(row, self._column, str(self._path))

    def __len__(self) -> int:
        if self._table is None:
            self._table = Table(self._load(streaming=False), self._column, str(self._path))
        return len(self._table)

    def read(self, number: int) -> str:
        assert self._table is not None
        return self._table.read(number)

    def _load(self, streaming: bool) -> Any:
        load = load_dataset(str(self._path))
        try:
            return load("parquet", data_files=glob.escape(str(self._path)), split="train", streaming=streaming)
        except Exception as error:
            why = first_line(error.__cause__ or error)
            raise UsageError(f"{self._path} can't be read as parquet ({why})", "Check the file") from None


class Table:
    """The rows of a data set that lies on the disk."""

    def __init__(self, dataset: Any, column: str, name: str) -> None:
        self._column, self._name = column, name
        if column not in dataset.column_names:
            raise _no_column(name, column, dataset.column_names)
        self._dataset = dataset.select_columns([column])
        self.size = dataset.num_rows

    def __len__(self) -> int:
        return self.size

    def read(self, number: int) -> str:
        return value_of(self._dataset[number], self._column, self._name)


class Spool:
    """Decompressed lines of any number of files: in memory while they are few, then in a temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115  # goes when the spool goes
        self._end = 0

    def write(self, line: bytes) -> int:
        """Add a line; returns where it begins."""
        start = self._end
        try:
            self._file.seek(start)
            self._end += self._file.write(line.rstrip(b"\r\n") + b"\n")
        except OSError as error:
            raise ResourceError(
                f"decompressed text doesn't fit into {tempfile.gettempdir()} ({error.strerror})",
                "Free some space, set TMPDIR to a disk that has some, or decompress the file",
            ) from error
        return start

    def line(self, start: int) -> bytes:
        self._file.seek(start)
        return self._file.readline()


def load_dataset(name: str) -> Any:
    """The function of that name in `datasets`.

    Raises:
        UsageError: the package is missing; `name` is what needs it.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        what = f"'{name}' can't be read without the package datasets"
        raise UsageError(what, "pip install 'linearize[train]'") from None
    return load_dataset


def value_of(row: dict[str, Any], column: str, where: str) -> str:
    """The text in a column; a missing value is an empty one, and half a surrogate pair, which no tokenizer takes, "?".

    Raises:
        UsageError: there is no such column, or it doesn't hold text.
    """
    if column not in row:
        raise _no_column(where, column, list(row))
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise UsageError(f"'{column}' of {where} is a {type(value).__name__}, not text", "Name another data.column")
    return (value or "").encode("utf-8", "replace").decode("utf-8")


def _no_column(where: str, column: str, known: Sequence[str]) -> UsageError:
    listed = ", ".join(f"'{name}'" for name in known[:8]) or "nothing"
    mend = did_you_mean(column, known) or "name one of them as data.column"
    return UsageError(f"{where} has no '{column}', but {listed}", mend[0].upper() + mend[1:])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into one sentence."""
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read as text ({first_line(error)})", "Check the file") from None


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")
