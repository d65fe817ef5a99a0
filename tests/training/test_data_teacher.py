"""Text sampled from a teacher: what its own softmax attention would say, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import random

import pytest
import torch

import linearize
from linearize.errors import ModelError
from linearize.training import teacher_text
from linearize.training.schema import Data
from linearize.training.stream import Stream
from linearize.training.teacher_text import sample
from tests.evals.engine import byte_tokenizer, tiny


def texts(path):
    return [json.loads(line)["text"] for line in gzip.open(path, "rt", encoding="utf-8")]


def test_a_converted_model_is_sampled_as_the_model_that_it_was(tmp_path):
    converted, seen = tiny("default"), []
    assert sample(converted, byte_tokenizer(), 150, 40, tmp_path / "a.gz", progress=lambda *a: seen.append(a)) == 160
    sample(tiny(), byte_tokenizer(), 150, 40, tmp_path / "b.gz")
    with linearize.bypass(converted):
        sample(converted, byte_tokenizer(), 150, 40, tmp_path / "c.gz")
        assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes() == (tmp_path / "c.gz").read_bytes()
    assert seen[-1] == ("sample", 160, 160)
    sample(converted, byte_tokenizer(), 150, 40, tmp_path / "d.gz", seed=1)
    assert texts(tmp_path / "d.gz") != texts(tmp_path / "a.gz")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".gz"]


def test_rows_do_not_depend_on_how_many_are_sampled_at_once(tmp_path, monkeypatch):
    model = tiny()
    sample(model, byte_tokenizer(), 200, 40, tmp_path / "a.gz")
    monkeypatch.setattr(teacher_text, "FEW_ROWS", 2)
    sample(model, byte_tokenizer(), 200, 40, tmp_path / "b.gz")
    assert texts(tmp_path / "a.gz") == texts(tmp_path / "b.gz")
    real = teacher_text._sample

    def hungry(model, start, numbers, *rest):
        if len(numbers) > 1:
            raise torch.OutOfMemoryError
        return real(model, start, numbers, *rest)

    monkeypatch.setattr(teacher_text, "_sample", hungry)
    sample(model, byte_tokenizer(), 200, 40, tmp_path / "c.gz")
    assert texts(tmp_path / "a.gz") == texts(tmp_path / "c.gz")


def test_each_token_is_drawn_by_its_probability_without_a_cache():
    model, length = tiny(), 30
    rows = teacher_text._sample(model, 0, range(5, 8), length, 3, 259, lambda _: None)
    for number, row in zip(range(5, 8), rows, strict=True):
        source = random.Random(f"3:teacher:{number}")
        with torch.no_grad():
            chances = model(row[None], use_cache=False).logits[0].double().softmax(-1)
        for at in range(1, length):
            below = float(chances[at - 1, : row[at]].sum())
            assert below - 1e-5 < source.random() < below + float(chances[at - 1, row[at]]) + 1e-5


def scripted(monkeypatch, text):
    """A model that says `text`, after the token that begins it; and how many tokens that are."""
    ids = byte_tokenizer()(text)["input_ids"]

    def say(model, start, numbers, length, *_):
        return torch.tensor([([start, *ids] * length)[:length] for _ in numbers])

    monkeypatch.setattr(teacher_text, "_sample", say)
    return tiny(), len(ids) + 1


def test_documents_end_at_eos_unless_turns_do(tmp_path, monkeypatch):
    model, length = scripted(monkeypatch, "one</s></s>two  <pad>é")
    length -= 1  # in the middle of the é
    for bos in (False, True):
        tokenizer = byte_tokenizer(bos)
        sample(model, tokenizer, 1, length, tmp_path / "a.gz")
        assert texts(tmp_path / "a.gz") == ["<s>one" if not bos else "one", "two  <pad>"]
        tokenizer.chat_template = "{{ messages[0].content }}</s>"
        sample(model, tokenizer, 1, length, tmp_path / "a.gz")
        assert texts(tmp_path / "a.gz") == [("" if bos else "<s>") + "one</s></s>two  <pad>"]


def test_a_stream_reads_what_was_sampled(tmp_path, monkeypatch):
    model, length = scripted(monkeypatch, "one</s>two</s>")
    tokenizer = byte_tokenizer(bos=True)
    sample(model, tokenizer, 30, length, tmp_path / "teacher.jsonl.gz")
    stream = Stream(Data(held_out=0), tokenizer, 10, teacher_text=tmp_path / "teacher.jsonl.gz")
    assert tokenizer.decode(stream.take(4)[0].ids) in ("<s>one</s><s>two</s>", "<s>two</s><s>one</s>", "<s>one</s>" * 2)


def test_what_can_t_be_sampled(tmp_path, monkeypatch):
    out = tmp_path / "in" / "a.gz"
    broken = tiny()
    torch.nn.init.constant_(broken.model.norm.weight, float("nan"))
    with pytest.raises(ModelError, match="the teacher's logits aren't finite after 1 tokens"):
        sample(broken.train(), byte_tokenizer(), 10, 10, out)
    assert broken.training
    nothing = byte_tokenizer()
    nothing.bos_token = nothing.eos_token = None
    with pytest.raises(ModelError, match="neither a BOS nor an EOS"):
        sample(tiny(), nothing, 10, 10, out)
    model, length = scripted(monkeypatch, "</s>")
    with pytest.raises(ModelError, match="ends every text at once"):
        sample(model, byte_tokenizer(bos=True), 10, length, out)
    assert list(out.parent.iterdir()) == []
