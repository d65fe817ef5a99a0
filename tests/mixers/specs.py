"""Every registered mixer, as the tests of this folder build it. A mixer or feature map without a row here fails."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linearize.mixers import AttentionShape, build_mixer

# name -> spec of `build_mixer`. Windows are small, so that a few dozen tokens leave them many times over.
SPECS: dict[str, dict[str, Any]] = {
    **{f"linear-{name}": {"name": "linear", "feature_map": name} for name in ("elu1", "relu", "hedgehog", "t2r")},
    "linear-favor": {"name": "linear", "feature_map": "favor", "feature_map_options": {"features": 32}},
    "linear-taylor": {"name": "linear", "feature_map": "taylor"},
    "linear-cosformer": {"name": "linear", "feature_map": "cosformer", "feature_map_options": {"length": 200}},
    "window-hedgehog": {"name": "window", "feature_map": "hedgehog", "window": 5, "sinks": 0},
    "window-favor-sinks": {
        "name": "window",
        "feature_map": "favor",
        "feature_map_options": {"features": 32},
        "window": 7,
        "sinks": 2,
    },
    "window-cosformer": {
        "name": "window",
        "feature_map": "cosformer",
        "feature_map_options": {"length": 200},
        "window": 7,
        "sinks": 2,
    },
    "length_switch-hedgehog": {"name": "length_switch", "feature_map": "hedgehog", "length": 10},
    "length_switch-favor": {
        "name": "length_switch",
        "feature_map": "favor",
        "feature_map_options": {"features": 32},
        "length": 37,
    },
    "length_switch-cosformer": {
        "name": "length_switch",
        "feature_map": "cosformer",
        "feature_map_options": {"length": 200},
        "length": 1,
    },
    "heads-linear": {"name": "heads", "over": "linear", "over_options": {"feature_map": "elu1"}},
    "heads-window": {"name": "heads", "keep": [1], "over_options": {"feature_map": "hedgehog", "window": 5}},
    "windowed-linear": {
        "name": "windowed",
        "over": "linear",
        "over_options": {"feature_map": "elu1"},
        "window": 5,
        "sinks": 0,
    },
    "windowed-gla-sinks": {"name": "windowed", "over": "gla", "window": 7, "sinks": 2},
    "windowed-gated_deltanet": {"name": "windowed", "window": 64},
    "rfa": {"name": "rfa", "features": 32},
    "rfa-gate": {"name": "rfa", "features": 30, "orthogonal": False, "gate": True, "guard": 0.1},
    "key_normalised": {"name": "key_normalised"},
    "linear_bias": {"name": "linear_bias", "reach": 5},
    "linear_bias-cosformer": {
        "name": "linear_bias",
        "feature_map": "cosformer",
        "feature_map_options": {"length": 200},
        "reach": 0,
    },
    **{name: {"name": name} for name in ("gla", "mamba2", "mamba", "gated_deltanet", "kda")},
    "retnet": {"name": "retnet", "output_gate": False},
    "retnet-gate": {"name": "retnet", "output_gate": True, "rank": 3},
    "gla-no-gate": {"name": "gla", "output_gate": False},
    "mamba2-no-gate": {"name": "mamba2", "output_gate": False},
    "mamba-no-gate": {"name": "mamba", "output_gate": False},
    "deltanet": {"name": "deltanet"},
    "deltanet-gate": {"name": "deltanet", "output_gate": True},
}


class Inputs(NamedTuple):
    """q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv), hidden_states (B, T, hidden)."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden_states: Tensor

    def part(self, *index: Any) -> Inputs:
        return Inputs(*(x[index] for x in self))


def shape_of(heads: int = 4, kv_heads: int = 2, dim: int = 16, v_dim: int = 24) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, v_dim, hidden_size=20, scaling=dim**-0.5)


def mixer_of(spec: dict[str, Any], shape: AttentionShape, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The mixer in `dtype`, every parameter moved off its initial value, so that dropped terms show."""
    mixer = build_mixer(spec, shape, layer=3, seed=5)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return mixer.to(dtype)


def inputs_of(
    shape: AttentionShape, length: int, batch: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(batch, length, *sizes, generator=generator, dtype=torch.float64).to(dtype)

    return Inputs(
        draw(shape.num_heads, shape.head_dim),
        draw(shape.num_key_value_heads, shape.head_dim),
        draw(shape.num_key_value_heads, shape.v_head_dim),
        draw(shape.hidden_size),
    )


def run(mixer: nn.Module, x: Inputs, **kwargs: Any) -> Any:
    """(out, state) of one call."""
    return mixer(x.q, x.k, x.v, hidden_states=x.hidden_states, **kwargs)


def in_pieces(mixer: nn.Module, x: Inputs, lengths: list[int], mask: Tensor | None = None) -> Tensor:
    """(B, T, H, Dv), fed through one state in pieces of the given lengths."""
    state, out, start = None, [], 0
    for length in lengths:
        part = slice(start, start + length)
        piece = None if mask is None else mask[:, part]
        one, state = run(mixer, x.part(slice(None), part), state=state, return_state=True, mask=piece)
        out.append(one)
        start += length
    return torch.cat(out, 1)
