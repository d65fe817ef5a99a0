"""delta_rule against softmax attention, transformers' gated DeltaNet and fla.

python benchmarks/bench_delta_rule.py
"""

from __future__ import annotations

import argparse

import torch
from linearize_kernels import delta_rule, delta_rule_step
from torch.nn import functional as F

import ops_peers as peers
from ops_timing import Run, main


def build(args: argparse.Namespace, length: int, dtype: torch.dtype, which: str) -> tuple[dict[str, Run], list]:
    batch, heads, kv_heads, dim = (int(n) for n in args.shape.split(","))
    grad = which == "both"
    shape = (batch, length, kv_heads, dim)
    q = F.normalize(torch.randn(batch, length, heads, dim), dim=-1).to(args.device, dtype).requires_grad_(grad)
    k = F.normalize(torch.randn(shape), dim=-1).to(args.device, dtype).requires_grad_(grad)
    v = torch.randn(shape).to(args.device, dtype).requires_grad_(grad)
    beta = torch.rand(shape[:3], device=args.device).requires_grad_(grad)
    token = -torch.rand(shape[:3], device=args.device) * 0.1
    vector = -torch.rand(shape, device=args.device) * 0.1
    runs: dict[str, Run] = {"sdpa": lambda: peers.sdpa(q, k, v)}
    own = {"cpu": ("torch", "cpu"), "cuda": ("torch", "triton")}[torch.device(args.device).type]
    if which == "step":
        runs = {"sdpa": lambda: peers.sdpa_step(q[:, -1:], k, v)}
        for name in own:
            state = delta_rule(q[:, :1], k[:, :1], v[:, :1], beta[:, :1], return_state=True)[1]
            runs[name] = lambda name=name, state=state: delta_rule_step(
                q[:, -1:], k[:, -1:], v[:, -1:], beta[:, -1:], state, backend=name
            )
        return runs, [q, k, v]
    for name in own:
        for kind, decay in (("", None), (" gated", token), (" kda", vector)):
            runs[name + kind] = lambda name=name, decay=decay: delta_rule(q, k, v, beta, log_decay=decay, backend=name)
    repeated = lambda: peers.repeated(args, k, v, token, beta)  # noqa: E731
    runs["transformers gated"] = lambda: peers.transformers_gated_delta(q, *repeated())
    if (op := peers.fla("chunk_delta_rule")) is not None:
        runs["fla"] = lambda: op(q, *peers.repeated(args, k, v, beta))[0]
    if (gated := peers.fla("chunk_gated_delta_rule")) is not None:
        runs["fla gated"] = lambda: gated(q, *repeated())[0]
    return runs, [q, k, v, beta]


def work(args: argparse.Namespace, grad: bool) -> tuple[float, float]:
    """Chunks of 64: what linear attention does, and the inverse, W and U of the WY form."""
    dim = int(args.shape.split(",")[3])
    flops, size = 8 * 64 * dim + 8 * dim**2 + 2 * 64 * 64, 20 * dim + 4 * dim**2 / 64
    return (flops * 3.5, size * 3) if grad else (flops, size)


if __name__ == "__main__":
    main(__doc__, build, work, "sdpa")
