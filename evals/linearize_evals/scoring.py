"""How well a model predicts the answers in documents: one forward a document, logits only where an answer is due."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linearize_evals import rope
from linearize_evals.batching import in_batches, plan_batches
from linearize_evals.document import Document

LONGEST_ARGMAX = 32  # a longer answer is a stretch of text, whose arg-max tokens nobody looks at
GENERATED_SPANS = 4  # each costs a prompt of its own
SLICE_ELEMENTS = 1 << 25  # of fp32 logits at a time: 128 MiB
LOGITS_BYTES = 1 << 31  # what the logits of one forward may take; on a GPU, see `logits_bytes`


@dataclass(frozen=True)
class SpanScore:
    """What a model makes of one answer.

    Attributes:
        logprob: sum over the answer's tokens, in nats.
        greedy: every token of the answer has the highest logit, so greedy decoding would produce it.
        argmax: the token with the highest logit at each position; None for answers of over 32 tokens.
    """

    logprob: float
    greedy: bool
    argmax: tuple[int, ...] | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "logprob": self.logprob,
            "greedy": self.greedy,
            "argmax": None if self.argmax is None else list(self.argmax),
        }


def score(model: Any, documents: Sequence[Document], *, batch_size: int | str = "auto") -> list[list[SpanScore]]:
    """The scores of every document's spans, in their order.

    Args:
        model: a causal LM in eval mode, whole on its device.
        batch_size: documents in a forward, or "auto": as many as fit into a number of tokens.

    Raises:
        FloatingPointError: NaN or infinite logits; names the document. Converted layers name themselves.
        ResourceError: out of memory with a single document.
    """
    scores: list[list[SpanScore]] = [[] for _ in documents]
    batches = plan_likelihood(model, documents, batch_size)
    for indices, results in score_batches(model, documents, batches):
        for index, result in zip(indices, results, strict=True):
            scores[index] = result
    return scores


def plan_likelihood(model: Any, documents: Sequence[Document], batch_size: int | str = "auto") -> list[list[int]]:
    """Batches (indices of `documents`) that `score_batches` takes."""
    lengths = [len(document.ids) for document in documents]
    return plan_batches(lengths, batch_size, _device(model).type, equal=rope.moves(model.config))


def score_batches(
    model: Any, documents: Sequence[Document], batches: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], list[list[SpanScore]]]]:
    """As `score`, batch by batch: yields (indices of documents, their scores)."""
    _check_mode(model)
    most = logits_bytes(_device(model)) if has_logits_to_keep(model) else None
    yield from in_batches(batches, lambda batch: _score(model, [documents[i] for i in batch], most))


def logits_bytes(device: torch.device) -> int:
    """What the logits of one forward may take: a quarter of a GPU's free memory, `LOGITS_BYTES` elsewhere.

    A power of two, so that a little more or less of free memory doesn't split a batch elsewhere and change rounding.
    """
    if device.type != "cuda":
        return LOGITS_BYTES
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 1 << max(20, (free // 4).bit_length() - 1)


def has_logits_to_keep(model: Any) -> bool:
    """Whether the model's forward can compute logits at chosen positions only."""
    if hasattr(model, "get_base_model"):  # PEFT hides the signature
        model = model.get_base_model()
    return "logits_to_keep" in inspect.signature(model.forward).parameters


