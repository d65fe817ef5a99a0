"""Other projects' implementations of the ops, as the bench_*.py files call them: only those that are there.

Layout (B, T, H, D), as ours. Each is called as its users would call it; transformers' layers run without their
projections, norms and gates, which aren't the op.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention of torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def sdpa_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query (B, 1, H, D) over a cache of keys and values (B, T, Hk, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


@functools.cache
def fla_naive(folder: Path, op: str) -> ModuleType:
    """fla/ops/OP/naive.py alone: importing fla itself changes which code transformers runs."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # einops
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", folder / "fla" / "ops" / op / "naive.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla(op: str) -> Any:
    """fla's Triton op, where fla is installed and there is a GPU."""
    if not torch.cuda.is_available() or importlib.util.find_spec("fla") is None:
        return None
    import fla.ops  # pyright: ignore[reportMissingImports]

    return getattr(fla.ops, op, None)


@functools.cache
def fast_transformers(source: Path) -> Any:
    """The CPU product of fast-transformers, built from its one C++ file."""
    from torch.utils.cpp_extension import load

    return load("causal_product_cpu", [str(source)], extra_cflags=["-O3", "-march=native", "-ffast-math", "-fopenmp"])


class FastTransformers(torch.autograd.Function):
    """Its own autograd function, over the built module: float32, (B, H, T, D)."""

    @staticmethod
    def forward(ctx: Any, built: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros(*q.shape[:3], v.shape[3])
        built.causal_dot_product(q, k, v, out)
        ctx.save_for_backward(q, k, v)
        ctx.built = built
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        ctx.built.causal_dot_backward(q, k, v, d_out.contiguous(), *grads)
        return None, *grads


def fast_transformers_attention(built: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    z = 1 / (torch.einsum("nhli,nhli->nhl", q, k.cumsum(2)) + 1e-6)
    return (FastTransformers.apply(built, q, k, v) * z[..., None]).transpose(1, 2)  # pyright: ignore


def performer(folder: Path) -> Any:
    """lucidrains' causal product in chunks, from the file alone (its package needs more)."""
    import ast

    text = (folder / "performer_pytorch" / "performer_pytorch.py").read_text()
    wanted = [node for node in ast.parse(text).body if getattr(node, "name", "") == "causal_linear_attention_noncuda"]
    space: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(wanted, []), "performer_pytorch.py", "exec"), space)
    return space["causal_linear_attention_noncuda"]


class _Gives(torch.nn.Module):
    """A module that is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def minimax(heads: int, dim: int) -> Any:
    """transformers' lightning attention (fixed decay per head) on q, k, v (B, T, H, D)."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(hidden_size=heads * dim, num_attention_heads=heads, head_dim=dim, num_hidden_layers=2)
    layer = MiniMaxLightningAttention(config, 0)
    layer.act_fn = layer.norm = layer.out_proj = torch.nn.Identity()  # pyright: ignore
    layer.output_gate = _Gives(lambda x: torch.zeros((), dtype=x.dtype))  # pyright: ignore

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.qkv_proj = _Gives(lambda x: torch.cat([q, k, v], -1).flatten(2))  # pyright: ignore
        return layer.to(q.dtype)(q.flatten(2), None, None)[0]

    return run


def mamba2(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """transformers' Mamba-2 scan: C <- q, B <- k, x <- v, dt = 1 for a decay of its own per token."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    A = torch.full((q.shape[2],), -1.0)
    out = mamba2_chunk_scan(v / -log_decay[..., None], -log_decay, A, k, q, 128)
    return out[0] if isinstance(out, tuple) else out


def transformers_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(q, k, v, g, beta)[0]


def repeated(args: argparse.Namespace, *tensors: Tensor) -> list[Tensor]:
    """Keys and values repeated for their query heads, as peers without grouped heads need them."""
    _, heads, kv_heads, _ = (int(n) for n in args.shape.split(","))
    return [x.repeat_interleave(heads // kv_heads, 2) if heads != kv_heads else x for x in tensors]
