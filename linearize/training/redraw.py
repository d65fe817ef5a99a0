"""Random features that are drawn anew now and then, so that nothing that is trained comes to fit one draw.

Choromanski et al. 2020 (arXiv:2009.14794) do so for FAVOR+. The last draw stays: omega is part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from linearize.training.trainable import MIXER


def drawn(model: Any) -> dict[str, Tensor]:
    """The buffers of the model's mixers that `redraw` changes, by name."""
    return {
        f"{name}.{own}": buffer
        for name, module in _modules(model)
        for own, buffer in module.named_buffers(recurse=False)
    }


def redraw(model: Any, seed: int, stage: int, step: int) -> None:
    """Draw anew what mixers draw, in place. It depends on the arguments and the layer's number alone: a training that
    is resumed, shared by processes or goes block by block draws the same."""
    generators: dict[int, torch.Generator] = {}
    for name, module in _modules(model):
        layer = model.get_submodule(_owner(name)).layer_idx
        if layer not in generators:
            # The 1 keeps it apart from the seed of the step itself.
            generators[layer] = torch.Generator().manual_seed(hash((seed, stage, step, layer, 1)) % 2**63)
        module.redraw(generators[layer])


def _modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules within mixers that can be drawn anew, by name."""
    for name, module in model.named_modules():
        if MIXER in f"{name}." and hasattr(module, "redraw"):
            yield name, module


def _owner(name: str) -> str:
    """The attention module of something within a mixer."""
    return f"{name}.".partition(MIXER)[0]