@torch.inference_mode()
def _score(model: Any, documents: Sequence[Document], most: int | None) -> list[list[SpanScore]]:
    """One batch. Padding on the right needs no mask: causal models don't look at it.

    Args:
        most: bytes that the logits of one forward may take; None if the model computes all of them anyway.
    """
    device = _device(model)
    ids = torch.zeros(len(documents), max(len(document.ids) for document in documents), dtype=torch.long)
    wanted = []  # (document, position of the logits) of every answer token
    for row, document in enumerate(documents):
        ids[row, : len(document.ids)] = torch.tensor(document.ids)
        wanted += [(row, t - 1) for span in document.spans for t in range(span.start, span.end)]
    if not wanted:
        return [[] for _ in documents]
    rows, positions = torch.tensor(wanted).unbind(1)
    parts = _parts(model, rows, positions, most)
    if len(parts) > 1 and len(documents) > 1:
        half = len(documents) // 2
        return _score(model, documents[:half], most) + _score(model, documents[half:], most)
    logprobs = torch.empty(len(wanted), dtype=torch.float32)
    argmax = torch.empty(len(wanted), dtype=torch.long)
    inputs = ids.to(device)
    for part in parts:
        chosen = positions[part].unique()
        rope.reset(model)
        if most is not None:
            logits = model(input_ids=inputs, use_cache=False, logits_to_keep=chosen.to(device)).logits
            columns = torch.searchsorted(chosen, positions[part])
        else:
            logits = model(input_ids=inputs, use_cache=False).logits
            columns = positions[part]
        targets = ids[rows[part], positions[part] + 1]
        logprobs[part], argmax[part] = _log_softmax_at(logits, rows[part], columns, targets)
    _check_finite(logprobs, rows, documents)
    right = argmax == ids[rows, positions + 1]
    return _by_span(documents, logprobs, right, argmax)


