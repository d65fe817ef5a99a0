"""What a run says of the student's window and of its linear branches, with what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from linearize_evals.compare import GATE, OK
from linearize_evals.intervals import newcombe, wilson
from linearize_evals.phrases import of_gate, percent, short

WIDE = 0.1  # an interval that reaches further than this from 0 can't show that nothing changed
SAME_NLL = 0.02  # nats per token
LOSS = 0.1  # of accuracy: what counts as lost within or beyond the window
GONE, SURELY_GONE = 0.1, 0.25  # retention, and the upper end of its interval
RECALL_GONE = 0.5

LOST_WITHIN = (
    "Loss within the window isn't a matter of memory: it is expected of a conversion without training; after training, "
    "run `linearize verify` on the student, and train longer."
)
LOST_BEYOND = "Train the linear branch on longer contexts, widen the window, or keep some softmax layers."
KEPT_BEYOND = "Measure longer contexts to find where it ends."

Results = Mapping[str, Any]


def window_of(results: Results) -> int | None:
    """The window of the student's layers; None without one, and where a layer sees everything."""
    student = results.get("models", {}).get("student") or {}
    return None if student.get("full_attention_layers") else student.get("window")


def gone(results: Results) -> Iterator[str]:
    """That nothing is left of recall, not even of what lies within the window."""
    window, tasks = window_of(results), _gone_tasks(results)
    if not tasks:
        return
    listed = []
    for name, task in tasks.items():
        near = _within(task, window)
        there = f"; within the window {percent(near['student'])} of {near['answers']} answers" if near else ""
        sides = f"teacher {percent(task['teacher']['accuracy'])}, chance {percent(task['chance'])}"
        listed.append(f"{name} {percent(task['student']['accuracy'])} ({sides}{there})")
    where = f", within the window of {window} tokens as well as beyond it" if window else ""
    yield (
        f"Recall is gone{where}: {', '.join(listed)}. This is expected of a conversion without training: train the "
        "student, then measure again. If it was trained, run `linearize verify` on it."
    )


def _gone_tasks(results: Results) -> dict[str, Any]:
    window = window_of(results)
    found = {}
    for name, task in of_gate(results, OK).items():
        kept = task["retention"]
        if kept["high"] is None or kept["value"] > GONE or kept["high"] > SURELY_GONE:
            continue
        near = _within(task, window)
        if not window or (near and near["student"] <= GONE and near["loss"][0] > RECALL_GONE):
            found[name] = task
    return found


def window(results: Results) -> Iterator[str]:
    """Whether what was lost lies beyond the window."""
    size, known = window_of(results), _gone_tasks(results)
    if size:
        for name, task in of_gate(results, OK).items():
            if name not in known:
                yield from (f"{name}: {sentence}" for sentence in _window(task, size))


def _window(task: Mapping[str, Any], size: int) -> Iterator[str]:
    near, far = _within(task, size), _beyond(task, size)
    if far is None or far["teacher"] < GATE or (near and near["teacher"] < GATE):
        return
    beyond = f"beyond it {_beside_teacher(far)[:-1]}; chance {percent(task['chance'])})"
    within = near and f"within the window of {size} tokens the student recalls {_beside_teacher(near)}, {beyond}"
    if near and _lost(near):
        yield f"{within}. {LOST_WITHIN}"
    elif far["loss"][1] <= 2 * LOSS:
        yield f"recall reaches past the window of {size} tokens: {beyond}. {KEPT_BEYOND}"
    elif not _lost(far):
        return
    elif near is None:
        yield f"the facts lie outside the window of {size} tokens: {beyond}. {LOST_BEYOND}"
    elif near["loss"][1] < far["loss"][0]:
        yield f"what was lost is just what left the window: {within}. {LOST_BEYOND}"
    else:
        yield (
            f"{within}. These answers are too few to tell whether only what left the window was lost: raise the "
            "samples."
        )


def _lost(pool: Mapping[str, Any]) -> bool:
    return pool["teacher"] - pool["student"] > LOSS and pool["loss"][0] > 0


def _beside_teacher(pool: Mapping[str, Any]) -> str:
    return f"{percent(pool['student'])} (teacher {percent(pool['teacher'])}, {pool['answers']} answers)"


