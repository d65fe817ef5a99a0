"""Where a NaN comes from, once there is one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.training.head import hidden_states


def is_finite(value: Any) -> bool:
    """Whether a tensor is, or this process's part of one."""
    return bool((value.to_local() if hasattr(value, "to_local") else value).isfinite().all())


@torch.no_grad()
def first_not_finite(model: Any, input_ids: Tensor, position_ids: Tensor | None) -> str:
    """The part of a converted model that first gives NaN or infinity for a batch (B, T): a layer, or what is left."""
    found: list[int] = []

    def look(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and not is_finite(hidden):
                found.append(number)

        return hook

    handles = []
    for layer in model.config.linearize["layers"]:
        block = model.get_submodule(layer["module"].rpartition(".")[0])
        handles.append(block.register_forward_hook(look(layer["layer"])))
    try:
        hidden = hidden_states(model, input_ids, position_ids)
    except FloatingPointError as error:
        return str(error)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"layer {found[0]} gives NaN or infinite values"
    return ("the head" if is_finite(hidden) else "the decoder's end") + " gives NaN or infinite values"
