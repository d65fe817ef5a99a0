"""Our tasks under lm-eval: every file loads, options arrive, what text can't hold is refused, metrics survive."""

from __future__ import annotations

import json
import math
import time

import pytest
import yaml
from linearize_evals import catalogue
from linearize_evals.catalogue import FAMILIES, tasks_path
from linearize_evals.document import Document, Span
from linearize_evals.lm import RecallLM
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from linearize.errors import UsageError
from tests.evals.engine import SPACE, byte_tokenizer, documents, tiny

# All but those for models that were trained on them.
RECALL = [name for name, family in FAMILIES.items() if family.kind == "recall" and name != "linearize_mqar_tokens"]
SMALL = {"lengths": [400], "pairs": [8], "samples": 2, "depths": [0.5]}


def manager(**metadata):
    return TaskManager(include_path=str(tasks_path()), include_defaults=False, metadata=metadata)


def one(name="linearize_niah_single", **metadata):
    return manager(**metadata).load([name])["tasks"][name]


def test_every_family_has_a_file_that_loads():
    """lm-eval passes over a file that fails to parse, and says nothing."""
    found = manager(tokenizer=byte_tokenizer())
    assert set(found.all_tasks) == {*FAMILIES, "linearize_recall"}
    assert {path.stem for path in tasks_path().glob("*.yaml")} == set(found.all_tasks)
    for name, family in FAMILIES.items():
        task = one(name, tokenizer=byte_tokenizer())
        assert (task.config.task, task.VERSION, task.config.metadata["version"]) == (name, *[family.version] * 2)
    group = yaml.safe_load((tasks_path() / "linearize_recall.yaml").read_text())
    assert group["task"] == RECALL


@pytest.mark.parametrize("metadata", [{}, {"lengths": [128]}, {"lengths": [128], "tokenizer": "./no such folder"}])
def test_no_tokenizer_is_one_clear_error_at_once(metadata, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.monotonic()
    with pytest.raises(UsageError, match='"tokenizer" in the metadata') as caught:
        manager(**metadata).load(["linearize_niah_single"])
    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "arrives"),
    [
        ({"lengths": "512"}, {"lengths": 512}),
        ({"lengths": "[128, 256]", "seed": "3"}, {"lengths": [128, 256], "seed": 3}),
        ({"lengths": [128], "depths": [0, 0.5], "samples": 4}, {"lengths": [128], "depths": [0, 0.5], "samples": 4}),
        ({"depths": "0.5", "pairs": 8, "text": "1.txt"}, {"depths": 0.5, "pairs": 8, "text": "1.txt"}),
        ({"text": "2024", "unknown": 1, "dtype": "bfloat16"}, {"text": "2024"}),
    ],
)
def test_options_come_from_metadata(monkeypatch, given, arrives):
    seen = {}
    monkeypatch.setattr(catalogue, "build", lambda name, tokenizer, **options: seen.update(options) or documents(1))
    one(tokenizer=byte_tokenizer(), **given).test_docs()
    assert seen == arrives


