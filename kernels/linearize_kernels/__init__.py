"""Linear attention with and without decay, the delta rule, and the windowed hybrid of linear and softmax attention:
exact in any split of a sequence, with or without padding.

    linear_attention, delta_rule, window_attention                    whole sequences, or any part of one with a state
    linear_attention_step, delta_rule_step, window_attention_step     one token, in place on its state
    hedgehog_features, favor_features                                 feature maps as one op each
    chunked_kl                                                        KL of two language models' logits, without them
    reference                                                         the definition: float64 loops over tokens
    LinearState, DeltaState, WindowState                              what a sequence leaves behind, of fixed size
    choose, available                                                 which backend runs, and why

Layout (B, T, H, D). Needs torch alone; Triton and a C++ compiler are used where they are.
"""

from . import reference
from .dispatch import Backend, Choice, available, choose
from .features import favor_features, hedgehog_features
from .kl import chunked_kl
from .ops import delta_rule, delta_rule_step, linear_attention, linear_attention_step
from .ops_window import window_attention, window_attention_step
from .state import (
    DeltaState,
    LinearState,
    WindowState,
    accumulate_dtype,
    empty_delta_state,
    empty_linear_state,
    empty_window_state,
)

__all__ = [
    "Backend",
    "Choice",
    "DeltaState",
    "LinearState",
    "WindowState",
    "accumulate_dtype",
    "available",
    "choose",
    "chunked_kl",
    "delta_rule",
    "delta_rule_step",
    "empty_delta_state",
    "empty_linear_state",
    "empty_window_state",
    "favor_features",
    "hedgehog_features",
    "linear_attention",
    "linear_attention_step",
    "reference",
    "window_attention",
    "window_attention_step",
]
