"""Synthetic documents in which most of the text can only be predicted by recalling what stood before.

A model that learned to do without softmax attention keeps its perplexity on plain text and still forgets names and
numbers; these documents make forgetting expensive. They are of five kinds, each in many formats: lists that are
stated again in other orders and asked about, needles in filler text, ledgers of facts and questions, records with
several fields, and word lists that are copied. Words and formats are others than those of `linearize_evals`, so
that its tasks stay a test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from linearize.training import recall_formats as formats
from linearize.training.recall_formats import Style, draw
from linearize.training.recall_words import sentence

Pairs = Sequence[tuple[str, str]]


class Mark(NamedTuple):
    """`text[start:end]` is the value that belongs to `key`."""

    start: int
    end: int
    key: str


@dataclass
class Recall:
    """A document.

    Attributes:
        text: all of it.
        facts: values where they are stated for the first time.
        answers: values that stood before, and can be told from what stands between.
    """

    text: str = ""
    facts: list[Mark] = field(default_factory=list)
    answers: list[Mark] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)

    def add(self, text: str) -> None:
        self.text += text

    def state(self, style: Style, key: str, value: str, name: str = "", *, told: bool = False) -> None:
        """Write a fact, for the first time or again.

        Args:
            style: how.
            key, value: of what.
            name: the key's, where that alone doesn't identify the fact.
            told: whether the text before tells which value comes; it always does where the key stands there.
        """
        self.add(style.before.replace("{k}", key))
        mark = Mark(len(self.text), len(self.text) + len(value), name or key)
        if mark.key not in self._known:
            self.facts.append(mark)
        elif told or "{k}" in style.before:
            self.answers.append(mark)
        self._known.add(mark.key)
        self.add(value + style.after.replace("{k}", key))


def document(rng: random.Random, characters: int, taken: set[str] | None = None) -> Recall:
    """A document of about `characters`; a little longer at times, and much if hardly anything fits.

    Args:
        rng: source of randomness; the same one gives the same document.
        characters: how long it may be.
        taken: keys of documents that are in view, which it doesn't use; its own are added.
    """
    taken = set() if taken is None else taken
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    page = Recall()
    (kind if characters > 300 else _listing)(rng, page, characters, taken)
    return page


def _pairs(rng: random.Random, count: int, taken: set[str], kinds: formats.Kinds) -> Pairs:
    kind, keys = draw(rng, formats.KEYS, count, taken)
    _, values = draw(rng, kinds, count, {key.lower() for key in keys}, unlike=kind)
    return list(zip(keys, values, strict=True))


def _many(rng: random.Random, most: float) -> int:
    """How many facts: often as many as there may be, else any number, small ones as often as large ones."""
    if most <= 2:
        return 2
    return int(most) if rng.random() < 0.6 else round(math.exp(rng.uniform(math.log(2), math.log(most))))


def _filler(rng: random.Random, page: Recall, until: float) -> None:
    """Sentences until the page has that many characters."""
    while len(page.text) < until:
        page.add(sentence(rng) + (" " if rng.random() < 0.9 else "\n\n"))


def _pad(rng: random.Random, page: Recall, until: float) -> None:
    """Filler where it is worth while, so that what was stated is far away."""
    if len(page.text) < 0.9 * until:
        page.add("\n")
        _filler(rng, page, until)


def _shuffled(rng: random.Random, pairs: Pairs) -> Pairs:
    return rng.sample(pairs, len(pairs))


def _unit(style: Style) -> int:
    return len(style.before) + len(style.after) + 14  # with a key and a value of usual length


def _listing(rng: random.Random, page: Recall, characters: int, taken: set[str]) -> None:
    """A list stated once to three times, in other orders, filler at times, and then its entries asked for."""
    style, question = formats.line_style(rng), rng.choice(formats.QUESTIONS)
    times, share = rng.choice((1, 1, 1, 2, 2, 3)), rng.choice((0.25, 0.5, 1.0))
    restated = "{k}" in style.before and rng.random() < 0.6
    asked = style if restated else question
    each = times * _unit(style) + share * _unit(asked)
    pairs = _pairs(rng, _many(rng, characters / each), taken, formats.LIST_VALUES)
    page.add(rng.choice(formats.TITLES))
    broken = rng.choice(formats.BREAKS)
    for turn in range(times):
        page.add((broken if turn else "") + style.head)
        for key, value in _shuffled(rng, pairs):
            page.state(style, key, value)
    count = max(2, round(share * len(pairs)))
    _pad(rng, page, characters - count * _unit(asked))
    page.add(broken)
    for key, value in _shuffled(rng, pairs)[:count]:
        page.state(asked, key, value)


def _needles(rng: random.Random, page: Recall, characters: int, taken: set[str]) -> None:
    """Facts anywhere in filler text, all or some of them asked for at its end."""
    count = _many(rng, min(characters / 250, 32))
    pairs = _pairs(rng, count, taken, formats.PROSE_VALUES)
    same = rng.random() < 0.5  # one wording for all: only the key tells them apart
    wording = rng.choice(formats.PROSE)
    wordings = [wording if same else rng.choice(formats.PROSE) for _ in pairs]
    end = characters - count * (_unit(wording[0]) + 20)
    places = sorted(rng.uniform(0, end) for _ in pairs)
    for place, (key, value), (style, _) in zip(places, pairs, wordings, strict=True):
        _filler(rng, page, place)
        page.state(style, key, value)
        page.add(" ")
    _filler(rng, page, end)
    page.text = page.text.rstrip()
    ask, reminder, questions = rng.choice(formats.ASKS), rng.choice(formats.REMINDERS), rng.random() < 0.5
    for at in rng.sample(range(count), max(1, round(rng.choice((0.5, 1.0)) * count))):
        _ask(page, pairs[at], wordings[at], ask if questions else None, reminder)


def _ask(
    page: Recall, pair: tuple[str, str], wording: tuple[Style, str], ask: tuple[str, str, str] | None, reminder: str
) -> None:
    """Ask for a fact by a question, or by its own words where the value comes after the key."""
    style, question = wording
    if ask is None and "{k}" in style.before:
        page.add(reminder)
        page.state(style, *pair)
        return
    opening, between, closing = ask or ("\n", " ", ".")
    page.state(Style(opening + question + between, closing), *pair)


def _ledger(rng: random.Random, page: Recall, characters: int, taken: set[str]) -> None:
    """Facts one after another, and in between again and again one that was given any time before."""
    prose = rng.random() < 0.5
    wording = rng.choice(formats.PROSE) if prose else (formats.line_style(rng), "")
    question = rng.choice(formats.QUESTIONS)
    new, filled = rng.uniform(0.2, 0.6), rng.choice((0.0, 0.0, 0.3))
    turns = max(4, int(characters / (_unit(wording[0]) + 90 * filled)))
    pairs = _pairs(rng, max(2, round(new * turns)), taken, formats.PROSE_VALUES if prose else formats.LIST_VALUES)
    again = prose or ("{k}" in wording[0].before and rng.random() < 0.7)
    ask = rng.choice(formats.ASKS) if prose and rng.random() < 0.5 else None
    stated = 0
    while len(page.text) < characters or stated < 2 or not page.answers:
        if stated < len(pairs) and (stated < 2 or rng.random() < new):
            page.state(wording[0], *pairs[stated])
            stated += 1
        elif prose:
            _ask(page, pairs[rng.randrange(stated)], wording, ask, "")
        else:
            page.state(wording[0] if again else question, *pairs[rng.randrange(stated)])
        page.add("\n" if prose and ask else " " if prose else "")
        if rng.random() < filled:
            page.add(sentence(rng) + ("\n" if not prose else " "))


def _records(rng: random.Random, page: Recall, characters: int, taken: set[str]) -> None:
    """Records with several fields each, then fields of some of them."""
    fields = rng.sample(formats.FIELDS, rng.randint(2, 4))
    write, query = rng.choice(_RECORDS), rng.choice(_FIELD_QUERIES)
    each = 24 + 20 * len(fields) + 30 * (share := rng.choice((0.5, 1.0, 1.5)))
    count = _many(rng, characters / each)
    kind, names = draw(rng, formats.KEYS, count, taken)
    columns = [draw(rng, formats.LIST_VALUES, count, {name.lower() for name in names}, unlike=kind)[1] for _ in fields]
    page.add(rng.choice(formats.TITLES))
    write(page, names, fields, columns)
    _pad(rng, page, characters - share * count * 30)
    page.add(rng.choice(formats.BREAKS))
    asked = [(row, column) for row in range(count) for column in range(len(fields))]
    for row, column in rng.sample(asked, min(len(asked), max(2, round(share * count)))):
        style = Style(query.before.replace("{f}", fields[column]), query.after)
        page.state(style, names[row], columns[column][row], f"{names[row]}/{fields[column]}")


def _table(page: Recall, names: Sequence[str], fields: Sequence[str], columns: Sequence[Sequence[str]]) -> None:
    page.add(f"| entry | {' | '.join(fields)} |\n|---{'|---' * len(fields)}|\n")
    _rows(page, names, fields, columns, "| {k}", " | ", " |\n")


def _sheet(page: Recall, names: Sequence[str], fields: Sequence[str], columns: Sequence[Sequence[str]]) -> None:
    page.add(f"entry,{','.join(fields)}\n")
    _rows(page, names, fields, columns, "{k}", ",", "\n")


def _json(page: Recall, names: Sequence[str], fields: Sequence[str], columns: Sequence[Sequence[str]]) -> None:
    _rows(page, names, fields, columns, '{"entry": "{k}"', ', "{f}": "', '"}\n', '"')


def _yaml(page: Recall, names: Sequence[str], fields: Sequence[str], columns: Sequence[Sequence[str]]) -> None:
    _rows(page, names, fields, columns, "- entry: {k}", "\n  {f}: ", "\n")


def _sentences(page: Recall, names: Sequence[str], fields: Sequence[str], columns: Sequence[Sequence[str]]) -> None:
    _rows(page, names, fields, columns, "{k} has", " {f} ", ".\n", ",")


def _rows(
    page: Recall, names: Sequence[str], fields: Sequence[str], columns: Sequence[Sequence[str]],
    start: str, before: str, end: str, after: str = "",
) -> None:  # fmt: skip
    for row, name in enumerate(names):
        page.add(start.replace("{k}", name))
        for number, (label, column) in enumerate(zip(fields, columns, strict=True)):
            last = number == len(fields) - 1
            style = Style(before.replace("{f}", label), end if last else after)
            page.state(style, name, column[row], f"{name}/{label}")


def _copy(rng: random.Random, page: Recall, characters: int, taken: set[str]) -> None:
    """Words in an order that nothing explains, and the same ones in the same order again, from any place on."""
    joint, times = rng.choice((" ", ", ", "\n", " - ", "; ")), rng.choice((2, 2, 3))
    kinds = formats.KEYS if rng.random() < 0.5 else formats.LIST_VALUES
    _, items = draw(rng, kinds, max(4, int(characters / times / 11)), taken)
    page.add(rng.choice(formats.TITLES))
    broken = rng.choice(formats.BREAKS)
    for turn in range(times):
        start = rng.randrange(len(items) // 2) if turn and rng.random() < 0.5 else 0
        page.add((broken if turn else "") + items[start] + joint)
        for before, item in zip(items[start:], items[start + 1 :], strict=False):
            page.state(Style("", joint), before, item, told=True)
    page.text = page.text.rstrip()


_RECORDS = (_table, _sheet, _json, _yaml, _sentences)
_FIELD_QUERIES = tuple(
    Style(before, after)
    for before, after in (
        ("{f} of {k} = ", "\n"),
        ("{k}.{f} == ", "\n"),
        ("{k} / {f} -> ", "\n"),
        ("What is the {f} of {k}? ", "\n"),
        ("The {f} of {k} is ", ". "),
        ("select {f} where entry={k}\n", "\n"),
        ("{k} ({f}) ", "; "),
    )
)
_KINDS: dict[Callable[[random.Random, Recall, int, set[str]], None], float] = {
    _listing: 0.4,
    _needles: 0.2,
    _ledger: 0.2,
    _records: 0.12,
    _copy: 0.08,
}
