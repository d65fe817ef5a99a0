"""From what hybrids lose to what stays softmax: damages with intervals, scores, the greedy choice, notes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from linearize_evals.compare import GATE
from linearize_evals.intervals import FEWEST, Interval, bootstrap, finite, interval

from linearize.select_measure import Outcome
from linearize.select_units import Unit, as_row

FLOOR = 0.01  # nats; the least KL that `ratio` divides by, so that one that hardly matters doesn't win by noise
CANDIDATES = 2  # times the budget: what `greedy` tries


def damage(teacher: Outcome, outcome: Outcome) -> dict[str, Any]:
    """What `outcome` lost: kl, recall_accuracy and recall_nll, each {"value", "low", "high"}, positive for a loss.

    Recall is the mean over the tasks. Intervals are 95 %, from a bootstrap over samples of the paired differences;
    None where the samples don't differ. `tasks` has the accuracy and nll of each task, as they are.
    """
    nll = np.mean([outcome.nll[task] - teacher.nll[task] for task in teacher.nll], axis=0)
    right = np.mean([teacher.accuracy[task] - outcome.accuracy[task] for task in teacher.accuracy], axis=0)
    tasks = {
        task: {"accuracy": finite(outcome.accuracy[task].mean()), "nll": finite(outcome.nll[task].mean())}
        for task in outcome.nll
    }
    return {"kl": _mean(outcome.kl), "recall_accuracy": _mean(right), "recall_nll": _mean(nll), "tasks": tasks}


def _mean(values_S: np.ndarray) -> Interval:
    found = bootstrap(np.stack([values_S, np.ones_like(values_S)], 1), lambda sums: sums[..., 0] / sums[..., 1])
    if found["low"] is not None and found["high"] - found["low"] < 1e-12:
        return interval(found["value"], None, None)
    return found


def mean_of(damages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of several hybrids' damages, without intervals."""
    means = {
        key: interval(float(np.mean([each[key]["value"] for each in damages])), None, None)
        for key in ("kl", "recall_accuracy", "recall_nll")
    }
    tasks = {
        task: {
            key: finite(float(np.mean([each["tasks"][task][key] for each in damages]))) for key in ("accuracy", "nll")
        }
        for task in damages[0]["tasks"]
    }
    return means | {"tasks": tasks}


def ratio(lost: Mapping[str, Any]) -> float:
    """Recall lost for each nat of language modelling lost; 0 where no recall is lost."""
    return max(lost["recall_nll"]["value"], 0.0) / max(lost["kl"]["value"], FLOOR)


def combined(lost: Mapping[str, Any]) -> float:
    """KL and the rise of the answers' loss, both in nats a token."""
    return lost["kl"]["value"] + lost["recall_nll"]["value"]


FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "kl": lambda lost: lost["kl"]["value"],
    "recall": lambda lost: lost["recall_nll"]["value"],
    "ratio": ratio,
    "greedy": combined,  # which ranks the candidates, and those that aren't chosen
}


def ranking(score: str, damages: Mapping[Unit, Mapping[str, Any]]) -> list[Unit]:
    """Units by their score, the highest first; of equals the first in the model first."""
    return sorted(damages, key=lambda unit: (-FORMULAS[score](damages[unit]), unit))


def greedy_hybrids(units: int, count: int) -> int:
    """How many hybrids `greedy` measures."""
    candidates = min(units, CANDIDATES * count)
    return sum(candidates - step for step in range(count))


def greedy(
    candidates: Sequence[Unit], count: int, measure: Callable[[Collection[Unit]], Mapping[str, Any]]
) -> tuple[list[Unit], list[dict[str, Any]]]:
    """Restore softmax in `count` of the candidates one after the other, each time where `combined` falls most.

    Args:
        measure: the damage of the hybrid that keeps some units.

    Returns:
        The units in that order, and for each {"layer", "kl", "recall_nll"} (and "head"): what the hybrid loses then.
    """
    steps: list[dict[str, Any]] = []
    kept: list[Unit] = []
    for _ in range(count):
        tried = {unit: measure([*kept, unit]) for unit in candidates if unit not in kept}
        best = min(tried, key=lambda unit: (combined(tried[unit]), unit))
        kept.append(best)
        steps.append({**as_row(best), "kl": tried[best]["kl"], "recall_nll": tried[best]["recall_nll"]})
    return kept, steps


def notes_on(found: Mapping[str, Any], mixers: str, samples: int, score: str, kind: str) -> list[str]:
    """What to know of a selection of "layers" or "heads"."""
    notes = []
    if mixers == "untrained":
        notes.append(
            "the mixers are untrained: attention transfer changes what each of them loses, and may be measured, too"
        )
    weak = [
        f"{task} {each['accuracy']:.2f}" for task, each in found["teacher"]["tasks"].items() if each["accuracy"] < GATE
    ]
    if weak:
        notes.append(
            f"the teacher itself often fails ({', '.join(weak)}), so that losses of recall say little"
            + (": use score kl" if score != "kl" else "")
        )
    if samples < FEWEST:
        notes.append(f"few samples ({samples}) tell little about chance: use at least {FEWEST}")
    rivals = {"uniform": found["uniform"], "random": mean_of(found["random"])}
    others = [name for name, rival in rivals.items() if combined(rival) < combined(found["chosen"])]
    if others:
        notes.append(
            f"the chosen {kind} lose more (KL and loss on answers together) than the {' and the '.join(others)} ones"
        )
    return notes
