"""Task families under models whose recall is known: all of it, a guess, or what is within the last W tokens."""

from __future__ import annotations

import random

import pytest
from linearize_evals.catalogue import FAMILIES, build
from scipy.stats import binomtest

from tests.evals.stubs import Guesser, Oracle, TokenOracle, bpe, correct

RECALL = [name for name, family in FAMILIES.items() if family.kind == "recall"]
TEXT_RECALL = [name for name in RECALL if name != "linearize_mqar_tokens"]
SMALL = {"lengths": [256], "depths": [0.0, 0.5, 1.0], "samples": 2}


def small(name, tokenizer, **options):
    pairs = [1, 3] if name == "linearize_variable_tracking" else [8, 40]
    return build(name, tokenizer, **{**SMALL, "pairs": pairs, **options})


@pytest.mark.parametrize("digits", ["single", "groups"])
@pytest.mark.parametrize("name", TEXT_RECALL)
def test_an_oracle_answers_everything(name, digits):
    tokenizer = bpe(digits)
    model = Oracle(tokenizer)
    for document in small(name, tokenizer, samples=1):
        assert document.spans
        assert all(correct(model, document))


@pytest.mark.parametrize("window", [32, 64, 128])
@pytest.mark.parametrize("name", TEXT_RECALL)
def test_a_window_answers_what_is_within_its_distance(name, window):
    tokenizer = bpe()
    model = Oracle(tokenizer, window)
    outcomes, expected = [], []
    for document in small(name, tokenizer):
        outcomes += correct(model, document)
        expected += [span.distance <= window for span in document.spans]
    assert outcomes == expected
    assert not all(expected)


@pytest.mark.parametrize("name", TEXT_RECALL)
def test_a_guess_scores_chance(name):
    tokenizer = bpe()
    samples = 60 if "niah" in name or "tracking" in name else 20
    documents = small(name, tokenizer, samples=samples, pairs=[3] if "tracking" in name else [20], lengths=[192])
    chances = {span.chance for document in documents for span in document.spans}
    assert len(chances) == 1
    chance = chances.pop()
    if chance == 0:  # one fact: a guess among the values in view is always right, so there is no chance level
        assert name in ("linearize_niah_single", "linearize_passkey")
        return
    outcomes = [right for document in documents for right in correct(Guesser(tokenizer), document)]
    assert binomtest(sum(outcomes), len(outcomes), chance).pvalue > 0.001


def test_token_pairs_under_an_oracle_and_a_window():
    documents = build("linearize_mqar_tokens", 1000, lengths=[64, 300], pairs=[4, 16], samples=3)
    assert all(all(correct(TokenOracle(1000), document)) for document in documents)
    for window in (32, 64, 128):
        for document in documents:
            expected = [span.distance <= window for span in document.spans]
            assert correct(TokenOracle(1000, window), document) == expected


def test_token_pairs_follow_the_zoology_grid():
    documents = build("linearize_mqar_tokens", 513, lengths=[64, 128], pairs=[4, 16, 32], samples=2)
    assert {(d.length, d.pairs) for d in documents} == {(64, 4), (64, 16), (128, 4), (128, 16), (128, 32)}
    for document in documents:
        assert len(document.ids) == document.length
        listed = document.ids[: 2 * document.pairs]
        keys, values = listed[::2], listed[1::2]
        assert len(set(keys)) == len(set(values)) == len(document.spans) == document.pairs
        assert 0 < max(keys) < 256 <= min(values)
        rest = document.ids[2 * document.pairs :]
        assert all(rest.count(token) == 1 for token in (*keys, *values))  # as query and answer, never as filler
        assert 0 not in rest
        assert all(span.chance == 1 / document.pairs for span in document.spans)


def test_token_pairs_are_asked_for_soon_after_the_list():
    from linearize_evals.mqar_tokens import gaps

    first = [gaps(random.Random(seed), 100, 1)[0] for seed in range(400)]
    weights = [(place + 1) ** -0.99 for place in range(100)]
    assert binomtest(first.count(0), 400, weights[0] / sum(weights)).pvalue > 0.01
    assert sorted(gaps(random.Random(0), 5000, 5000)) == list(range(5000))
