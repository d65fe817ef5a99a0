"""Linear attention in Triton, on plain tensors: forward, backward and one token in place."""

from .linear_bwd import backward
from .linear_fwd import forward
from .steps_linear import step

__all__ = ["backward", "forward", "step"]
