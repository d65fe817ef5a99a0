"""Documents as token ids, cut into rows of equal length.

T is the length of a row, B the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from linearize.errors import UsageError

if TYPE_CHECKING:
    import torch

PIECE = 1 << 16  # characters that are tokenised as one text: the time and memory of a tokenizer grow with its length
FIRST_BATCH, LARGEST_BATCH = 1 << 14, 1 << 18  # characters that are tokenised in one call


class Row(NamedTuple):
    """One sequence of T tokens.

    Attributes:
        ids: T token ids.
        positions: T positions, which start again at 0 with each document; None where documents see each other.
    """

    ids: list[int]
    positions: list[int] | None


class Spot(NamedTuple):
    """Where a token stands in its document: which piece of text, and which token of that; JSON-able.

    Pieces are tokenised one by one, so a spot deep inside a book is found without tokenising all that is before it.
    """

    piece: int = 0
    token: int = 0


class Source(NamedTuple):
    """A document that is to be packed, from `start` on; `key` is whatever the caller knows it by."""

    key: Any
    text: str
    start: Spot = Spot()


class Segment(NamedTuple):
    """Tokens of one piece of a document.

    Attributes:
        key: the document's.
        start: where the first of the tokens stands.
        ids: the tokens.
        begins: whether positions start again here.
    """

    key: Any
    start: Spot
    ids: list[int]
    begins: bool


class Encoder:
    """Tokenises documents: what the tokenizer puts before a text, the text, and the token that ends one.

    Args:
        tokenizer: a tokenizer of transformers. Its own tokens at the front are used as they are; `eos_token`, where
            there is one, goes to the end of every document.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._front = front(tokenizer)
        self._back = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of whole, short documents."""
        return [[*self._front, *ids, *self._back] for ids in self._batch(texts)]

    def segments(self, sources: Iterable[Source]) -> Iterator[Segment]:
        """The tokens of documents of any length, in order, tokenised some ahead; those without text are left out."""
        waiting: list[tuple[Source, int, str, bool]] = []
        characters, most = 0, FIRST_BATCH
        for source in sources:
            for number, text, last in _pieces(source.text):
                if number < source.start.piece:
                    continue
                waiting.append((source, number, text, last))
                characters += len(text)
                if characters >= most:
                    yield from self._segments(waiting)
                    waiting, characters, most = [], 0, min(2 * most, LARGEST_BATCH)
        yield from self._segments(waiting)

    def _segments(self, waiting: Sequence[tuple[Source, int, str, bool]]) -> Iterator[Segment]:
        batch = self._batch([text for _, _, text, _ in waiting])
        for (source, number, _, last), ids in zip(waiting, batch, strict=True):
            whole = [*(self._front if number == 0 else ()), *ids, *(self._back if last else ())]
            begins = number == source.start.piece
            start = source.start if begins else Spot(number)
            yield Segment(source.key, start, whole[start.token :], begins)

    def _batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return self._tokenizer(list(texts), **options)["input_ids"]


class Packer:
    """Rows from the segments of documents, one after another without a gap.

    Args:
        segments: the tokens, in order.
        length: T.
        separate: whether rows get positions that start again at each document.

    Attributes:
        key: the document that the next token belongs to, as far as it is known; None before the first row.
        spot: where that token stands in it.
    """

    def __init__(self, segments: Iterator[Segment], length: int, separate: bool) -> None:
        self._segments, self._length, self._separate = segments, length, separate
        self._ids: list[int] = []
        self._at = 0
        self.key: Any = None
        self._start = Spot()

    @property
    def spot(self) -> Spot:
        return Spot(self._start.piece, self._start.token + self._at)

    def row(self) -> Row | None:
        """The next row, or None if too few tokens are left for a whole one."""
        ids: list[int] = []
        begins: list[int] = []
        while True:
            taken = self._ids[self._at : self._at + self._length - len(ids)]
            ids += taken
            self._at += len(taken)
            if len(ids) == self._length:
                return Row(ids, positions(begins, self._length) if self._separate else None)
            segment = next(self._segments, None)
            if segment is None:
                return None
            self.key, self._start, self._ids, begin = segment
            self._at = 0
            if begin:
                begins.append(len(ids))


def positions(begins: Sequence[int], length: int) -> list[int]:
    """Positions of a row, from 0 at its start and again from 0 at each of `begins`, which ascend."""
    found: list[int] = []
    for begin in (*begins, length):
        found += range(begin - len(found))
    return found


def batch(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Rows as what a model takes.

    Returns:
        `input_ids` and, where the rows have positions, `position_ids`: both (B, T), int64.

    Raises:
        UsageError: there are no rows.
    """
    import torch

    if not rows:
        raise UsageError("a batch needs at least one row")
    tensors = {"input_ids": torch.tensor([row.ids for row in rows], dtype=torch.long)}
    if rows[0].positions is not None:
        tensors["position_ids"] = torch.tensor([row.positions for row in rows], dtype=torch.long)
    return tensors


def front(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before a text (BOS, where it has one)."""
    framed = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    starts = range(len(framed) - len(plain) + 1)
    return next((framed[:start] for start in starts if framed[start : start + len(plain)] == plain), [])


def _pieces(text: str) -> Iterator[tuple[int, str, bool]]:
    """A text in numbered pieces, each with whether it is the last; none of a text of spaces.

    They end before a space or line break where there is one near the end, since most tokenizers take the space to the
    word that follows.
    """
    if not text.strip():
        return
    begin = 0
    for number in count():
        end = begin + PIECE
        if end >= len(text):
            yield number, text[begin:], True
            return
        near = max(text.rfind(" ", end - PIECE // 8, end), text.rfind("\n", end - PIECE // 8, end))
        end = near if near > begin else end
        yield number, text[begin:end], False
        begin = end
