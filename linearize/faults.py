"""One fault of a checkpoint's files, and an exception that carries several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.errors import ModelError


@dataclass(frozen=True, order=True)
class Fault:
    """What is wrong, and where.

    Attributes:
        file: name of the file in its folder.
        key: the tensor, or empty if the fault is the file's.
        what: a clause that follows the name: "is missing".
    """

    file: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: tensor '{self.key:.120}' {self.what}" if self.key else f"{self.file} {self.what}"

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.file, "key": self.key, "what": self.what}


class BadFiles(Exception):
    """Raised below the level that knows what the user asked for, and turned into a `ModelError` there."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__("; ".join(map(str, faults)))


def all_faults(folder: Path | str, faults: Sequence[Fault], fix: str = "", limit: int = 8) -> ModelError:
    """One error of one sentence that names every fault: the first `limit` in full, the others by their
    number."""
    shown = [str(fault) for fault in faults[:limit]]
    if len(faults) > limit:
        shown.append(f"and {len(faults) - limit} more")
    return ModelError(f"{folder}: " + "; ".join(shown), fix)
