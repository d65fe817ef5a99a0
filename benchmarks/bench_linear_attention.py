"""linear_attention against softmax attention and other implementations of the same op.

    python benchmarks/bench_linear_attention.py --oracles DIR --fast-transformers causal_product_cpu.cpp --performer DIR

`decay` is the same op with a scalar decay for each token, which Mamba-2's scan and lightning attention have too; `gla`
has one for each key dim. The other rows have none.
"""

from __future__ import annotations

import argparse

import torch
from linearize_kernels import linear_attention, linear_attention_step

import ops_peers as peers
from ops_timing import Run, main


def build(args: argparse.Namespace, length: int, dtype: torch.dtype, which: str) -> tuple[dict[str, Run], list]:
    batch, heads, kv_heads, dim = (int(n) for n in args.shape.split(","))
    grad = which == "both"
    shape = (batch, length, kv_heads, dim)
    q = (torch.rand(batch, length, heads, dim) + 0.1).to(args.device, dtype).requires_grad_(grad)
    k = (torch.rand(shape) + 0.1).to(args.device, dtype).requires_grad_(grad)
    v = torch.randn(shape).to(args.device, dtype).requires_grad_(grad)
    token = -torch.rand(shape[:3], device=args.device) * 0.1 - 0.01
    vector = -torch.rand(shape, device=args.device) * 0.1 - 0.01
    runs: dict[str, Run] = {"sdpa": lambda: peers.sdpa(q, k, v)}
    own = {"cpu": ("torch", "cpu"), "cuda": ("torch", "triton")}[torch.device(args.device).type]
    if which == "step":
        runs = {"sdpa": lambda: peers.sdpa_step(q[:, -1:], k, v)}
        for name in own:
            state = linear_attention(q[:, :1], k[:, :1], v[:, :1], return_state=True)[1]
            runs[name] = lambda name=name, state=state: linear_attention_step(
                q[:, -1:], k[:, -1:], v[:, -1:], state, backend=name
            )
        return runs, [q, k, v]
    for name in own:
        runs[name] = lambda name=name: linear_attention(q, k, v, backend=name)
        runs[f"{name} decay"] = lambda name=name: linear_attention(
            q, k, v, log_decay=token, normalize=False, backend=name
        )
        runs[f"{name} gla"] = lambda name=name: linear_attention(
            q, k, v, log_decay=vector, normalize=False, backend=name
        )
    if args.oracles and length % 64 == 0:
        naive = peers.fla_naive(args.oracles, "linear_attn").naive_chunk_linear_attn
        runs["fla naive chunk"] = lambda: naive(q, *peers.repeated(args, k, v), scale=1.0, normalize=True)
    if args.fast_transformers and dtype == torch.float32 and args.device == "cpu":
        built = peers.fast_transformers(args.fast_transformers)
        runs["fast-transformers"] = lambda: peers.fast_transformers_attention(built, q, *peers.repeated(args, k, v))
    if args.performer and length <= 2048:
        product = peers.performer(args.performer)
        runs["performer"] = lambda: product(*(x.transpose(1, 2) for x in (q, *peers.repeated(args, k, v))))
    if args.device == "cpu":
        lightning = peers.minimax(heads, dim)
        runs["minimax decay"] = lambda: lightning(q, *peers.repeated(args, k, v))
        decay = peers.repeated(args, token)[0]
        runs["mamba-2 decay"] = lambda: peers.mamba2(q, *peers.repeated(args, k, v), decay)
    for peer, options in (("chunk_linear_attn", {}), ("chunk_simple_gla", {"g": token}), ("chunk_gla", {"g": vector})):
        if (op := peers.fla(peer)) is not None:
            runs[f"fla {peer}"] = lambda op=op, options=options: op(q, *peers.repeated(args, k, v), **options)[0]
    return runs, [q, k, v]


def work(args: argparse.Namespace, grad: bool) -> tuple[float, float]:
    """Chunks of 64, both triangles: 4 C D + 4 D^2 forward, 10 C D + 10 D^2 backward; two passes over memory."""
    dim = int(args.shape.split(",")[3])
    flops, size = 4 * 64 * dim + 4 * dim**2, 12 * dim + 4 * dim**2 / 64
    if grad:
        flops, size = flops + 10 * 64 * dim + 10 * dim**2, size + 28 * dim + 20 * dim**2 / 64
    return flops, size


if __name__ == "__main__":
    main(__doc__, build, work, "sdpa")
