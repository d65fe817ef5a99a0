"""The rows of a training run: packed text with a share of synthetic recall documents, the same at every try.

Row r depends on the settings, the tokenizer, the length and r alone. The rows that a model is judged on come from the
front of the text, which training never sees, in no epoch.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from linearize.errors import UsageError
from linearize.training.packing import Encoder, Packer, Row, Segment, Source, Spot
from linearize.training.recall_rows import fill
from linearize.training.sources import open_source

_SHAPING = ("column", "separate", "recall_share", "held_out", "shuffle", "seed")  # settings that a state depends on


class _Key(NamedTuple):
    epoch: int
    place: Any
    number: int


class _Front(NamedTuple):
    """Where training text begins: documents below `number` are held out, and that one's tokens before `spot`."""

    number: int
    spot: Spot


class Stream:
    """Rows without end: when the last document is used up, the next epoch begins with all of them permuted anew.

    Rows of recall documents stand between those of text and take nothing away from it: the rows of text are the same
    ones, in the same order, with any `recall_share`.

    Args:
        data: the recipe's section `data`.
        tokenizer: a tokenizer of transformers.
        length: tokens of a row.
        teacher_text: the .jsonl.gz that `teacher_text.sample` wrote, for the source `teacher`.
        longest: the length that the held-out rows may have at most. Give the longest of all stages to each of their
            streams, or a stage of shorter rows trains on what another one's rows are judged on.

    Attributes:
        rows_seen: rows taken so far.
        epoch: which pass over the documents the last row of text ended in, from 0.

    Raises:
        UsageError: the source can't be read, or holds no more text than is held out.
        NetworkError: the data set can't be loaded.
    """

    def __init__(
        self, data: Any, tokenizer: Any, length: int, *, teacher_text: Path | None = None, longest: int | None = None
    ) -> None:
        self._data, self._length, self._tokenizer = data, length, tokenizer
        self._source = open_source(data, teacher_text)
        self._encoder = Encoder(tokenizer)
        longest = max(length, longest or length)
        self._front = self._find_front(data.held_out * longest)
        shaping = {name: getattr(data, name) for name in _SHAPING}
        identity = json.dumps([shaping, longest, self._source.identity], sort_keys=True)
        self._digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.rows_seen = 0
        self._begin(0, None, Spot())

    @property
    def epoch(self) -> int:
        return self._epoch if self._packer.key is None else self._packer.key.epoch

    def take(self, n: int) -> list[Row]:
        """The next n rows, of `length` tokens each."""
        return [self._next() for _ in range(n)]

    def state(self) -> dict[str, Any]:
        """Where the stream is, JSON-able. It doesn't depend on `length`: a later stage may go on from here."""
        if self._packer.key is None:
            epoch, place, spot = self._epoch, self._place, self._spot
        else:
            epoch, place, _ = self._packer.key
            spot = self._packer.spot
        return {"data": self._digest, "rows_seen": self.rows_seen, "epoch": epoch, "place": place, "spot": list(spot)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`: `take` gives the rows that it would have given without the interruption.

        Raises:
            UsageError: the state is of other data, or of other settings.
        """
        if state["data"] != self._digest:
            what = f"'{self._data.source}' or other settings under `data` have changed since the run began"
            raise UsageError(what, "Put them back, or begin the run anew")
        self.rows_seen = state["rows_seen"]
        self._begin(state["epoch"], state["place"], Spot(*state["spot"]))

    def _begin(self, epoch: int, place: Any, spot: Spot) -> None:
        self._epoch, self._place, self._spot = epoch, place, spot
        segments = self._segments(epoch, place, spot)
        self._packer = Packer(segments, self._length, self._data.separate)

    def _next(self) -> Row:
        number, data = self.rows_seen, self._data
        if random.Random(f"{data.seed}:{number}").random() < data.recall_share:
            row = fill(f"{data.seed}:{number}:recall", self._encoder, self._length, data.separate)
        else:
            row = self._packer.row()
            assert row is not None, "epochs have no end"
        self.rows_seen += 1
        return row

    def _segments(self, epoch: int, place: Any, spot: Spot) -> Iterator[Segment]:
        while True:
            some = False
            for segment in self._encoder.segments(self._documents(epoch, place, spot)):
                some = some or bool(segment.ids)
                yield segment
            if not some and place is None:
                raise UsageError(
                    f"'{self._data.source}' holds no more text than the {self._data.held_out} rows that are held out",
                    "Give more text, or lower data.held_out",
                )
            epoch, place, spot = epoch + 1, None, Spot()

    def _documents(self, epoch: int, place: Any, spot: Spot) -> Iterator[Source]:
        for found in self._source.walk(epoch, place, self._front.number):
            start = self._front.spot if found.number == self._front.number else Spot()
            yield Source(_Key(epoch, found.place, found.number), found.text, max(start, spot))
            spot = Spot()

    def _find_front(self, tokens: int) -> _Front:
        if not tokens:
            return _Front(0, Spot())
        packer = Packer(_front_segments(self._source, self._encoder), tokens, False)
        if packer.row() is None:
            raise _too_little(self._data, tokens // self._data.held_out)
        return _Front(packer.key.number, packer.spot)


def held_out(
    data: Any, tokenizer: Any, length: int, n: int | None = None, *, teacher_text: Path | None = None
) -> list[Row]:
    """The rows to judge a model on: the first n of the text, `data.held_out` by default, without recall documents.

    A stream leaves them out if its `length` or its `longest` is at least this `length`.

    Args:
        data, tokenizer, length, teacher_text: as of `Stream`.
        n: at most `data.held_out`.

    Raises:
        UsageError: there is too little text, or more rows are asked for than are held out.
        NetworkError: the data set can't be loaded.
    """
    count: int = data.held_out if n is None else n
    if count > data.held_out:
        what = f"{count} rows can't be held out with data.held_out {data.held_out}"
        raise UsageError(what, f"Set data.held_out to {count}")
    segments = _front_segments(open_source(data, teacher_text), Encoder(tokenizer))
    packer = Packer(segments, length, data.separate)
    rows = [row for row in (packer.row() for _ in range(count)) if row is not None]
    if len(rows) < count:
        raise _too_little(data, length)
    return rows


def _front_segments(source: Any, encoder: Encoder) -> Iterator[Segment]:
    return encoder.segments(Source(_Key(0, found.place, found.number), found.text) for found in source.walk(None))


def _too_little(data: Any, length: int) -> UsageError:
    return UsageError(
        f"'{data.source}' holds less text than the {data.held_out} rows of {length} tokens that are held out",
        "Give more text, or lower data.held_out",
    )
