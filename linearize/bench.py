"""Speed and memory of models at several context lengths: prefill, decoding, the cache, measured in turns.

A converted model is measured beside itself under softmax attention, in one copy of the weights, so that the two differ
in nothing but the attention.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from linearize_evals.loading import choose_device, choose_dtype, has_position_table, load_model
from linearize_kernels import choose
from torch import Tensor
from transformers import DynamicCache

import linearize
from linearize.errors import ResourceError, UsageError, out_of_memory
from linearize.modeling.attach import SWITCH
from linearize.modeling.bypass import bypass
from linearize.modeling.compat import cache_keyword
from linearize.training.memory import peak_memory, reset_peak

Progress = Callable[[str, int, int], None] | None
WARM_UP = 64  # tokens


class Subject(NamedTuple):
    """One thing to be measured: a model, and the mode that it runs in."""

    name: str
    attention: str  # "softmax" or "converted"
    model: Any
    mode: Callable[[], AbstractContextManager[Any]]


class Sample(NamedTuple):
    """One prefill and the decoding after it: seconds, seconds of each token, bytes."""

    prefill: float
    tokens: list[float]
    cache: int
    peak: int | None


def bench(
    models: Sequence[str | Path],
    *,
    lengths: Sequence[int] = (1024, 8192),
    new_tokens: int = 32,
    rounds: int = 3,
    batch: int = 1,
    alone: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time `models` at each of `lengths` (tokens of context), in turns, and say how they compare.

    Args:
        models: folders or Hub names, converted or not.
        new_tokens: tokens decoded after each prefill; the median of their times counts.
        rounds: measurements of each model and length, in turns; their median counts.
        batch: sequences at once.
        alone: don't measure a converted model beside itself under softmax.

    Returns:
        `models`: for each, `name`, `attention`, `weights_bytes` and `rows`: for each length `tokens`,
        `prefill_tokens_per_second`, `decode_ms` (a token of the batch), `decode_tokens_per_second`, `cache_bytes` (the
        batch's) and `peak_bytes` (the rise while it ran; None where the system doesn't tell). `ratios`: the same
        figures of each model over the first one's, as times faster or smaller. `machine`, with the backend that takes a
        tensor like the model's of each op; `versions`.

    Raises:
        UsageError: an argument out of range, or a length beyond a model's table of positions.
        LinearizeError: as `linearize.load`.
    """
    lengths = sorted(set(lengths))
    _check(lengths, new_tokens, rounds, batch)
    place = choose_device(device)
    chosen, because = choose_dtype(dtype, place)
    note(f"{str(chosen).removeprefix('torch.')} on {place}: {because}")
    subjects = [one for name in models for one in _subjects(name, place, chosen, alone)]
    for one in subjects:
        _check_positions(one, lengths[-1] + new_tokens)
    total = len(subjects) * (sum(lengths) + new_tokens * len(lengths)) * rounds
    done = 0
    samples: dict[tuple[int, int], list[Sample]] = {}
    with torch.no_grad():
        for one in subjects:
            _measure(one, min(WARM_UP, lengths[0]), 2, batch, place)
        for length in lengths:
            for _ in range(rounds):
                for number, one in enumerate(subjects):
                    if progress:
                        progress("bench", done, total)
                    samples.setdefault((number, length), []).append(_measure(one, length, new_tokens, batch, place))
                    done += length + new_tokens
    if progress:
        progress("bench", total, total)
    measured = [
        {
            "name": one.name,
            "attention": one.attention,
            "weights_bytes": sum(p.nbytes for p in one.model.parameters()),
            "rows": [_row(length, batch, samples[number, length]) for length in lengths],
        }
        for number, one in enumerate(subjects)
    ]
    return {
        "models": measured,
        "ratios": [_ratios(model["rows"], measured[0]["rows"]) for model in measured],
        "settings": {
            "batch": batch, "new_tokens": new_tokens, "rounds": rounds, "dtype": str(subjects[0].model.dtype)[6:],
            "device": str(place),
        },
        "machine": _machine(place, subjects[0].model.dtype),
        "versions": _versions(),
    }  # fmt: skip


