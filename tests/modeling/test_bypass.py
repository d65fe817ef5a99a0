"""The teacher inside a converted model, and mixers without one of their branches."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import linearize
from linearize.mixers import build_mixer
from linearize.mixers.registry import AttentionShape
from linearize.modeling.bypass import keeping
from tests.modeling.models import RECIPES, greedy, logits, shaken, tiny_llama, tokens

PADDED = torch.ones(2, 40, dtype=torch.long)
PADDED[0, :17] = 0


def tiny_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_head=4, n_layer=2, n_positions=128, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("base", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("recipe", ["favor", "window-hedgehog"])
def test_bypassed_is_the_base_model_bit_for_bit(base, implementation, recipe):
    plain = base()
    plain.set_attn_implementation(implementation)
    student = linearize.linearize_(copy.deepcopy(plain), RECIPES[recipe])
    ids = tokens(2, 40)
    before = logits(student, ids, attention_mask=PADDED)
    with linearize.bypass(student) as teacher:
        assert torch.equal(logits(teacher, ids), logits(plain, ids))
        assert torch.equal(logits(teacher, ids, attention_mask=PADDED), logits(plain, ids, attention_mask=PADDED))
        assert greedy(teacher, ids, attention_mask=PADDED) == greedy(plain, ids, attention_mask=PADDED)
        with pytest.raises(linearize.errors.UsageError, match="already"), linearize.bypass(student):
            pass
    assert torch.equal(logits(student, ids, attention_mask=PADDED), before)
    assert not torch.allclose(before, logits(plain, ids, attention_mask=PADDED))


def test_an_error_inside_ends_the_bypass():
    student = linearize.linearize_(tiny_llama(), RECIPES["favor"])
    ids = tokens(1, 20)
    before = logits(student, ids)
    with pytest.raises(KeyError), linearize.bypass(student):
        raise KeyError
    assert torch.equal(logits(student, ids), before)


@pytest.mark.parametrize("act", [linearize.bypass, lambda model: linearize.ablate(model, "linear")])
def test_a_model_that_is_not_converted_is_refused(act):
    with pytest.raises(linearize.errors.UsageError, match="isn't converted"), act(tiny_llama()):
        pass


def test_a_mixer_with_one_branch_has_nothing_to_ablate():
    student = linearize.linearize_(tiny_llama(), RECIPES["favor"])
    with pytest.raises(linearize.errors.UsageError, match="'linear' branch"), linearize.ablate(student, "linear"):
        pass


@pytest.mark.parametrize("feature_map", ["favor", "hedgehog", "elu1"])
@pytest.mark.parametrize("branch", ["linear", "window"])
def test_what_an_ablated_mixer_leaves(branch, feature_map):
    """Against sums written out: softmax over the window and the sinks, or linear attention over what is older."""
    window, sinks, length, scale = 5, 2, 20, 0.35
    shape = AttentionShape(1, 1, 8, 8, hidden_size=8, scaling=scale)
    spec = {"name": "window", "feature_map": feature_map, "window": window, "sinks": sinks}
    mixer = build_mixer(spec, shape, layer=0, seed=0)
    # Keys alike the newest queries: the exact part outweighs the linear one by many orders.
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, 8) * factor for factor in (4, 4, 1))
    mixer.ablated = branch
    with torch.no_grad():
        out = mixer(q, k, v)[0][0, :, 0].double()
        fq, fk = mixer.feature_map(q, "q"), mixer.feature_map(k, "k")
    phi_q, phi_k = fq.phi[0, :, 0].double(), fk.phi[0, :, 0].double()
    logs = torch.zeros(length).double() if fk.log_scale is None else fk.log_scale[0, :, 0].double()
    for t in range(length):
        near = [j for j in range(t + 1) if j > t - window or j < sinks]
        old = [j for j in range(t + 1) if j not in near]
        if branch == "linear":
            weights = {j: float(torch.exp(scale * q[0, t, 0].double() @ k[0, j, 0].double())) for j in near}
        else:
            top = max((float(logs[j]) for j in old), default=0.0)
            weights = {j: float(phi_q[t] @ phi_k[j] * torch.exp(logs[j] - top)) for j in old}
        expected = sum((w * v[0, j, 0].double() for j, w in weights.items()), torch.zeros(8).double())
        expected = expected / sum(weights.values()) if weights else expected
        torch.testing.assert_close(out[t], expected, atol=2e-3, rtol=2e-3, msg=f"token {t}")


@pytest.mark.parametrize("base", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_keeping_some_layers_is_the_conversion_that_keeps_them(base, implementation):
    """All converted, so that the model itself asks for no T x T mask."""
    plain = base()
    plain.set_attn_implementation(implementation)
    recipe = {**RECIPES["window-hedgehog"], "keep_softmax": "none"}
    student = shaken(linearize.linearize_(copy.deepcopy(plain), recipe))
    ids, length = tokens(2, 40), plain.config.num_hidden_layers
    trained = {name: value for name, value in student.state_dict().items() if ".linearize." in name}

    def run(model):
        return [
            logits(model, ids, use_cache=False),
            logits(model, ids, attention_mask=PADDED, use_cache=False)[PADDED.bool()],
            greedy(model, ids, attention_mask=PADDED),
        ]

    def same(mine, theirs):
        pairs = zip(mine, theirs, strict=True)
        return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)

    own = run(student)
    for layers in [{0}, {length - 1}, set(range(length - 1)), {1}]:
        hybrid = linearize.linearize_(copy.deepcopy(plain), {**recipe, "keep_softmax": sorted(layers)})
        mine = {name: trained[name] for name in hybrid.state_dict() if name in trained}
        hybrid.load_state_dict(mine, strict=False)
        with keeping(student, layers):
            assert same(run(student), run(hybrid)), layers
            with pytest.raises(linearize.errors.UsageError, match="already"), keeping(student, {0}):
                pass
        assert not same(run(hybrid), own)
    with keeping(student, set(range(length))):
        assert same(run(student), run(plain))
    with keeping(student, ()):
        assert same(run(student), own)
    assert same(run(student), own)


@pytest.mark.parametrize(
    ("layers", "heads", "said"),
    [
        ({1}, None, "layer 1 isn't converted"),
        ((), {0: [0], 1: [0]}, "layer 1 isn't converted"),
        ({0}, {0: [0]}, "layer 0 is kept whole"),
        ((), {0: []}, "keep="),
        ((), {0: [0, 1]}, "keep="),
    ],
)
def test_what_can_not_be_kept(layers, heads, said):
    student = linearize.linearize_(tiny_llama(), {**RECIPES["favor"], "keep_softmax": [1]})
    with pytest.raises(linearize.errors.UsageError, match=said), keeping(student, layers, heads):
        pass
    with keeping(student, ()):  # nothing is left of the refused ones
        pass


def test_kept_heads_are_a_mode_of_their_own():
    student, ids = linearize.linearize_(tiny_llama(), RECIPES["favor"]), tokens(1, 12)
    own = logits(student, ids, use_cache=False)
    with keeping(student, (), {0: [1]}):
        mixed = logits(student, ids, use_cache=False)
        for mode in (keeping(student, (), {0: [0]}), keeping(student, {1}), linearize.bypass(student)):
            with pytest.raises(linearize.errors.UsageError, match="already"), mode:
                pass
        assert torch.equal(logits(student, ids, use_cache=False), mixed)
        with pytest.raises(RuntimeError, match="use_cache=False"):
            student(ids, use_cache=True)
    assert not torch.equal(mixed, own)
    assert torch.equal(logits(student, ids, use_cache=False), own)
