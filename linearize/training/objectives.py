"""What each stage minimises: functions of a batch that leave gradients behind, or give a loss to go back from.

A batch is (B, T) input_ids and position_ids or None. `share` is the batch's share of an optimiser step: summed over
micro-batches and processes, the losses are the mean over the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linearize.errors import ModelError
from linearize.modeling.observe import Observation, observing
from linearize.training.head import head, hidden_states, logit_loss, targets
from linearize.training.losses import attention_loss
from linearize.training.trainable import as_teacher


class Runner(nn.Module):
    """Holds the model that data-parallel and sharded training wrap: whatever uses its weights runs in this forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


@dataclass
class Transfer:
    """Attention transfer: each mixer learns what the softmax attention of its own layer puts out.

    The teacher's output flows on, so no gradient leaves a layer: each layer's is taken as soon as the layer has run,
    and no more than one layer's graph is ever in memory. There is nothing for gradient checkpointing to save.

    Attributes:
        model: a converted model, or one of whose layers only a part is there.
        loss: a key of `losses.LOSSES`.
        forward: runs the decoder on input_ids and position_ids; by default the whole of it.
        dtype: that of autocast, if any. Mixers stay in float32.
    """

    model: Any
    loss: str
    forward: Callable[[Tensor, Tensor | None], Any] | None = None
    dtype: torch.dtype | None = None

    @property
    def names(self) -> list[str]:
        """The converted layers, in their order."""
        there = {name for name, _ in self.model.named_modules()}
        converted = [layer for layer in self.model.config.linearize["layers"] if layer.get("mixer")]
        return [f"layer {layer['layer']}" for layer in converted if layer["module"] in there]

    def __call__(self, input_ids: Tensor, position_ids: Tensor | None, share: float) -> Tensor:
        """(layers,) the loss of each converted layer times `share`; its gradient is in the mixers' `grad` already.

        Raises:
            ModelError: if a layer runs twice in one forward.
            FloatingPointError: as the mixers.
        """
        losses: dict[int, Tensor] = {}

        def observer(given: Observation) -> None:
            if given.layer in losses:
                raise ModelError(f"layer {given.layer} ran twice in one forward", "Train this model by distillation")
            loss = attention_loss(self.loss, given.student(), given.teacher, given.inputs["mask"]) * share
            losses[given.layer] = loss.detach()
            if loss.requires_grad:
                loss.backward()

        kind = input_ids.device.type
        products = torch.autocast(kind, self.dtype) if self.dtype is not None else nullcontext()
        with torch.no_grad(), observing(self.model, observer), products:
            if self.forward is not None:
                self.forward(input_ids, position_ids)
            else:
                hidden_states(self.model, input_ids, position_ids)
        return torch.stack(list(losses.values()))


@dataclass
class Logits:
    """Logit distillation, cross-entropy, or a mixture: `ce` is the share of the latter.

    Attributes:
        adapter: peft's wrapper of `model`, if it has LoRA.
        teacher: a model of its own, or its `Runner`; None for `model` as it was before training.
    """

    model: Any
    adapter: Any = None
    teacher: Any = None
    temperature: float = 1.0
    ce: float = 0.0
    dtype: torch.dtype | None = None  # of autocast

    def __call__(self, input_ids: Tensor, position_ids: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
        """The loss times `share`, and (3,) figures: the sums of KL and cross-entropy, and the number of labels."""
        kind = input_ids.device.type
        with torch.autocast(kind, self.dtype) if self.dtype is not None else nullcontext():
            aim = self._aim(input_ids, position_ids) if self.ce < 1 else None
            hidden = hidden_states(self.model, input_ids, position_ids)
            labels = targets(input_ids, position_ids)
            loss, figures = logit_loss(
                self.model, hidden, labels, teacher=aim, temperature=self.temperature, ce=self.ce
            )
        return loss * (share / input_ids.numel()), figures

    def _aim(self, input_ids: Tensor, position_ids: Tensor | None) -> Callable[[slice], Tensor]:
        """Gives the teacher's logits (n, V) of a slice of the B T tokens."""
        known = self._teacher_states(input_ids, position_ids).flatten(0, 1)
        # LoRA is never on the head, so that the student's is the teacher's.
        return lambda part: self.with_teacher(head, known[part][None])[0]

    @torch.no_grad()
    def judge(self, input_ids: Tensor, position_ids: Tensor | None, teacher: bool) -> Tensor:
        """(2,) the sum of the student's or teacher's cross-entropy, and the number of labels."""
        if teacher:
            hidden = self._teacher_states(input_ids, position_ids)
            return self.with_teacher(logit_loss, hidden, targets(input_ids, position_ids))[1][1:]
        hidden = hidden_states(self.model, input_ids, position_ids)
        return logit_loss(self.model, hidden, targets(input_ids, position_ids))[1][1:]

    def with_teacher(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function` of the teacher's model: within its runner's forward, if it has one."""
        if isinstance(self.teacher, Runner):
            return self.teacher(function, self.teacher.model, *args)
        return function(self.teacher or self.model, *args)

    def _teacher_states(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        if self.teacher is not None:
            with torch.no_grad():
                return self.with_teacher(hidden_states, input_ids, position_ids)
        with as_teacher(self.model, self.adapter):
            return hidden_states(self.model, input_ids, position_ids)