def _parts(model: Any, rows: Tensor, positions: Tensor, most: int | None) -> list[Tensor]:
    """Indices of the wanted logits, split so that the logits of one forward fit into memory.

    There is more than one part, and so more than one forward, only for thousands of positions and a large vocabulary.
    """
    order = torch.argsort(positions, stable=True)
    if most is None:
        return [order]
    vocab = model.config.get_text_config().vocab_size
    batch = int(rows.max()) + 1
    columns = max(1, most // (batch * vocab * torch.finfo(model.dtype).bits // 8))
    number = torch.unique(positions[order], return_inverse=True)[1] // columns
    return [order[number == n] for n in range(int(number.max()) + 1)]


def _log_softmax_at(logits: Tensor, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities (fp32) of `targets` at logits[rows, columns], and arg-maxes, both (N,) on the CPU.

    NaN where a row of logits has a NaN or +inf. A GPU is waited for once, at the end.
    """
    step = max(1, SLICE_ELEMENTS // logits.shape[-1])
    rows, columns, targets = (tensor.to(logits.device) for tensor in (rows, columns, targets))
    logprobs, best = [], []
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        chosen = logits[rows[part], columns[part]].float()
        target = chosen.gather(1, targets[part, None]).squeeze(1)
        logprobs.append(target - chosen.logsumexp(-1))
        best.append(chosen.argmax(-1))
    return torch.cat(logprobs).cpu(), torch.cat(best).cpu()


def _check_finite(logprobs: Tensor, rows: Tensor, documents: Sequence[Document]) -> None:
    bad = logprobs.isnan() | logprobs.isposinf()
    if bool(bad.any()):
        document = documents[int(rows[bad.nonzero()[0, 0]])]
        raise FloatingPointError(
            f"the model gave NaN or infinite logits for {describe(document)}: look for them in its weights, or use "
            "bfloat16 or float32 where it overflows float16"
        )


def describe(document: Document) -> str:
    """Names a document in messages."""
    cell = [f"length {document.length}"]
    cell += [f"depth {document.depth}"] if document.depth is not None else []
    cell += [f"{document.pairs} pairs"] if document.pairs is not None else []
    return f"document {document.index} of the cell {', '.join(cell)}"


def _by_span(documents: Sequence[Document], logprobs: Tensor, right: Tensor, argmax: Tensor) -> list[list[SpanScore]]:
    values, rights, tokens = logprobs.tolist(), right.tolist(), argmax.tolist()
    scores, at = [], 0
    for document in documents:
        spans = []
        for span in document.spans:
            end = at + span.end - span.start
            best = tuple(tokens[at:end]) if end - at <= LONGEST_ARGMAX else None
            spans.append(SpanScore(sum(values[at:end]), all(rights[at:end]), best))
            at = end
        scores.append(spans)
    return scores


def generate(
    model: Any, documents: Sequence[Document], *, batch_size: int | str = "auto", use_cache: bool = True
) -> list[list[tuple[int, ...]]]:
    """Greedy continuations at the first `GENERATED_SPANS` spans of every document, as many tokens as the answer has.

    Token ids are compared with the answer's, so there are no stop sequences and nothing is cut. EOS doesn't end an
    answer, and the model's own generation settings (repetition penalty, sampling) don't apply.

    Raises: as `score`, except that only converted layers look for NaN.
    """
    results: list[list[tuple[int, ...]]] = [[] for _ in documents]
    batches = plan_generation(model, documents, batch_size)
    for indices, found in generate_batches(model, documents, batches, use_cache=use_cache):
        for index, result in zip(indices, found, strict=True):
            results[index] = result
    return results


def plan_generation(model: Any, documents: Sequence[Document], batch_size: int | str = "auto") -> list[list[int]]:
    """Batches (indices of `documents`) that `generate_batches` takes; `batch_size` counts documents."""
    lengths = [len(document.ids) for document in documents]
    rows = [max(1, len(document.spans[:GENERATED_SPANS])) for document in documents]
    return plan_batches(lengths, batch_size, _device(model).type, rows)


def generate_batches(
    model: Any, documents: Sequence[Document], batches: Sequence[Sequence[int]], *, use_cache: bool = True
) -> Iterator[tuple[list[int], list[list[tuple[int, ...]]]]]:
    """As `generate`, batch by batch: yields (indices of documents, their continuations)."""
    _check_mode(model)
    yield from in_batches(batches, lambda batch: _generate(model, [documents[i] for i in batch], use_cache))


@torch.inference_mode()
def _generate(model: Any, documents: Sequence[Document], use_cache: bool) -> list[list[tuple[int, ...]]]:
    """One batch; prompts of different length share a forward unless RoPE forbids it."""
    jobs = [(row, span) for row, document in enumerate(documents) for span in document.spans[:GENERATED_SPANS]]
    found: list[list[tuple[int, ...]]] = [[] for _ in documents]
    groups = [jobs] if jobs else []
    if rope.moves(model.config):  # a document's spans are in order, so the shortest prompts go first
        starts = sorted({span.start for _, span in jobs})
        groups = [[job for job in jobs if job[1].start == start] for start in starts]
    for group in groups:
        prompts = [documents[row].ids[: span.start] for row, span in group]
        count = max(span.end - span.start for _, span in group)
        for (row, span), tokens in zip(group, _continue(model, prompts, count, use_cache), strict=True):
            found[row].append(tuple(tokens[: span.end - span.start]))
    return found


def _continue(model: Any, prompts: Sequence[Sequence[int]], count: int, use_cache: bool) -> list[list[int]]:
    """`count` more tokens for every prompt, padded on the left with a mask; answers that are shorter are cut later."""
    from transformers import GenerationConfig

    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, prompt in enumerate(prompts):
        ids[number, longest - len(prompt) :] = torch.tensor(prompt)
        mask[number, longest - len(prompt) :] = 1
    device = _device(model)
    settings = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0, use_cache=use_cache)
    rope.reset(model)
    with _without_settings(model):
        out = model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=settings)
    return out[:, longest:].tolist()


@contextmanager
def _without_settings(model: Any) -> Iterator[None]:
    """Set the model's own generation settings aside: they fill in whatever a call leaves open."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _check_mode(model: Any) -> None:
    if model.training:
        raise ValueError("the model is in training mode, so dropout would change its scores: call model.eval()")


def _device(model: Any) -> torch.device:
    return model.get_input_embeddings().weight.device
