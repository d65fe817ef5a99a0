"""What verifying a folder comes to: faults, notes, what could not be checked, and the mend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linearize.faults import Fault

DAMAGED = "Copy the folder again from where it was whole, or convert the original model again"
NOT_CONVERTED = "Give the folder that `linearize convert` or `save_pretrained` of a converted model wrote"


@dataclass(frozen=True)
class Verdict:
    """What was found in a folder.

    Attributes:
        out: the folder.
        faults: everything that is wrong; none if the folder is whole.
        notes: what is worth knowing and no fault.
        unchecked: what could not be checked, and why.
        mend: what to do about the faults; empty if there is none.
    """

    out: str
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    mend: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": self.out,
            "ok": not self.faults,
            "faults": [fault.to_dict() for fault in self.faults],
            "notes": [*self.unchecked, *self.notes],
            "complete": not self.unchecked,
            "mend": self.mend,
        }


@dataclass
class Findings:
    """What the checks collect besides their faults."""

    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    mend: str = DAMAGED
