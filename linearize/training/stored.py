"""What block-wise training keeps on the disk: the rows of a stage, and what the last block of layers made of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from linearize_evals.settings import write_json
from torch import Tensor

from linearize.errors import ModelError
from linearize.sink import disk_errors
from linearize.training.packing import Row

TOKEN_BYTES = 8  # an id and a position, int32


class File:
    """Tensors of one shape and dtype, one for each row, one after another in a file."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), dtype
        self.bytes = math.prod(shape) * dtype.itemsize  # of a row
        self._file: BinaryIO | None = None

    @property
    def rows(self) -> int:
        """How many the file holds."""
        return self.path.stat().st_size // self.bytes if self.path.exists() else 0

    def open(self, row: int, *, cut: bool = False) -> None:
        """Go to a row, and forget it and what comes after it if `cut`."""
        with disk_errors(self.path):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "r+b" if self.path.exists() else "w+b")  # noqa: SIM115
            self._file.seek(row * self.bytes)
            if cut:
                self._file.truncate()

    def read(self, count: int) -> Tensor:
        """(count, ...), the next rows.

        Raises:
            ModelError: there are fewer.
        """
        assert self._file is not None
        buffer = bytearray(count * self.bytes)
        with disk_errors(self.path):
            found = self._file.readinto(buffer)  # pyright: ignore[reportAttributeAccessIssue]
        if found != len(buffer):
            raise ModelError(f"{self.path} is shorter than it was", "Start again with --resume")
        return torch.frombuffer(buffer, dtype=self.dtype).view(count, *self.shape)

    def write(self, rows: Tensor) -> None:
        """Add rows (n, ...) where the file stands."""
        assert self._file is not None
        if rows.dtype != self.dtype or tuple(rows.shape[1:]) != self.shape:
            what = f"hidden states are {rows.dtype} {list(rows.shape[1:])}, not {self.dtype} {list(self.shape)}"
            raise ModelError(what, "Train this model without train.N.block")
        with disk_errors(self.path):
            data: Any = rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            self._file.write(data)

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        if self._file is not None:
            with disk_errors(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


class Rows:
    """The rows of a stage, as its stream gave them."""

    def __init__(self, path: Path, length: int) -> None:
        self._facts = path.with_suffix(".json")
        self._file = File(path, (2, length), torch.int32)
        self.after: dict[str, Any] = {}  # where the stream was, once it had given them

    def fill(self, stream: Any, count: int, at_once: int, tick: Callable[[int], None]) -> None:
        """Take `count` rows from a stream, `at_once` ones at a time, unless that was done before."""
        if not self._facts.exists() or self._file.rows < count:
            self._file.open(0, cut=True)
            for done in range(0, count, at_once):
                rows = stream.take(at_once)
                self._file.write(torch.tensor([(row.ids, row.positions or _none(row)) for row in rows]).int())
                tick(done + at_once)
            self._file.flush()
            write_json(self._facts, stream.state())
        self.after = json.loads(self._facts.read_text(encoding="utf-8"))

    def open(self, row: int) -> None:
        self._file.open(row)

    def take(self, count: int) -> list[Row]:
        """The next rows."""
        found = self._file.read(count).tolist()
        return [Row(ids, positions if positions[0] >= 0 else None) for ids, positions in found]

    def close(self) -> None:
        self._file.close()


def _none(row: Row) -> list[int]:
    return [-1] * len(row.ids)
