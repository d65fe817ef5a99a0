"""Run teacher and student in one forward: softmax attention flows, and every mixer sees what it sees.

Attention transfer needs both outputs of every converted layer on the same inputs. The teacher's weights are the
student's, so one forward of the model gives both, and no second model has to be in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize.errors import UsageError
from linearize.modeling.attention import IMPLEMENTATION, mix
from linearize.modeling.bypass import owner_of


@dataclass
class Observation:
    """What one converted layer sees in a forward, and what its softmax attention makes of it.

    Attributes:
        module: the attention module; `module.linearize` is its mixer.
        layer: the number of its decoder layer.
        q, k, v: (B, T, H, D), (B, T, Hk, D), (B, T, Hk, Dv), after the model's own RoPE and norms.
        inputs: what else the mixer is given: hidden_states, mask, position_ids.
        cu_seqlens: bounds of packed sequences, or None.
        teacher: (B, T, H, Dv), what softmax attention gives.
        scaling: the factor of that softmax.
    """

    module: Any
    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    inputs: dict[str, Any]
    cu_seqlens: Tensor | None
    teacher: Tensor
    scaling: float

    def student(self) -> Tensor:
        """(B, T, H, Dv), what the mixer gives. Gradients reach its parameters, and nothing else.

        Raises:
            FloatingPointError: if it isn't finite, naming the layer.
        """
        return mix(self.module, (self.q, self.k, self.v), self.inputs, self.cu_seqlens)[0]


Observer = Callable[[Observation], None]


@contextmanager
def observing(model: Any, observer: Observer) -> Iterator[Any]:
    """Within the block, `model` is its base model, and each converted layer calls `observer` with an `Observation`.

    Forwards are to be run without gradients and without a cache. The observer runs with gradients enabled, and may
    call `backward` on what it makes of `student()`: everything that it is given is detached.

    Raises:
        UsageError: if the model isn't converted, or runs in another mode already.
    """
    owner = owner_of(model)
    switch = owner._linearize_switch
    if switch.busy:
        raise UsageError("the model is bypassed or observed already")
    implementation = owner.config._attn_implementation_internal

    def observe(
        module: Any,
        qkv: tuple[Tensor, Tensor, Tensor],
        inputs: dict[str, Any],
        cu_seqlens: Tensor | None,
        scaling: float,
        softmax: Callable[..., Tensor],
    ) -> Tensor:
        teacher = softmax(implementation=switch.softmax)
        with torch.enable_grad():
            observer(Observation(module, module.layer_idx, *qkv, inputs, cu_seqlens, teacher, scaling))
        return teacher

    try:
        switch.busy, switch.observer = True, observe
        if implementation == IMPLEMENTATION:  # no softmax layer was left, so that no mask would be made
            owner.config._attn_implementation_internal = switch.softmax
        yield model
    finally:
        switch.busy, switch.observer = False, None
        owner.config._attn_implementation_internal = implementation
