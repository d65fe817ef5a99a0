"""Needles in a haystack: facts somewhere in filler text, and a question at its end in the needles' own words.

After RULER (arXiv:2404.06654) and Landmark Attention's pass key (arXiv:2305.16300). RULER asks in other words than
the needle's; a small model then answers with a whole sentence, so here the question repeats the needle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from linearize_evals.document import Ask, Cell, Document, Fact, Make, Piece, Setting
from linearize_evals.haystack import fill, open_haystack
from linearize_evals.words import Nouns, numbers

KEYS = 8  # needles of the multi-key task
VALUES = 4  # values of the multi-value task
QUERIES = 4  # needles, and questions, of the multi-query task
CODE_DIGITS = 7
PASS_DIGITS = 5
CUE = "The secret code for {} is"

Draw = Callable[[random.Random], tuple[list[Fact], list[Piece]]]


def single(setting: Setting) -> Make:
    nouns = Nouns(setting.tokenizer)

    def draw(rng: random.Random) -> tuple[list[Fact], list[Piece]]:
        noun = nouns.draw(rng, 1)
        needles = codes(rng, noun)
        return needles, ask(noun, needles, chance=0.0)

    return needles_in(setting, draw)


def multikey(setting: Setting) -> Make:
    nouns = Nouns(setting.tokenizer)

    def draw(rng: random.Random) -> tuple[list[Fact], list[Piece]]:
        keys = nouns.draw(rng, KEYS)
        needles = codes(rng, keys)
        asked = rng.choice(range(KEYS))
        return needles, ask([keys[asked]], [needles[asked]], chance=1 / KEYS)

    return needles_in(setting, draw)


def multiquery(setting: Setting) -> Make:
    nouns = Nouns(setting.tokenizer)

    def draw(rng: random.Random) -> tuple[list[Fact], list[Piece]]:
        keys = nouns.draw(rng, QUERIES)
        needles = codes(rng, keys)
        order = rng.sample(range(QUERIES), QUERIES)
        return needles, ask([keys[i] for i in order], [needles[i] for i in order], chance=1 / QUERIES)

    return needles_in(setting, draw)


def multivalue(setting: Setting) -> Make:
    nouns = Nouns(setting.tokenizer)

    def draw(rng: random.Random) -> tuple[list[Fact], list[Piece]]:
        noun = nouns.draw(rng, 1) * VALUES
        needles = codes(rng, noun)
        return needles, ask(noun, needles, chance=1 / VALUES)

    return needles_in(setting, draw)


def passkey(setting: Setting) -> Make:
    def draw(rng: random.Random) -> tuple[list[Fact], list[Piece]]:
        (value,) = numbers(rng, 1, PASS_DIGITS)
        needle = Fact(f"The pass key is {value}. Remember it: {value} is the pass key.", value)
        return [needle], ["\nThe pass key is", Ask(f" {value}", value), "."]

    return needles_in(setting, draw)


def codes(rng: random.Random, nouns: Sequence[str]) -> list[Fact]:
    """A needle for each noun; the fact's name is its value."""
    values = numbers(rng, len(nouns), CODE_DIGITS)
    return [Fact(f"{CUE.format(noun)} {value}.", value) for noun, value in zip(nouns, values, strict=True)]


def ask(nouns: Sequence[str], needles: Sequence[Fact], chance: float) -> list[Piece]:
    """Needles once more, each of its noun, with the values to be predicted."""
    pieces: list[Piece] = []
    for noun, needle in zip(nouns, needles, strict=True):
        pieces += [f"\n{CUE.format(noun)}", Ask(f" {needle.name}", needle.name, chance), "."]
    return pieces


def needles_in(setting: Setting, draw: Draw) -> Make:
    """Documents with the needles that `draw` gives, one at the cell's depth or several spread evenly."""
    source = open_haystack(setting.haystack)

    def make(cell: Cell, index: int, rng: random.Random) -> Document:
        facts, question = draw(rng)
        places = [cell.depth] if cell.depth is not None else spread(rng, len(facts))
        return fill(setting.tokenizer, source(rng), lambda filler: weave(filler, facts, places, question), cell, index)

    return make


def spread(rng: random.Random, count: int) -> list[float]:
    """Depths of `count` needles, one in each of as many equal parts of a document."""
    return [(number + rng.uniform(0.1, 0.9)) / count for number in range(count)]


def weave(
    filler: Sequence[str], facts: Sequence[Fact], places: Sequence[float], question: Sequence[Piece]
) -> list[Piece]:
    """Sentences with every fact at its depth (0: before the first; 1: after the last), and the question."""
    characters = sum(len(sentence) + 1 for sentence in filler)
    pieces: list[Piece] = []
    waiting = list(zip(places, facts, strict=True))
    done = 0
    for sentence in filler:
        while waiting and done >= waiting[0][0] * characters:
            pieces += [waiting.pop(0)[1], " "]
        pieces += [sentence, " "]
        done += len(sentence) + 1
    for _, fact in waiting:
        pieces += [fact, " "]
    return [*pieces[:-1], *question]
