"""What attention costs and what its replacements save: time, memory and perplexity by length, with fitted exponents.

    python benchmarks/theory_cost.py time [--lengths 512,1024,2048,4096,8192,16384] [--rounds 3]
    python benchmarks/theory_cost.py perplexity --data TRAIN [--tokens 8192] [--out theory-cost]

`time` runs one layer's attention (q, k and v as SmolLM2-135M has them: 9 query heads, 3 key/value heads of dim 64,
float32, batch 1) in turns in one process, each peak of memory in a process of its own. Projections aren't counted.
`perplexity` converts all layers of SmolLM2-135M-Instruct: untrained, and after calibration and the same tokens of
distillation with LoRA for each. TRAIN is a text (.jsonl.gz with a key "text"); what is judged is demo_text.txt.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import linearize
from demo import find_model
from linearize.mixers import FEATURE_MAPS, MIXERS, AttentionShape, build_mixer, state_bytes
from linearize.training.memory import peak_memory, reset_peak
from theory_tools import TEXT, figure, lines, logarithmic, slope, versions

SHAPE = AttentionShape(9, 3, 64, 64, 576, 0.125)
MATRIX_UP_TO = 2048  # 9 matrices of 16384 x 16384 floats would take 9.7 GB
BACKWARD_UP_TO = 8192
FIT_FROM = 1024
SPECS: dict[str, dict[str, Any]] = {
    "linear, elu1": {"name": "linear", "feature_map": "elu1"},
    "linear, favor (m = 256)": {"name": "linear", "feature_map": "favor"},
    "cosFormer": {"name": "linear", "feature_map": "cosformer", "feature_map_options": {"length": 32768}},
    "window 64 + 4 sinks, hedgehog": {"name": "window", "feature_map": "hedgehog"},
    **{name: {"name": name} for name in ("mamba2", "gla", "deltanet")},
}
Inputs = dict[str, Tensor]


def specs() -> dict[str, dict[str, Any]]:
    """Those that are registered."""
    there = {**FEATURE_MAPS, "": None}
    return {
        label: spec for label, spec in SPECS.items() if spec["name"] in MIXERS and spec.get("feature_map", "") in there
    }


def inputs_of(length: int) -> Inputs:
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, length, *sizes, generator=draw)

    q, k, v = normal(9, 64), normal(3, 64), normal(3, 64)
    return {"q": q, "k": k, "v": v, "hidden_states": normal(SHAPE.hidden_size)}


def softmax(q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> Tensor:
    """torch's own, which on CPUs too never has the T x T matrix in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def softmax_step(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One token's q (1, 1, 9, 64) over a cache (1, 3, N, 64), laid out as caches are. The heads of a group are queries
    of one head, which is several times as fast as enable_gqa."""
    return F.scaled_dot_product_attention(q.view(1, 3, 3, 64), keys, values).view(1, 1, 9, 64)


def matrix(q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> Tensor:
    """softmax as the formula has it, with the T x T matrix."""
    k, v = (x.repeat_interleave(3, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * SHAPE.scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill_(hidden, -torch.inf).softmax(-1), v)


def mixer_run(mixer: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor) -> Tensor:
        positions = torch.arange(q.shape[1])[None]
        return mixer(q, k, v, hidden_states=hidden_states, position_ids=positions)[0]

    return run


def subjects(length: int) -> dict[str, Callable[..., Tensor]]:
    runs: dict[str, Callable[..., Tensor]] = {"softmax": softmax}
    if length <= MATRIX_UP_TO:
        runs["softmax with its matrix"] = matrix
    for label, spec in specs().items():
        runs[label] = mixer_run(build_mixer(spec, SHAPE, layer=3, seed=0))
    return runs


def once(run: Callable[..., Tensor], inputs: Inputs, backward: bool) -> float:
    """Seconds of one call, with gradients by q, k and v if asked."""
    begun = time.perf_counter()
    if backward:
        run(**inputs).sum().backward()
    else:
        with torch.no_grad():
            run(**inputs)
    return time.perf_counter() - begun


Timed = dict[tuple[str, int], Callable[[], float]]  # by name and length


def in_turns(runs: Timed, rounds: int) -> dict[tuple[str, int], float]:
    """Median milliseconds. Every round has all lengths, so that an exponent isn't of how busy the machine was when."""
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            seconds[key].append(run())
    return {key: statistics.median(values) * 1e3 for key, values in seconds.items()}