def test_a_tokenizer_may_be_a_folder_or_the_models(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    for metadata in ({"tokenizer": str(tmp_path)}, {"pretrained": str(tmp_path)}, {"tokenizer": byte_tokenizer()}):
        assert one(**metadata).test_docs() == one(tokenizer=byte_tokenizer()).test_docs()


def test_token_ids_need_a_vocabulary_only():
    options = {"lengths": [64], "pairs": [4], "samples": 1}
    task = one("linearize_mqar_tokens", vocab_size="256", packed=True, **options)
    docs = task.test_docs()
    assert all(max(doc["ids"]) < 256 for doc in docs)
    assert docs[0]["text"].startswith(f"{docs[0]['ids'][0]} ")
    with pytest.raises(UsageError, match="needs a tokenizer"):
        one("linearize_mqar_tokens", **options)
    task = one("linearize_mqar_tokens", vocab_size=256, **options)
    with pytest.raises(UsageError, match="needs a tokenizer to put token ids into text"):
        task.construct_requests(docs[0], "", metadata=("t", 0, 1))


@pytest.mark.parametrize("bos", [False, True])
def test_requests_are_the_documents_own_tokens(bos, tmp_path):
    """What HFLM makes of the text must be the ids again, with BOS once where the tokenizer adds it."""
    (tmp_path / "text.txt").write_text("plain-words,and-few-of-them." * 100)  # no context ends in a space
    tokenizer = byte_tokenizer(bos)
    lm = HFLM(pretrained=tiny(), tokenizer=tokenizer)
    for name in ("linearize_niah_single", "linearize_mqar_lines", "linearize_perplexity", "linearize_ar_text"):
        task = one(name, tokenizer=tokenizer, **SMALL, text=str(tmp_path / "text.txt"))
        for doc in task.test_docs():
            requests = task.construct_requests(doc, "", metadata=(name, 0, 1))
            recall = task.family.kind == "recall"
            assert len(requests) == (len(doc["spans"]) if recall else 1)
            for request, span in zip(requests, doc["spans"], strict=recall):
                context, continuation = lm._encode_pair(*request.args)
                assert context == doc["ids"][: span["start"]]
                end = span["end"] if recall else doc["spans"][-1]["end"]
                assert continuation == doc["ids"][span["start"] : end]


@pytest.mark.parametrize(
    "ids",
    [
        [70, 71, SPACE, 72],  # lm-eval would move the space into the answer
        [70, 71, 3 + 200, 72],  # half a character
    ],
)
def test_what_text_cannot_hold_is_refused(monkeypatch, ids):
    made = Document(tuple(ids), (Span(3, 4),), 4)
    monkeypatch.setattr(catalogue, "build", lambda *_, **options: [made])
    task = one(tokenizer=byte_tokenizer())
    with pytest.raises(UsageError, match="document 0 of linearize_niah_single can't be asked as text"):
        task.construct_requests(task.test_docs()[0], "", metadata=("t", 0, 1))
    task = one(tokenizer=byte_tokenizer(), packed=True)
    assert len(task.construct_requests(task.test_docs()[0], "", metadata=("t", 0, 1))) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_text_tasks_report_perplexity_per_token(packed, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n\n".join(f"{n}-plain-words,and-few-of-them." * 40 for n in range(5)))
    model, tokenizer = tiny("default"), byte_tokenizer()
    options = {
        "tokenizer": tokenizer,
        "packed": packed,
        "lengths": [96],
        "samples": 3,
        "text": str(tmp_path / "text.txt"),
    }
    lm = RecallLM(model, tokenizer) if packed else HFLM(pretrained=model, tokenizer=tokenizer)
    found = simple_evaluate(lm, tasks=["linearize_ar_text", "linearize_perplexity"], task_manager=manager(**options))
    import torch

    for name in ("linearize_ar_text", "linearize_perplexity"):
        total, count = 0.0, 0
        for doc in one(name, **options).test_docs():
            with torch.no_grad():
                rows = model(torch.tensor([doc["ids"]])).logits[0].log_softmax(-1)
            places = [t for span in doc["spans"] for t in range(span["start"], span["end"])]
            total -= sum(float(rows[t - 1, doc["ids"][t]]) for t in places)
            count += len(places)
        assert found["results"][name]["perplexity,none"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert "linearize_perplexity" in make_table(found)


def test_lm_eval_aggregates_prints_and_logs_all_of_it():
    model, tokenizer = tiny("default"), byte_tokenizer()
    options = {"tokenizer": tokenizer, "packed": True, "generate": "true", **SMALL, "lengths": [700]}
    found = simple_evaluate(
        RecallLM(model, tokenizer),
        tasks=["linearize_recall", "linearize_perplexity"],
        task_manager=manager(**options),
        limit=2,
        bootstrap_iters=100,
    )
    for name in RECALL:
        result = found["results"][name]
        assert {"acc,none", "nll,none", "gen_acc,none", "acc_stderr,none"} <= result.keys()
        assert result["gen_acc,none"] == pytest.approx(result["acc,none"], abs=0.5)
        assert found["n-samples"][name]["effective"] == len(found["samples"][name]) <= 2
    expected = sum(found["results"][name]["acc,none"] for name in RECALL) / len(RECALL)
    assert found["groups"]["linearize_recall"]["acc,none"] == pytest.approx(expected)
    assert "gen_acc" in make_table(found)
    assert "linearize_recall" in make_table(found, "groups")
    json.dumps(found, default=handle_non_serializable)
    assert json.dumps(found["samples"])
