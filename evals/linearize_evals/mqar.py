"""Multi-query associative recall (arXiv:2312.04927) as lists of pairs in plain text, which pretrained models can read.

A document states `pairs` facts, one a line, and then asks for up to `QUERIES` of them in the same format, in another
order. All are scored in one forward: an answer is in view only after it was predicted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from linearize.errors import UsageError
from linearize_evals.document import Ask, Cell, Document, Fact, Make, Piece, Setting, compose
from linearize_evals.words import NOUNS, Nouns, numbers

QUERIES = 16  # in one document they count nearly as 16 documents of one query each
WARM_UP = 4  # a model that saw a list once takes some queries to notice what is asked

Pairs = Sequence[tuple[str, str]]


def lines(setting: Setting) -> Make:
    """`garden: 345`, the list stated twice, in two orders."""
    return _lists(setting.tokenizer, partial(numbers, digits=3), ("{}:", " {}", "\n"), times=2)


def lines_once(setting: Setting) -> Make:
    """`garden: 345`, stated once; the answers of the first queries are given and not scored."""
    return _lists(setting.tokenizer, partial(numbers, digits=3), ("{}:", " {}", "\n"), times=1, warm_up=WARM_UP)


def json(setting: Setting) -> Make:
    """`"garden": "3456",`, stated once; the answers of the first queries are given and not scored."""
    return _lists(setting.tokenizer, partial(numbers, digits=4), ('"{}": "', "{}", '",\n'), times=1, warm_up=WARM_UP)


def nouns(setting: Setting) -> Make:
    """`garden: river`, the list stated twice. No noun is both a key and a value."""
    return _lists(setting.tokenizer, None, ("{}:", " {}", "\n"), times=2)


def _lists(tokenizer: Any, values: Any, style: tuple[str, str, str], times: int, warm_up: int = 0) -> Make:
    pool = Nouns(tokenizer)
    sizes: dict[int, int] = {}

    def draw(rng: random.Random, count: int) -> Pairs:
        most = len(NOUNS) // (1 if values else 2)
        if not warm_up < count <= most:
            raise UsageError(
                f"this task can't have {count} pairs", f"Use a number of pairs between {warm_up + 1} and {most}"
            )
        keys = pool.draw(rng, count if values else 2 * count)
        return list(zip(keys[:count], values(rng, count) if values else keys[count:], strict=True))

    def make(cell: Cell, index: int, rng: random.Random) -> Document:
        assert cell.pairs is not None
        write = partial(_write, style=style, times=times, warm_up=warm_up)
        if cell.pairs not in sizes:  # one number for the cell, whichever of its documents are built
            example = random.Random("size")
            typical = compose(tokenizer, write(draw(example, cell.pairs), example))
            sizes[cell.pairs] = -(-len(typical.ids) // 16) * 16
        return compose(tokenizer, write(draw(rng, cell.pairs), rng), cell, length=sizes[cell.pairs], index=index)

    return make


def _write(pairs: Pairs, rng: random.Random, style: tuple[str, str, str], times: int, warm_up: int) -> list[Piece]:
    before, answer, after = style
    pieces: list[Piece] = []
    for _ in range(times):
        # In another order each time: a list that repeats as a whole teaches to go on in its order.
        for key, value in rng.sample(pairs, len(pairs)):
            pieces += [Fact(before.format(key) + answer.format(value), key), after]
        pieces.append("\n")
    asked = rng.sample(pairs, min(QUERIES + warm_up, len(pairs)))
    for number, (key, value) in enumerate(asked):
        text = answer.format(value)
        shown = text if number < warm_up else Ask(text, key, 1 / len(pairs))
        pieces += [before.format(key), shown, after]
    return pieces[:-1] if after == "\n" else [*pieces[:-1], after.rstrip()]
