"""The rows of training: which tokens they hold, in which order, and that a run goes on where it stopped."""

from __future__ import annotations

import gzip
import json
import random

import pytest
import torch

from linearize.errors import UsageError
from linearize.training import packing, sources
from linearize.training.packing import batch
from linearize.training.schema import Data
from linearize.training.stream import Stream, held_out
from tests.evals.engine import byte_tokenizer

END = 1
TEXTS = [f"{n}:" + "".join(random.Random(n).choices("abcdefgh \n", k=5 + n * n % 83)) + "." for n in range(23)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces and batches so small that every document meets their edges."""
    monkeypatch.setattr(packing, "PIECE", 32)
    monkeypatch.setattr(packing, "FIRST_BATCH", 40)
    monkeypatch.setattr(packing, "LARGEST_BATCH", 200)


@pytest.fixture
def source(tmp_path, monkeypatch, request):
    """The same 23 documents in each way in which they can be stored."""
    kind = getattr(request, "param", "jsonl")
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS)
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_text(lines)
        return str(tmp_path / "a.jsonl")
    if kind == "gz":
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        return str(tmp_path / "a.jsonl.gz")
    if kind == "folder":
        (tmp_path / "in").mkdir()
        for n, text in enumerate(TEXTS[:9]):
            (tmp_path / f"{n}.txt").write_text(text)
        (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(TEXTS[9].encode()))
        rest = [json.dumps({"text": text}) for text in TEXTS[10:]]
        (tmp_path / "in" / "c.jsonl").write_text("\n".join(rest[:6]))
        (tmp_path / "in" / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(rest[6:]).encode()))
        return str(tmp_path)
    datasets = pytest.importorskip("datasets")
    for n in range(2):
        part = {"text": TEXTS[:10] if n == 0 else TEXTS[10:]}
        datasets.Dataset.from_dict(part).to_parquet(str(tmp_path / f"{n}.parquet"))
    if kind == "parquet":
        return str(tmp_path)
    files = [str(tmp_path / f"{n}.parquet") for n in range(2)]

    def load(name, config, split, streaming):
        assert (name, config, split) == ("owner/name", "small", "train")
        return datasets.load_dataset("parquet", data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(sources, "load_dataset", lambda _: load)
    monkeypatch.setattr(sources, "BUFFER", 7)
    return "owner/name:small"


KINDS = pytest.mark.parametrize("source", ["jsonl", "gz", "folder", "parquet", "hub"], indirect=True)


def data(source, **values):
    return Data(**({"source": source, "held_out": 0} | values))


def flat(rows):
    return [token for row in rows for token in row.ids]


def documents(ids, tokenizer):
    """Whole documents in running tokens, split at the token that ends them."""
    found, begin = [], 0
    for at, token in enumerate(ids):
        if token == END:
            found.append(tokenizer.decode(ids[begin:at]))
            begin = at + 1
    return found


@KINDS
@pytest.mark.parametrize("bos", [False, True])
def test_every_epoch_holds_every_token_once_in_another_order(source, bos):
    tokenizer = byte_tokenizer(bos)
    stream = Stream(data(source), tokenizer, 16)
    total = sum(len(text.encode()) + 1 + bos for text in TEXTS)
    ids = flat(stream.take(-(-2 * total // 16)))[: 2 * total]
    found = documents(ids, tokenizer)
    wanted = ["<s>" * bos + text for text in TEXTS]
    first, second = found[: len(TEXTS)], found[len(TEXTS) :]
    assert sorted(first) == sorted(second) == sorted(wanted)
    assert first != second
    assert wanted not in (first, second)
    assert stream.epoch in (1, 2)


@KINDS
def test_documents_keep_their_order_without_shuffling(source):
    rows = Stream(data(source, shuffle=False), byte_tokenizer(), 16).take(200)
    assert documents(flat(rows), byte_tokenizer())[: 2 * len(TEXTS)] == TEXTS + TEXTS


@KINDS
def test_a_state_gives_the_same_rows_at_every_row(source):
    settings = data(source, recall_share=0.3, held_out=2)
    whole = Stream(settings, byte_tokenizer(), 16, longest=24)
    rows, states = [], []
    while whole.epoch < 2:
        states.append((json.dumps(whole.state()), whole.epoch, len(rows)))
        rows += whole.take(1)
    rows += whole.take(5)
    part = Stream(settings, byte_tokenizer(), 16, longest=24)
    for text, epoch, number in states:
        part.load_state(json.loads(text))
        assert (part.epoch, part.rows_seen) == (epoch, number)
        assert json.dumps(part.state()) == text
        assert part.take(5) == rows[number : number + 5]


def test_a_state_serves_another_length(source):
    whole, short, long = (Stream(data(source, held_out=2), byte_tokenizer(), n, longest=24) for n in (8, 8, 24))
    begun = short.take(7)
    long.load_state(short.state())
    assert flat(begun) + flat(long.take(3)) == flat(whole.take(16))


def test_a_state_of_other_data_is_refused(source, tmp_path):
    state = Stream(data(source), byte_tokenizer(), 16).state()
    with pytest.raises(UsageError, match="have changed since the run began"):
        Stream(data(source, seed=1), byte_tokenizer(), 16).load_state(state)
    with open(source, "a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UsageError, match="have changed since the run began"):
        Stream(data(source), byte_tokenizer(), 16).load_state(state)


def test_positions_start_again_at_documents_and_rows_alone(source):
    for row in Stream(data(source), byte_tokenizer(), 64).take(40):
        wanted, last = [], 0
        for at, _ in enumerate(row.ids):
            last = 0 if at == 0 or row.ids[at - 1] == END else last + 1
            wanted.append(last)
        assert row.positions == wanted
    assert all(row.positions is None for row in Stream(data(source, separate=False), byte_tokenizer(), 64).take(3))


@KINDS
@pytest.mark.parametrize(("length", "longest"), [(16, None), (16, 40), (40, 16)])
def test_held_out_rows_are_never_trained_on(source, length, longest):
    tokenizer, settings = byte_tokenizer(), data(source, held_out=3)
    most = max(length, longest or 0)
    judged = flat(held_out(settings, tokenizer, most))
    assert len(judged) == 3 * most
    assert flat(held_out(settings, tokenizer, most, 1)) == judged[:most]
    every = flat(Stream(data(source), tokenizer, sum(len(text) + 1 for text in TEXTS)).take(1))
    trained = len(every) - len(judged)
    ids = flat(Stream(settings, tokenizer, length, longest=longest).take(-(-2 * trained // length)))
    for epoch in (ids[:trained], ids[trained : 2 * trained]):
        # With what is judged on, every document once, one of them cut in two.
        first, second = (set(documents([*part, END], tokenizer)) for part in (judged, epoch))
        assert len([text for text in TEXTS if (text in first) != (text in second)]) >= len(TEXTS) - 1
        assert sorted([*judged, *epoch]) == sorted(every)


def test_held_out_rows_hold_no_recall_documents(source):
    plain, mixed = data(source, held_out=3), data(source, held_out=3, recall_share=1.0)
    assert held_out(plain, byte_tokenizer(), 16) == held_out(mixed, byte_tokenizer(), 16)


def test_recall_rows_take_nothing_from_the_text(source):
    plain = Stream(data(source), byte_tokenizer(), 16).take(700)
    mixed = Stream(data(source, recall_share=0.4), byte_tokenizer(), 16).take(1000)
    same = iter(plain)
    wanted = next(same)
    text = 0
    for row in mixed:
        if row == wanted:
            text, wanted = text + 1, next(same)
    assert 600 - 65 < text < 600 + 65  # four standard deviations of 1000 draws


def test_seeds_and_instances(source):
    def rows(**values):
        return Stream(data(source, recall_share=0.5, **values), byte_tokenizer(), 24).take(40)

    assert rows() == rows()
    assert rows() != rows(seed=1)
    stream = Stream(data(source, recall_share=0.5), byte_tokenizer(), 24)
    assert rows() == [*stream.take(1), *stream.take(13), *stream.take(26)]


def test_a_batch_has_positions_where_documents_are_separate(source):
    made = batch(Stream(data(source), byte_tokenizer(), 12).take(3))
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == {
        "input_ids": ((3, 12), torch.int64),
        "position_ids": ((3, 12), torch.int64),
    }
    assert set(batch(Stream(data(source, separate=False), byte_tokenizer(), 12).take(3))) == {"input_ids"}


def test_too_little_text_is_said(source):
    with pytest.raises(UsageError, match="less text than the 400 rows of 16 tokens that are held out"):
        Stream(data(source, held_out=400), byte_tokenizer(), 16)
    with pytest.raises(UsageError, match="less text than"):
        held_out(data(source, held_out=400), byte_tokenizer(), 16)
    with pytest.raises(UsageError, match=r"3 rows can't be held out with data.held_out 2"):
        held_out(data(source, held_out=2), byte_tokenizer(), 16, 3)
    total = sum(len(text) + 1 for text in TEXTS)
    with pytest.raises(UsageError, match="no more text than the 1 rows"):
        Stream(data(source, held_out=1), byte_tokenizer(), total).take(1)


def test_one_long_text_is_held_out_in_part(tmp_path):
    text = "".join(random.Random(0).choices("abc de\n", k=500))
    (tmp_path / "book.txt").write_text(text)
    settings = data(str(tmp_path / "book.txt"), held_out=2)
    whole = byte_tokenizer()(text)["input_ids"] + [END]
    assert flat(held_out(settings, byte_tokenizer(), 50)) == whole[:100]
    assert flat(Stream(settings, byte_tokenizer(), 50).take(17))[:802] == [*whole[100:], *whole[100:]]


def test_texts_without_words_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " \\n"}\n{"text": "word"}\n{"text": null}\n')
    rows = Stream(data(str(tmp_path / "a.jsonl")), byte_tokenizer(), 10).take(2)
    assert byte_tokenizer().decode(flat(rows)) == "word</s>" * 4
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UsageError, match="no more text"):
        Stream(data(str(tmp_path / "a.jsonl")), byte_tokenizer(), 10).take(1)
