"""One record for each answer that a model was asked for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linearize.errors import UsageError
from linearize_evals.catalogue import FAMILIES


@dataclass(frozen=True)
class Answer:
    """What one model did with one span of one document.

    Attributes:
        task: the lm-eval task.
        document: hash of the document, the same for every model that was given it.
        index: number of the document within its cell.
        span: number of the span within the document.
        length: tokens of the cell; depth and pairs: its other axes, None where it has none.
        position: index of the answer's first token.
        distance: tokens back to the start of the needed fact, as in `Span`.
        chance: accuracy of a guess.
        label: the span's kind.
        correct: whether every token of the answer is the most likely one.
        logprob: log probability of the answer, in nats.
        tokens: tokens of the answer.
        generated: whether greedy generation gave exactly the answer; None where it wasn't asked for.
    """

    task: str
    document: str
    index: int
    span: int
    length: int
    depth: float | None
    pairs: int | None
    position: int
    distance: int | None
    chance: float
    label: str
    correct: bool
    logprob: float
    tokens: int
    generated: bool | None = None

    @property
    def cluster(self) -> Hashable:
        """What is alike within and independent without, to be resampled as one: the document.

        Of a running text it is the window of one number at every length: the shorter ones lie inside the longer ones.
        """
        return (self.task, self.index) if FAMILIES[self.task].kind == "text" else self.document


def answers(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Answer]:
    """The answers in the samples that lm-eval logged for our packed tasks, by task.

    Raises:
        UsageError: a sample isn't one of a packed task, or doesn't answer every span of its document.
    """
    return [answer for task, logged in samples.items() for sample in logged for answer in _of_document(task, sample)]


def _of_document(task: str, sample: Mapping[str, Any]) -> list[Answer]:
    document = sample["doc"]
    responses = [response[0] for response in sample["resps"]]
    if not all(isinstance(response, Mapping) and "spans" in response for response in responses):
        raise UsageError(
            f"the samples of task '{task}' weren't scored a document at a time", "Take those that `linearize eval` logs"
        )
    scored = responses[0]["spans"]
    if len(scored) != len(document["spans"]):
        raise UsageError(
            f"task '{task}' has {len(scored)} scores for the {len(document['spans'])} answers of document "
            f"{sample['doc_id']}",
            "Delete the stored scores and run the evaluation again",
        )
    generated = responses[1]["spans"] if len(responses) > 1 else []
    found = []
    for number, (span, score) in enumerate(zip(document["spans"], scored, strict=True)):
        wanted = list(document["ids"][span["start"] : span["end"]])
        found.append(
            Answer(
                task=task,
                document=sample["doc_hash"],
                index=document["index"],
                span=number,
                length=document["length"],
                depth=document["depth"],
                pairs=document["pairs"],
                position=span["start"],
                distance=span["distance"],
                chance=span["chance"],
                label=span["label"],
                correct=bool(score["greedy"]),
                logprob=float(score["logprob"]),
                tokens=len(wanted),
                generated=list(generated[number]) == wanted if number < len(generated) else None,
            )
        )
    return found
