"""Natural text: which tokens are associative recall, comparable windows, and the files that a text can come from."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from linearize_evals import text as texts
from linearize_evals import words
from linearize_evals.catalogue import build
from linearize_evals.text import read_text

from linearize.errors import UsageError
from tests.evals.engine import byte_tokenizer
from tests.evals.stubs import bpe

RNG = random.Random(5)
STORY = " ".join(words.sentence(RNG) for _ in range(600))


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    return str(path)


def test_a_hit_completes_a_pair_of_tokens_seen_before(story):
    (document,) = build("linearize_ar_text", bpe(), lengths=[300], samples=1, text=story)
    assert [span.start for span in document.spans] == list(range(1, 300))
    ids = document.ids
    for span in document.spans:
        at = span.start
        earlier = [b for b in range(at - 1) if ids[b : b + 2] == ids[at - 1 : at + 1]]
        assert (span.label, span.distance) == (("hit", at - earlier[-1]) if earlier else ("other", None))
        assert span.end == at + 1
    assert {span.label for span in document.spans} == {"hit", "other"}


def test_windows_of_one_number_end_at_the_same_token(story):
    tokenizer = bpe()
    documents = build("linearize_perplexity", tokenizer, lengths=[200, 1000], samples=4, text=story)
    for short, long in zip(documents[::2], documents[1::2], strict=True):
        assert (len(short.ids), len(long.ids)) == (200, 1000)
        assert long.ids[-200:] == short.ids
        assert tokenizer.decode(long.ids).strip() in STORY
    assert [(span.start, span.end) for span in documents[0].spans] == [(1, 64), (64, 128), (128, 192), (192, 200)]
    assert len({document.ids for document in documents}) == 8


@pytest.mark.parametrize("name", ["linearize_perplexity", "linearize_ar_text"])
def test_a_window_holds_whole_words_and_keeps_the_length_of_its_cell(name, story):
    """Cut inside a word, most tokenizers would split the text in another way."""
    for document in build(name, byte_tokenizer(), lengths=[200], samples=8, text=story):
        text = byte_tokenizer().decode(document.ids)
        assert set(text.split()) <= set(STORY.split())
        assert document.length == 200
        assert 168 < len(document.ids) <= 200


def test_texts_that_are_too_short_or_too_long(story, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"story.txt has \d+ tokens, of 50000 needed"):
        build("linearize_perplexity", bpe(), lengths=[50000], text=story)
    tokens = len(bpe()(STORY)["input_ids"])
    assert len(build("linearize_perplexity", bpe(), lengths=[tokens], samples=2, text=story)[1].ids) == tokens
    monkeypatch.setattr(texts, "MAX_CHARACTERS", 100)
    assert read_text(story) == STORY[:100]


def test_a_text_can_be_plain_or_json_lines_packed_or_not(tmp_path):
    first = "one\u2028é"  # JSON may hold a line separator as it is
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in (first, "two"))
    for name, content in (("a.txt", f"{first}\n\ntwo"), ("a.jsonl", lines)):
        (tmp_path / name).write_text(content, encoding="utf-8")
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        assert read_text(str(tmp_path / name)) == read_text(str(tmp_path / f"{name}.gz")) == f"{first}\n\ntwo"


def test_a_data_set_by_name(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name, config, split, streaming):
        calls.append((name, config, split))
        return [{"text": "one"}, {"text": "two"}] if name == "prose" else [{"words": "one"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_text("prose") == read_text("prose:en:train") == "one\n\ntwo"
    assert calls == [("prose", None, "test"), ("prose", "en", "train")]
    with pytest.raises(UsageError, match='no column "text"'):
        read_text("numbers")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "there is no text file"),
        ("a.pdf", b"%PDF", "isn't a text that can be read"),
        ("a.txt.gz", b"plain", "can't be read as text"),
        ("a.txt", b"\xff\xfe", "can't be read as text"),
        ("a.jsonl", b'{"words": "a"}\n', 'isn\'t lines of JSON with a key "text"'),
        ("b.jsonl", b'["a"]\n', 'isn\'t lines of JSON with a key "text"'),
        ("c.jsonl", b'{"text": 5}\n', 'isn\'t lines of JSON with a key "text"'),
        ("d.jsonl", b"text", 'isn\'t lines of JSON with a key "text"'),
    ],
)
def test_files_that_are_no_text(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_text(str(tmp_path / name))


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("x")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read anything
    with pytest.raises(UsageError, match=r"mine\.txt' can't be read \(Permission denied\)"):
        read_text(str(tmp_path / "mine.txt"))
