"""Variable tracking: where a value goes, through a chain of moves (after RULER, arXiv:2404.06654).

`pairs` is the number of hops: after "VAR 12345 is in river.", as many moves "VAR river is in garden." A second chain
with another value runs beside it. RULER writes `VAR X2 = VAR X1` and asks for a list of names; small models score 0 on
that, so here the question is the chain once more in the same words, with every name to be predicted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from linearize.errors import UsageError
from linearize_evals.document import Ask, Cell, Document, Fact, Make, Piece, Setting
from linearize_evals.haystack import fill, open_haystack
from linearize_evals.niah import spread, weave
from linearize_evals.words import NOUNS, Nouns, numbers

CHAINS = 2
DIGITS = 5


def tracking(setting: Setting) -> Make:
    nouns, source = Nouns(setting.tokenizer), open_haystack(setting.haystack)

    def make(cell: Cell, index: int, rng: random.Random) -> Document:
        assert cell.pairs is not None
        size = cell.pairs + 1
        if CHAINS * size > len(NOUNS):
            raise UsageError(
                f"there are no names for {cell.pairs} hops", f"Ask for at most {len(NOUNS) // CHAINS - 1} hops"
            )
        names = nouns.draw(rng, CHAINS * size)
        values = numbers(rng, CHAINS, DIGITS)
        chains = [chain(names[n * size : (n + 1) * size], value) for n, value in enumerate(values)]
        facts = interleave(rng, chains)
        chance = 1 / len(facts)
        question: list[Piece] = ["\n"]
        for fact, name in zip(chains[0], names, strict=False):
            question += [fact.text.removesuffix(f" {name}."), Ask(f" {name}", name, chance), ". "]
        question[-1] = "."
        places = spread(rng, len(facts))
        return fill(setting.tokenizer, source(rng), lambda f: weave(f, facts, places, question), cell, index)

    return make


def chain(names: Sequence[str], value: str) -> list[Fact]:
    """The value moves to the first name, and every name to the next."""
    return [Fact(f"VAR {before} is in {name}.", name) for before, name in zip((value, *names), names, strict=False)]


def interleave(rng: random.Random, chains: Sequence[Sequence[Fact]]) -> list[Fact]:
    """All facts in one random order that keeps each chain's own."""
    turns = [number for number, facts in enumerate(chains) for _ in facts]
    rng.shuffle(turns)
    rest = [iter(facts) for facts in chains]
    return [next(rest[turn]) for turn in turns]
