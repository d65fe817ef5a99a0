"""What a hybrid of softmax attention and mixers loses beside its teacher, all in one copy of the weights.

B batch, T tokens, D hidden, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from linearize_evals import rope
from linearize_evals.batching import plan_batches
from linearize_evals.document import Document
from torch import Tensor

from linearize.errors import ModelError, ResourceError, out_of_memory
from linearize.family import load_config
from linearize.modeling.bypass import keeping, owner_of
from linearize.modeling.chain import Chain, Part, chain
from linearize.select_samples import Samples
from linearize.select_units import Unit, heads_of, layer_of, parted, units_of
from linearize.training.head import CHUNK_ELEMENTS, head, hidden_states, kl

Tick = Callable[[int], None]  # told how many runs of a layer were done


@dataclass(frozen=True)
class Batch:
    """Rows of about one length, of texts or of documents of one task, padded on the right, which needs no mask.

    Attributes:
        task: the task; "" for texts.
        samples: the number of each row's sample.
        ids: (B, T).
        lengths: tokens of each row.
        documents: those of the rows; none for texts.
    """

    task: str
    samples: Sequence[int]
    ids: Tensor
    lengths: Sequence[int]
    documents: Sequence[Document]


@dataclass(frozen=True)
class Outcome:
    """What a model makes of every sample.

    Attributes:
        kl: (S,) KL(teacher || model), nats a token of text.
        nll: (S,) by task, nats a token of the answers, the mean over a document's answers.
        accuracy: (S,) by task, share of the answers that greedy decoding would give.
    """

    kl: np.ndarray
    nll: Mapping[str, np.ndarray]
    accuracy: Mapping[str, np.ndarray]


class Bench:
    """A converted model, the samples that it is measured on, and what its teacher makes of them.

    Attributes:
        kind: what can be kept, "layers" or "heads".
        heads: the layers that have a mixer, ascending, and how many key/value heads each has.
        units: those layers, or their key/value heads.
        teacher: the outcome of softmax attention in all of them.
        runs: how many layers a whole forward of all batches runs.
    """

    def __init__(self, model: Any, samples: Samples, *, kind: str = "layers", tick: Tick = lambda runs: None) -> None:
        """Run the teacher.

        Raises:
            UsageError: the model isn't converted.
            ModelError: its decoder can't be told from its head, or it gives NaN or infinite logits.
            ResourceError: memory runs out.
        """
        self.model, self._tick, self._count = owner_of(model), tick, samples.count
        switch = self.model._linearize_switch
        self.heads = dict(sorted(heads_of(self.model.config.linearize["layers"]).items()))
        self.kind, self.units = kind, units_of(self.heads, kind)
        self._modules = {layer: name for name, layer in switch.layers.items()}
        self._batches = list(_batches(self.model, samples))
        self._chain = _chain(self.model)
        self._depth = len(self._chain.returns) if self._chain else len(self.heads)
        self.runs = len(self._batches) * self._depth
        self._hidden: list[Tensor] = []  # the teacher's, of texts
        with self._running(self.units):
            hidden = [self._forward(batch) for batch in self._batches]
            self._hidden = [each for each, batch in zip(hidden, self._batches, strict=True) if not batch.task]
            self.teacher = self._outcome(hidden)

    @property
    def sweep_runs(self) -> int:
        """How many layers `sweep` runs."""
        if self._chain is None:
            return self.runs * len(self.units)
        places = [self._place(unit) for unit in self.units]
        return len(self._batches) * (sum(self._depth - place for place in places) + max(places))

    def hybrid(self, kept: Collection[Unit]) -> Outcome:
        """Of softmax attention in the units `kept`, and the mixers in all others."""
        with self._running(kept):
            return self._outcome(self._forward(batch) for batch in self._batches)

    def sweep(self) -> dict[Unit, Outcome]:
        """Of every unit's mixer alone, all other units being the teacher's.

        What a layer is given is what the teacher gives it, since the layers before it are the teacher's. So where a
        decoder is a chain of layers (see `modeling.chain`), those needn't run again.
        """
        if self._chain is None:
            return {unit: self.hybrid(self._without(unit)) for unit in self.units}
        found: dict[Unit, Outcome] = {}
        given: list[Tensor | None] = [None] * len(self._batches)
        last = max(map(self._place, self.units))
        for place in range(last + 1):
            for unit in (unit for unit in self.units if self._place(unit) == place):
                with self._running(self._without(unit)), self._part(place, self._depth) as run:
                    found[unit] = self._outcome(map(run, self._batches, given))
            if place < last:
                with self._running(self.units), self._part(place, place + 1) as run:
                    given = list(map(run, self._batches, given))
        return {unit: found[unit] for unit in self.units}

    def _without(self, unit: Unit) -> list[Unit]:
        return [other for other in self.units if other != unit]

    def _place(self, unit: Unit) -> int:
        """Where the decoder's list of layers has the layer of `unit`."""
        assert self._chain is not None
        return int(self._modules[layer_of(unit)][len(self._chain.layers) + 1 :].partition(".")[0])

    @contextmanager
    def _running(self, kept: Collection[Unit]) -> Iterator[None]:
        with torch.inference_mode(), keeping(self.model, *parted(kept, self.heads)):
            try:
                yield
            except FloatingPointError as error:  # a mixer's own complaint, on the CPU
                raise ModelError(f"the model can't be measured: {error}") from error
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                what = "memory is too small for the model and these documents"
                raise ResourceError(what, "Choose a smaller --length, or fewer --pairs or --samples") from error

    @contextmanager
    def _part(self, begin: int, end: int) -> Iterator[Callable[[Batch, Tensor | None], Tensor]]:
        """Layers `begin` to `end` alone: (B, T, D) of a batch and of what layer `begin` is given."""
        part = Part(self.model, self._chain, begin, end)  # pyright: ignore[reportArgumentType]

        def run(batch: Batch, given: Tensor | None) -> Tensor:
            # A copy, since families may write into it.
            hidden = part.run(partial(self._forward, batch, 0), None if given is None else given.clone())
            self._tick(end - begin)
            return hidden

        try:
            yield run
        finally:
            part.bring_back()

    def _forward(self, batch: Batch, runs: int | None = None) -> Tensor:
        """(B, T, D), what the decoder gives to its head."""
        rope.reset(self.model)
        hidden = hidden_states(self.model, batch.ids, None)
        self._tick(self._depth if runs is None else runs)
        return hidden

    def _outcome(self, hidden: Any) -> Outcome:
        """Of (B, T, D) for each batch in turn."""
        tasks = list(dict.fromkeys(batch.task for batch in self._batches if batch.task))
        divergence = np.full(self._count, np.nan)
        nll, accuracy = ({task: np.full(self._count, np.nan) for task in tasks} for _ in range(2))
        teacher = iter(self._hidden)
        for batch, states in zip(self._batches, hidden, strict=True):
            if batch.task:
                for sample, (loss, right) in zip(batch.samples, self._answers(batch, states), strict=True):
                    nll[batch.task][sample], accuracy[batch.task][sample] = loss, right
                continue
            for row, (sample, theirs) in enumerate(zip(batch.samples, next(teacher), strict=True)):
                length = batch.lengths[row]
                divergence[sample] = self._kl(states[row, :length], theirs[:length])
        if not all(np.isfinite(values).all() for values in (divergence, *nll.values())):
            raise ModelError(
                "the model gives NaN or infinite logits", "Look for them in its weights, or choose --dtype float32"
            )
        return Outcome(divergence, nll, accuracy)

    def _kl(self, states: Tensor, teacher: Tensor) -> float:
        """Mean over tokens of KL(teacher || model), for (T, D) of each; a chunk of tokens at a time has logits."""
        total = 0.0
        for mine, theirs in zip(self._chunks(states), self._chunks(teacher), strict=True):
            total += float(kl(self._logits(mine), self._logits(theirs), 1.0))
        return total / len(states)

    def _answers(self, batch: Batch, states: Tensor) -> Iterator[tuple[float, float]]:
        """Mean loss a token of the answers, and share of right answers, of each document."""
        for row, document in enumerate(batch.documents):
            places = [t for span in document.spans for t in range(span.start, span.end)]
            ids = batch.ids[row]
            losses, right = [], []
            for at in self._chunks(torch.tensor(places, device=ids.device)):
                logits = self._logits(states[row, at - 1]).float()
                losses += (logits.logsumexp(-1) - logits.gather(1, ids[at, None])[:, 0]).tolist()
                right += (logits.argmax(-1) == ids[at]).tolist()
            sizes = np.cumsum([span.end - span.start for span in document.spans])[:-1]
            answers = np.split(np.array(losses), sizes), np.split(np.array(right), sizes)
            yield float(np.mean([each.mean() for each in answers[0]])), float(np.mean([e.all() for e in answers[1]]))

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        vocabulary = self.model.config.get_text_config().vocab_size
        return x.split(max(1, CHUNK_ELEMENTS // vocabulary))

    def _logits(self, states: Tensor) -> Tensor:
        """(N, vocabulary) of (N, D), from the model's own head."""
        return head(self.model, states[None])[0]


def _batches(model: Any, samples: Samples) -> Iterator[Batch]:
    device = model.get_input_embeddings().weight.device
    texts = {"": [(text, None) for text in samples.texts]}
    tasks = {task: [(one.ids, one) for one in documents] for task, documents in samples.recall.items()}
    for task, rows in (texts | tasks).items():
        lengths = [len(ids) for ids, _ in rows]
        for numbers in plan_batches(lengths, "auto", device.type, equal=rope.moves(model.config)):
            ids = torch.zeros(len(numbers), max(lengths[n] for n in numbers), dtype=torch.long)
            for row, number in enumerate(numbers):
                ids[row, : lengths[number]] = torch.tensor(rows[number][0])
            documents = [document for number in numbers if (document := rows[number][1]) is not None]
            yield Batch(task, numbers, ids.to(device), [lengths[n] for n in numbers], documents)


def _chain(model: Any) -> Chain | None:
    """How the layers are strung together; None where a layer takes more than what the one before it gives."""
    try:
        config = load_config(model.config.to_dict(), type(model).__name__)
        return chain(config, list(model._linearize_switch.layers), model.dtype)
    except ModelError:
        return None
