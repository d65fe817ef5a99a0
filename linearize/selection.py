"""Which layers or heads should stay softmax: each one's mixer is measured alone, then the choice beside others of its
size.

Teacher, student and every hybrid between them are one copy of the weights (see `modeling.bypass.keeping`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import linearize
from linearize.errors import UsageError, did_you_mean
from linearize.keep_softmax import is_budget, spread
from linearize.select_units import UNITS, Unit, as_json, as_row
from linearize.selection_file import VERSION, architecture

if TYPE_CHECKING:
    from linearize.recipe import Recipe
    from linearize.select_measure import Bench

SCORES = {
    "kl": "KL to the teacher on text",
    "recall": "rise of the loss on answers",
    "ratio": "that rise for each nat of KL",
    "greedy": "restores one after the other where it helps most; slow",
}
DEFAULT_SCORE = "recall"
BUDGET = "25%"
RANDOM_SETS = 3
NEEDED = ("accelerate", "matplotlib", "scipy")  # the last two are of the extra `eval`
Note = Callable[[str], None]
Progress = Callable[[str, int, int], None] | None


def select(
    model: str | Path,
    budget: str | int = BUDGET,
    *,
    units: str = "layers",
    score: str = DEFAULT_SCORE,
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    data: str | None = None,
    samples: int = 8,
    length: int = 512,
    pairs: Sequence[int] = (16, 32),
    seed: int = 0,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: Progress = None,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Choose the layers of a model that should keep softmax attention, or the heads.

    Args:
        model: a base model, which is given untrained mixers in memory; or a converted checkpoint that keeps no layer,
            and whose weights beside the mixers are still the teacher's (fresh, or after attention transfer).
        budget: how many layers to keep: a share of those that can be converted ("25%"), or a number.
        units: "layers"; or "heads", and the budget counts the key/value heads of those layers. One is kept with the
            query heads that read it.
        score: "kl", "recall", "ratio" or "greedy", see docs/selection.md.
        recipe, overrides: what a base model is converted to, as in `convert`; their keep_softmax has no say.
        data: a text file for the KL; None for the bundled text.
        samples: texts, lists of pairs and documents with a needle, as many of each.
        length: tokens of a text, and most tokens of a document with a needle.
        pairs: facts in the lists.
        seed: of the documents and of the random sets.
        progress: called with (what, layers run, layers to run).
        note: called with what a user should know before the end.

    Returns:
        The selection, JSON-able; its keys are in docs/selection.md.

    Raises:
        UsageError: an argument out of range, or a checkpoint that can't be measured so.
        LinearizeError: as `convert` and `linearize.load`.
    """
    from linearize.recipe import load_recipe
    from linearize.select_subject import find_subject

    begun = time.monotonic()
    budget = str(budget)
    _check(budget, units, score, samples, length)
    asked = recipe is not None or bool(overrides)
    settings = load_recipe(recipe, overrides or {}).model_copy(update={"keep_softmax": "none"})
    subject = find_subject(model, revision, settings, asked)
    count = subject.count(budget, units)

    from linearize_evals.loading import choose_device, choose_dtype

    from linearize.select_measure import Bench
    from linearize.select_samples import check_positions, draw
    from linearize.select_scores import notes_on

    place = choose_device(device)
    chosen_dtype, why = choose_dtype(dtype, place)
    note(f"{str(chosen_dtype).removeprefix('torch.')} on {place}: {why}")
    tokenizer = linearize.load_tokenizer(subject.place)
    drawn = draw(tokenizer, samples=samples, length=length, pairs=pairs, data=data, seed=seed)
    loaded = subject.load(place, chosen_dtype)
    check_positions(loaded, drawn)
    meter = _Meter(progress)
    bench = Bench(loaded, drawn, kind=units, tick=meter.tick)
    found = choose(bench, score, count, seed=seed, meter=meter, note=note)
    return {
        "version": VERSION,
        "model": str(model),
        "architecture": architecture(subject.probed),
        "converted": subject.settings is None,
        "mixers": subject.mixers,
        "recipe": subject.recipe,
        "units": units,
        "score": score,
        "budget": budget,
        "count": count,
        "seed": seed,
        "data": {
            "text": data or "bundled", "tasks": list(drawn.recall), "samples": samples, "length": length,
            "pairs": list(pairs), "tokens": drawn.tokens,
        },
        "settings": {"dtype": str(loaded.dtype).removeprefix("torch."), "device": place.type},
        "versions": _versions(),
        **found,
        "notes": [*notes_on(found, subject.mixers, samples, score, units), *subject.notes(units)],
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def _check(budget: str, units: str, score: str, samples: int, length: int) -> None:
    if units not in UNITS:
        raise UsageError(f"units can't be '{units}'", f"Choose {' or '.join(UNITS)}")
    if not is_budget(budget):
        raise UsageError(f"the budget can't be '{budget}'", f"Write a share of the {units} such as 25%, or a number")
    if score not in SCORES:
        raise UsageError(f"there is no score '{score}'", did_you_mean(score, SCORES) or f"Choose {', '.join(SCORES)}")
    for name, value in (("samples", samples), ("length", length)):
        if value < 1:
            raise UsageError(f"{name} can't be {value}", "Give at least 1")
    check_packages()


def check_packages() -> None:
    """Raise `UsageError` where a package is missing that choosing layers needs."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"choosing layers needs {', '.join(missing)}", "pip install 'linearize[eval]'")


class _Meter:
    """Counts runs of layers for a progress bar."""

    def __init__(self, progress: Progress) -> None:
        self.total = self.done = 0
        self._progress = progress

    def tick(self, runs: int) -> None:
        self.done += runs
        if self._progress and self.total:
            self._progress("select", min(self.done, self.total), self.total)


def choose(
    bench: Bench, score: str, count: int, *, seed: int = 0, meter: _Meter | None = None, note: Note = lambda text: None
) -> dict[str, Any]:
    """Sweep over the units of `bench`, choose `count` of them, and measure the choice beside others of its size.

    Returns:
        teacher, linear, layers or heads, chosen, uniform, random and, for score "greedy", greedy: as in
        docs/selection.md.
    """
    from linearize.select_scores import CANDIDATES, FORMULAS, damage, greedy, greedy_hybrids, ranking, ratio

    units = bench.units
    hybrids = 3 + RANDOM_SETS + (greedy_hybrids(len(units), count) if score == "greedy" else 0)
    if meter:
        meter.total = bench.runs * (1 + hybrids) + bench.sweep_runs
    if score == "greedy":
        note(
            f"greedy tries the {min(len(units), CANDIDATES * count)} highest-ranked {bench.kind} of the sweep in "
            f"{hybrids} hybrids, which takes {bench.runs * hybrids / bench.sweep_runs:.0f} times as long as the sweep"
        )
    alone = {unit: damage(bench.teacher, outcome) for unit, outcome in bench.sweep().items()}
    order, known = ranking(score, alone), {}

    def measure(kept: Collection[Unit]) -> dict[str, Any]:
        key = tuple(sorted(kept))
        if key not in known:
            known[key] = damage(bench.teacher, bench.hybrid(key))
        return known[key]

    def hybrid(kept: Collection[Unit]) -> dict[str, Any]:
        return {**as_json(kept, bench.heads, bench.kind), **measure(kept)}

    first, steps = greedy(order[: CANDIDATES * count], count, measure) if score == "greedy" else ([], [])
    order = first + [unit for unit in order if unit not in first]
    sets = [sorted(random.Random(f"select:{seed}:{number}").sample(units, count)) for number in range(RANDOM_SETS)]
    chosen = sorted(order[:count])
    found = {
        "teacher": {"tasks": damage(bench.teacher, bench.teacher)["tasks"]},
        "linear": measure(()),
        bench.kind: [
            {
                **as_row(unit), "chosen": unit in chosen, "rank": order.index(unit) + 1,
                "score": FORMULAS[score](alone[unit]), "ratio": ratio(alone[unit]), **alone[unit],
            }
            for unit in units
        ],
        "chosen": hybrid(chosen),
        "uniform": hybrid(sorted(spread(count, units))),
        "random": [hybrid(each) for each in sets],
    }  # fmt: skip
    return found | ({"greedy": steps} if steps else {})


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"linearize": linearize.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