def passes(lengths: list[int], backward: bool) -> Timed:
    runs: Timed = {}
    for length in lengths:
        inputs = inputs_of(length)
        if backward:
            inputs = {name: x.requires_grad_(name != "hidden_states") for name, x in inputs.items()}
        for name, run in subjects(length).items():
            once(run, {name: x[:, :64] for name, x in inputs.items()}, backward)  # whatever is made once
            runs[name, length] = partial(once, run, inputs, backward)
    return runs


def decoding(lengths: list[int]) -> Timed:
    """A token after `length` of them. Steps of mixers go on from where the last one ended."""
    runs: Timed = {}
    for length in lengths:
        inputs = inputs_of(length)
        token = {name: x[:, -1:] for name, x in inputs.items()}
        sides = (("keys", "k"), ("values", "v"))
        cache = {name: inputs[x].transpose(1, 2).contiguous() for name, x in sides}
        runs["softmax", length] = partial(once, softmax_step, cache | {"q": token["q"]}, False)
        for label, spec in specs().items():
            mixer = build_mixer(spec, SHAPE, layer=3, seed=0)
            with torch.no_grad():
                _, state = mixer(**inputs, position_ids=torch.arange(length)[None], return_state=True)
            runs[label, length] = stepper(mixer, state, token, length)
    return runs


def stepper(mixer: Any, state: Any, token: Inputs, length: int) -> Callable[[], float]:
    held = {"state": state, "at": length}

    def run() -> float:
        positions = torch.tensor([[held["at"]]])
        begun = time.perf_counter()
        with torch.no_grad():
            _, held["state"] = mixer(**token, position_ids=positions, state=held["state"], return_state=True)
        taken = time.perf_counter() - begun
        held["at"] += 1
        return taken

    return run


def peaks(length: int) -> dict[str, float]:
    """Bytes that a forward takes beyond its inputs, each in a forked process of its own."""
    context = multiprocessing.get_context("fork")
    found = {}
    for name in subjects(length):
        parent, child = context.Pipe(duplex=False)
        process = context.Process(target=_peak, args=(name, length, child))
        process.start()
        found[name] = parent.recv()
        process.join()
    return found


def _peak(name: str, length: int, to: Any) -> None:
    run, inputs = subjects(length)[name], inputs_of(length)
    once(run, {key: x[:, :64] for key, x in inputs.items()}, False)  # whatever is made once
    gc.collect()
    reset_peak(torch.device("cpu"))
    before = peak_memory(torch.device("cpu"))
    once(run, inputs, False)
    to.send(peak_memory(torch.device("cpu")) - before)


def crossing(lengths: list[int], base: list[float], own: list[float]) -> str:
    """The length from which `own` stays below `base`, between two measured ones on a logarithmic axis."""
    faster = [a < b for a, b in zip(own, base, strict=True)]
    if not faster[-1]:
        return f"> {lengths[-1]}"
    first = max((i + 1 for i, value in enumerate(faster) if not value), default=0)
    if first == 0:
        return f"< {lengths[0]}"
    (a, b), (x, y) = ([base[i] / own[i] for i in (first - 1, first)], lengths[first - 1 : first + 1])
    return f"{x * (y / x) ** ((1 - a) / (b - a)):.0f}"


