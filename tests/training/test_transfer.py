"""Stage 1 against a plain implementation: q, k and v taken by hooks from the base model, one backward at the end."""

from __future__ import annotations

import pytest
import torch

import linearize
from linearize.errors import ModelError
from linearize.modeling.compat import recompute_activations
from linearize.modeling.observe import observing
from linearize.training.calibrate import attention_distance
from linearize.training.head import hidden_states
from linearize.training.objectives import Transfer
from linearize.training.trainable import MIXER, choose
from tests.modeling.models import converted, tokens
from tests.training.formulas import attention_of, softmax_attention, written_out

LENGTH = 24
# Documents of 9 and 15 tokens in the first row, one of 24 in the second.
POSITIONS = torch.stack([torch.cat([torch.arange(9), torch.arange(15)]), torch.arange(24)])
DOCUMENTS = [(0, 0, 9), (0, 9, 24), (1, 0, 24)]
CLOSE = {"rtol": 2e-4, "atol": 1e-5}


def transferred(model, ids, positions=None, loss: str = "mse", share: float = 1.0):
    """Losses, and gradients by name, of the engine."""
    parameters = choose(model, "mixers")
    model.zero_grad(set_to_none=True)
    losses = Transfer(model, loss)(ids, positions, share)
    return losses, {name: parameter.grad for name, parameter in parameters.items()}


def reference(model, documents, loss: str = "mse"):
    """The same of documents (1, T) that run one by one: the losses are means over all their tokens."""
    parameters = choose(model, "mixers")
    model.zero_grad(set_to_none=True)
    total = sum(ids.shape[1] for ids in documents)
    sums: dict[int, torch.Tensor] = {}
    for ids in documents:
        for layer, q, k, v in attention_of(model, ids):
            mixer = model.model.layers[layer].self_attn.linearize
            teacher = softmax_attention(q, k, v, scale=32**-0.5)
            value = written_out(loss, mixer(q, k, v)[0], teacher).sum() / total
            sums[layer] = sums.get(layer, torch.zeros(())) + value
    losses = torch.stack(list(sums.values()))
    losses.sum().backward()
    return losses.detach(), {name: parameter.grad for name, parameter in parameters.items()}


def same(one, other, **tolerance) -> None:
    torch.testing.assert_close(one[0], other[0], **tolerance)
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], **tolerance, msg=name)
    assert any(bool(gradient.abs().sum() > 0) for gradient in one[1].values())


@pytest.mark.parametrize("loss", ["mse", "normalized_l2", "cosine"])
@pytest.mark.parametrize("recipe", ["hedgehog", "window-hedgehog", "window-sinks", "window-favor", "window-taylor"])
def test_losses_and_gradients_are_those_of_one_backward_through_everything(recipe, loss):
    model, ids = converted(recipe), tokens(2, LENGTH)
    same(transferred(model, ids, loss=loss), reference(model, [ids[:1], ids[1:]], loss), **CLOSE)


@pytest.mark.parametrize("recipe", ["hedgehog", "window-hedgehog", "window-sinks"])
def test_packed_documents_are_documents_run_one_by_one(recipe):
    model, ids = converted(recipe), tokens(2, LENGTH)
    alone = [ids[row : row + 1, begin:end] for row, begin, end in DOCUMENTS]
    same(transferred(model, ids, POSITIONS), reference(model, alone), **CLOSE)
    with pytest.raises(AssertionError):
        same(transferred(model, ids), reference(model, alone), **CLOSE)


