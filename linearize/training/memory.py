"""How much memory a training, or anything else, takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def reset_peak(device: Any) -> bool:
    """Begin to measure anew: False where that is impossible, since a process has one peak from its start."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux
    except OSError:
        return False
    return True


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
