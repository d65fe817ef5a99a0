"""Whether a model keeps the documents of a row apart when their positions start again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from linearize.errors import UsageError
from linearize.modeling.attach import SWITCH
from linearize.modeling.bypass import bypass
from linearize.training.head import hidden_states

TOKENS = 8  # of each of two documents
# Of a token's hidden state. Routing other tokens rounds bfloat16 sums otherwise; another document changes all of it.
TOLERANCE = 0.05


@torch.no_grad()
def check_separate(model: Any) -> None:
    """Refuse a model that lets documents see each other, with softmax in every layer.

    Several families make their masks without looking at positions, and recurrent layers carry their state on.

    Raises:
        UsageError: with what to do about it.
    """
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(embedding.shape[0], (3, TOKENS), generator=generator)
    positions = torch.arange(TOKENS).repeat(2)[None].to(embedding.device)
    training = model.training
    model.eval()
    try:
        with bypass(model) if SWITCH in vars(model) else nullcontext():
            rows = [torch.cat([before, second])[None].to(embedding.device) for before in (first, other)]
            one, two = (hidden_states(model, row, positions) for row in rows)
    finally:
        model.train(training)
    check_second(model, one, two)


def check_second(model: Any, one: Tensor, two: Tensor) -> None:
    """Refuse a model for which the second document of two rows (1, 2 TOKENS, ...) depends on the first.

    Raises:
        UsageError: as `check_separate`.
    """
    one, two = (hidden[0, TOKENS:].float() for hidden in (one, two))
    if float(((one - two).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-6)).max()) > TOLERANCE:
        raise UsageError(
            f"data.separate: in {model.config.model_type} models the documents of a row see each other",
            "Set data.separate to false, which makes rows of running text",
        )