def _check(lengths: Sequence[int], new_tokens: int, rounds: int, batch: int) -> None:
    if not lengths:
        raise UsageError("there is no length to measure at", "Give --lengths, such as 1024,8192")
    for name, least in (("lengths", min(lengths)), ("new-tokens", new_tokens), ("rounds", rounds), ("batch", batch)):
        if least < 1:
            raise UsageError(f"--{name} can't be {least}", "Give at least 1")


def _subjects(name: str | Path, device: Any, dtype: Any, alone: bool) -> list[Subject]:
    model = load_model(name, device=device, dtype=dtype)
    if not any(SWITCH in vars(module) for module in model.modules()):
        return [Subject(str(name), "softmax", model, nullcontext)]
    own = Subject(str(name), "converted", model, nullcontext)
    return [own] if alone else [Subject(str(name), "softmax", model, partial(bypass, model)), own]


def _check_positions(one: Subject, tokens: int) -> None:
    most = getattr(one.model.config.get_text_config(), "max_position_embeddings", None)
    if most and tokens > most and has_position_table(one.model, most):
        raise UsageError(f"{one.name} has a table of {most:,} positions, fewer than {tokens:,}", "Choose less")


def _measure(one: Subject, length: int, new_tokens: int, batch: int, device: Any) -> Sample:
    """One prefill of `length` tokens and `new_tokens` decoded ones."""
    generator = torch.Generator().manual_seed(length)
    vocabulary = one.model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (batch, length), generator=generator).to(device)
    gc.collect()
    before = peak_memory(device) if reset_peak(device) else None
    with one.mode():
        cache = DynamicCache(config=one.model.config)
        begun = _now(device)
        token = _next(one.model, ids, cache)
        prefill = _now(device) - begun
        times = []
        for _ in range(new_tokens):
            begun = _now(device)
            token = _next(one.model, token, cache)
            times.append(_now(device) - begun)
    return Sample(prefill, times, cache_bytes(cache), None if before is None else peak_memory(device) - before)


def _next(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """(B, 1) the likeliest next token; the head runs on the last position alone."""
    try:
        held = {cache_keyword(model): cache}
        logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **held).logits
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ResourceError(f"{ids.shape[1]:,} tokens don't fit in memory", "Choose less") from error
    return logits[:, -1:].argmax(-1)


def _now(device: Any) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def cache_bytes(cache: Any) -> int:
    """Bytes of every tensor that the layers of a cache hold."""
    total = 0
    for layer in cache.layers:
        own = getattr(layer, "nbytes", None)
        if own is None:
            own = sum(x.nbytes for x in vars(layer).values() if isinstance(x, Tensor))
        total += own
    return total


def _row(length: int, batch: int, samples: Sequence[Sample]) -> dict[str, Any]:
    token = statistics.median(seconds for sample in samples for seconds in sample.tokens)
    peaks = [sample.peak for sample in samples if sample.peak is not None]
    return {
        "tokens": length,
        "prefill_tokens_per_second": batch * length / statistics.median(sample.prefill for sample in samples),
        "decode_ms": 1000 * token,
        "decode_tokens_per_second": batch / token,
        "cache_bytes": samples[0].cache,
        "peak_bytes": max(peaks) if peaks else None,
    }


def _ratios(rows: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times faster or smaller than the first model."""
    found = []
    for row, base in zip(rows, first, strict=True):
        speeds = {name: row[name] / base[name] for name in ("prefill_tokens_per_second", "decode_tokens_per_second")}
        found.append(
            {"tokens": row["tokens"], **speeds, "cache_bytes": base["cache_bytes"] / max(row["cache_bytes"], 1)}
        )
    return found


def _machine(device: Any, dtype: Any) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    backends = {}
    for op in ("linear_attention", "window_attention", "delta_rule"):
        backends[op] = choose(op, torch.empty(1, 1, 1, 16, dtype=dtype, device=device))._asdict()
    return {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "backends": backends}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    import transformers

    return {"linearize": linearize.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
