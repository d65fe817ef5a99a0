"""Which implementation runs an op: decided by caller or device, never by what is installed."""

from __future__ import annotations

import os
from typing import NamedTuple

from torch import Tensor

ENVIRONMENT = "LINEARIZE_BACKEND"


class Choice(NamedTuple):
    """A backend and the reason it was taken."""

    backend: str
    because: str


class Backend(NamedTuple):
    """A backend, whether it can be used here, and what it is or why it can't."""

    name: str
    usable: bool
    because: str


BACKENDS = (
    Backend("torch", True, "chunked PyTorch, any device"),
    Backend("reference", True, "float64 loop over tokens, slow, any device"),
    Backend("triton", False, "not built yet: this version ships no Triton kernels"),
)


def available() -> tuple[Backend, ...]:
    """Every backend there is, usable or not, each with a reason."""
    return BACKENDS


def choose(op: str, tensor: Tensor, backend: str | None = None) -> Choice:
    """The backend that runs `op` on tensors like `tensor`: `backend`, $LINEARIZE_BACKEND, or by device.

    Raises ValueError for a backend that doesn't exist or can't be used, naming those that can.
    """
    if backend is not None:
        return Choice(_checked(op, backend, "backend"), "asked for by the caller")
    forced = os.environ.get(ENVIRONMENT)
    if forced:
        return Choice(_checked(op, forced, ENVIRONMENT), f"forced by {ENVIRONMENT}")
    return Choice(
        "torch",
        f"the tensors are on {tensor.device.type}, and there is no kernel written for that device",
    )


def _checked(op: str, name: str, origin: str) -> str:
    usable = ", ".join(b.name for b in BACKENDS if b.usable)
    for entry in BACKENDS:
        if entry.name == name and entry.usable:
            return name
        if entry.name == name:
            raise ValueError(f"{origin}={name!r} can't run {op}: {entry.because}; usable backends: {usable}")
    raise ValueError(f"{origin}={name!r} is no backend of {op}; usable backends: {usable}")
