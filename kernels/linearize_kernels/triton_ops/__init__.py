"""The "triton" backend: `linear`, `delta` and `window`, each with forward, backward and step.

Nothing here imports triton before one of them is used, so that the package works without it.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

OPS = ("linear", "delta", "window")


def __getattr__(name: str) -> Any:
    if name in OPS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def refuses(op: str, tensors: dict[str, Tensor]) -> str | None:
    """Why the kernels can't serve `op` on these tensors, or None. A kernel module may add its own `refuses`."""
    reason = _missing()
    if reason is not None:
        return reason
    for name, x in tensors.items():
        if x.dtype == torch.float64:
            return f"{name} is float64, which the Triton kernels don't compute in"
    device = next(iter(tensors.values())).device
    if device.type == "cuda":
        if not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
            return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    elif not interpreted():
        return f"Triton needs a CUDA or ROCm device, but the tensors are on {device}"
    more = getattr(import_module(f".{op}", __name__), "refuses", None)
    return None if more is None else more(tensors)


def status() -> tuple[bool, str]:
    """Whether the kernels run on this machine, and on what or why not."""
    reason = _missing()
    if reason is not None:
        return False, reason
    version = import_module("triton").__version__
    if torch.cuda.is_available():
        return True, f"Triton {version} on {torch.cuda.get_device_name()}"
    if interpreted():
        return True, f"Triton {version}, interpreted on the CPU: for tests"
    return False, f"Triton {version} is installed, but there is no CUDA or ROCm device"


def _missing() -> str | None:
    """Why there is no Triton here that can compile the kernels, or None."""
    return "Triton isn't installed (`pip install triton`)" if find_spec("triton") is None else _too_old()


@functools.cache
def _too_old() -> str | None:
    # What the kernels use that came to Triton last. Forks have version numbers of their own, so ask for it by name.
    loop = getattr(import_module("triton.language"), "range", None)
    if loop is not None and "disable_licm" in inspect.signature(loop).parameters:
        return None
    return f"Triton {import_module('triton').__version__} is too old: pip install -U triton"


def interpreted() -> bool:
    """Whether the kernels run under Triton's interpreter: TRITON_INTERPRET was set before they were imported."""
    return import_module(".launch", __name__).INTERPRETED
