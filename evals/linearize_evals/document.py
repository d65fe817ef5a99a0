"""Documents as token ids, and the spans in them that a model has to predict."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from linearize.errors import UsageError


@dataclass(frozen=True)
class Span:
    """An answer: `ids[start:end]` of its document.

    Attributes:
        start: index of its first token, at least 1.
        end: index after its last token.
        chance: accuracy of a guess that only knows the answers in the context (1/N); 0 where there is no such guess.
        distance: how many tokens back a model must see to have the whole needed fact in view while it predicts the
            last token of the answer, `end - 1 - start of the fact`; the nearest statement counts. None without a fact.
        label: what kind of answer it is: "query", "hit", "other".
    """

    start: int
    end: int
    chance: float = 0.0
    distance: int | None = None
    label: str = "query"


@dataclass(frozen=True)
class Document:
    """Token ids and their answers; the cell of the grid that it belongs to.

    Attributes:
        ids: all tokens, answers included, with the tokenizer's special tokens at the front.
        spans: the answers, in order, disjoint.
        length: the cell's length in tokens.
        depth: where the fact stands, from 0 (the beginning) to 1 (right before the question); None without that axis.
        pairs: number of facts; None without that axis.
        index: number of the document within its cell.

    Raises:
        ValueError: if a span isn't inside the document or spans overlap.
    """

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    length: int
    depth: float | None = None
    pairs: int | None = None
    index: int = 0

    def __post_init__(self) -> None:
        last = 1
        for span in self.spans:
            if not last <= span.start < span.end <= len(self.ids):
                raise ValueError(
                    f"span {span.start}:{span.end} doesn't follow token {last} inside {len(self.ids)} tokens"
                )
            last = span.end

    def to_dict(self) -> dict[str, Any]:
        """A JSON document; `from_dict` is the inverse."""
        return asdict(self) | {"ids": list(self.ids), "spans": [asdict(span) for span in self.spans]}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Document:
        fields = {key: document[key] for key in ("length", "depth", "pairs", "index")}
        return cls(ids=tuple(document["ids"]), spans=tuple(Span(**span) for span in document["spans"]), **fields)


@dataclass(frozen=True)
class Cell:
    """One cell of a task's grid; an axis that the task doesn't have is None."""

    length: int | None = None
    depth: float | None = None
    pairs: int | None = None


@dataclass(frozen=True)
class Setting:
    """What every document of a task shares: the tokenizer, and the user's own text or haystack."""

    tokenizer: Any
    text: str | None = None
    haystack: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Fact:
    """Text that states a fact, for instance "garden: 345"; `name` is what answers refer to."""

    text: str
    name: str


@dataclass(frozen=True)
class Ask:
    """The text of an answer that has to be predicted, with its leading space; `fact` names what it needs."""

    text: str
    fact: str
    chance: float = 0.0
    label: str = "query"


Piece = str | Fact | Ask
Make = Callable[[Cell, int, Random], Document]  # a document of a cell, by number, from its own source of randomness


def front(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text (BOS, where it has one)."""
    with_special = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    return []


class Tokens:
    """A tokenised text: `ids`, and which token a character lies in.

    Fast tokenizers tell the characters of every token. For the others, a position is where the tokens of the
    text up to it end.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        fast = bool(getattr(tokenizer, "is_fast", False))
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        self.ids: list[int] = list(encoding["input_ids"])
        offsets = encoding["offset_mapping"] if fast else None
        self.starts = [start for start, _ in offsets] if offsets is not None else None
        self.ends = [end for _, end in offsets] if offsets is not None else None

    def first(self, character: int) -> int:
        """The first token that ends after `character`: the one that holds it."""
        if self.ends is not None:
            return bisect_right(self.ends, character)
        return self._common(character)

    def last(self, character: int) -> int:
        """The number of tokens that begin before `character`."""
        if self.starts is not None:
            return bisect_left(self.starts, character)
        return self._common(character)

    def aligned(self, begin: int, end: int) -> bool:
        """Whether the text between two characters is made of whole tokens."""
        first, last = self.first(begin), self.last(end)
        if first >= last:
            return False
        if self.starts is not None and self.ends is not None:
            return self.starts[first] >= begin and self.ends[last - 1] <= end
        return all(len(self._prefix(at)) == self._common(at) for at in (begin, end))

    def words(self) -> set[int]:
        """The tokens that begin a word, and the number of all tokens; without what a slow tokenizer can't tell."""
        begins = {
            number
            for number, start in enumerate(self.starts or ())
            if start == 0 or self.text[start].isspace() or self.text[start - 1].isspace()
        }
        return begins | {len(self.ids)}

    def _prefix(self, character: int) -> list[int]:
        return list(self.tokenizer(self.text[:character], add_special_tokens=False, verbose=False)["input_ids"])

    def _common(self, character: int) -> int:
        """How many leading tokens the text up to `character` shares with the whole text."""
        count = 0
        for mine, whole in zip(self._prefix(character), self.ids, strict=False):
            if mine != whole:
                break
            count += 1
        return count


def compose(
    tokenizer: Any, pieces: Sequence[Piece], cell: Cell | None = None, *, length: int | None = None, index: int = 0
) -> Document:
    """A document from pieces of text, tokenised as one text, so that its ids are those that a user's text gives.

    Args:
        tokenizer: a tokenizer of transformers, fast or slow.
        pieces: plain text, facts and answers, in order.
        cell: the cell that it belongs to.
        length: the nominal length where the cell has none; the document's own by default.
        index: the document's number within its cell.

    Raises:
        UsageError: an answer or a fact doesn't survive tokenisation, or an answer isn't made of whole tokens.
    """
    cell = cell or Cell()
    tokens = Tokens(tokenizer, "".join(piece if isinstance(piece, str) else piece.text for piece in pieces))
    specials = front(tokenizer)
    unknown = getattr(tokenizer, "unk_token_id", None)
    stated: dict[str, int] = {}
    spans: list[Span] = []
    begin = 0
    for piece in pieces:
        text = piece if isinstance(piece, str) else piece.text
        end = begin + len(text)
        if not isinstance(piece, str):
            first, last = tokens.first(begin), tokens.last(end)
            if unknown is not None and unknown in tokens.ids[first:last]:
                raise _lost(tokenizer, text, "it has no tokens for it")
        if isinstance(piece, Fact):
            stated[piece.name] = first
        elif isinstance(piece, Ask):
            _check(tokens, begin, end)
            distance = last - 1 - stated[piece.fact] if piece.fact in stated else None
            spans.append(Span(first + len(specials), last + len(specials), piece.chance, distance, piece.label))
        begin = end
    ids = (*specials, *tokens.ids)
    return Document(ids, tuple(spans), length or cell.length or len(ids), cell.depth, cell.pairs, index)


def _check(tokens: Tokens, begin: int, end: int) -> None:
    text = tokens.text[begin:end]
    inner = begin + len(text) - len(text.lstrip())  # some tokenizers count the space before a word to no token
    if not tokens.aligned(begin, end) or tokens.first(inner) >= tokens.last(end):
        raise _lost(tokens.tokenizer, text, "its first or last token holds other text too")
    ids = tokens.ids[tokens.first(begin) : tokens.last(end)]
    decoded = tokens.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if decoded.strip() != text.strip():
        raise _lost(tokens.tokenizer, text, f"its tokens give {decoded!r}")


def _lost(tokenizer: Any, text: str, why: str) -> UsageError:
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return UsageError(
        f"{text.strip()!r} doesn't tokenise as an answer with the tokenizer {name!r}: {why}",
        "Use a task whose answers suit this tokenizer, for instance linearize_ar_text",
    )