def _within(task: Mapping[str, Any], size: int | None) -> dict[str, Any] | None:
    return _pool([b for b in task["by_distance"] if size and b["up_to"] <= size])


def _beyond(task: Mapping[str, Any], size: int | None) -> dict[str, Any] | None:
    return _pool([b for b in task["by_distance"] if size and b["over"] >= size])


def _pool(bins: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Accuracies of several bins taken together, and the interval of the loss (teacher minus student).

    The interval is of independent answers, and too narrow where those of a document are alike. So no rule is content
    with one that excludes 0.
    """
    n, lost, gained = (sum(b[key] for b in bins) for key in ("answers", "lost", "gained"))
    if not n:
        return None
    right = sum(round(b["teacher"]["accuracy"] * b["answers"]) for b in bins)
    low, high = newcombe(right - lost, lost, gained, n - right - gained)
    return {"answers": n, "teacher": right / n, "student": (right - lost + gained) / n, "loss": (-high, -low)}


def ablations(results: Results) -> Iterator[str]:
    """What the linear branch does, by its absence, and where recall is the window's alone."""
    runs = results.get("ablations") or {}
    linear = runs.get("linear") or {}
    for name, run in linear.items():
        if run["low"] is not None and run["low"] <= 0:
            yield f"{short(name)}: {_linear_branch(run, results)}"
    for name, run in (runs.get("window") or {}).items():
        task = of_gate(results, OK).get(short(name))
        far = task and _beyond(task, window_of(results))
        if not task or not far or name not in linear or not _nothing(linear[name]):
            continue  # without the window all that is near is missing, too: that alone tells nothing of what is far
        near_chance = wilson(far["student"] * far["answers"], far["answers"])[1] <= task["chance"] + LOSS
        if near_chance and run["low"] is not None and run["low"] > RECALL_GONE * run["full"]:
            yield (
                f"{short(name)}: recall comes from the window: accuracy {percent(run['full'])} as it is, "
                f"{percent(run['without'])} without the window ({run['n']} answers); beyond the window "
                f"{_beside_teacher(far)}. Expect nothing from there until the linear branch is trained."
            )


def _nothing(run: Mapping[str, Any]) -> bool:
    """Whether it is known that the branch changes next to nothing."""
    narrow = run["low"] is not None and run["low"] <= 0 <= run["high"] and max(-run["low"], run["high"]) <= WIDE
    return narrow and not _changes_loss(run)


def _changes_loss(run: Mapping[str, Any]) -> int:
    """1 if the branch lowers the answers' loss for certain, -1 if it raises it, else 0."""
    low, high = run["nll_low"], run["nll_high"]
    if low is None or high is None or abs(run["nll_without"] - run["nll_full"]) <= SAME_NLL:
        return 0
    return 1 if low > 0 else -1 if high < 0 else 0


def _linear_branch(run: Mapping[str, Any], results: Results) -> str:
    """What a linear branch is worth that doesn't raise the accuracy for certain."""
    scores = (
        f"accuracy {percent(run['full'])} as it is, {percent(run['without'])} with the linear branch's output at "
        f"zero ({run['n']} answers)"
    )
    if run["nll_full"] is not None and run["nll_without"] is not None:
        scores += f", loss {run['nll_full']:.2f} and {run['nll_without']:.2f} nats a token"
    change = _changes_loss(run)
    if run["high"] < 0:
        return f"the linear branch does harm: {scores}. Train it before anything else."
    if change < 0:
        return f"the linear branch raises the loss of the answers: {scores}. Train it before anything else."
    if max(-run["low"], run["high"]) > WIDE:
        if change > 0:
            return f"the linear branch lowers the loss of the answers; how many it mends can't be told: {scores}."
        return f"what the linear branch does can't be told from so few answers: {scores}."
    if run["full"] >= GATE:
        return f"this task doesn't need the linear branch: {scores}. Use a longer length to test it."
    if change > 0:
        return f"the linear branch lowers the loss, but mends no answer: {scores}. Train it longer."
    return (
        f"the linear branch does nothing that can be seen: {scores}. Whatever is recalled comes from the window"
        f"{'' if window_of(results) else ' or from layers without one'}: train with a smaller window, "
        "or drop the window at times, so that the branch has to learn."
    )
