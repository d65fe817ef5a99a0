"""Rows of recall documents, which fit them as far as possible, so that what is asked for stands in the same row."""

from __future__ import annotations

import math
import random

from linearize.training.packing import Encoder, Row, positions
from linearize.training.recall_text import document

TRIES = 5  # at a document that fits the row
SMALL = 64  # tokens; less room isn't worth a fitted document


def fill(seed: str, encoder: Encoder, length: int, separate: bool) -> Row:
    """A row of recall documents: half of the time a single one, so that facts are far away, else several.

    Args:
        seed: the same one gives the same row.
        encoder: of the tokenizer.
        length: tokens of the row. The last document is cut where none fits any more.
        separate: whether positions start again at each document.
    """
    rng = random.Random(seed)
    taken: set[str] = set()
    ids: list[int] = []
    begins: list[int] = []
    ratio = 2.5  # characters of a token, by the last document
    while len(ids) < length:
        begins.append(len(ids))
        room = length - len(ids)
        whole = room < 2 * SMALL or rng.random() < 0.5
        goal = room if whole else int(math.exp(rng.uniform(math.log(SMALL), math.log(room))))
        characters, best = goal * ratio, None
        for _ in range(TRIES):
            used = set(taken)
            page = document(random.Random(f"{seed}:{len(ids)}"), int(characters), used)
            (found,) = encoder.documents([page.text])
            ratio = len(page.text) / len(found)
            if best is None or _misfit(len(found), room) < _misfit(len(best[0]), room):
                best = found, used
            if room < SMALL or (0.9 * goal if whole else 0) <= len(found) <= room:
                break
            characters *= min(0.96 * goal / len(found), 2.0)
        assert best is not None
        ids += best[0][:room]
        taken = best[1]
    return Row(ids, positions(begins, length) if separate else None)


def _misfit(tokens: int, room: int) -> int:
    return room - tokens if tokens <= room else room + tokens
