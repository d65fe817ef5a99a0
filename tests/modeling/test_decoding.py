"""Decoding a converted model is the same function as one full forward, whatever the cut, the cache and the search."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

import linearize
from tests.modeling.models import GREEDY, RECIPES, TOLERANCE, converted, greedy, logits, tiny_llama, tokens


def in_pieces(model, ids, lengths, mask=None):
    """Logits of `ids`, fed through one cache in pieces of the given lengths."""
    cache, out, start = DynamicCache(), [], 0
    for length in lengths:
        stop = start + length
        kwargs = {} if mask is None else {"attention_mask": mask[:, :stop]}
        with torch.no_grad():
            out.append(model(ids[:, start:stop], cache=cache, use_cache=True, **kwargs).logits)
        start = stop
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 300])
def test_prefill_then_single_steps_equal_one_forward(length):
    model = converted("window-hedgehog")
    ids = tokens(2, length)
    whole = logits(model, ids, use_cache=False)
    for steps in (1, 5, 70):
        if steps < length:
            torch.testing.assert_close(in_pieces(model, ids, [length - steps] + [1] * steps), whole, **TOLERANCE)


def test_any_cut_equals_one_forward(any_model):
    ids = tokens(2, 70)
    whole = logits(any_model, ids, use_cache=False)
    for lengths in ([70], [1] * 70, [64, 6], [3, 1, 60, 1, 5], [6, 64]):
        torch.testing.assert_close(in_pieces(any_model, ids, lengths), whole, **TOLERANCE)


def test_later_tokens_never_change_earlier_outputs(any_model):
    ids = tokens(1, 80)
    torch.testing.assert_close(logits(any_model, ids)[:, :50], logits(any_model, ids[:, :50]), **TOLERANCE)


def test_generate_with_every_kind_of_cache_equals_generate_without(any_model):
    ids = tokens(2, 12)
    expected = greedy(any_model, ids, use_cache=False)
    assert greedy(any_model, ids) == expected
    assert greedy(any_model, ids, cache=DynamicCache()) == expected
    assert greedy(any_model, ids, cache=DynamicCache(config=any_model.config)) == expected
    assert greedy(any_model, ids, cache_implementation="static") == expected
    assert greedy(any_model, ids, cache_implementation="static", prefill_chunk_size=5) == expected
    assert greedy(any_model, ids, prefill_chunk_size=5) == expected
    static = StaticCache(config=any_model.config, max_cache_len=64)
    assert greedy(any_model, ids, cache=static) == expected
    static.reset()
    assert greedy(any_model, ids, cache=static) == expected


def test_beams_samples_and_returned_sequences(any_model):
    ids = tokens(2, 9)
    for kwargs in (
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 1.3},
        {"num_beams": 2, "do_sample": True},
    ):
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            outputs.append(greedy(any_model, ids, use_cache=use_cache, **kwargs))
        assert outputs[0] == outputs[1], kwargs


def test_assisted_decoding_equals_greedy(any_model):
    ids = tokens(1, 12).repeat(1, 3)  # repetition gives prompt lookup something to find
    expected = greedy(any_model, ids)
    assert greedy(any_model, ids, prompt_lookup_num_tokens=4) == expected
    draft = converted("hedgehog", layers=2, seed=4)
    assert greedy(any_model, ids, assistant_model=draft) == expected
    plain = tiny_llama(seed=4)
    assert greedy(plain, ids, assistant_model=any_model) == greedy(plain, ids)


def test_a_conversation_continues_from_the_returned_cache(any_model):
    first = tokens(1, 10)
    start = any_model.generate(first, return_dict_in_generate=True, **GREEDY)
    cache = start.cache
    more = torch.cat([start.sequences, tokens(1, 8, seed=8)], dim=1)
    assert greedy(any_model, more, cache=cache) == greedy(any_model, more)


def test_crop_takes_back_recorded_tokens_and_refuses_others():
    model = converted("window-sinks")
    ids = tokens(1, 30)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :10], cache=cache, use_cache=True)
        cache.activate_past_recording()
        model(ids[:, 10:25], cache=cache, use_cache=True)
        model(ids[:, 25:27], cache=cache, use_cache=True)
        cache.crop(-9)  # into the middle of the second call
        assert cache.get_seq_length() == 18
        resumed = model(ids[:, 18:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(resumed, logits(model, ids)[:, 18:], **TOLERANCE)
    with pytest.raises(RuntimeError, match="can't crop 25 tokens"):
        cache.crop(-25)


def test_a_filled_softmax_cache_is_refused():
    plain, model = tiny_llama(), converted("hedgehog")
    cache = DynamicCache()
    with torch.no_grad():
        plain(tokens(1, 4), cache=cache, use_cache=True)
        with pytest.raises(RuntimeError, match="layer 0 of the cache was filled by softmax"):
            model(tokens(1, 4), cache=cache, use_cache=True)


def state_bytes(cache):
    return sum(layer.nbytes for layer in cache.layers if hasattr(layer, "nbytes"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_bytes_do_not_grow(recipe):
    """Past max_position_embeddings too; and they are what inspect announces."""
    from linearize.mixers import AttentionShape
    from linearize.mixers import state_bytes as announced

    model = converted(recipe)
    cache, sizes = DynamicCache(), []
    for _ in range(6):
        with torch.no_grad():
            model(tokens(1, 100), cache=cache, use_cache=True)
        sizes.append(state_bytes(cache))
    assert len(set(sizes)) == 1
    layers = [layer for layer in model.config.linearize["layers"] if layer.get("mixer")]
    assert sizes[0] == sum(
        announced(layer["mixer"], AttentionShape(**layer["shape"]), dtype=torch.float32) for layer in layers
    )


@pytest.mark.slow
def test_state_bytes_do_not_grow_up_to_32k_tokens():
    model = linearize.linearize_(tiny_llama(2), mixer="window", feature_map="elu1", window=64)
    cache, sizes = DynamicCache(), set()
    for _ in range(16):
        with torch.no_grad():
            output = model(tokens(1, 2048), cache=cache, use_cache=True, logits_to_keep=1)
        assert output.logits.isfinite().all()
        sizes.add(state_bytes(cache))
    assert cache.get_seq_length() == 32768
    assert len(sizes) == 1


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_converted_sliding_layer_beside_a_kept_one_in_a_static_cache(chunk):
    """The prompt is longer than the model's own sliding window, so the static cache has moved on."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        pad_token_id=0,
    )
    model = linearize.linearize_(
        MistralForCausalLM(config).eval(), feature_map="hedgehog", window=4, convert_sliding=True, keep_softmax=[1]
    )
    ids = tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = greedy(model, ids, attention_mask=mask, use_cache=False)
    got = greedy(model, ids, attention_mask=mask, cache_implementation="static", prefill_chunk_size=chunk)
    assert got == expected


def test_early_exit_of_the_model_itself_as_the_assistant():
    model = converted("window-hedgehog")
    ids = tokens(1, 12)
    expected = greedy(model, ids)
    assert greedy(model, ids, assistant_early_exit=2) == expected
    assert greedy(model, ids) == expected


def test_a_prompt_of_inference_mode_is_continued_outside_of_it(any_model):
    """Its tensors can't be changed in place there."""
    ids = tokens(1, 20)
    cache = DynamicCache()
    with torch.inference_mode():
        any_model(ids[:, :18], cache=cache, use_cache=True)
    with torch.no_grad():
        outs = [any_model(ids[:, t : t + 1], cache=cache, use_cache=True).logits for t in (18, 19)]
    torch.testing.assert_close(torch.cat(outs, 1), logits(any_model, ids)[:, 18:], **TOLERANCE)
