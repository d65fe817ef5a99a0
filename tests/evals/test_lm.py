"""RecallLM under lm-eval: the same numbers as plain HFLM, nothing truncated, and what was scored is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linearize_evals import catalogue, scoring
from linearize_evals import lm as module
from linearize_evals.document import Span
from linearize_evals.lm import RecallLM
from linearize_evals.store import Store, document_key
from linearize_evals.task import GENERATION
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from linearize.errors import UsageError
from tests.evals.engine import RECIPES, byte_tokenizer, continued, documents, tiny


def hand_made(monkeypatch, made):
    monkeypatch.setattr(catalogue, "build", lambda name, tokenizer, **options: made)


def evaluate(lm, task="linearize_niah_single", **metadata):
    manager = TaskManager(
        include_path=str(catalogue.tasks_path()),
        include_defaults=False,
        metadata={"tokenizer": byte_tokenizer(), **metadata},
    )
    return simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=10)


def packed(made, generated=False):
    kind, argument = ("generate_until", GENERATION) if generated else ("loglikelihood", "")
    return [
        Instance(kind, document.to_dict() | {"text": "x"}, ("x", argument), 0, ("t", n, 1))
        for n, document in enumerate(made)
    ]


def plain(*pairs, kind="loglikelihood"):
    return [Instance(kind, {"question": 1}, pair, 0, ("their_task", n, 1)) for n, pair in enumerate(pairs)]


def is_word(document):
    """A random model's answer may be half a character or a space, which text can't hold."""
    text = byte_tokenizer().decode(document.ids)
    return text.isascii() and text == text.strip() and byte_tokenizer().encode(text) == list(document.ids)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_packed_equals_plain_lm_eval(monkeypatch, recipe):
    model, tokenizer = tiny(recipe), byte_tokenizer()
    likely = [continued(model, document, tokens=1) for document in documents(30)]
    made = documents() + [document for document in likely if is_word(document)][:5]
    hand_made(monkeypatch, made)
    theirs = evaluate(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4))
    ours = evaluate(RecallLM(model, tokenizer), packed=True)
    name = "linearize_niah_single"
    assert 0 < ours["results"][name]["acc,none"] == theirs["results"][name]["acc,none"]
    assert ours["results"][name]["nll,none"] == pytest.approx(theirs["results"][name]["nll,none"], abs=1e-4)
    for a, b in zip(ours["samples"][name], theirs["samples"][name], strict=True):
        assert (a["doc_hash"], a["doc"]) == (b["doc_hash"], b["doc"])
        spans = a["filtered_resps"][0]["spans"]
        for mine, (logprob, greedy) in zip(spans, b["filtered_resps"], strict=True):
            assert mine["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert mine["greedy"] == greedy


def test_generated_answers_are_compared_token_by_token(monkeypatch):
    model = tiny("default")
    hand_made(monkeypatch, [continued(model, document) for document in documents(3)] + documents(6)[3:])
    found = evaluate(RecallLM(model, byte_tokenizer()), packed=True, generate=True)
    result = found["results"]["linearize_niah_single"]
    assert result["gen_acc,none"] == result["acc,none"] == 0.5
    assert result["gen_acc_stderr,none"] > 0
    for sample in found["samples"]["linearize_niah_single"]:
        likelihood, generated = sample["filtered_resps"]
        assert [len(tokens) for tokens in generated["spans"]] == [len(s["argmax"]) for s in likelihood["spans"]]


def test_other_requests_get_lm_evals_own_answers_in_their_order():
    model, tokenizer, made = tiny("default"), byte_tokenizer(), documents(3)
    pairs = [("The cat", " sat"), ("A", " dog ran"), ("The cat", " lay"), ("Words", " words words")]
    texts = [("one two three",), ("four",)]
    asked = [("Say", {"until": ["\n"], "max_gen_toks": 5}), ("Say it", {"until": ["\n"], "max_gen_toks": 5})]
    theirs, ours = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8), RecallLM(model, tokenizer)
    expected = theirs.loglikelihood(plain(*pairs))
    mixed = [plain(*pairs)[0], *packed(made), *plain(*pairs)[1:]]
    found = ours.loglikelihood(mixed)
    assert [found[0], *found[4:]] == expected
    assert [len(one["spans"]) for one in found[1:4]] == [3, 3, 3]
    rolling = plain(*texts, kind="loglikelihood_rolling")
    assert ours.loglikelihood_rolling(rolling) == theirs.loglikelihood_rolling(rolling)
    generation = plain(*asked, kind="generate_until")
    assert ours.generate_until(generation) == theirs.generate_until(generation)
    assert (ours.rank, ours.world_size) == (0, 1)
    assert ours.loglikelihood([]) == []


def test_a_document_that_would_be_truncated_is_an_error():
    lm = RecallLM(tiny(max_position_embeddings=32), byte_tokenizer())
    assert lm.max_length == 32
    long = "x" * 30
    assert lm.loglikelihood(plain((long, " ab")))  # 33 tokens, of which the last is only predicted
    with pytest.raises(UsageError, match=r"task 'their_task' has 34 tokens, and the model takes 32"):
        lm.loglikelihood(plain(("short", " a"), (long, " abc")))
    assert lm.loglikelihood_rolling(plain((long * 3,), kind="loglikelihood_rolling"))  # windows lose nothing
    settings = {"until": ["\n"], "max_gen_toks": 4}
    assert lm.generate_until(plain(("x" * 28, settings), kind="generate_until"))
    with pytest.raises(UsageError, match=r"task 'their_task' has 29 tokens, and the model takes 28"):
        lm.generate_until(plain(("x" * 8, settings), ("x" * 29, settings), kind="generate_until"))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("generated", [False, True])
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, generated):
    model = tiny("default")
    made = [replace(document, spans=(Span(20, 22), Span(30, 32))) for document in documents(12, (60,))]
    method = "generate_until" if generated else "loglikelihood"

    def run(store, progress=None):
        lm = RecallLM(model, byte_tokenizer(), batch_size=2, store=store, progress=progress, label="teacher")
        return getattr(lm, method)(packed(made, generated))

    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    expected = run(None)
    every = len(forwards)
    seen = []

    def stop(label, done, total):
        seen.append((label, done, total))
        if done >= 4 * 60:
            raise Stopped

    forwards.clear()
    with pytest.raises(Stopped):
        run(Store(tmp_path, {"model": 1}), stop)
    assert seen == [("teacher", n * 60, 720) for n in (0, 2, 4)]
    assert len(forwards) == every * 2 // 6
    forwards.clear()
    seen.clear()
    assert run(Store(tmp_path, {"model": 1}), lambda *report: seen.append(report)) == expected
    assert len(forwards) == every * 4 // 6
    assert (seen[0], seen[-1]) == (("teacher", 240, 720), ("teacher", 720, 720))
    forwards.clear()
    assert run(Store(tmp_path, {"model": 1})) == expected
    assert not forwards


def test_a_batch_of_which_one_document_is_missing_runs_as_it_was_planned(tmp_path):
    """Without the others its padding, and so its rounding, would be another."""
    model, made, shapes = tiny(), documents(4, (60, 58)), []
    expected = RecallLM(model, byte_tokenizer(), batch_size=2).loglikelihood(packed(made))
    batches = scoring.plan_likelihood(model, made, 2)
    kept = [0, 1, 2, 3]
    kept.remove(batches[1][1])
    store, marked = Store(tmp_path, {"model": 1}), expected[batches[1][0]]["spans"]
    marked[0]["logprob"] -= 1  # what was kept stays
    store.append((document_key(made[n], "likelihood"), expected[n]["spans"]) for n in kept)
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    seen = []
    lm = RecallLM(model, byte_tokenizer(), batch_size=2, store=store, progress=lambda *report: seen.append(report[1:]))
    assert lm.loglikelihood(packed(made)) == expected
    missing = len(made[batches[1][1]].ids)
    assert shapes == [(2, max(len(made[n].ids) for n in batches[1]))]
    assert seen == [(236 - missing, 236), (236, 236)]


TEXTS = [f"{'word ' * (n % 7)}number {n}" for n in range(10)]
SETTINGS = {"until": ["\n"], "max_gen_toks": 3}
REQUESTS = {
    "loglikelihood": plain(*((text, f" answer {n}") for n, text in enumerate(TEXTS)), (TEXTS[0], " answer 0")),
    "loglikelihood_rolling": plain(*((text,) for text in TEXTS), kind="loglikelihood_rolling"),
    "generate_until": plain(*((text, SETTINGS) for text in TEXTS), kind="generate_until"),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_lm_evals_own_requests_are_kept_and_resumed(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "CHUNK", 4)
    model, forwards, seen = tiny("default"), [], []

    def run(store, progress=None):
        lm = RecallLM(model, byte_tokenizer(), store=store, progress=progress, label="teacher")
        return getattr(lm, kind)(REQUESTS[kind])

    def stop(*report):
        seen.append(report)
        if len(seen) == 2:
            raise Stopped

    expected = run(None)
    theirs = getattr(HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=4), kind)(REQUESTS[kind])
    for mine, want in zip(expected, theirs, strict=True):
        assert type(mine) is type(want)
        assert mine == want if isinstance(want, str) else mine == pytest.approx(want, abs=1e-4)
    with pytest.raises(Stopped):
        run(Store(tmp_path, {"model": 1}), stop)
    (label, nothing, total), (_, done, _) = seen
    assert (label, nothing) == ("teacher", 0)
    assert total == sum(len(text) for request in REQUESTS[kind] for text in request.args if isinstance(text, str))
    assert 0 < done < total
    model.register_forward_hook(lambda *_: forwards.append(1))
    assert run(Store(tmp_path, {"model": 1}), lambda *report: seen.append(report)) == expected
    assert (seen[2], seen[-1]) == (("teacher", done, total), ("teacher", total, total))
    assert forwards
    forwards.clear()
    assert run(Store(tmp_path, {"model": 1})) == expected
    assert not forwards


def test_requests_share_no_forward_where_rope_depends_on_the_longest():
    options = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    rows = plain(("a" * 200, " b"), ("c" * 90, " d"))
    asked = plain(("a" * 200, SETTINGS), ("c" * 90, SETTINGS), kind="generate_until")
    model, angles = tiny(rope_parameters=options, max_position_embeddings=64), []
    lm = RecallLM(model, byte_tokenizer(), max_length=512)
    alone = [lm.loglikelihood([row])[0] for row in reversed(rows)]
    assert lm.loglikelihood(rows) == alone[::-1]
    model.model.rotary_emb.register_forward_hook(lambda module, args, out: angles.append(out[0]))
    alone = [lm.generate_until([row])[0] for row in reversed(asked)]
    prompts = [angle for angle in angles if angle.shape[1] > 1]
    angles.clear()
    assert lm.generate_until(asked) == alone[::-1]
    for mine, want in zip([angle for angle in angles if angle.shape[1] > 1], prompts[::-1], strict=True):
        assert torch.equal(mine, want)


def test_likelihood_and_generation_do_not_share_scores(tmp_path):
    model, made = tiny(), documents(2)
    lm = RecallLM(model, byte_tokenizer(), store=Store(tmp_path, {"model": 1}))
    likelihood, generated = lm.loglikelihood(packed(made)), lm.generate_until(packed(made, True))
    assert isinstance(likelihood[0]["spans"][0], dict)
    assert isinstance(generated[0]["spans"][0], list)
    assert lm.loglikelihood(packed(made)) == likelihood
