"""cosformer, key normalisation and the relative-position bias, each against a loop over tokens from its formula."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import linearize
from linearize.errors import UsageError
from linearize.mixers import AttentionShape, build_mixer, state_bytes
from linearize.mixers.key_normalised import key_normalised_attention
from linearize.mixers.linear import build_feature_map
from tests.mixers.specs import SPECS, inputs_of, mixer_of, run, shape_of
from tests.modeling.models import logits, tiny_llama, tokens

COSFORMER = {"name": "linear", "feature_map": "cosformer", "feature_map_options": {"length": 40}}


def test_cosformer_is_its_formula():
    """Qin et al. 2022, equation 10: relu(q).relu(k) cos(pi (i - j) / 2M)."""
    shape = shape_of()
    x, mixer = inputs_of(shape, 40), mixer_of(COSFORMER, shape)
    out = run(mixer, x)[0]
    for b, t, head in ((0, 0, 0), (0, 17, 1), (1, 39, 2), (1, 30, 3)):
        numerator, denominator = torch.zeros(24, dtype=torch.float64), 0.0
        for j in range(t + 1):
            weight = x.q[b, t, head].relu() @ x.k[b, j, head // 2].relu() * math.cos(math.pi * (t - j) / 80)
            numerator, denominator = numerator + weight * x.v[b, j, head // 2], denominator + weight
        torch.testing.assert_close(out[b, t, head], numerator / denominator)


def test_cosformer_weights_distances_alone_wherever_it_counts_from():
    shape = shape_of()
    x, found = inputs_of(shape, 20, dtype=torch.float32), []
    cosformer = build_feature_map("cosformer", {"length": 100}, shape, None)
    for first in (0, 10**9 + 7):
        places = first + torch.arange(20)[None]
        q, k = cosformer(x.q[:, :, :2], "q", places).phi, cosformer(x.k, "k", places).phi
        found.append(torch.einsum("bthf,bshf->bhts", q, k))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_cosformer_takes_its_length_from_the_model_and_none_without():
    shape = shape_of()
    with pytest.raises(UsageError, match=r"needs a model whose config has a length.*feature_map_options\.length"):
        build_feature_map("cosformer", {"length": 0}, shape, None)
    with pytest.raises(UsageError, match="-3"):
        build_feature_map("cosformer", {"length": -3}, shape, None)
    known = AttentionShape(**{**shape.to_dict(), "max_length": 70})
    assert build_feature_map("cosformer", {}, known, None).max_length == 70
    assert build_feature_map("cosformer", {"length": 9}, known, None).max_length == 9
    old = shape.to_dict()
    del old["max_length"]
    assert AttentionShape(**old) == shape
    assert known.agrees(old)
    assert not known.agrees({**old, "num_heads": 3})
    assert not known.agrees(None)


def test_sequences_beyond_the_length_are_refused_and_say_which_option():
    shape = shape_of()
    mixer, said = mixer_of(COSFORMER, shape), r"41 tokens.*takes 40.*feature_map_options\.length"
    with pytest.raises(ValueError, match=said):
        run(mixer, inputs_of(shape, 41))
    with torch.no_grad():
        _, state = run(mixer, inputs_of(shape, 39), return_state=True)
        _, state = run(mixer, inputs_of(shape, 1), state=state, return_state=True)
        assert state["seen"].tolist() == [40, 40]
        with pytest.raises(ValueError, match=said):
            run(mixer, inputs_of(shape, 1), state=state)
    # A row of packed sequences may be longer than each of them.
    packed = inputs_of(shape, 60, batch=1)
    _, state = run(mixer, packed, cu_seqlens=torch.tensor([0, 30, 60]), return_state=True)
    assert state["seen"].tolist() == [30, 30]
    with pytest.raises(ValueError, match=said):
        run(mixer, packed, cu_seqlens=torch.tensor([0, 19, 60]))


def test_a_model_that_cosformer_was_put_on_counts_up_to_its_own_length(tmp_path):
    model = linearize.linearize_(
        tiny_llama(max_position_embeddings=50), {"mixer": "linear", "feature_map": "cosformer"}
    )
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tokens(1, 50)
    assert torch.equal(logits(again, ids), logits(model, ids))
    with pytest.raises(ValueError, match="takes 50"):
        logits(again, tokens(1, 51))
    endless = LlamaForCausalLM(LlamaConfig(**{**tiny_llama().config.to_dict(), "max_position_embeddings": -1}))
    with pytest.raises(UsageError, match="needs a model whose config has a length"):
        linearize.linearize_(endless, {"mixer": "linear", "feature_map": "cosformer"})


def feature_pairs(mixer, x):
    """phi(q_t).phi(k_j), (B, H, T, T), key/value heads repeated."""
    phi_q, phi_k = mixer.feature_map(x.q, "q").phi, mixer.feature_map(x.k, "k").phi
    return torch.einsum("bthf,bshf->bhts", phi_q, phi_k.repeat_interleave(2, 2))


@pytest.mark.parametrize("name", ["hedgehog", "elu1"])
def test_key_normalisation_divides_each_key_by_the_queries_up_to_it(name):
    shape = shape_of()
    x, mixer = inputs_of(shape, 12), mixer_of({"name": "key_normalised", "feature_map": name}, shape)
    out, pairs = run(mixer, x)[0], feature_pairs(mixer, x)
    for b, t, head in ((0, 0, 0), (0, 5, 1), (1, 11, 2), (1, 11, 3)):
        expected = torch.zeros(24, dtype=torch.float64)
        for j in range(t + 1):
            first = 2 * (head // 2)
            z = sum((pairs[b, first, i, j] + pairs[b, first + 1, i, j]) / 2 for i in range(j + 1))
            expected = expected + pairs[b, head, t, j] / z * x.v[b, j, head // 2]
        torch.testing.assert_close(out[b, t, head], mixer.out_scale[head] * expected)


@pytest.mark.parametrize("causal", [True, False])
def test_the_public_key_normalised_attention_in_both_directions(causal):
    generator = torch.Generator().manual_seed(0)
    phi_q, phi_k, v = (
        torch.rand(2, 9, h, d, generator=generator, dtype=torch.float64) for h, d in ((4, 6), (2, 6), (2, 5))
    )
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = mask[1, 8:] = False
    out = key_normalised_attention(phi_q, phi_k, v, causal=causal, mask=mask)
    for b, rows in ((0, range(3, 9)), (1, range(8))):
        for t in rows:
            for head in range(4):
                expected = torch.zeros(5, dtype=torch.float64)
                for j in (j for j in rows if j <= t or not causal):
                    k, group = phi_k[b, j, head // 2], slice(2 * (head // 2), 2 * (head // 2) + 2)
                    z = sum((phi_q[b, i, group] @ k).mean() for i in rows if i <= j or not causal)
                    expected = expected + phi_q[b, t, head] @ k / z * v[b, j, head // 2]
                torch.testing.assert_close(out[b, t, head], expected)


def test_key_normalisation_over_queries_to_come_is_refused_for_a_causal_model():
    with pytest.raises(UsageError, match="would see its future"):
        build_mixer({"name": "key_normalised", "causal": False}, shape_of(), layer=0, seed=0)


@pytest.mark.parametrize("mixer", ["key_normalised", "linear_bias"])
def test_maps_known_up_to_a_factor_of_each_query_are_refused(mixer):
    for name in ("favor", "taylor"):
        with pytest.raises(UsageError, match=f"'{mixer}' can't take feature map '{name}'"):
            build_mixer({"name": mixer, "feature_map": name}, shape_of(), layer=0, seed=0)


@pytest.mark.parametrize("reach", [0, 3, 50])
def test_the_bias_is_one_sum_with_linear_attention(reach):
    shape = shape_of()
    mixer = mixer_of({"name": "linear_bias", "reach": reach}, shape)
    x = inputs_of(shape, 14)
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, 5:7] = False
    out, pairs = run(mixer, x, mask=mask)[0], feature_pairs(mixer, x)
    weight = (mixer.level[:, None] + mixer.bias).exp()
    for b, t, head in ((0, 0, 0), (0, 8, 1), (0, 13, 0), (1, 13, 2), (1, 4, 3)):
        numerator, denominator = torch.zeros(24, dtype=torch.float64), 0.0
        for j in (j for j in range(t + 1) if mask[b, j]):
            w = pairs[b, head, t, j] + (weight[head, t - j] if t - j <= reach else 0)
            numerator, denominator = numerator + w * x.v[b, j, head // 2], denominator + w
        torch.testing.assert_close(out[b, t, head], numerator / denominator)


def test_the_state_after_packed_sequences_is_that_of_each():
    """Which a mixer of a language model never needs, but a caller may."""
    shape = shape_of()
    x, bounds = inputs_of(shape, 20, batch=1), [0, 17, 17, 20]
    for spec in ({"name": "linear_bias", "reach": 5}, {"name": "rfa", "features": 8, "gate": True}, COSFORMER):
        mixer = mixer_of(spec, shape)
        _, packed = run(mixer, x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), return_state=True)
        for row, (a, b) in enumerate(itertools.pairwise(bounds)):
            if a < b:
                _, alone = run(mixer, x.part(slice(None), slice(a, b)), return_state=True)
                for key, value in alone.items():
                    torch.testing.assert_close(packed[key][row], value[0], msg=f"{spec['name']} {key}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_take_the_bytes_that_the_documentation_says(dtype):
    shape, heads, v_dim, features, element = shape_of(), 2, 24, 32, dtype.itemsize
    linear, reach = features * v_dim + features + 1, 5
    sizes = {
        "linear-cosformer": 4 * heads * linear + 8,
        "rfa": 4 * heads * (features * (v_dim + 2) + 2),
        "key_normalised": 4 * heads * (features * v_dim + 3 * features + 2),
        "linear_bias": 4 * heads * (features * v_dim + 2 * features + 1) + reach * (element * heads * v_dim + 1),
    }
    assert {name: state_bytes(SPECS[name], shape, dtype=dtype) for name in sizes} == sizes
