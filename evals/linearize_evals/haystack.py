"""Filler text around facts, and how much of it fills a document."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

from linearize.errors import UsageError, did_you_mean
from linearize_evals import words
from linearize_evals.document import Cell, Document, Piece, Tokens, compose

KINDS = ("sentences", "noise")
# Of a needle's wording, which filler must not hold.
RESERVED = re.compile(r"secret code|pass key|VAR ", re.IGNORECASE)


def open_haystack(haystack: str | None) -> Callable[[random.Random], Iterator[str]]:
    """A source of filler: a function that gives the sentences of one document, in order.

    Args:
        haystack: "sentences" (generated, all different; the default), "noise" (five sentences over and over), or
            the path of a text, whose sentences are taken in order from a random place.

    Raises:
        UsageError: there is no such kind or file.
    """
    if haystack in (None, "sentences"):
        return lambda rng: (words.sentence(rng) for _ in count())
    if haystack == "noise":
        return lambda rng: (words.NOISE[number % len(words.NOISE)] for number in count())
    if not Path(haystack).is_file():
        hint = did_you_mean(haystack, KINDS) or f"Use {' or '.join(KINDS)}, or the path of a text file"
        raise UsageError(f"there is no haystack '{haystack}'", hint)
    from linearize_evals.text import read_text

    found = re.split(r"(?<=[.!?])\s+", " ".join(read_text(haystack).split()))
    sentences = [sentence for sentence in found if sentence and not RESERVED.search(sentence)]

    def draw(rng: random.Random) -> Iterator[str]:
        # Anywhere in the first half: the second is then always there to read on.
        return iter(sentences[rng.randrange(len(sentences) // 2 + 1) :])

    return draw


def fill(
    tokenizer: Any,
    sentences: Iterator[str],
    assemble: Callable[[Sequence[str]], Sequence[Piece]],
    cell: Cell,
    index: int,
) -> Document:
    """The document with as many sentences as the cell's length allows.

    Args:
        tokenizer: any tokenizer.
        sentences: filler, drawn as needed.
        assemble: makes the pieces of a document from its filler.
        cell: its length is the most tokens that the document may have; less than one sentence stays free.
        index: the document's number.

    Raises:
        UsageError: the facts alone are longer than that, or the filler ends too early.
    """
    assert cell.length is not None
    bare = len(compose(tokenizer, assemble([])).ids)
    room = cell.length - bare
    if room < 0:
        raise UsageError(
            f"{cell.length} tokens are too few for this task's facts and question"
            + (f" with {cell.pairs} pairs" if cell.pairs else "")
            + f", which take {bare}",
            f"Use a length of at least {-(-(bare + 8) // 16) * 16}",
        )
    drawn, ends = _draw(tokenizer, sentences, room)
    number = sum(end <= room for end in ends)
    best: Document | None = None
    for _ in range(16):  # neighbours may share tokens, so the estimate is off by a sentence at times
        document = compose(tokenizer, assemble(drawn[:number]), cell, index=index)
        if len(document.ids) > cell.length:
            if best is not None or number == 0:
                break
            number -= 1
        elif number == len(drawn):
            best = document
            break
        else:
            best, number = document, number + 1
    if best is None:
        raise UsageError(f"filler doesn't fit into {cell.length} tokens", "Use a greater length")
    return best


def _draw(tokenizer: Any, sentences: Iterator[str], room: int) -> tuple[list[str], list[int]]:
    """Sentences of a little more than `room` tokens, and the number of tokens up to the end of each."""
    drawn: list[str] = []
    ends: list[int] = []
    while not ends or ends[-1] <= room + 64:
        mean = ends[-1] / len(ends) if ends else 12
        missing = room + 128 - (ends[-1] if ends else 0)
        more = list(islice(sentences, 4 + int(1.02 * missing / max(mean, 1))))
        if not more:
            if not ends or ends[-1] <= room:
                raise UsageError(
                    f"the haystack has {ends[-1] if ends else 0} tokens from where this document begins, of {room} "
                    "needed",
                    "Use a longer text, or a shorter length",
                )
            break
        drawn += more
        ends = _ends(tokenizer, drawn)
    return drawn, ends


def _ends(tokenizer: Any, sentences: Sequence[str]) -> list[int]:
    if not getattr(tokenizer, "is_fast", False):
        sizes = [len(tokenizer(f" {each}", add_special_tokens=False)["input_ids"]) for each in sentences]
        return list(accumulate(sizes))
    tokens = Tokens(tokenizer, " ".join(sentences))
    return [tokens.last(end) for end in accumulate((len(each) + 1 for each in sentences), initial=-1)][1:]
