"""A model as lm-eval's harness sees it, with whole documents scored at once and the work spread over processes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models import huggingface

from linearize.errors import UsageError
from linearize_evals import processes, rope, scoring
from linearize_evals.batching import check_batch_size, in_batches
from linearize_evals.document import Document
from linearize_evals.store import Store, document_key, request_key
from linearize_evals.task import is_packed

Progress = Callable[[str, int, int], None]  # (label, tokens done, tokens in all)
Batches = Sequence[Sequence[int]]
Runs = Callable[[Batches], Iterator[tuple[list[int], list[Any]]]]  # batches of indices -> (indices, responses) of each

HFLM: Any = huggingface.HFLM  # its decorator hides its type

CHUNK = 64  # of lm-eval's own requests, which it answers and which are kept together
CPU_BATCH = 8  # of them in a forward; it would look for the largest batch by filling the memory


class RecallLM(HFLM):
    """A loaded model with a tokenizer, for `lm_eval.simple_evaluate`.

    Requests of our packed tasks go to `scoring`, all others to lm-eval's own code, with one difference: where that
    would cut a document that is too long and go on, this raises.

    Under torchrun or `accelerate launch` every process builds all requests, works on a share of them, and gets all
    results, so that the scores can't depend on the number of processes; lm-eval itself sees one process. Every process
    holds the whole model, so they needn't run equally many forwards; a model that is itself spread over processes
    (FSDP, tensor parallelism) can't be used here.

    Args:
        model: a causal LM on its device. It is put into eval mode.
        batch_size: documents in a forward, or "auto".
        store: where scores are kept and looked up first.
        progress: hears of tokens done, and of those to do, by this process; found ones count.
        label: names the model in `progress`.
        max_length: of lm-eval's own requests; the model's by default.

    Raises:
        UsageError: a document of another task is longer than the model takes; a wrong batch size.
        FloatingPointError, ResourceError: see `scoring`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int | str = "auto",
        store: Store | None = None,
        progress: Progress | None = None,
        label: str = "model",
        max_length: int | None = None,
    ) -> None:
        check_batch_size(batch_size)
        self._processes = processes.start(model.device.type)
        with _quiet():
            super().__init__(
                pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=CPU_BATCH, max_length=max_length
            )
        self._recall_batch = batch_size
        self._store, self._progress, self._label = store, progress, label
        self._task_of: dict[Any, str | None] = {}  # task name by text, to name a document that is too long

    # Requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._split(requests, self._likelihoods, super().loglikelihood)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._split(requests, self._continuations, super().generate_until)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._plain(requests, super().loglikelihood_rolling)

    def _split(
        self,
        requests: list[Instance],
        packed: Callable[[list[Document]], list[Any]],
        plain: Callable[..., list[Any]],
    ) -> list[Any]:
        """Answer packed requests by `packed`, the others by lm-eval's `plain`, in their order."""
        ours = [number for number, request in enumerate(requests) if is_packed(request)]
        others = sorted(set(range(len(requests))) - set(ours))
        results: dict[int, Any] = {}
        if ours:
            results |= zip(ours, packed([Document.from_dict(requests[n].doc) for n in ours]), strict=True)
        if others:
            results |= zip(others, self._plain([requests[number] for number in others], plain), strict=True)
        return [results[number] for number in range(len(requests))]

    def _likelihoods(self, documents: list[Document]) -> list[dict[str, Any]]:
        plan = scoring.plan_likelihood(self.model, documents, self._recall_batch)

        def run(batches: Batches) -> Iterator[tuple[list[int], list[Any]]]:
            for indices, scores in scoring.score_batches(self.model, documents, batches):
                yield indices, [[score.to_dict() for score in spans] for spans in scores]

        return self._packed(documents, plan, "likelihood", run)

    def _continuations(self, documents: list[Document]) -> list[dict[str, Any]]:
        plan = scoring.plan_generation(self.model, documents, self._recall_batch)

        def run(batches: Batches) -> Iterator[tuple[list[int], list[Any]]]:
            for indices, found in scoring.generate_batches(self.model, documents, batches):
                yield indices, [[list(tokens) for tokens in spans] for spans in found]

        return self._packed(documents, plan, "generate", run)

    def _packed(self, documents: list[Document], plan: Batches, mode: str, run: Runs) -> list[dict[str, Any]]:
        keys = [document_key(document, mode) for document in documents]
        found = self._answered([len(document.ids) for document in documents], keys, plan, run)
        for spans in found:
            if not isinstance(spans, list) or not all(isinstance(span, (dict, list)) for span in spans):
                path = self._store.path if self._store is not None else "the scores"
                raise UsageError(f"{path} holds a score that isn't one: {str(spans)[:40]}", "Delete the file")
        return [{"spans": spans} for spans in found]

    def _plain(self, requests: list[Instance], answer: Callable[..., list[Any]]) -> list[Any]:
        """Responses to requests of lm-eval's own tasks by its own code, `CHUNK` at a time."""
        self._task_of = {request.args: request.task_name for request in requests if _hashable(request.args)}
        self._task_of |= {request.args[0]: request.task_name for request in requests}
        sizes, seen, keys = self._tokens(requests), Counter(), []
        for request in requests:
            name = repr(request.args)
            keys.append(request_key(request.request_type, request.args, seen[name], self.max_length))
            seen[name] += 1

        def run(chunks: Batches) -> Iterator[tuple[list[int], list[Any]]]:
            def chunk(indices: Sequence[int]) -> list[Any]:
                self.batch_size_per_gpu = self._rows(max(sizes[index] for index in indices))
                return answer([requests[index] for index in indices], disable_tqdm=True)

            return in_batches(chunks, chunk)

        found = self._answered(sizes, keys, _chunks(requests), run)
        return [tuple(response) if isinstance(response, list) else response for response in found]  # JSON has no tuples

    def _tokens(self, requests: list[Instance]) -> list[int]:
        """How long each request's texts are together."""
        texts = sorted({text for request in requests for text in request.args if isinstance(text, str)})
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        lengths = {text: len(tokens) for text, tokens in zip(texts, ids, strict=True)}
        return [sum(lengths[text] for text in request.args if isinstance(text, str)) for request in requests]

    def _rows(self, tokens: int) -> int:
        """Requests in a forward of lm-eval's, which computes all logits of up to `tokens` positions each."""
        if rope.moves(self.model.config):
            return 1
        if self._recall_batch != "auto":
            return int(self._recall_batch)
        if self.model.device.type == "cpu":
            return CPU_BATCH
        row = max(1, tokens) * self.model.config.get_text_config().vocab_size * self.model.dtype.itemsize
        return min(CHUNK, max(1, scoring.logits_bytes(self.model.device) // row))

    # Shared between processes, and kept

    def _answered(self, sizes: Sequence[int], keys: Sequence[str | None], plan: Batches, run: Runs) -> list[Any]:
        """The response to everything that is asked, from the store where it has it; each new batch is kept at once.

        Batches are planned over all that is asked, and run whole if anything in them is missing, so that their padding,
        and so their rounding, is the same for any number of processes, and for a run that goes on after a stop.
        Only what the first process's store lacks is dealt out, so that all have something to do.

        Args:
            sizes: tokens of each.
            keys: in the store; None for what can't be kept.
            plan: batches of indices.
        """
        known = processes.same({n for n, key in enumerate(keys) if self._stored(key) is not None})
        waiting = [batch for batch in plan if not known.issuperset(batch)]
        mine = waiting[self._processes.process_index :: self._processes.num_processes]

        def work() -> dict[int, Any]:
            found = {n: self._stored(keys[n]) for n in known} if self._processes.is_main_process else {}
            done = sum(sizes[n] for n in known)
            total = done + sum(sizes[n] for batch in mine for n in batch if n not in known)
            self._report(done, total)
            for indices, responses in run(mine):
                new = {n: response for n, response in zip(indices, responses, strict=True) if n not in known}
                if self._store is not None:  # an empty one is false
                    self._store.append((key, new[n]) for n in new if (key := keys[n]) is not None)
                found |= new
                done += sum(sizes[n] for n in new)
                self._report(done, total)
            return found

        everything = {n: response for found in processes.together(work) for n, response in found.items()}
        if self._store is not None:
            self._store.remember((key, everything[n]) for n, key in enumerate(keys) if key is not None)
        return [everything[n] for n in range(len(keys))]

    def _stored(self, key: str | None) -> Any:
        return None if self._store is None or key is None else self._store.get(key)

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(self._label, done, total)

    # RoPE that remembers

    def _model_call(self, *args: Any, **kwargs: Any) -> Any:
        rope.reset(self.model)
        return super()._model_call(*args, **kwargs)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        rope.reset(self.model)
        return super()._model_generate(*args, **kwargs)

    # Nothing is truncated

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        for text, context, continuation in requests:
            if len(context) + len(continuation) > self.max_length + 1:  # the last token is only predicted
                raise self._too_long(text, len(context) + len(continuation), self.max_length)
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Any, Any]:
        ids, mask = super().tok_batch_encode(list(strings), padding_side, None, truncation)
        if left_truncate_len and ids.shape[1] > left_truncate_len:
            longest = strings[int(mask.sum(1).argmax())]
            raise self._too_long(longest, ids.shape[1], left_truncate_len)
        return ids, mask

    def _too_long(self, text: Any, length: int, most: int) -> UsageError:
        return UsageError(
            f"a document of task '{self._task_of.get(text, 'unknown')}' has {length} tokens, and the model takes "
            f"{most} there: lm-eval would cut off its beginning",
            "Leave the task out, or ask for shorter documents or answers",
        )


def _hashable(arguments: tuple) -> bool:
    return all(isinstance(argument, str) for argument in arguments)


def _chunks(requests: Sequence[Instance]) -> list[list[int]]:
    """Indices of requests, the longest first and those with equal settings or context next to each other, in chunks.

    lm-eval runs continuations of one token for the same context in one forward.
    """

    def order(index: int) -> tuple[str, int, str, int]:
        first, *others = requests[index].args
        settings = json.dumps([other for other in others if not isinstance(other, str)], sort_keys=True, default=str)
        return settings, -len(first), first, index

    ordered = sorted(range(len(requests)), key=order)
    return [ordered[start : start + CHUNK] for start in range(0, len(ordered), CHUNK)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's warnings that a model given as an object isn't loaded or spread by it: it needn't be."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
