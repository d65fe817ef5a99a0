"""RoPE whose frequencies depend on what a model has been given: those of types "dynamic" and "longrope".

In transformers, the longest row of a batch decides for all rows, and "dynamic" keeps the frequencies of the longest
batch so far. A document's score would depend on its neighbours and on what came before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MOVING = ("dynamic", "longrope")


def moves(config: Any) -> bool:
    """Whether rows of different length may not share a batch."""
    text = config.get_text_config()
    return any(_moves(getattr(text, name, None)) for name in ("rope_parameters", "rope_scaling"))


def _moves(parameters: Any) -> bool:
    """RoPE parameters, or those of each kind of layer."""
    if not isinstance(parameters, Mapping):
        return False
    kind = parameters.get("rope_type") or parameters.get("type")
    return kind in MOVING or any(_moves(value) for value in parameters.values())


@torch.inference_mode(False)  # what is kept must be usable outside of it
def reset(model: Any) -> None:
    """Forget the lengths seen: the frequencies are those of a model just loaded."""
    if not moves(model.config):
        return
    for module in model.modules():
        layers = getattr(module, "layer_types", None)
        for prefix in ("", *(f"{kind}_" for kind in layers or ())):
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if not isinstance(original, torch.Tensor):
                continue
            device = getattr(module, f"{prefix}inv_freq").device
            module.register_buffer(f"{prefix}inv_freq", original.to(device).clone(), persistent=False)
            if hasattr(module, f"{prefix}max_seq_len_cached"):
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