def test_there_is_a_loss_for_each_converted_layer_and_none_for_others():
    model = converted("window-hedgehog", layers=4)  # layer 1 keeps softmax
    losses, gradients = transferred(model, tokens(1, LENGTH))
    assert Transfer(model, "mse").names == ["layer 0", "layer 2", "layer 3"]
    assert losses.shape == (3,)
    assert bool((losses > 0).all())
    assert {name.split(".")[2] for name in gradients} == {"0", "2", "3"}
    assert all(p.grad is None for name, p in model.named_parameters() if MIXER not in name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_mode_and_gradient_checkpointing_change_nothing(reentrant):
    model, ids = converted("window-hedgehog"), tokens(2, LENGTH)
    plain = transferred(model, ids, POSITIONS)
    model.train()
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch({"use_reentrant": reentrant})
    same(transferred(model, ids, POSITIONS), plain, rtol=0, atol=0)
    recompute_activations(model, False)
    model.eval()
    same(transferred(model, ids, POSITIONS), plain, rtol=0, atol=0)


def test_shares_of_a_step_add_up():
    model, ids = converted("window-hedgehog"), tokens(4, LENGTH)
    whole = transferred(model, ids)
    choose(model, "mixers")
    model.zero_grad(set_to_none=True)
    objective = Transfer(model, "mse")
    losses = objective(ids[:3], None, 3 / 4) + objective(ids[3:], None, 1 / 4)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    same((losses, found), whole, **CLOSE)


def test_the_teacher_flows_on_and_is_the_base_model_s():
    """What a layer sees doesn't depend on the mixers before it."""
    model, ids = converted("window-hedgehog"), tokens(2, LENGTH)
    seen = {}
    with torch.no_grad(), observing(model, lambda given: seen.update({given.layer: given})):
        hidden = hidden_states(model, ids, POSITIONS)
    with torch.no_grad(), linearize.bypass(model):
        assert torch.equal(hidden, hidden_states(model, ids, POSITIONS))
    for row, begin, end in DOCUMENTS:
        for layer, q, k, v in attention_of(model, ids[row : row + 1, begin:end]):
            given = seen[layer]
            for own, alone in ((given.q, q), (given.k, k), (given.v, v)):
                torch.testing.assert_close(own[row : row + 1, begin:end], alone, **CLOSE)
            expected = softmax_attention(q, k, v, scale=32**-0.5)
            torch.testing.assert_close(given.teacher[row : row + 1, begin:end], expected, **CLOSE)


def test_padding_takes_no_part():
    model, ids = converted("window-hedgehog"), tokens(2, LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :9] = 0
    students = {}

    def observer(given):
        students[given.layer] = (given.student(), given.teacher, given.inputs["mask"])

    with torch.no_grad(), observing(model, observer):
        model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    with torch.no_grad(), observing(model, lambda given: students.update({(given.layer,): given.student()})):
        model.model(input_ids=ids[:1, 9:], use_cache=False)
    for layer in (0, 2):
        out, _, seen = students[layer]
        assert torch.equal(seen, mask.bool())
        torch.testing.assert_close(out[:1, 9:], students[(layer,)], **CLOSE)


def test_a_layer_that_runs_twice_is_refused():
    model, ids = converted("hedgehog"), tokens(1, LENGTH)
    layers = model.model.layers
    layers[1] = layers[0]
    with pytest.raises(ModelError, match="layer 0 ran twice in one forward"):
        Transfer(model, "mse")(ids, None, 1.0)
    assert model._linearize_switch.observer is None


def test_observing_ends_with_its_block_and_takes_no_other_mode_or_cache():
    model, ids = converted("hedgehog"), tokens(1, LENGTH)
    with torch.no_grad():
        before = model(ids).logits
    refused = pytest.raises(linearize.errors.UsageError, match="bypassed or observed")
    with linearize.bypass(model), refused, observing(model, print):
        pass
    with pytest.raises(KeyError), observing(model, print):
        raise KeyError
    with torch.no_grad(), observing(model, lambda given: None), pytest.raises(RuntimeError, match="use_cache=False"):
        model(ids, use_cache=True)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("packed", [True, False])
def test_how_far_attention_looks(packed):
    """Each head's mean distance, token by token; packed documents are run alone."""
    model, ids = converted("window-hedgehog"), tokens(2, LENGTH)
    found = {}
    with torch.no_grad(), observing(model, lambda given: found.update({given.layer: attention_distance(given)})):
        hidden_states(model, ids, POSITIONS if packed else None)
    documents = DOCUMENTS if packed else [(0, 0, LENGTH), (1, 0, LENGTH)]
    expected = {layer: torch.zeros(4, dtype=torch.float64) for layer in found}
    for row, begin, end in documents:
        for layer, q, k, _ in attention_of(model, ids[row : row + 1, begin:end]):
            for h in range(4):
                for t in range(end - begin):
                    scores = k[0, : t + 1, h // 2] @ q[0, t, h] * 32**-0.5
                    back = t - torch.arange(t + 1)
                    expected[layer][h] += float((scores.double().softmax(0) * back).sum())
    for layer, value in found.items():
        torch.testing.assert_close(value, expected[layer], rtol=1e-4, atol=0)
