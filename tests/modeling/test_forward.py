"""One forward of a converted model: gradients, precision, threads, compilation, and what it refuses."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import DynamicCache

from tests.modeling.models import RECIPES, converted, greedy, logits, tiny_llama, tokens


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
