"""Padding and packing: every real token gets what it gets alone, and masks that a state can't follow are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.modeling.models import GREEDY, TOLERANCE, converted, greedy, logits, tokens


@pytest.mark.parametrize("chunk", [None, 5])
def test_left_padded_batch_equals_each_row_alone(any_model, chunk):
    rows = [tokens(1, n, seed=n) for n in (3, 17, 64)]
    longest = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - row.shape[1] :] = row[0]
        mask[i, longest - row.shape[1] :] = 1
    together = any_model.generate(
        ids,
        attention_mask=mask,
        output_logits=True,
        return_dict_in_generate=True,
        prefill_chunk_size=chunk,
        **GREEDY,
    )
    # Padding by hand, without generate and so without position_ids.
    by_hand = logits(any_model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        alone = any_model.generate(row, output_logits=True, return_dict_in_generate=True, **GREEDY)
        torch.testing.assert_close(by_hand[i, longest - row.shape[1] :], logits(any_model, row)[0], **TOLERANCE)
        for step, (a, b) in enumerate(zip(together.logits, alone.logits, strict=True)):
            torch.testing.assert_close(a[i], b[0], **TOLERANCE, msg=f"row {i}, decoded token {step}")
        assert together.sequences[i, longest:].tolist() == alone.sequences[0, row.shape[1] :].tolist()


def test_what_is_masked_does_not_matter(any_model):
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[:, 10:23] = 0
    other = ids.clone()
    other[:, 10:23] = tokens(2, 13, seed=9)
    kept = mask.bool()
    assert torch.equal(
        logits(any_model, ids, attention_mask=mask)[kept], logits(any_model, other, attention_mask=mask)[kept]
    )


def test_left_padding_with_a_static_cache(any_model):
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert greedy(any_model, ids, attention_mask=mask, cache_implementation="static") == greedy(
        any_model, ids, attention_mask=mask, use_cache=False
    )


@pytest.mark.parametrize("recipe", ["favor", "window-hedgehog", "window-sinks"])
def test_packed_sequences_equal_separate_ones(recipe):
    model = converted(recipe)
    parts = [tokens(1, n, seed=n) for n in (7, 1, 20, 12)]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    separate = torch.cat([logits(model, part) for part in parts], dim=1)
    packed = logits(model, torch.cat(parts, dim=1), position_ids=positions, use_cache=False)
    torch.testing.assert_close(packed, separate, **TOLERANCE)
    # Two rows, packed differently.
    rows = torch.cat([torch.cat(parts, dim=1), torch.cat(parts[::-1], dim=1)])
    other = torch.cat([torch.arange(part.shape[1]) for part in parts[::-1]])[None]
    both = logits(model, rows, position_ids=torch.cat([positions, other]), use_cache=False)
    reverse = torch.cat([logits(model, part) for part in parts[::-1]], dim=1)
    torch.testing.assert_close(both, torch.cat([separate, reverse]), **TOLERANCE)


def test_a_four_dimensional_mask_is_read_or_refused():
    """Causal with padding is followed; block-diagonal and bidirectional ones can't be, so they raise."""
    model = converted("window-hedgehog")
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None] & mask.bool()[:, None, None, :]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kept = mask.bool()
    torch.testing.assert_close(
        logits(model, ids, attention_mask=causal, position_ids=positions, use_cache=False)[kept],
        logits(model, ids, attention_mask=mask)[kept],
        **TOLERANCE,
    )
    packed = causal.clone()
    packed[:, :, 7:, :7] = False
    for wrong in (packed, torch.ones_like(causal)):
        with pytest.raises(ValueError, match="more than causal with padding"):
            logits(model, ids, attention_mask=wrong, use_cache=False)


def packed_call(lengths=(6, 9)):
    return tokens(1, sum(lengths)), torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.slow
def test_packed_sequences_stay_apart_when_compiled():
    torch._dynamo.reset()
    model = converted("window-hedgehog")
    ids, positions = packed_call()
    expected = logits(model, ids, position_ids=positions, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, ids, position_ids=positions, use_cache=False), expected, **TOLERANCE)


def test_packing_follows_transformers_own_rule_and_never_fills_a_cache():
    """With its default use_cache=True, transformers doesn't separate packed sequences: nor do converted layers."""
    model = converted("window-hedgehog")
    ids, positions = packed_call()
    assert model.config.use_cache
    whole = logits(model, ids, position_ids=positions)
    torch.testing.assert_close(whole, logits(model, ids, position_ids=positions, cache=DynamicCache()), **TOLERANCE)
    with pytest.raises(RuntimeError, match="pass use_cache=False"):
        model(ids, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 6, 15]))
    apart = logits(model, ids, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 6, 15]), use_cache=False)
    torch.testing.assert_close(apart, logits(model, ids, position_ids=positions, use_cache=False), **TOLERANCE)


def test_a_mask_as_long_as_a_static_cache_is_cut_at_the_tokens_place(any_model):
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    long = torch.cat([mask, torch.zeros(2, 8, dtype=torch.long)], 1)
    cache = StaticCache(config=any_model.config, max_cache_len=20)
    kept = mask.bool()
    torch.testing.assert_close(
        logits(any_model, ids, attention_mask=long, cache=cache)[kept],
        logits(any_model, ids, attention_mask=mask)[kept],
        **TOLERANCE,
    )
    with pytest.raises(ValueError, match="12 tokens were seen and 1 are new"):
        logits(any_model, ids[:, :1], attention_mask=torch.ones(2, 1), cache=cache)


def test_a_model_inside_another_models_forward_leaves_its_padding_alone():
    outer, inner = converted("hedgehog"), converted("window-hedgehog", seed=4)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = logits(outer, ids, attention_mask=mask)
    handle = outer.model.layers[0].register_forward_hook(lambda *_: inner(tokens(1, 4)) and None)
    got = logits(outer, ids, attention_mask=mask)
    handle.remove()
    assert torch.equal(got, expected)
