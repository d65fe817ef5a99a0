"""Which implementation runs an op: decided by the caller or by the tensors' device and dtype, with a reason."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

ENVIRONMENT = "LINEARIZE_BACKEND"

# The modules of each backend: `forward`, `backward` and `step` on plain tensors, where the op has them; `divergence` of
# the logits of a chunk for `chunked_kl`.
MODULES: dict[str, dict[str, str]] = {
    "torch": {
        "linear_attention": "torch_linear",
        "delta_rule": "torch_delta",
        "window_attention": "torch_window",
        "chunked_kl": "kl",
        "hedgehog_features": "torch_hedgehog",
        "favor_features": "torch_favor",
    },
    "cpu": {
        "linear_attention": "cpu_ops.linear",
        "delta_rule": "cpu_ops.delta",
        "window_attention": "cpu_ops.window",
        "hedgehog_features": "cpu_ops.hedgehog",
        "favor_features": "cpu_ops.favor",
    },
    "triton": {
        "linear_attention": "triton_ops.linear",
        "delta_rule": "triton_ops.delta",
        "window_attention": "triton_ops.window",
        "chunked_kl": "triton_ops.kl",
    },
}
# The backend that is written for a device; what it can't serve, and every other device, is torch's.
BY_DEVICE = {"cpu": "cpu", "cuda": "triton"}


class Choice(NamedTuple):
    """A backend and the reason it was taken."""

    backend: str
    because: str


class Backend(NamedTuple):
    """A backend, whether it can be used here, and what it is or why it can't."""

    name: str
    usable: bool
    because: str


def available() -> tuple[Backend, ...]:
    """Every backend there is, usable or not, each with a reason."""
    from . import cpu_ops, triton_ops

    return (
        Backend("torch", True, "chunked PyTorch, any device and dtype"),
        Backend("cpu", *cpu_ops.status()),
        Backend("triton", *triton_ops.status()),
        Backend("reference", True, "float64 loop over tokens, slow, any device"),
    )


def forced(op: str, backend: str | None) -> str:
    """The backend that the caller or $LINEARIZE_BACKEND asks for, "" for none; ValueError if it doesn't exist."""
    name = backend if backend is not None else os.environ.get(ENVIRONMENT, "")
    if backend is None and not name:
        return ""
    if name not in (*MODULES, "reference"):
        origin = "backend" if backend is not None else ENVIRONMENT
        raise ValueError(f"{origin}={name!r} is no backend of {op}; there are torch, cpu, triton and reference")
    return name


def choose(op: str, tensors: Mapping[str, Tensor | None] | Tensor, backend: str | None = None) -> Choice:
    """The backend that runs `op` on `tensors`, by their argument names (or on tensors like the one given).

    `backend` decides, then $LINEARIZE_BACKEND, then the device: the C++ backend for CPU tensors, Triton for CUDA and
    ROCm ones, and PyTorch for what these can't serve and for all other devices.

    Raises:
        ValueError: for a backend that doesn't exist, or that was asked for and can't serve these tensors.
    """
    given: dict[str, Tensor] = {}
    if isinstance(tensors, Tensor):
        given["q"] = tensors
    else:
        given = {name: x for name, x in tensors.items() if x is not None}
    name = forced(op, backend)
    if name:
        reason = _refusal(name, op, given)
        origin = f"backend {name!r}"
        if os.environ.get(ENVIRONMENT) == name:  # compiled ops only get the name
            origin += f" (which is {ENVIRONMENT})"
        if reason is not None:
            raise ValueError(f"{origin} can't run {op}: {reason}")
        return Choice(name, "asked for by the caller" if backend is not None else f"forced by {ENVIRONMENT}")
    device = next(iter(given.values())).device.type
    if device not in BY_DEVICE:
        return Choice("torch", f"the tensors are on {device}, and there is no kernel written for that device")
    name = BY_DEVICE[device]
    reason = _refusal(name, op, given)
    if reason is None:
        return Choice(name, f"the tensors are on {device}")
    if device == "cuda" and op in MODULES[name]:
        _slow(f"{op} runs in plain PyTorch, not in Triton: {reason}")
    return Choice("torch", f"the {name} backend can't run it: {reason}")


@functools.cache
def _slow(message: str) -> None:
    """Say once what costs a GPU user most of the speed."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _refusal(name: str, op: str, tensors: dict[str, Tensor]) -> str | None:
    """Why a backend can't serve the tensors, or None."""
    if op not in MODULES["torch"]:
        raise ValueError(f"there is no op {op!r}; there are {', '.join(MODULES['torch'])}")
    if name not in MODULES or op not in MODULES[name]:
        return None if name == "reference" and op != "chunked_kl" else "it isn't written for that backend"
    if name == "torch":
        return None
    package, module = MODULES[name][op].split(".")
    return importlib.import_module(f"{__package__}.{package}").refuses(module, tensors)


@functools.cache
def implementation(name: str, op: str) -> ModuleType:
    """The module of an op in a backend."""
    return importlib.import_module(f"{__package__}.{MODULES[name][op]}")
