"""How much memory a training takes."""

from __future__ import annotations

import sys
from typing import Any


def reset_peak() -> None:
    """Begin to measure anew, where that is possible: a process on a CPU has one peak from its start."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: Any) -> int:
    """The most bytes so far: of tensors on a GPU, else of this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
