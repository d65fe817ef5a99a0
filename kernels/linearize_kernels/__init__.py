"""Linear attention and its windowed hybrid with softmax: exact in any split of a sequence, with or without
padding.

    linear_attention, window_attention              whole sequences, or any part of one with a state
    linear_attention_step, window_attention_step    one token
    reference                                       the definition: float64 loops over tokens
    LinearState, WindowState                        what a sequence leaves behind, of fixed size
    choose, available                               which backend runs, and why

Layout (B, T, H, D). Needs torch alone.
"""

from . import reference
from .dispatch import Backend, Choice, available, choose
from .ops import (
    linear_attention,
    linear_attention_step,
    window_attention,
    window_attention_step,
)
from .state import LinearState, WindowState, accumulate_dtype

__all__ = [
    "Backend",
    "Choice",
    "LinearState",
    "WindowState",
    "accumulate_dtype",
    "available",
    "choose",
    "linear_attention",
    "linear_attention_step",
    "reference",
    "window_attention",
    "window_attention_step",
]
