"""Every mixer in a whole model: saved, reloaded, decoded with and without a cache, batched and alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import linearize
from linearize.mixers import grows
from tests.mixers.specs import SPECS
from tests.modeling.models import TOLERANCE, greedy, logits, shaken, tiny_llama, tokens


def recipe_of(spec):
    own = ("feature_map", "feature_map_options", "window", "sinks")
    rest = {key: value for key, value in spec.items() if key != "name" and key not in own}
    return {"mixer": spec["name"], **{key: spec[key] for key in own if key in spec}, "mixer_options": rest}


@pytest.mark.parametrize("name", SPECS)
def test_saved_reloaded_and_decoded(name, tmp_path):
    """Biases, GQA, a head_dim that isn't hidden / heads; one layer of three stays softmax."""
    model = shaken(linearize.linearize_(tiny_llama(), {**recipe_of(SPECS[name]), "keep_softmax": [1]}))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokens(2, 40)
    whole = logits(model, ids, use_cache=False)
    torch.testing.assert_close(logits(again, ids, use_cache=False), whole, atol=0, rtol=0)
    expected = greedy(model, ids, use_cache=False)
    assert greedy(again, ids) == expected
    if grows(SPECS[name]):
        with pytest.raises(RuntimeError, match="static cache can't hold the state of a mixer that grows"):
            greedy(again, ids, cache_implementation="static")
    else:
        assert greedy(again, ids, cache_implementation="static") == expected
    padded = torch.cat([torch.zeros(2, 9, dtype=torch.long), ids], 1)
    mask = (torch.arange(49) >= 9).long().repeat(2, 1)
    torch.testing.assert_close(logits(again, padded, attention_mask=mask)[:, 9:], whole, **TOLERANCE)
    assert [row[49:] for row in greedy(again, padded, attention_mask=mask)] == [row[40:] for row in expected]


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_taken_back_and_rows_chosen_again(name):
    """As assisted decoding and beam search do; a state that was remembered is not written over."""
    model = shaken(linearize.linearize_(tiny_llama(), {**recipe_of(SPECS[name]), "keep_softmax": [1]}))
    ids, wrong = tokens(2, 40), tokens(2, 9, seed=9)
    whole, cache = logits(model, ids, use_cache=False), DynamicCache(config=model.config)
    logits(model, ids[:, :10], cache=cache)
    cache.activate_past_recording()
    logits(model, ids[:, 10:11], cache=cache)
    logits(model, torch.cat([ids[:, 11:13], wrong[:, :3]], 1), cache=cache)
    logits(model, wrong[:, 3:4], cache=cache)
    cache.crop(-4)  # into the middle of a call
    torch.testing.assert_close(logits(model, ids[:, 13:14], cache=cache), whole[:, 13:14], **TOLERANCE)
    for step in (4, 5):
        logits(model, wrong[:, step : step + 1], cache=cache)
    cache.crop(-2)
    torch.testing.assert_close(logits(model, ids[:, 14:24], cache=cache), whole[:, 14:24], **TOLERANCE)
    cache.reorder_cache(torch.tensor([1, 1]))
    for step in range(24, 28):
        found = logits(model, ids[[1, 1], step : step + 1], cache=cache)
        torch.testing.assert_close(found, whole[[1, 1], step : step + 1], **TOLERANCE)
