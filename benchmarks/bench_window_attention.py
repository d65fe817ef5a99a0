"""window_attention (window 64, 4 sinks, features of twice the head dim, as hedgehog's) against softmax attention.

    python benchmarks/bench_window_attention.py --shape 1,9,3,64

No other project has the two parts fused; flex_attention's sliding window alone, without the linear part, is measured on
a GPU.
"""

from __future__ import annotations

import argparse

import torch
from linearize_kernels import window_attention, window_attention_step

import ops_peers as peers
from ops_timing import Run, main

WINDOW, SINKS = 64, 4


def build(args: argparse.Namespace, length: int, dtype: torch.dtype, which: str) -> tuple[dict[str, Run], list]:
    batch, heads, kv_heads, dim = (int(n) for n in args.shape.split(","))
    grad = which == "both"
    q = torch.randn(batch, length, heads, dim).to(args.device, dtype).requires_grad_(grad)
    k, v = (torch.randn(batch, length, kv_heads, dim).to(args.device, dtype).requires_grad_(grad) for _ in "kv")
    phi_q = torch.rand(batch, length, heads, 2 * dim, device=args.device).requires_grad_(grad)
    phi_k = torch.rand(batch, length, kv_heads, 2 * dim, device=args.device).requires_grad_(grad)
    runs: dict[str, Run] = {"sdpa": lambda: peers.sdpa(q, k, v)}
    own = {"cpu": ("torch", "cpu"), "cuda": ("torch", "triton")}[torch.device(args.device).type]
    if which == "step":
        runs = {"sdpa": lambda: peers.sdpa_step(q[:, -1:], k, v)}
        for name in own:
            state = window_attention(
                *(x[:, :1] for x in (q, k, v, phi_q, phi_k)), window=WINDOW, sinks=SINKS, return_state=True
            )[1]
            runs[name] = lambda name=name, state=state: window_attention_step(
                *(x[:, -1:] for x in (q, k, v, phi_q, phi_k)), state, window=WINDOW, sinks=SINKS, backend=name
            )
        return runs, [q, k, v]
    for name in own:
        runs[name] = lambda name=name: window_attention(q, k, v, phi_q, phi_k, window=WINDOW, sinks=SINKS, backend=name)
    if args.device == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def near(b, h, i, j):  # type: ignore[no-untyped-def]
            return (j <= i) & ((i - j < WINDOW) | (j < SINKS))

        block_mask = create_block_mask(near, None, None, length, length, device="cuda")
        flex = torch.compile(flex_attention)
        runs["flex, window alone"] = lambda: flex(
            *(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask, enable_gqa=heads != kv_heads
        )
    return runs, [q, k, v, phi_q, phi_k]


def work(args: argparse.Namespace, grad: bool) -> tuple[float, float]:
    """Linear attention on features of 2 D, and 4 D for each key of the window and the sinks."""
    dim = int(args.shape.split(",")[3])
    flops = 2 * 64 * 2 * dim + 2 * 64 * dim + 8 * dim**2 + 4 * dim * (WINDOW + SINKS)
    size = 16 * dim + 8 * dim**2 / 64
    return (flops * 3.5, size * 3) if grad else (flops, size)


if __name__ == "__main__":
    main(__doc__, build, work, "sdpa")
