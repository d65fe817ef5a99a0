"""Recall documents: others than the test's, solvable, and as long as their row."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from functools import cache

import pytest
from linearize_evals import mqar, niah, tracking, words

from linearize.training import recall_formats, recall_words
from linearize.training.packing import Encoder
from linearize.training.recall_rows import fill
from linearize.training.recall_text import document
from tests.evals.engine import byte_tokenizer

POOLS = ("ADJECTIVES", "CREATURES", "FIRST_NAMES", "PLACES", "VERBS")
SIZES = (150, 400, 1000, 3000, 12000)


@cache
def made(size, count=150):
    return [document(random.Random(f"{size}:{n}"), size) for n in range(count)]


def every():
    return [page for size in SIZES for page in made(size)]


def tokens(text):
    return re.findall(r"\b[a-z]+\b", text.lower())


def test_words_are_not_the_tests():
    ours = {word.lower() for pool in POOLS for word in getattr(recall_words, pool)}
    assert len(ours) > 1300
    assert not ours & set(words.NOUNS)
    rng = random.Random(0)
    invented = {recall_words.invented(rng) for _ in range(50_000)}
    assert len(invented) > 25_000
    assert not invented & set(words.NOUNS)
    # All that can be invented, not only what was.
    parts = ["|".join(getattr(recall_words, name).split()) for name in ("_ONSETS", "_NUCLEI", "_CODAS")]
    shape = re.compile("(?:(?:{})(?:{}))+(?:{})".format(*parts))
    assert all(shape.fullmatch(word) for word in list(invented)[:100])
    assert not [word for word in words.NOUNS if shape.fullmatch(word) and len(re.findall("[aeiou]+", word)) > 1]


def test_no_key_or_value_is_a_noun_of_the_test():
    for page in every():
        for mark in (*page.facts, *page.answers):
            assert not {*tokens(page.text[mark.start : mark.end]), *tokens(mark.key.split("/")[0])} & set(words.NOUNS)


def test_filler_is_not_the_tests():
    theirs = (*words.SUBJECTS, *words.VERBS, *words.OBJECTS, *words.TAILS, *words.NOISE)
    ours = " / ".join(recall_words.PHRASES).lower()
    assert not [phrase for phrase in theirs if phrase.lower() in ours]


def test_filler_and_questions_hold_no_key():
    keys = {word.lower() for pool in POOLS for word in getattr(recall_words, pool)}
    lists = [*recall_formats.LINES, *recall_formats.QUESTIONS]
    prose = [style for style, _ in recall_formats.PROSE]
    written = [part for style in (*lists, *prose) for part in style]
    written += [question for _, question in recall_formats.PROSE]
    written += [part for ask in recall_formats.ASKS for part in ask]
    written += [*recall_formats.REMINDERS, *recall_formats.BREAKS, *recall_formats.TITLES, *recall_formats.FIELDS]
    found = {word for text in (*written, *recall_words.PHRASES) for word in tokens(text.replace("{k}", ""))}
    assert found & keys == set()


def test_templates_are_not_the_tests():
    # The test's own code writes what we may not: each line of its lists, and its needles, questions and chains.
    pairs = [("garden", "345"), ("river", "678")]
    for style in (("{}:", " {}", "\n"), ('"{}": "', "{}", '",\n')):
        pieces = mqar._write(pairs, random.Random(0), style, 2, 0)
        text = "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)
        listed = re.compile(r'\w+: \w+|"\w+": "\w+",?')
        assert all(listed.fullmatch(line) for line in text.splitlines() if line)
        assert not [line for page in every() for line in page.text.splitlines() if listed.fullmatch(line)]
    needle = niah.codes(random.Random(0), ["garden"])[0].text
    assert needle.startswith(niah.CUE.format("garden"))
    move = tracking.chain(["garden"], "123")[0].text
    assert move == "VAR 123 is in garden."
    cues = ("The secret code", "secret", "pass key", "Remember it", "VAR ", " is in ")
    assert all(any(cue in text for cue in cues) for text in (needle, move))
    assert not [cue for page in every() for cue in cues if cue in page.text]


def test_numbers_have_other_lengths_than_the_tests():
    lists, prose = recall_formats.LIST_VALUES, recall_formats.PROSE_VALUES
    assert not {"3 digits", "4 digits"} & set(lists)
    assert not {f"{niah.CODE_DIGITS} digits", f"{niah.PASS_DIGITS} digits"} & set(prose)
    digits = {kind: len(make(random.Random(0))) for kinds in (lists, prose) for kind, (make, _) in kinds.items()}
    assert {f"{n} digits": n for n in range(2, 8)}.items() <= digits.items()


def test_answers_stand_in_the_text_before():
    """Found without the marks of where facts are: the key stands just before its answer, and beside it earlier."""
    for page in every():
        text = page.text
        for start, end, key in page.answers:
            name, _, label = key.partition("/")
            value = text[start:end]
            asked = text[max(0, start - 90) : start]
            assert name in asked
            assert label in asked or "entry," in text or "| entry" in text
            earlier = (at.start() for at in re.finditer(re.escape(value), text[:start]))
            assert any(name in text[max(0, at - 160) : at + len(value) + 90] for at in earlier), (key, value, text)


def test_lists_never_contradict_themselves():
    """Lists read by a parser of our own: a key that comes again has its value again."""
    again = 0
    for page in every():
        for line in (
            r"(.+) -> (.+)",
            r"(.+) = (.+)",
            r"(\w+)\t(.+)",
            r"\| (.+) \| (.+) \|",
            r"lookup\((.+)\) returns (.+)",
        ):
            values = defaultdict(list)
            for key, value in re.findall(f"^{line}$", page.text, re.MULTILINE):
                values[key].append(value)
            again += sum(len(found) - 1 for found in values.values())
            assert all(len(set(found)) == 1 for found in values.values()), page.text
    assert again > 500


def test_documents_are_varied():
    shapes = {re.sub(r"\w+", "x", page.text[: page.facts[0].end + 20])[-24:] for page in made(1000)}
    assert len(shapes) > 75
    facts = [len(page.facts) for page in made(12000)]
    assert min(facts) == 2
    assert max(facts) > 200
    assert len(set(facts)) > 30
    stated = [{mark.key: mark.start for mark in reversed(page.facts)} for page in made(12000)]
    far = [
        mark.start - first[mark.key] for page, first in zip(made(12000), stated, strict=True) for mark in page.answers
    ]
    assert sum(distance > 6000 for distance in far) > len(far) / 10
    assert sum(distance < 600 for distance in far) > len(far) / 100
    for size in SIZES[1:]:
        lengths = [len(page.text) for page in made(size)]
        assert sum(0.6 * size < length < 1.25 * size for length in lengths) > 0.85 * len(lengths), size
        assert sum(bool(page.answers) for page in made(size)) == len(lengths)


@pytest.mark.parametrize("length", [1, 40, 300, 1024])
def test_rows_are_full_and_end_with_whole_documents(length):
    tokenizer, whole = byte_tokenizer(), 0
    for n in range(40):
        row = fill(f"seed:{n}", Encoder(tokenizer), length, True)
        assert row == fill(f"seed:{n}", Encoder(tokenizer), length, True)
        assert len(row.ids) == len(row.positions or ()) == length
        begins = [at for at, position in enumerate(row.positions or ()) if position == 0]
        assert begins == [0, *(at + 1 for at, token in enumerate(row.ids[:-1]) if token == 1)]
        last = max((at for at, token in enumerate(row.ids) if token == 1), default=0)
        whole += last > 0.7 * length
    assert fill("seed:0", Encoder(tokenizer), length, False).positions is None
    assert length < 300 or whole >= 34


def test_documents_of_a_row_have_different_keys():
    taken = set()
    keys = []
    for n in range(30):
        page = document(random.Random(n), 500, taken)
        found = {mark.key.split("/")[0].lower() for mark in page.facts}
        assert not found & set(keys)
        keys += found
