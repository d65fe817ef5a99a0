"""Decoding a converted model is the same function as one full forward: however the tokens are cut, padded or packed."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import DynamicCache, StaticCache

import linearize
from tests.modeling.models import RECIPES, converted, tiny_llama, tokens

# fp32 sums in another order: errors seen are below 2e-6 of logits of order 3.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}

GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


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


def test_later_tokens_never_change_earlier_outputs(any_model):
    ids = tokens(1, 80)
    torch.testing.assert_close(logits(any_model, ids)[:, :50], logits(any_model, ids[:, :50]), **TOLERANCE)


def greedy(model, ids, **kwargs):
    return model.generate(ids, **{**GREEDY, **kwargs}).tolist()


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


def test_left_padding_with_a_static_cache(any_model):
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert greedy(any_model, ids, attention_mask=mask, cache_implementation="static") == greedy(
        any_model, ids, attention_mask=mask, use_cache=False
    )


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    """With padding, which the recomputation has to know of though the decoder's own forward doesn't run again."""
    ids, gradients = tokens(2, 40), []
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    for checkpointing in (False, True):
        model = converted("window-hedgehog").train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        losses = [model(ids, attention_mask=mask, labels=ids, use_cache=False).loss for _ in range(2)]
        sum(losses).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any(".linearize." in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_is_near_fp32(recipe):
    model = converted(recipe)
    ids = tokens(2, 90)
    exact = logits(model, ids)
    half = logits(copy.deepcopy(model).to(torch.bfloat16), ids).float()
    plain = tiny_llama()
    base = logits(plain, ids)
    # What bf16 costs the softmax model itself is the measure: the rest of the model rounds too.
    allowed = (logits(copy.deepcopy(plain).to(torch.bfloat16), ids).float() - base).norm() / base.norm()
    assert (half - exact).norm() / exact.norm() < max(2e-2, 2 * float(allowed))


def test_autocast_keeps_sums_in_fp32():
    model = converted("window-hedgehog")
    ids = tokens(1, 60)
    cache = DynamicCache()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids, cache=cache, use_cache=True)
    state = next(layer.state for layer in cache.layers if hasattr(layer, "state"))
    assert state["S"].dtype == state["z"].dtype == torch.float32


def test_two_threads_share_a_model():
    model = converted("window-hedgehog")
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[0, :11] = 0
    jobs = [(tokens(1, 30, seed=1), torch.ones_like(mask)), (tokens(1, 30, seed=2), mask)]
    expected = [greedy(model, ids, attention_mask=m) for ids, m in jobs]
    results = [[], []]

    def work(i):
        for _ in range(3):
            results[i].append(greedy(model, jobs[i][0], attention_mask=jobs[i][1]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[expected[0]] * 3, [expected[1]] * 3]


def test_model_and_cache_can_be_copied_and_nothing_is_left_behind():
    from linearize.modeling import context

    model = converted("window-hedgehog")
    ids = tokens(1, 20)
    with torch.no_grad():
        output = model(ids, use_cache=True)
    assert context.current() is None
    clone = copy.deepcopy(model)
    cache = copy.deepcopy(output.cache)
    step = tokens(1, 1, seed=5)
    with torch.no_grad():
        a = clone(step, cache=cache, use_cache=True).logits
        b = model(step, cache=output.cache, use_cache=True).logits
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"attention_mask is \(1, 3\)"):
        model(ids, attention_mask=torch.ones(1, 3, dtype=torch.long))
    assert context.current() is None


def test_a_layer_called_on_its_own_refuses_instead_of_guessing_the_mask():
    model = converted("hedgehog")
    hidden = torch.randn(1, 4, 48)
    positions = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(RuntimeError, match="converted layer 0 ran outside its decoder's forward"):
        model.model.layers[0](hidden, position_embeddings=positions)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["favor", "window-hedgehog", "window-sinks"])
def test_compiles_in_one_graph(recipe):
    torch._dynamo.reset()  # its limit of recompilations counts over the whole process
    model = converted(recipe)
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for kwargs in ({}, {"attention_mask": mask}):
        torch.testing.assert_close(
            logits(compiled, ids, use_cache=False, **kwargs), logits(model, ids, use_cache=False, **kwargs)
        )
    cache, eager_cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    logits(model, ids, cache=cache, use_cache=True)
    logits(model, ids, cache=eager_cache, use_cache=True)
    step = tokens(2, 1)
    torch.testing.assert_close(
        logits(compiled, step, cache=cache, use_cache=True),
        logits(model, step, cache=eager_cache, use_cache=True),
    )


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


def test_early_exit_of_the_model_itself_as_the_assistant():
    model = converted("window-hedgehog")
    ids = tokens(1, 12)
    expected = greedy(model, ids)
    assert greedy(model, ids, assistant_early_exit=2) == expected
    assert greedy(model, ids) == expected


def test_an_unconverted_layer_asked_to_run_as_one_says_so():
    model = converted("window-hedgehog")  # layer 1 is softmax
    model.model.layers[1].self_attn.config._attn_implementation = "linearize"
    with pytest.raises(RuntimeError, match="layer 1 isn't converted"):
        model(tokens(1, 4))


def test_nan_raises_and_names_the_layer_before_it_enters_a_state():
    model = converted("window-hedgehog")
    cache = DynamicCache(config=model.config)
    logits(model, tokens(1, 8), cache=cache, use_cache=True)
    before = {name: x.clone() for name, x in cache.layers[2].state.items()}
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="converted layer 2 gave NaN"):
        logits(model, tokens(1, 3), cache=cache, use_cache=True)
    assert all(torch.equal(x, cache.layers[2].state[name]) for name, x in before.items())
