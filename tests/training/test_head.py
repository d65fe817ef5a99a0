"""Losses on logits that never stand in memory, against formulas on all of them in float64."""

from __future__ import annotations

import pytest
import torch

import linearize
from linearize.training import head as heads
from linearize.training.head import hidden_states, kl, logit_loss, targets
from tests.families import tiny_model
from tests.modeling.models import tiny_llama

WINDOW = {"mixer": "window", "feature_map": "hedgehog", "window": 4}
VOCAB = 1000
# fp32 logits, softmax and sums against float64 ones.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def student(vocab: int = VOCAB, seed: int = 0, **config):
    return linearize.linearize_(tiny_llama(layers=2, vocab_size=vocab, seed=seed, **config), WINDOW)


def ids_of(vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(1, vocab, (2, 13), generator=torch.Generator().manual_seed(3))


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    labels = targets(ids, None)
    labels[0, 4:7] = -100
    return labels


def formula(logits, aim, labels, temperature: float, ce: float) -> tuple[torch.Tensor, list[float]]:
    """sum of (1 - ce) T^2 sum_v q (log q - log p) + ce (-log p[label]), in the dtype of its arguments."""
    logits, aim, labels = logits.flatten(0, 1), aim.flatten(0, 1), labels.flatten()
    q = (aim / temperature).softmax(-1)
    log_p = logits / temperature - (logits / temperature).logsumexp(-1, keepdim=True)
    divergence = temperature**2 * (q * (q.log() - log_p)).sum()
    known = labels >= 0
    chosen = logits[known].gather(1, labels[known, None])[:, 0]
    crossed = (logits[known].logsumexp(-1) - chosen).sum()
    shown = [divergence.item(), crossed.item(), int(known.sum())]
    return (1 - ce) * divergence + ce * crossed, shown


def test_kl_is_that_of_tempered_distributions():
    torch.manual_seed(0)
    a, b = (3 * torch.randn(5, VOCAB, dtype=torch.float64) for _ in range(2))
    for temperature in (0.5, 1.0, 3.0):
        p, q = ((x / temperature).softmax(-1) for x in (a, b))
        expected = temperature**2 * (q * (q / p).log()).sum()
        torch.testing.assert_close(kl(a.float(), b.float(), temperature).double(), expected, **CLOSE)


def test_targets_are_the_next_tokens_of_the_same_document():
    ids = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])
    positions = torch.tensor([[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]])
    assert targets(ids, None).tolist() == [[6, 7, 8, 9, -100], [2, 3, 4, 5, -100]]
    assert targets(ids, positions).tolist() == [[6, -100, -100, 9, -100], [2, 3, 4, 5, -100]]


@pytest.mark.parametrize("chunk", [7, 26, None])
@pytest.mark.parametrize(("temperature", "ce"), [(1.0, 0.0), (2.5, 0.3), (1.0, 1.0)])
def test_in_chunks_it_is_the_loss_on_all_logits(chunk, temperature, ce):
    """Value, figures, and gradients of hidden states and head, also where the loss is scaled afterwards."""
    model, ids = student(), ids_of()
    weight = model.lm_head.weight.requires_grad_(True)
    torch.manual_seed(1)
    hidden = torch.randn(2, 13, 48)
    aim = 3 * torch.randn(2, 13, VOCAB)
    given = hidden.clone().requires_grad_(True)
    teacher = (lambda part: aim.flatten(0, 1)[part]) if ce < 1 else None
    loss, figures = logit_loss(
        model, given, labels_of(ids), teacher=teacher, temperature=temperature, ce=ce, chunk=chunk
    )
    assert not figures.requires_grad
    (loss * 0.25).backward()

    exact, matrix = hidden.double().requires_grad_(True), weight.detach().double().requires_grad_(True)
    expected, shown = formula(exact @ matrix.T, aim.double(), labels_of(ids), temperature, ce)
    (expected * 0.25).backward()
    torch.testing.assert_close(loss.double(), expected, **CLOSE)
    shown[0] *= ce < 1
    torch.testing.assert_close(figures.double(), torch.tensor(shown).double(), **CLOSE)
    torch.testing.assert_close(given.grad.double(), exact.grad, **CLOSE)
    torch.testing.assert_close(weight.grad.double(), matrix.grad, **CLOSE)


def test_under_autocast_every_chunk_reaches_the_float32_weights():
    model, ids = student(), ids_of()
    weight = model.lm_head.weight.requires_grad_(True)
    hidden = torch.randn(2, 13, 48, generator=torch.Generator().manual_seed(1))
    found = []
    for dtype in (torch.bfloat16, None):
        weight.grad, given = None, hidden.clone().requires_grad_(True)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss, _ = logit_loss(model, given, labels_of(ids), chunk=7)
        loss.backward()
        assert weight.grad.dtype == given.grad.dtype == torch.float32
        found.append((loss.detach(), given.grad, weight.grad))
    for rounded, exact in zip(*found, strict=True):
        assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_a_whole_model_add_up_where_embeddings_are_tied(tied):
    """Every parameter's gradient, against one backward through the whole model in float64."""
    model, ids = student(tie_word_embeddings=tied), ids_of()
    exact = student(tie_word_embeddings=tied).double().requires_grad_(True)
    exact.load_state_dict(model.state_dict())
    model.requires_grad_(True)
    aim = torch.randn(2, 13, VOCAB, generator=torch.Generator().manual_seed(1))
    loss, _ = logit_loss(
        model, hidden_states(model, ids, None), labels_of(ids), teacher=lambda p: aim.flatten(0, 1)[p], ce=0.4, chunk=7
    )
    loss.backward()
    formula(exact(ids, use_cache=False).logits, aim.double(), labels_of(ids), 1.0, 0.4)[0].backward()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    for (name, one), (other_name, other) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere", "opt"])
def test_what_a_family_does_to_its_logits_is_done(family):
    """gemma2 caps them, granite and cohere scale them; opt projects hidden states first in some sizes."""
    model = tiny_model(family).requires_grad_(True)
    vocab = model.config.vocab_size
    ids = ids_of(vocab)
    aim = torch.randn(2, 13, vocab, generator=torch.Generator().manual_seed(1))
    whole = model(ids, use_cache=False).logits
    expected, _ = formula(whole, aim, labels_of(ids), 1.5, 0.5)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss, _ = logit_loss(
        model,
        hidden_states(model, ids, None),
        labels_of(ids),
        teacher=lambda p: aim.flatten(0, 1)[p],
        temperature=1.5,
        ce=0.5,
        chunk=7,
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


def test_the_head_sees_a_few_tokens_at_a_time_and_judging_takes_no_gradient(monkeypatch):
    model, ids = student().requires_grad_(True), ids_of()
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 7 * VOCAB + 1)
    taken = []
    real = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kw: taken.append(1) or real(*args, **kw))
    with torch.no_grad():
        logit_loss(model, hidden_states(model, ids, None), targets(ids, None))
    assert (seen, taken) == ([7, 7, 7, 5], [])
    logit_loss(model, hidden_states(model, ids, None), targets(ids, None))[0].backward()
    assert (seen[4:], len(taken)) == ([7, 7, 7, 5], 4)
    assert model.lm_head.weight.grad is not None


def test_a_head_leaves_the_model_as_it_was():
    model, ids = student(), ids_of()
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        with pytest.raises(RuntimeError):
            heads.head(model, torch.randn(1, 2, 7))  # no hidden states of this model
        torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=0, atol=0)
    assert "forward" not in vars(model.model)