def timing(lengths: list[int], rounds: int, out: Path | None) -> None:
    trained = [length for length in lengths if length <= BACKWARD_UP_TO]
    measures: dict[str, Callable[[], dict[tuple[str, int], float]]] = {
        # First: what this process had freed, its forks would take without a rise.
        "peak of a forward MB": lambda: {(k, n): x / 1e6 for n in lengths for k, x in peaks(n).items()},
        "forward ms": lambda: in_turns(passes(lengths, False), rounds),
        "forward and backward ms": lambda: in_turns(passes(trained, True), rounds),
        "decoding ms/token": lambda: in_turns(decoding(lengths), 10 * rounds),
    }
    tables: dict[str, dict[str, list[float]]] = {}
    for title, measure in measures.items():
        found = measure()
        names = list(dict.fromkeys(name for name, _ in found))
        rows = {name: [found[name, n] for n in lengths if (name, n) in found] for name in names}
        tables[title] = rows
        print(f"\n{title:32}" + "".join(f"{n:>9}" for n in lengths) + "  exponent  below softmax from")
        for name, values in rows.items():
            measured = lengths[: len(values)]
            large = sum(n < FIT_FROM for n in measured)
            fitted = f"{slope(measured[large:], values[large:]):.2f}" if len(values) - large > 1 else ""
            same = name != "softmax" and len(values) == len(rows["softmax"])
            crossed = crossing(measured, rows["softmax"], values) if same else ""
            cells = "".join(f"{value:9.3g}" for value in values) + " " * 9 * (len(lengths) - len(values))
            print(f"{name:32}{cells}{fitted:>10}  {crossed}", flush=True)
    states = {name: state_bytes(spec, SHAPE, dtype=torch.float32) for name, spec in specs().items()}
    print("\nstate bytes of a layer (float32): " + ", ".join(f"{name} {size:,}" for name, size in states.items()))
    print(f"cache bytes of softmax (float32): {2 * 3 * 64 * 4} N")
    with figure("cost", 3, width=3.9, height=4.2) as (_, axes):
        for one, title in zip(axes, ("forward ms", "decoding ms/token", "peak of a forward MB"), strict=True):
            lines(one, lengths, {k: v for k, v in tables[title].items() if len(v) == len(lengths)}, title=title)
            if "softmax with its matrix" in tables[title]:
                values = tables[title]["softmax with its matrix"]
                one.plot(lengths[: len(values)], values, color="black", linewidth=0.8, label="softmax with its matrix")
            one.set_xlabel("tokens N")
            logarithmic(one, lengths)
    if out:
        out.write_text(json.dumps({"lengths": lengths, "machine": versions(), "tables": tables}, indent=1) + "\n")


def recipe_of(spec: dict[str, Any]) -> dict[str, Any]:
    options = dict(spec)
    return {"mixer": options.pop("name"), **options}


def perplexities(data: str, tokens: int, out: Path, only: list[str]) -> None:
    from untrained import perplexity

    gguf = find_model()
    ids = linearize.load_tokenizer(gguf)(TEXT.read_text(encoding="utf-8")).input_ids
    base = linearize.load(gguf, dtype=torch.bfloat16).eval()
    out.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        teacher = perplexity(base, ids)
    print(f"{'all layers':34}{'untrained':>12}{'difference':>12}{f'after {tokens}':>14}{'difference':>12}")
    print(f"{'softmax':34}{teacher:12.1f}", flush=True)
    there = specs()
    for label in only or there:
        spec = there[label]
        with torch.inference_mode():
            before = perplexity(linearize.linearize_(copy.deepcopy(base), recipe_of(spec)), ids)
        after = perplexity_trained(label, spec, data, tokens, out, ids)
        print(f"{label:34}{before:12.1f}{before - teacher:12.1f}{after:14.1f}{after - teacher:12.1f}", flush=True)


def perplexity_trained(label: str, spec: dict[str, Any], data: str, tokens: int, out: Path, ids: list[int]) -> float:
    from untrained import perplexity

    name = "".join(c if c.isalnum() else "-" for c in label)
    start, end = out / f"{name}-0", out / f"{name}-{tokens}"
    if not start.exists():
        linearize.convert(find_model(), start, recipe=recipe_of(spec), dtype="bfloat16")
    if not end.exists():
        distill = {"stage": "distill", "tokens": tokens, "length": 256, "batch": 1, "lr": 1e-3, "trains": "lora"}
        settings = {
            **recipe_of(spec),
            "data": {"source": data, "held_out": 2, "separate": False},
            "train": [{"stage": "calibrate"}, distill | {"lora": {"r": 16, "alpha": 32}}],
            "every": {"evaluate": 1000, "save": 1000},
        }
        linearize.train(start, end, recipe=settings, resume=(out / f"{end.name}-training").exists())
    with torch.inference_mode():
        return perplexity(linearize.load(end, dtype=torch.bfloat16).eval(), ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "perplexity"))
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384", help="tokens")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of all mixers and lengths; decoding takes ten times as many"
    )
    parser.add_argument("--json", type=Path, help="where to write the times")
    parser.add_argument("--data", help="text to train on")
    parser.add_argument("--tokens", type=int, default=8192, help="of distillation")
    parser.add_argument("--only", nargs="+", default=[], help="of the mixers' labels")
    parser.add_argument("--out", type=Path, default=Path("theory-cost"), help="folder for the trained models")
    arguments = parser.parse_args()
    print(versions())
    if arguments.what == "time":
        return timing([int(n) for n in arguments.lengths.split(",")], arguments.rounds, arguments.json)
    if not arguments.data:
        parser.error("perplexity needs --data")
    return perplexities(arguments.data, arguments.tokens, arguments.out, arguments.only)


if __name__ == "__main__":
    main()
