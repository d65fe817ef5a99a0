"""Attention and its losses written out, for tiny Llamas: nothing here runs the engine's code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import linearize


@torch.no_grad()
def attention_of(model, ids: Tensor) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """(layer, q, k, v) of each converted layer where the base model runs on ids (1, T): (1, T, heads, D) after RoPE."""
    seen: dict[str, Tensor] = {}
    handles = []
    width = model.config.head_dim
    layers = {layer["layer"] for layer in model.config.linearize["layers"] if layer.get("mixer")}
    for number in layers:
        attention = model.model.layers[number].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):

            def keep(module, args, output, key=f"{number} {name}"):
                seen[key] = output.unflatten(-1, (-1, width))

            handles.append(getattr(attention, name).register_forward_hook(keep))
    handles.append(model.model.rotary_emb.register_forward_hook(lambda module, args, out: seen.update(rope=out)))
    with linearize.bypass(model):
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    cos, sin = (x[:, :, None] for x in seen["rope"])

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return [
        (number, rotated(seen[f"{number} q_proj"]), rotated(seen[f"{number} k_proj"]), seen[f"{number} v_proj"])
        for number in sorted(layers)
    ]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """(B, T, H, Dv): causal softmax attention with one loop over heads."""
    heads = []
    group = q.shape[2] // k.shape[2]
    length = q.shape[1]
    hidden = torch.ones(length, length).triu(1).bool()
    for h in range(q.shape[2]):
        scores = q[:, :, h] @ k[:, :, h // group].transpose(1, 2) * scale
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, :, h // group])
    return torch.stack(heads, 2)


def written_out(name: str, student: Tensor, teacher: Tensor) -> Tensor:
    """(B, T): the loss of each token of (B, T, H, D)."""
    width = student.shape[2] * student.shape[3]
    if name == "mse":
        return 1000 * ((student - teacher) ** 2).sum((2, 3)) / width
    if name == "normalized_l2":
        return ((student - teacher) ** 2).sum((2, 3)).sqrt() / math.sqrt(width)
    lengths = (student**2).sum(3).sqrt() * (teacher**2).sum(3).sqrt()
    return (1 - (student * teacher).sum(3) / lengths).mean(2)
