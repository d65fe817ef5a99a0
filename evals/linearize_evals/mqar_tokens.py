"""Multi-query associative recall on token ids, zoology's task and grid (arXiv:2312.04927).

`k1 v1 k2 v2 … ` and then the keys again, each followed by its value, at gaps drawn from a power law. Keys come from
the first half of the vocabulary and values from the second. It needs no text, so it runs on models trained from
scratch on it. What differs from zoology's generator: the value follows its query (there, random tokens do, and the
value is only a label); filler is drawn from the tokens that are neither keys nor values of the document, so that no
key is stated with another value; everything comes from the seed.
"""

from __future__ import annotations

import random

from linearize.errors import UsageError
from linearize_evals.document import Cell, Document, Make, Setting, Span

POWER = 0.01  # zoology's alpha


def tokens(setting: Setting) -> Make:
    """The setting's tokenizer may be a vocabulary size; special tokens and token 0 are left out."""
    tokenizer = setting.tokenizer
    size = tokenizer if isinstance(tokenizer, int) else len(tokenizer)
    special = {0, *(getattr(tokenizer, "all_special_ids", None) or ())}
    keys = [token for token in range(size // 2) if token not in special]
    values = [token for token in range(size // 2, size) if token not in special]

    def make(cell: Cell, index: int, rng: random.Random) -> Document:
        length, pairs = cell.length, cell.pairs
        assert length is not None
        assert pairs is not None
        if 2 * pairs >= min(len(keys), len(values)):
            raise UsageError(f"{pairs} pairs need a vocabulary of more than {4 * pairs + 4} tokens, not {size}")
        mine = rng.sample(keys, pairs), rng.sample(values, pairs)
        used = {*mine[0], *mine[1]}
        ids = [token for pair in zip(*mine, strict=True) for token in pair]
        ids += _filler(rng, keys, values, used, length - len(ids))
        spans = []
        for number, gap in enumerate(gaps(rng, (length - 2 * pairs) // 2, pairs)):
            at = 2 * pairs + 2 * gap
            ids[at], ids[at + 1] = mine[0][number], mine[1][number]
            spans.append(Span(at + 1, at + 2, 1 / pairs, at + 1 - 2 * number))
        spans.sort(key=lambda span: span.start)
        return Document(tuple(ids), tuple(spans), length, None, pairs, index)

    return make


def fits(cell: Cell) -> bool:
    """Whether the list and as many queries take no more than the length; zoology's grid has only such cells."""
    return 4 * (cell.pairs or 0) <= (cell.length or 0)


def gaps(rng: random.Random, space: int, count: int) -> list[int]:
    """`count` different places of 0 … space - 1, drawn one after another with weights `(place + 1)^(alpha - 1)`."""
    # The smallest of exponential times with these rates: the same as drawing without replacement, in that order
    # (Efraimidis and Spirakis 2006).
    times = [rng.expovariate(1) * (place + 1) ** (1 - POWER) for place in range(space)]
    return sorted(range(space), key=lambda place: times[place])[:count]


def _filler(rng: random.Random, keys: list[int], values: list[int], used: set[int], count: int) -> list[int]:
    free = [token for token in (*keys, *values) if token not in used]
    return rng.choices(free, k=count)
