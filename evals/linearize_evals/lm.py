"""A model as lm-eval's harness sees it, with whole documents scored at once and the work spread over processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.models import huggingface

from linearize.errors import LinearizeError, UsageError
from linearize_evals import scoring
from linearize_evals.document import Document
from linearize_evals.store import Store, document_key
from linearize_evals.task import is_packed

Progress = Callable[[str, int, int], None]  # (label, tokens done, tokens in all)
Result = TypeVar("Result")

HFLM: Any = huggingface.HFLM  # its decorator hides its type

CPU_BATCH = 8  # of lm-eval's own requests; it would look for the largest batch by filling the memory


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
        progress: hears of tokens scored by this process, and of those that it has to score; found ones count.
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
        from accelerate import PartialState

        size = CPU_BATCH if batch_size == "auto" and model.device.type == "cpu" else batch_size
        with _quiet():
            super().__init__(
                pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=size, max_length=max_length
            )
        self._recall_batch = batch_size
        self._store, self._progress, self._label = store, progress, label
        self._processes = PartialState()
        self._task_of: dict[Any, str | None] = {}  # task name by text, to name a document that is too long

    # Requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._split(requests, self._likelihoods, super().loglikelihood, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._split(requests, self._continuations, super().generate_until, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._shared(requests, super().loglikelihood_rolling, disable_tqdm)

    def _split(
        self,
        requests: list[Instance],
        packed: Callable[[list[Document]], list[Any]],
        plain: Callable[..., list[Any]],
        disable_tqdm: bool,
    ) -> list[Any]:
        """Answer packed requests by `packed`, the others by lm-eval's `plain`, in their order."""
        ours = [number for number, request in enumerate(requests) if is_packed(request)]
        others = sorted(set(range(len(requests))) - set(ours))
        results: dict[int, Any] = {}
        if ours:
            results |= zip(ours, packed([Document.from_dict(requests[n].doc) for n in ours]), strict=True)
        if others:
            answers = self._shared([requests[number] for number in others], plain, disable_tqdm)
            results |= zip(others, answers, strict=True)
        return [results[number] for number in range(len(requests))]

    def _likelihoods(self, documents: list[Document]) -> list[dict[str, Any]]:
        plan = scoring.plan_likelihood(self.model, documents, self._recall_batch)

        def run(wanted: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[Any]]]:
            for indices, scores in scoring.score_batches(self.model, documents, wanted):
                yield indices, [[score.to_dict() for score in spans] for spans in scores]

        return self._scored(documents, plan, "likelihood", run)

    def _continuations(self, documents: list[Document]) -> list[dict[str, Any]]:
        plan = scoring.plan_generation(self.model, documents, self._recall_batch)

        def run(wanted: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], list[Any]]]:
            for indices, found in scoring.generate_batches(self.model, documents, wanted):
                yield indices, [[list(tokens) for tokens in spans] for spans in found]

        return self._scored(documents, plan, "generate", run)

    def _scored(
        self,
        documents: list[Document],
        plan: list[list[int]],
        mode: str,
        run: Callable[[Sequence[Sequence[int]]], Iterator[tuple[list[int], list[Any]]]],
    ) -> list[dict[str, Any]]:
        """{"spans": ...} of every document, from the store where it has them; each new batch is kept at once.

        Batches are planned over all documents and then dealt out, so that their padding, and so their rounding, is
        the same for any number of processes.
        """
        keys = [document_key(document, mode) for document in documents]
        mine = plan[self._processes.process_index :: self._processes.num_processes]

        def work() -> list[tuple[int, Any]]:
            found: dict[int, Any] = {}
            for index in (index for batch in mine for index in batch):
                kept = self._store.get(keys[index]) if self._store is not None else None
                if kept is not None:
                    found[index] = kept
            total = sum(len(documents[index].ids) for batch in mine for index in batch)
            done = sum(len(documents[index].ids) for index in found)
            self._report(done, total)
            waiting = [[index for index in batch if index not in found] for batch in mine]
            for indices, results in run([batch for batch in waiting if batch]):
                found |= zip(indices, results, strict=True)
                if self._store is not None:  # an empty one is false
                    self._store.append((keys[index], found[index]) for index in indices)
                done += sum(len(documents[index].ids) for index in indices)
                self._report(done, total)
            return list(found.items())

        everything = dict(self._together(work))
        return [{"spans": everything[index]} for index in range(len(documents))]

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(self._label, done, total)

    # Processes

    def _shared(self, requests: list[Instance], run: Callable[..., list[Any]], disable_tqdm: bool) -> list[Any]:
        """Results of lm-eval's own code for all requests, each process doing every n-th."""
        self._task_of = {request.args: request.task_name for request in requests if _hashable(request.args)}
        self._task_of |= {request.args[0]: request.task_name for request in requests}
        mine = range(self._processes.process_index, len(requests), self._processes.num_processes)

        def work() -> list[tuple[int, Any]]:
            answers = run([requests[n] for n in mine], disable_tqdm=disable_tqdm) if mine else []
            return list(zip(mine, answers, strict=True))

        everything = dict(self._together(work))
        return [everything[number] for number in range(len(requests))]

    def _together(self, work: Callable[[], list[Result]]) -> list[Result]:
        """What `work` gives in all processes. An error in one is an error in all, which would wait for it otherwise."""
        if self._processes.num_processes == 1:
            return work()
        from accelerate.utils import gather_object

        results: list[Result] = []
        error: Exception | None = None
        try:
            results = work()
        except Exception as caught:
            error = caught
        gathered = gather_object([(self._processes.process_index, repr(error) if error else None, results)])
        if error is not None:
            raise error
        for process, failure, _ in gathered:
            if failure:
                raise LinearizeError(f"process {process} failed: {failure}")
        return [result for _, _, results in gathered for result in results]

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
