"""Losses on logits without the logits: the head runs on a few tokens at a time, and their gradients are taken at once.

T x vocabulary never stands in memory: the gradient with respect to the hidden states is computed in the forward, chunk
by chunk, so that nothing has to be kept or computed again. The head is the model's own forward on hidden states that
are there already, so that soft caps, scales and biases of a family are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from linearize.errors import ModelError
from linearize.modeling.attach import SWITCH

CHUNK_ELEMENTS = 1 << 25  # of fp32 logits at a time: 128 MiB


class _DecoderOutput(BaseModelOutputWithPast):
    """Whatever else a family's head looks for in its decoder's output isn't there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def decoder(model: Any) -> Any:
    """The part of a causal LM, converted or not, that its head takes hidden states from.

    Raises:
        ModelError: if the two can't be told apart.
    """
    found = model.get_submodule(vars(model)[SWITCH].body) if SWITCH in vars(model) else model.get_decoder()
    if found is model:
        raise ModelError(f"{type(model).__name__} has no decoder apart from its head", "Train it with `transfer` alone")
    return found


def hidden_states(model: Any, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """(B, T, hidden), what the decoder of a causal LM gives to its head."""
    positions = {} if position_ids is None else {"position_ids": position_ids}
    return decoder(model)(input_ids=input_ids, use_cache=False, **positions).last_hidden_state


def head(model: Any, hidden: Tensor) -> Tensor:
    """(B, T, vocabulary): the logits of a causal LM for hidden (B, T, hidden) from its decoder."""
    with _decoder_gives(model, hidden):
        return model(inputs_embeds=hidden, use_cache=False).logits


@contextmanager
def _decoder_gives(model: Any, hidden: Tensor) -> Iterator[None]:
    body = decoder(model)
    before = vars(body).get("forward")
    body.forward = lambda *args, **kwargs: _DecoderOutput(last_hidden_state=hidden)  # pyright: ignore
    try:
        yield
    finally:
        if before is None:
            del body.forward
        else:
            body.forward = before


def targets(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """(B, T) the token that comes next; -100 at the end of a row and where another document begins."""
    following = torch.full_like(input_ids, -100)
    following[:, :-1] = input_ids[:, 1:]
    if position_ids is not None:
        following[:, :-1].masked_fill_(position_ids[:, 1:] == 0, -100)
    return following


def kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Sum over tokens of KL(teacher || student) for logits (N, V), times temperature^2 so that gradients keep their
    size (Hinton et al. 2015, arXiv:1503.02531)."""
    log_p = F.log_softmax(student.float() / temperature, -1)
    log_q = F.log_softmax(teacher.float() / temperature, -1)
    return F.kl_div(log_p, log_q, log_target=True, reduction="sum") * temperature**2


class _LocalGradient(torch.autograd.Function):
    """A sum over chunks of tokens of a loss, with its gradient computed in the forward."""

    @staticmethod
    def forward(ctx: Any, loss: Callable[[Tensor, slice], tuple[Tensor, Tensor]], size: int, hidden: Tensor, *weights):
        """hidden (N, D); `loss` of hidden[part] and part -> what is to be minimised, and (K,) figures to report."""
        needed = [weight for weight in weights if weight.requires_grad]
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[2] else None
        sums = [torch.zeros_like(weight) for weight in needed]
        total: Any = 0.0
        figures: Any = 0.0
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            with torch.enable_grad():
                x = hidden[part].detach().requires_grad_(gradient is not None)
                value, seen = loss(x, part)
            wanted = [x, *needed] if gradient is not None else needed
            if wanted:
                found = list(torch.autograd.grad(value, wanted))
                if gradient is not None:
                    gradient[part] = found.pop(0)
                for sum_, one in zip(sums, found, strict=True):
                    sum_ += one
            total, figures = total + value.detach(), figures + seen.detach()
        ctx.gradient, ctx.sums = gradient, sums
        ctx.needed = [weight.requires_grad for weight in weights]
        ctx.mark_non_differentiable(figures)
        return total, figures

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        by = grad_outputs[0]
        sums = iter(ctx.sums)
        weights = [next(sums) * by if needed else None for needed in ctx.needed]
        return None, None, None if ctx.gradient is None else ctx.gradient * by, *weights


def logit_loss(
    model: Any,
    hidden: Tensor,
    labels: Tensor,
    *,
    teacher: Callable[[slice], Tensor] | None = None,
    temperature: float = 1.0,
    ce: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(1 - ce) KL(teacher || student) + ce cross-entropy, both summed over tokens.

    Args:
        model: a causal LM; hidden (B, T, D) comes from its decoder.
        labels: (B, T), -100 where there is none.
        teacher: gives the teacher's logits (n, V) of a slice of the B T tokens; needed unless ce is 1.
        chunk: tokens at a time; by default as many as make 128 MiB of logits.

    Returns:
        The loss, and (3,) figures without gradient: summed KL, summed cross-entropy, number of labels.
    """
    flat, wanted = hidden.flatten(0, 1), labels.flatten()
    vocabulary = model.config.get_text_config().vocab_size
    size = chunk or max(1, CHUNK_ELEMENTS // vocabulary)

    def loss(x: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        logits = head(model, x[None])[0]
        crossed = F.cross_entropy(logits.float(), wanted[part], reduction="sum")
        divergence = torch.zeros_like(crossed)
        if teacher is not None:
            with torch.no_grad():
                aim = teacher(part)
            # Heads of one tokenizer's models have more rows than it has tokens, and not all as many.
            shared = min(logits.shape[-1], aim.shape[-1])
            divergence = kl(logits[:, :shared], aim[:, :shared], temperature)
        value = ce * crossed + (1 - ce) * divergence if teacher is not None else crossed
        count = (wanted[part] != -100).sum().to(crossed.dtype)
        return value, torch.stack([divergence.detach(), crossed.detach(), count])

    weights = _head_weights(model) if torch.is_grad_enabled() else ()
    return _LocalGradient.apply(loss, size, flat, *weights)  # pyright: ignore


def _head_weights(model: Any) -> Sequence[Tensor]:
    """Parameters whose gradients the head gives: those outside of the decoder, and a tied output embedding."""
    inside = {id(parameter) for parameter in decoder(model).parameters()}
    own = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    output = model.get_output_embeddings()
    return [*own, *(p for p in (output.parameters() if output is not None else ()) if id(p) in inside)]
