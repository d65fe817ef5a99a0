"""What the probe says of a model equals what is known of the family, without a weight being made."""

from __future__ import annotations

import pytest
from transformers import (
    BertConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    T5Config,
)

from linearize.errors import ModelError
from linearize.mixers.registry import AttentionShape
from linearize.modeling.probe import probe
from tests.families import tiny_config


def test_heads_dims_and_scaling():
    config = LlamaConfig(num_hidden_layers=2, hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=48)
    config.max_position_embeddings = 77
    found = probe(config)
    assert (found.base_model_type, found.architecture, found.num_layers) == ("llama", "LlamaForCausalLM", 2)
    assert [layer.module for layer in found.layers] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    assert found.layers[0].shape == AttentionShape(6, 2, 48, 48, 96, 48**-0.5, max_length=77)


def test_seventy_billion_parameters_cost_nothing():
    config = LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
    assert len(probe(config).layers) == 80


def test_gemma2_sliding_layers_scaling_and_softcap():
    found = probe(Gemma2Config(num_hidden_layers=4, query_pre_attn_scalar=144, attn_logit_softcapping=30.0))
    assert [layer.kind for layer in found.layers] == ["sliding_attention", "full_attention"] * 2
    assert {(layer.shape.scaling, layer.shape.softcap) for layer in found.layers} == {(144**-0.5, 30.0)}
    assert "soft-capping (30.0)" in found.layers[0].notes[0]


def test_latent_attention_has_other_dims_for_values():
    shape = probe(tiny_config("deepseek_v3")).layers[0].shape
    config: DeepseekV3Config = tiny_config("deepseek_v3")
    assert shape.head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    assert shape.v_head_dim == config.v_head_dim


def test_only_attention_layers_of_a_hybrid_are_found():
    config = tiny_config("qwen3_next")
    expected = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert [layer.layer for layer in probe(config).layers] == expected


def test_layers_that_share_keys_are_refused_one_by_one():
    config = tiny_config("gemma4_text")
    assert config.num_kv_shared_layers == 1
    refusals = [layer.refusal for layer in probe(config).layers]
    assert refusals[:2] == ["", ""]
    assert "reads its keys" in refusals[2]
    assert "keys of an earlier layer" in refusals[3]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(num_layers=1), "encoder-decoder"),
        (FalconConfig(num_hidden_layers=1), "in its own code"),
        (BertConfig(num_hidden_layers=1), "isn't causal"),
        (Gemma3Config(), "multimodal"),
    ],
)
def test_what_cannot_be_converted_says_why(config, reason):
    with pytest.raises(ModelError, match=reason):
        probe(config)


def test_a_module_that_calls_attention_twice_is_refused():
    with pytest.raises(ModelError, match="more than once per forward"):
        probe(tiny_config("diffllama"))
