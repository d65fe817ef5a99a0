"""What a selection of layers is measured on: windows of text, and documents that ask for recall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linearize_evals.catalogue import build
from linearize_evals.document import Cell, Document, Setting
from linearize_evals.loading import has_position_table
from linearize_evals.text import Windows

from linearize.errors import UsageError

# What a small instruct model answers nearly perfectly: one that asks much at short range, one that asks once far back.
LISTS, NEEDLES = "linearize_mqar_lines", "linearize_niah_single"
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
PAIRS = (16, 32)
LENGTH = 512
SAMPLES = 8


@dataclass(frozen=True)
class Samples:
    """As many texts as documents of each task: sample i is text i and document i of every task.

    Attributes:
        texts: token ids.
        recall: documents with answers, by task.

    Raises:
        ValueError: there are none, or not as many of all; a text of one token; a document without an answer.
    """

    texts: tuple[tuple[int, ...], ...]
    recall: Mapping[str, tuple[Document, ...]]

    def __post_init__(self) -> None:
        counts = {len(self.texts), *(len(documents) for documents in self.recall.values())}
        if not self.recall or len(counts) != 1 or 0 in counts:
            raise ValueError(f"a selection needs as many texts as documents of each task, not {sorted(counts)}")
        if any(len(text) < 2 for text in self.texts):
            raise ValueError("a text needs two tokens")
        if any(not document.spans for documents in self.recall.values() for document in documents):
            raise ValueError("a document for recall needs an answer")

    @property
    def count(self) -> int:
        return len(self.texts)

    @property
    def tokens(self) -> int:
        documents = [document.ids for documents in self.recall.values() for document in documents]
        return sum(map(len, (*self.texts, *documents)))


def draw(
    tokenizer: Any,
    *,
    samples: int = SAMPLES,
    length: int = LENGTH,
    pairs: Sequence[int] = PAIRS,
    data: str | None = None,
    seed: int = 0,
) -> Samples:
    """The evaluation's own documents: text, lists of pairs, needles in filler.

    Args:
        samples: of each; numbers of pairs and depths of the needle take turns.
        length: tokens of a window of text, and most tokens of a document with a needle.
        pairs: facts in the lists.
        data: a text file (see `linearize_evals.text.read_text`); None for the bundled text.

    Raises:
        UsageError: an argument out of range, or a text that is too short or can't be read.
    """
    each = -(-samples // max(len(set(pairs)), 1))  # of no pairs, `build` complains
    lists = build(LISTS, tokenizer, pairs=pairs, samples=each, seed=seed)
    needles = build(NEEDLES, tokenizer, lengths=[length], depths=DEPTHS, samples=-(-samples // len(DEPTHS)), seed=seed)
    windows = Windows(Setting(tokenizer, text=data, seed=seed))
    texts = tuple(windows.ids(Cell(length=length), number)[0] for number in range(samples))
    # Documents of the same number in every cell are next to each other.
    return Samples(texts, {LISTS: tuple(lists[:samples]), NEEDLES: tuple(needles[:samples])})


def check_positions(model: Any, samples: Samples) -> None:
    """Refuse documents that are longer than a model's table of positions; raises `UsageError`."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    documents = [document.ids for documents in samples.recall.values() for document in documents]
    longest = max(map(len, (*samples.texts, *documents)))
    if most and longest > most and has_position_table(model, most):
        raise UsageError(
            f"the model has a table of {most:,} positions, fewer than the {longest:,} tokens of a document",
            "Choose a smaller --length, or fewer --pairs",
        )
