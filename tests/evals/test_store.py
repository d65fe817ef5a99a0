"""The score cache: what was kept is found, damage is cut off or refused; and the fingerprint that names a model."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time

import pytest
import torch
from linearize_evals.document import Document, Span
from linearize_evals.fingerprint import fingerprint
from linearize_evals.scoring import score
from linearize_evals.store import Store, document_key, request_key

import linearize
from linearize.errors import ModelError, ResourceError, UsageError
from tests.evals.engine import RECIPES, byte_tokenizer, documents, tiny

IDENTITY = {"fingerprint": "a" * 64, "dtype": "float32", "torch": "2.13"}


def test_what_was_kept_is_found_again(tmp_path):
    store = Store(tmp_path / "new" / "folder", IDENTITY)
    store.append([("a", [0.1 + 0.2, None]), ("b", [[1, 2]])])
    store.append([("a", "another"), ("c", {"é": True})])
    again = Store(tmp_path / "new" / "folder", dict(reversed(IDENTITY.items())))
    assert [again.get(key) for key in "abcd"] == [[0.1 + 0.2, None], [[1, 2]], {"é": True}, None]
    assert (len(again), again.path) == (3, store.path)
    assert Store(tmp_path / "new" / "folder", IDENTITY | {"dtype": "bfloat16"}).path != store.path


@pytest.mark.parametrize("torn", ['{"key": "b", "sco', '{"key": "b", "score": 1}', "\0" * 100_000])
def test_a_torn_last_line_is_cut_off(tmp_path, torn):
    store = Store(tmp_path, IDENTITY)
    store.append([("a", 1)])
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + torn.encode())
    store.append([("c", 3)])  # by one who had the file open
    assert store.path.read_bytes() == whole + b'{"key": "c", "score": 3}\n'
    store.path.write_bytes(store.path.read_bytes() + torn.encode())
    again = Store(tmp_path, IDENTITY)
    assert (again.get("a"), again.get("b"), again.get("c")) == (1, None, 3)
    store.path.write_bytes(whole[:5])
    assert len(Store(tmp_path, IDENTITY)) == 0


def test_files_of_others_and_damaged_ones_are_refused(tmp_path):
    store = Store(tmp_path, IDENTITY)
    store.append([("a", 1)])
    other = IDENTITY | {"dtype": "bfloat16"}
    shutil.copy(store.path, Store(tmp_path, other).path)
    with pytest.raises(UsageError, match=r"jsonl holds scores of another model \(another dtype\)"):
        Store(tmp_path, other)
    head = store.path.read_bytes().splitlines(keepends=True)[0]
    for line, message in (
        (b"gar\xffbage", "damaged in line 2"),
        (b'{"key": 1}', "no score in line 2"),
        (b"[]", "line 2"),
    ):
        store.path.write_bytes(head + line + b'\n{"key": "z", "score": 1}\n')
        with pytest.raises(UsageError, match=message):
            Store(tmp_path, IDENTITY)
    store.path.write_bytes(b'{"other": 1}\n')
    with pytest.raises(UsageError, match="doesn't begin with"):
        Store(tmp_path, IDENTITY)
    with pytest.raises(UsageError, match="set LINEARIZE_CACHE to another folder"):
        Store(tmp_path, IDENTITY)
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"score cache.*set LINEARIZE_CACHE to another folder"):
        Store(tmp_path / "file", IDENTITY)
    with pytest.raises(ResourceError, match="or choose another -o"):
        Store(tmp_path / "file", IDENTITY, elsewhere="choose another -o")


def _write(folder, number):
    store = Store(folder, IDENTITY)
    for n in range(40):
        store.append([(f"{number}:{n}", "x" * 5000)])


def test_processes_append_to_one_file(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write, args=(tmp_path, number)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(Store(tmp_path, IDENTITY)) == 120


def test_the_key_is_of_all_that_a_score_depends_on():
    base = Document((1, 2, 3, 4), (Span(1, 2), Span(3, 4)), 4)
    same = Document((1, 2, 3, 4), (Span(1, 2, chance=0.5, distance=1), Span(3, 4, label="hit")), 9, depth=0.5, index=7)
    assert document_key(base, "likelihood") == document_key(same, "likelihood")
    others = [Document((1, 2, 3, 5), base.spans, 4), Document(base.ids, (Span(1, 2), Span(2, 4)), 4)]
    keys = [document_key(base, "likelihood"), document_key(base, "generate")]
    assert len({*keys, *(document_key(other, "likelihood") for other in others)}) == 4


def test_the_key_of_a_request_is_of_all_that_is_asked():
    settings = {"until": ["."], "temperature": 0.5}
    first = request_key("generate_until", ("x", settings), 0, 512)
    assert first == request_key("generate_until", ("x", dict(reversed(settings.items()))), 0, 512)
    others = [
        ("loglikelihood", ("x", settings), 0, 512),
        ("generate_until", ("y", settings), 0, 512),
        ("generate_until", ("x", settings | {"temperature": 0.6}), 0, 512),
        ("generate_until", ("x", settings), 1, 512),
        ("generate_until", ("x", settings), 0, 256),
    ]
    assert len({first, *(request_key(*other) for other in others)}) == 6
    assert request_key("generate_until", ("x", {"until": object()}), 0, 512) is None


def test_what_another_process_kept_is_not_written_again(tmp_path):
    one, two = Store(tmp_path, IDENTITY), Store(tmp_path, IDENTITY)
    two.append([("a", 1)])
    one.remember([("a", 1)])
    one.append([("a", 1)])
    assert one.get("a") == 1
    assert len(one.path.read_text().splitlines()) == 2


@pytest.mark.parametrize("wide", [False, True])
def test_a_bypassed_student_has_the_fingerprint_of_its_base(tmp_path, wide):
    tiny(num_key_value_heads=8 if wide else 2).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    base, own = fingerprint(linearize.load(tmp_path / "base")), set()
    for name, recipe in RECIPES.items():
        linearize.convert(tmp_path / "base", tmp_path / name, recipe=recipe)
        for student in (
            linearize.load(tmp_path / name),
            linearize.linearize_(linearize.load(tmp_path / "base"), recipe),
        ):
            with linearize.bypass(student):
                assert fingerprint(student) == base
                eager = student.config._attn_implementation_internal
                student.config._attn_implementation_internal = "eager"
                assert fingerprint(student) != base
                student.config._attn_implementation_internal = eager
                with torch.no_grad():
                    student.model.norm.weight[0] += 1
                assert fingerprint(student) != base
            own.add(fingerprint(student))
    assert len(own) == len(RECIPES)
    assert base not in own


def test_the_fingerprint_does_not_depend_on_what_ran_before():
    options = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny(rope_parameters=options, max_position_embeddings=64)
    first = fingerprint(model)
    score(model, documents(1, (200,)))
    assert fingerprint(model) == first


def test_the_fingerprint_is_of_weights_and_config():
    model = tiny("default")
    first = fingerprint(model)
    assert first == fingerprint(tiny("default"))
    assert len(first) == 64
    model.config._name_or_path = "/somewhere/else"
    assert fingerprint(model) == first
    seen = {
        first,
        fingerprint(tiny("default", torch.bfloat16)),
        fingerprint(tiny("hedgehog-window")),
        fingerprint(tiny()),
    }
    changes = {
        "last bit": lambda weight: weight.view(torch.int32)[3:4, 5].bitwise_xor_(1),
        "two swapped in a row": lambda weight: weight[0].copy_(weight[0].flip(0)),
        "two rows swapped": lambda weight: weight[:2].copy_(weight[:2].flip(0)),
        "two blocks of 4 KiB swapped": lambda weight: weight.view(-1, 1024)[:2].copy_(
            weight.view(-1, 1024)[:2].flip(0)
        ),
        "-0.0 for 0.0": lambda weight: weight[0, 0].zero_().neg_(),
        "0.0": lambda weight: weight[0, 0].zero_(),
    }
    for change in changes.values():
        model = tiny("default")
        with torch.no_grad():
            change(model.model.layers[1].mlp.up_proj.weight)
        seen.add(fingerprint(model))
    model = tiny("default")
    model.model.rotary_emb.inv_freq[0] += 1  # a buffer that isn't saved
    seen.add(fingerprint(model))
    model = tiny("default")
    model.config.rms_norm_eps *= 2
    seen.add(fingerprint(model))
    assert len(seen) == 4 + len(changes) + 2


def test_weights_of_any_kind_have_a_fingerprint():
    model = tiny()
    for number, dtype in enumerate((torch.int8, torch.bool, torch.float16, torch.complex64, torch.int64, torch.uint8)):
        model.register_buffer(f"extra{number}", torch.ones(9000 + number).to(dtype)[number:])
    model.register_buffer("scalar", torch.tensor(3))
    model.register_buffer("none", torch.empty(0))
    first = fingerprint(model)
    model.extra1[2500] = False  # in the middle of an unaligned buffer
    assert fingerprint(model) != first
    model.register_buffer("meta", torch.empty(3, device="meta"))
    with pytest.raises(ModelError, match="'meta' has no data"):
        fingerprint(model)


def test_tied_weights_count_once(monkeypatch):
    model, read = tiny(), []
    import linearize_evals.fingerprint as module

    original = module._sums
    monkeypatch.setattr(module, "_sums", lambda name, tensor: read.append(name) or original(name, tensor))
    fingerprint(model)
    assert "model.embed_tokens.weight" in read
    assert "lm_head.weight" not in read


@pytest.mark.slow
def test_a_fingerprint_of_135m_weights_takes_under_two_seconds():
    model = tiny(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=20_000)
    assert model.num_parameters() > 1.2e8
    start = time.process_time()
    fingerprint(model)
    assert time.process_time() - start < 2.0


def test_every_line_is_json(tmp_path):
    store = Store(tmp_path, IDENTITY)
    store.append([("a", {"text": "line\nbreak"})])
    lines = store.path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"identity": IDENTITY},
        {"key": "a", "score": {"text": "line\nbreak"}},
    ]
