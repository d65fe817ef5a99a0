"""Times several implementations of one op in turns, and says how they compare: what the bench_*.py files share.

Machines are busy and their clocks move, so nothing is timed alone: each round runs every implementation once, and
ratios are of the medians over the rounds of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Tensor]
# Dense bf16 TFLOP/s and GB/s of the cards that a share of the roofline is given for (NVIDIA's data sheets).
CARDS = {"H100": (989, 3350), "H200": (989, 4800), "A100": (312, 2039)}


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", default="512,2048,8192", help="tokens")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--shape", default="1,8,8,64", help="batch, query heads, key/value heads, head dim")
    parser.add_argument("--passes", default="forward,both", help="forward, both (and backward), step (a token)")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row of the table, about")
    parser.add_argument("--oracles", type=Path, help="folder with fla-core and einops, for its naive code")
    parser.add_argument("--fast-transformers", type=Path, help="causal_product_cpu.cpp of that project, built here")
    parser.add_argument("--performer", type=Path, help="folder that holds performer_pytorch")
    parser.add_argument("--only", help="names of implementations, comma-separated")
    parser.add_argument("--json", type=Path, help="where to write everything")
    return parser.parse_args()


def sync(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def seconds_of(run: Run, inputs: Sequence[Tensor], weight: Tensor | None, device: str) -> float:
    """One call; with a weight, also its gradient by every input."""
    sync(device)
    begun = time.perf_counter()
    if weight is None:
        with torch.no_grad():
            run()
    else:
        torch.autograd.grad(run(), [x for x in inputs if x.requires_grad], weight, allow_unused=True)
    sync(device)
    return time.perf_counter() - begun


def compare(runs: dict[str, Run], inputs: Sequence[Tensor], backward: bool, device: str, budget: float) -> Any:
    """name -> median seconds and peak bytes (on a GPU), measured in turns for about `budget` seconds."""
    weights = {name: torch.randn_like(run()) if backward else None for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, int] = {}
    for name, run in runs.items():
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds_of(run, inputs, weights[name], device)  # warms up, and compiles what is compiled
        if device != "cpu":
            peaks[name] = torch.cuda.max_memory_allocated() - before
    begun = time.perf_counter()
    while len(next(iter(seconds.values()))) < 3 or (
        time.perf_counter() - begun < budget and len(next(iter(seconds.values()))) < 200
    ):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run, inputs, weights[name], device))
    return {
        name: {"seconds": statistics.median(s), "rounds": len(s), "peak": peaks.get(name)}
        for name, s in seconds.items()
    }


def matmul_rate(dtype: torch.dtype, device: str) -> float:
    """FLOP/s of the fastest of several 1024 x 1024 products (4096 on a GPU)."""
    n = 1024 if device == "cpu" else 4096
    x = torch.randn(n, n, device=device).to(dtype)
    best = min(seconds_of(lambda: x @ x, (), None, device) for _ in range(20))
    return 2 * n**3 / best


def machine(device: str) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    if device != "cpu":
        name = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    found = {"device": name, "threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found | {"date": date.today().isoformat()}


def main(
    description: str | None,
    build: Callable[[argparse.Namespace, int, torch.dtype, str], tuple[dict[str, Run], list[Tensor]]],
    work: Callable[[argparse.Namespace, bool], tuple[float, float]],
    baseline: str,
) -> None:
    """Print a table for each dtype and pass, and write it.

    Args:
        build: (arguments, length, dtype, pass) -> implementations and the inputs that they close over.
        work: (arguments, with gradients) -> FLOPs and bytes (in bf16) of a token and head, at best; not for steps.
        baseline: the implementation that ratios are to.
    """
    args = arguments(description)
    batch, heads, _, _ = (int(n) for n in args.shape.split(","))
    facts = machine(args.device)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    rows: list[dict[str, Any]] = []
    for dtype_name in args.dtypes.split(","):
        dtype = getattr(torch, dtype_name)
        peak = matmul_rate(dtype, args.device)
        print(f"\n{dtype_name}: 1024 x 1024 products run at {peak / 1e9:,.0f} GFLOP/s here")
        for which in args.passes.split(","):
            if which not in ("forward", "both", "step"):
                raise SystemExit(f"--passes takes forward, both and step, not {which}")
            print(f"{which:8} {'T':>7}  times as fast as {baseline} (its ms in front); share of the product speed")
            for length in (int(n) for n in args.lengths.split(",")):
                torch.manual_seed(0)
                runs, inputs = build(args, length, dtype, which)
                if args.only:
                    runs = {name: run for name, run in runs.items() if name in (baseline, *args.only.split(","))}
                found = compare(runs, inputs, which == "both", args.device, args.seconds)
                flops, size = (value * batch * heads * length for value in work(args, which == "both"))
                base = found[baseline]["seconds"]
                parts = []
                for name, one in found.items():
                    one["ratio"] = base / one["seconds"]
                    if which == "step":  # bound by memory and by the call itself
                        if name != baseline:
                            parts.append(f"{name} {one['ratio']:.2f}")
                        continue
                    one["tflops"] = flops / one["seconds"] / 1e12
                    one["share_of_product_speed"] = flops / one["seconds"] / peak
                    card = next((limits for card, limits in CARDS.items() if card in facts["device"]), None)
                    if card:
                        one["share_of_roofline"] = max(flops / card[0] / 1e12, size / card[1] / 1e9) / one["seconds"]
                    if name != baseline:
                        share = one.get("share_of_roofline", one["share_of_product_speed"])
                        parts.append(f"{name} {one['ratio']:.2f} ({share:.0%})")
                print(f"{'':8} {length:>7}  {base * 1e3:9.2f}  {'  '.join(parts)}", flush=True)
                rows.append({"dtype": dtype_name, "pass": which, "tokens": length, "results": found})
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"machine": facts, "shape": args.shape, "baseline": baseline, "rows": rows}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {args.json}")
