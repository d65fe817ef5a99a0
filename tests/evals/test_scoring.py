"""Scores against a plain loop, whatever the batch, and generation against likelihood."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from linearize_evals import scoring
from linearize_evals.batching import SHORTEST, in_batches, plan_batches
from linearize_evals.document import Document, Span
from linearize_evals.scoring import generate, score

from linearize.errors import ResourceError, UsageError
from tests.evals.engine import NEWLINE, RECIPES, SPACE, VOCAB, continued, documents, reference, tiny

ALL = [None, *RECIPES]


@pytest.mark.parametrize("recipe", ALL)
def test_scores_equal_those_of_the_whole_sequences_logits(recipe):
    model, some = tiny(recipe), documents()
    some += [continued(model, document) for document in some[:4]]
    for document, spans in zip(some, score(model, some, batch_size=8), strict=True):
        for mine, (logprob, greedy, best) in zip(spans, reference(model, document), strict=True):
            assert mine.logprob == pytest.approx(logprob, abs=2e-4)
            assert (mine.greedy, mine.argmax) == (greedy, tuple(best))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ALL)
def test_the_batch_size_does_not_matter(recipe, dtype):
    model, some = tiny(recipe, dtype), documents()
    one, eight = (score(model, some, batch_size=size) for size in (1, 8))
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    for a, b in zip(list(chain.from_iterable(one)), list(chain.from_iterable(eight)), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
        assert dtype == torch.bfloat16 or a.argmax == b.argmax


@pytest.mark.parametrize("recipe", ALL)
def test_likelihood_says_what_generation_gives(recipe):
    model, some = tiny(recipe), documents()
    some = [continued(model, document) for document in some[:6]] + some[6:]
    said = score(model, some, batch_size=8)
    cached, uncached = (generate(model, some, batch_size=8, use_cache=cache) for cache in (True, False))
    assert cached == uncached
    greedy = []
    for document, scores, found in zip(some, said, cached, strict=True):
        for span, one, tokens in zip(document.spans, scores, found, strict=True):
            assert (tokens == document.ids[span.start : span.end]) == one.greedy
            assert len(tokens) == span.end - span.start
            assert tokens[0] == one.argmax[0]
            greedy.append(one.greedy)
    assert 6 <= sum(greedy) < len(greedy)


def test_the_models_own_generation_settings_and_eos_do_not_change_answers():
    model = tiny()
    some = [continued(model, document, tokens=8) for document in documents(6)]
    before = generate(model, some)
    model.generation_config.repetition_penalty = 30.0
    model.generation_config.no_repeat_ngram_size = 1
    model.generation_config.eos_token_id = [token for found in before for token in found[0][:2]]
    model.generation_config.max_length = 5
    own = model.generation_config
    assert generate(model, some) == before == [[document.ids[-8:]] for document in some]
    assert model.generation_config is own


def test_newlines_before_and_after_an_answer_cut_nothing():
    """A value followed by a newline, and one that begins with a newline."""
    model, document = tiny(), documents(1)[0]
    start = document.spans[0].start
    with torch.no_grad():  # a model that says newline, newline, space, whatever it sees
        cycle = {SPACE: NEWLINE, NEWLINE: SPACE}
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        embedding = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        for n, token in enumerate((SPACE, NEWLINE)):
            embedding[token, n] = 100.0
            model.lm_head.weight[cycle[token], n] = 1.0
        model.model.embed_tokens.weight = embedding
    for first in (NEWLINE, SPACE):
        ids = [*document.ids[:start], cycle[first], first, cycle[first], first, cycle[first]]
        made = Document(tuple(ids), (Span(start + 1, start + 5),), len(ids))
        assert generate(model, [made]) == [[tuple(ids[start + 1 :])]]
        assert score(model, [made])[0][0].greedy


def test_a_model_without_logits_to_keep_gets_the_same_scores(monkeypatch):
    model, some = tiny("default"), documents()
    expected = score(model, some)
    monkeypatch.setattr(scoring, "has_logits_to_keep", lambda model: False)
    assert score(model, some) == expected


def test_only_the_needed_logits_are_computed():
    model, seen = tiny(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    document = documents(1)[0]
    score(model, [document])
    assert seen == [sum(span.end - span.start for span in document.spans)]


def test_logits_come_in_parts_that_fit(monkeypatch):
    model = tiny()
    some = [
        Document(d.ids, tuple(Span(t, t + 1) for t in range(1, len(d.ids))), len(d.ids)) for d in documents(5, (40,))
    ]
    expected, sizes = score(model, some), []
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 10 * 4 * model.config.vocab_size)
    monkeypatch.setattr(scoring, "SLICE_ELEMENTS", 3 * model.config.vocab_size)
    model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[:2].numel()))
    mine, wanted = (list(chain.from_iterable(scores)) for scores in (score(model, some), expected))
    for one, want in zip(mine, wanted, strict=True):
        assert one.logprob == pytest.approx(want.logprob, abs=1e-4)
    assert max(sizes) <= 10


def test_nan_names_the_document_or_the_layer():
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(FloatingPointError, match="document 3 of the cell length 110"):
        score(model, documents()[3:4])
    model = tiny("default")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3] = float("nan")
        model.model.layers[0].self_attn.v_proj.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="layer 0"):
        score(model, documents())


ROPE = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 24,
        "long_factor": [1.0 + n for n in range(24)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("recipe", [None, "default"])
@pytest.mark.parametrize("kind", ROPE)
def test_rope_that_depends_on_the_longest_row_gives_each_document_its_own(kind, recipe):
    options = {"rope_parameters": ROPE[kind], "max_position_embeddings": 256 if kind == "longrope" else 64}
    some = documents(8, (190, 180, 70, 66, 60, 58))
    fresh = [score(tiny(recipe, **options), [document])[0] for document in some]
    said = [generate(tiny(recipe, **options), [document])[0] for document in some]
    model = tiny(recipe, **options)
    for order in (some, some[::-1]):
        for size in (1, 8):
            found, continued = score(model, order, batch_size=size), generate(model, order, batch_size=size)
            for n, document in enumerate(order):
                for mine, want in zip(found[n], fresh[document.index], strict=True):
                    assert mine.logprob == pytest.approx(want.logprob, abs=1e-4)
                assert continued[n] == said[document.index]


def test_generation_forgets_the_lengths_before_it():
    seen, some = [], documents(2, (600, 200))  # all prompts beyond 64: below, transformers forgets by itself
    for before in ([], some[:1]):
        model = tiny(rope_parameters=ROPE["dynamic"], max_position_embeddings=64)
        generate(model, before)
        hook = model.model.rotary_emb.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        generate(model, some[1:])
        hook.remove()
    fresh, later = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(torch.equal(mine, want) for mine, want in zip(later, fresh, strict=True))


def test_a_gpu_is_waited_for_once_a_forward(monkeypatch):
    logits, targets = torch.randn(2, 50, VOCAB), torch.arange(100) % VOCAB
    rows, columns, copies, cpu = torch.arange(100) % 2, torch.arange(100) // 2, [], torch.Tensor.cpu
    monkeypatch.setattr(scoring, "SLICE_ELEMENTS", 3 * VOCAB)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(1) or cpu(self))
    logprobs, best = scoring._log_softmax_at(logits, rows, columns, targets)
    assert len(copies) == 2
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[rows, columns, targets])
    assert torch.equal(best, logits.argmax(-1)[rows, columns])


def test_logits_may_take_a_quarter_of_a_gpus_free_memory(monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * gib, 140 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * gib)
    assert scoring.logits_bytes(torch.device("cuda")) == 32 * gib
    assert scoring.logits_bytes(torch.device("cpu")) == 2 * gib


def test_training_mode_is_refused():
    model = tiny().train()
    for function in (score, generate):
        with pytest.raises(ValueError, match="training mode"):
            function(model, documents(1))


def test_batches_hold_like_lengths_and_keep_to_the_budget():
    lengths = [(37 * n) % 900 + 100 for n in range(200)]
    for size, device in (("auto", "cpu"), ("auto", "cuda"), (8, "cpu")):
        batches = plan_batches(lengths, size, device)
        assert sorted(chain.from_iterable(batches)) == list(range(200))
        for batch in batches:
            longest, shortest = (f(lengths[i] for i in batch) for f in (max, min))
            assert shortest >= SHORTEST * longest
            assert len(batch) <= 8 if size == 8 else len(batch) * longest <= (2048 if device == "cpu" else 32768)
    assert plan_batches([5000, 10], "auto") == [[0], [1]]
    assert plan_batches([60, 59, 60, 60], 2, equal=True) == [[0, 2], [3], [1]]
    for bad in (0, -1, True, "many", 1.5):
        with pytest.raises(UsageError, match="batch size"):
            plan_batches(lengths, bad)


def test_a_batch_that_runs_out_of_memory_is_halved_and_so_are_the_later_ones():
    tried = []

    def run(batch):
        tried.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return [10 * index for index in batch]

    found = {}
    for indices, results in in_batches([range(8), range(8, 13)], run):
        found |= zip(indices, results, strict=True)
    assert found == {index: 10 * index for index in range(13)}
    assert tried == [8, 4, 2, 2, 2, 2, 2, 2, 1]

    def never(batch):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(ResourceError, match="a single document"):
        list(in_batches([[0, 1]], never))
