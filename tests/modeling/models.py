"""Tiny converted models. Weights are random but far from their initial symmetry, so that dropped terms show."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import linearize

VOCAB = 96

# fp32 sums in another order: benchmarks/exactness.py sees errors up to 8e-6, of logits up to 5.
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}

GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


def tiny_llama(layers: int = 3, seed: int = 0, **config) -> LlamaForCausalLM:
    """A Llama whose head_dim isn't hidden/heads, with GQA and q, k, v, o biases."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        **config,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def shaken(model):
    """The model with every mixer parameter moved off its initial value."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linearize." in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


# name -> recipe; the window is small, so that a few dozen tokens leave it many times over.
RECIPES = {
    "elu1": {"mixer": "linear", "feature_map": "elu1"},
    "hedgehog": {"mixer": "linear", "feature_map": "hedgehog"},
    "favor": {"mixer": "linear", "feature_map": "favor", "feature_map_options": {"features": 32}},
    "window-hedgehog": {"mixer": "window", "feature_map": "hedgehog", "window": 5, "keep_softmax": [1]},
    "window-sinks": {"mixer": "window", "feature_map": "t2r", "window": 5, "sinks": 2},
    "window-favor": {
        "mixer": "window",
        "feature_map": "favor",
        "feature_map_options": {"features": 32},
        "window": 5,
        "keep_softmax": [0],
    },
    "window-taylor": {"mixer": "window", "feature_map": "taylor", "window": 7, "sinks": 1},
}


def converted(recipe: str = "window-hedgehog", **config):
    return shaken(linearize.linearize_(tiny_llama(**config), RECIPES[recipe]))


def tokens(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def greedy(model, ids, **kwargs):
    return model.generate(ids, **{**GREEDY, **kwargs}).tolist()
