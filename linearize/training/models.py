"""Models as training holds them: frozen weights in the recipe's precision, in one process or spread over several."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from linearize.training import place, sharding
from linearize.training.objectives import Runner


def precision(recipe: Any, work: Path, device: Any) -> tuple[torch.dtype, torch.dtype | None, str]:
    """What weights are held in, what products are computed in where that differs, and a sentence on both.

    Args:
        work: remembers what was chosen for `auto`, for a training that goes on.
    """
    from linearize_evals import processes
    from linearize_evals.loading import choose_dtype

    asked = place.earlier_dtype(work) if recipe.precision == "auto" else recipe.precision
    chosen, because = choose_dtype(asked, device)
    if chosen == "auto":
        chosen = torch.bfloat16
    chosen = processes.same(chosen)
    name = str(chosen).removeprefix("torch.")
    processes.first(lambda: place.remember_dtype(work, name))
    everything = any(getattr(stage, "trains", "") == "all" for stage in recipe.train)
    if everything and chosen != torch.float32:
        return torch.float32, chosen, f"{name} products, float32 weights, since a stage trains all of them"
    return chosen, None, f"frozen weights in {name} ({because}), what is trained in float32"


def frozen(name: str | Path, dtype: torch.dtype, device: Any, accelerator: Any, *, sharded: bool) -> Runner:
    """A model that doesn't require gradients, whole in each process or spread over all."""
    from linearize_evals import processes

    import linearize

    def read(where: Any) -> Any:
        return linearize.load(name, dtype=dtype, device_map={"": where})

    if sharded:
        return sharding.load(read, accelerator)
    return Runner(processes.everywhere(lambda: read(device)).requires_grad_(False))


def sampled(
    runner: Runner, tokenizer: Any, data: Any, length: int, path: Path, *, sharded: bool, progress: Any
) -> None:
    """Write text that the teacher samples to `path`, unless an earlier run has; see `teacher_text.sample`."""
    from linearize_evals import processes

    from linearize.training.teacher_text import sample

    if processes.first(path.exists):
        return
    asked = (runner.model, tokenizer, data.teacher_tokens, length, path, data.seed, progress)
    # A sharded model runs in all processes at once, which then write the same.
    (processes.everywhere if sharded else processes.first)(lambda: runner(sample, *asked))


def quiet_libraries() -> Any:
    """Without progress bars of other libraries, as far as the evaluation's packages are there."""
    if find_spec("lm_eval") is None:
        return nullcontext()
    from linearize_evals import judging

    return judging.quiet_libraries()
