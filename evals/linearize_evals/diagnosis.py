"""What the figures of a run mean for the one who converted the model, each with what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from linearize_evals.compare import GATE, NO_TEACHER, OK, TOO_WEAK

FEW_DOCUMENTS = 10
WIDE = 0.1  # an interval that reaches further than this from 0 can't show that nothing changed
SAME_NLL = 0.02  # nats per token
PERPLEXITY_KEPT = 1.1
RECALL_GONE = 0.5
COLLAPSED = 0.6
LOSS = 0.1  # of accuracy: what counts as lost within or beyond the window

LOST_WITHIN = (
    "Loss within the window isn't a matter of memory: run `linearize verify` on the student, then train longer."
)
LOST_BEYOND = "Train the linear branch on longer contexts, widen the window, or keep some softmax layers."
KEPT_BEYOND = "Measure longer contexts to find where it ends."

Results = Mapping[str, Any]


def findings(results: Results) -> list[str]:
    """Plain sentences about a run, in the order of the rules; nothing is said without the figures that show it."""
    rules = (
        _teacher,
        _window,
        _perplexity_hides_it,
        _gap,
        _ablations,
        _generation,
        _collapse,
        _quiet_loss,
        _kept,
        _few,
    )
    return [sentence for rule in rules for sentence in rule(results)]


def percent(value: float) -> str:
    """`0.934` as `93 %`; a figure that isn't 0 or 1 never reads as if it were."""
    digits = 0 if 0.01 <= value <= 0.99 or value in (0.0, 1.0) else 1
    return f"{100 * value:.{digits}f} %"


def short(task: str) -> str:
    return task.removeprefix("linearize_")


def _tasks(results: Results, gate: str = OK) -> dict[str, Any]:
    return {short(name): task for name, task in results.get("tasks", {}).items() if task["gate"] == gate}


def _teacher(results: Results) -> Iterator[str]:
    weak = _tasks(results, TOO_WEAK)
    listed = ", ".join(f"{name} {percent(task['teacher']['accuracy'])}" for name, task in weak.items())
    if weak and len(weak) == len(results["tasks"]):
        yield (
            f"The teacher itself recalls too little to measure a loss ({listed}; {percent(GATE)} is needed). "
            "Use easier tasks (fewer pairs, shorter lengths) or a stronger teacher."
        )
    elif weak:
        yield (
            f"Nothing is said about the loss where the teacher is too weak ({listed}; {percent(GATE)} is needed). "
            "Use shorter lengths or fewer pairs there."
        )
    if results.get("tasks") and len(_tasks(results, NO_TEACHER)) == len(results["tasks"]):
        yield "No teacher was run, so nothing is said about what was lost. Give the unconverted model as the teacher."


def _window(results: Results) -> Iterator[str]:
    window = (results.get("models", {}).get("student") or {}).get("window")
    if not window:
        return
    for name, task in _tasks(results).items():
        near = _pool([b for b in task["by_distance"] if b["up_to"] <= window])
        far = _pool([b for b in task["by_distance"] if b["over"] >= window])
        if far is None or far["teacher"] < GATE:
            continue
        beyond = f"beyond it {_beside_teacher(far)[:-1]}; chance {percent(task['chance'])})"
        within, lost_within = "", False
        if near is not None and near["teacher"] >= GATE:
            within = f"within the window of {window} tokens the student recalls {_beside_teacher(near)}, "
            lost_within = near["teacher"] - near["student"] > LOSS
        if lost_within:
            yield f"{name}: {within}{beyond}. {LOST_WITHIN}"
        elif far["teacher"] - far["student"] <= LOSS:
            yield f"{name}: recall reaches past the window of {window} tokens: {beyond}. {KEPT_BEYOND}"
        elif within:
            yield f"{name}: what was lost is just what left the window: {within}{beyond}. {LOST_BEYOND}"
        else:
            yield f"{name}: the facts lie outside the window of {window} tokens: {beyond}. {LOST_BEYOND}"


def _beside_teacher(pool: Mapping[str, Any]) -> str:
    return f"{percent(pool['student'])} (teacher {percent(pool['teacher'])}, {pool['answers']} answers)"


def _pool(bins: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Accuracies of several bins taken together."""
    n = sum(b["answers"] for b in bins)
    if not n:
        return None
    return {"answers": n} | {
        side: sum(b[side]["accuracy"] * b["answers"] for b in bins) / n for side in ("teacher", "student")
    }


def _perplexity_hides_it(results: Results) -> Iterator[str]:
    kept = {
        short(name): text["ratio"]["value"]
        for name, text in results.get("text", {}).items()
        if text["ratio"] and (text["ratio"]["high"] or text["ratio"]["value"] or 9) <= PERPLEXITY_KEPT
    }
    gone = {
        name: task["retention"]["value"]
        for name, task in _tasks(results).items()
        if task["retention"]["high"] is not None and task["retention"]["high"] < RECALL_GONE
    }
    if kept and gone:
        yield (
            f"Perplexity hides the loss: it is {_list(kept, '{:.2f}')} times the teacher's, while the retention of "
            f"recall is {_list(gone, '{:.2f}')}. Judge this model by recall, and train on text that needs it."
        )


def _list(figures: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{form.format(value)} ({name})" for name, value in figures.items())


def _gap(results: Results) -> Iterator[str]:
    for name, text in results.get("text", {}).items():
        hit = text["by_label"].get("hit")
        if not hit or not hit["gap_share"] or text["tokens"] == hit["tokens"]:
            continue
        share = hit["gap_share"]
        if share["low"] is None:
            continue
        words = (
            f"{short(name)}: {percent(share['value'])} (95 % interval {percent(share['low'])} to "
            f"{percent(share['high'])}) of the rise in loss is on tokens that need recall, which are "
            f"{percent(hit['tokens'] / text['tokens'])} of the text."
        )
        if share["low"] > hit["tokens"] / text["tokens"]:
            yield f"{words} Recall, not the language, is what the model lacks: give it a wider window or more state."
        else:
            yield f"{words} The language itself suffered at least as much: train longer."


def _ablations(results: Results) -> Iterator[str]:
    ablations = results.get("ablations") or {}
    for name, run in (ablations.get("linear") or {}).items():
        if run["low"] is not None and run["low"] <= 0:
            yield f"{short(name)}: {_linear_branch(run)}"
    for name, run in (ablations.get("window") or {}).items():
        if run["low"] is not None and run["low"] > RECALL_GONE * run["full"]:
            yield (
                f"{short(name)}: recall comes from the window: accuracy {percent(run['full'])} as it is, "
                f"{percent(run['without'])} without the window ({run['n']} answers). Expect nothing from beyond it "
                "until the linear branch is trained."
            )


def _linear_branch(run: Mapping[str, Any]) -> str:
    """What a linear branch is worth that doesn't raise the accuracy for certain."""
    scores = (
        f"accuracy {percent(run['full'])} as it is, {percent(run['without'])} with the linear branch's output at "
        f"zero ({run['n']} answers)"
    )
    with_it, without = run["nll_full"], run["nll_without"]
    if run["high"] < 0:
        return f"the linear branch does harm: {scores}. Train it before anything else."
    if max(-run["low"], run["high"]) > WIDE:
        return f"too few answers to tell what the linear branch does: {scores}. Raise the samples."
    if run["full"] >= GATE:
        return f"this task doesn't need the linear branch: {scores}. Use a longer length to test it."
    if with_it is not None and without is not None and abs(without - with_it) > SAME_NLL:
        return (
            f"the linear branch changes the loss ({with_it:.2f} nats a token, {without:.2f} without it), but no "
            f"answer: {scores}. Train it longer."
        )
    return (
        f"the linear branch does nothing: {scores}. Whatever is recalled comes from the window or from softmax layers: "
        "train with a smaller window, or drop the window at times, so that the branch has to learn."
    )


def _generation(results: Results) -> Iterator[str]:
    for name, task in results.get("tasks", {}).items():
        student = (task["generation"] or {}).get("student")
        teacher = (task["generation"] or {}).get("teacher")
        if not student or student["difference"]["high"] is None or student["difference"]["high"] >= -0.05:
            continue
        also = f"; teacher {percent(teacher['accuracy'])} and {percent(teacher['scored'])}" if teacher else ""
        yield (
            f"{short(name)}: the likelihood is fine, generation isn't: {percent(student['accuracy'])} of the answers "
            f"are generated, {percent(student['scored'])} are the most likely tokens{also}. "
            "Generation runs through the cache: compare cached and uncached output of this model."
        )


def _collapse(results: Results) -> Iterator[str]:
    for name, scores in (results.get("lm_eval") or {}).items():
        histogram = (scores.get("histogram") or {}).get("student")
        if not histogram or not sum(histogram["choices"]):
            continue
        choices, gold = histogram["choices"], histogram["gold"]
        n = sum(choices)
        top = max(range(len(choices)), key=choices.__getitem__)
        share, due = choices[top] / n, gold[top] / n
        if n >= 20 and share >= COLLAPSED and share - due >= 0.25:
            yield (
                f"{name}: answers collapsed: {percent(share)} are choice {chr(ord('A') + top)}, which is right in "
                f"{percent(due)} ({n} questions). The score is chance in disguise: train further, and look at the "
                "answers before the score."
            )


def _quiet_loss(results: Results) -> Iterator[str]:
    for name, task in _tasks(results).items():
        before, after = task["teacher"]["nll"], task["student"]["nll"]
        missed = task["difference"]
        if not before or after is None or missed["low"] is None:
            continue
        if missed["low"] <= 0 <= missed["high"] and after > max(1.2 * before, before + SAME_NLL):
            yield (
                f"{name}: accuracy hasn't moved (difference {missed['value']:+.3f}), but the answers' loss rose "
                f"from {before:.2f} to {after:.2f} nats a token. Harder cells would show a loss: raise the length "
                "or the pairs."
            )


def _kept(results: Results) -> Iterator[str]:
    tasks = _tasks(results)
    lows = [task["retention"]["low"] for task in tasks.values()]
    if lows and all(low is not None and low >= 0.95 for low in lows):
        yield (
            f"Nothing was lost that these tasks can see: retention is at least {min(lows):.2f} on "
            f"{'all ' if len(lows) > 1 else ''}{len(lows)} task{'s' if len(lows) > 1 else ''}. Measure longer contexts."
        )


def _few(results: Results) -> Iterator[str]:
    few = {
        short(name): group["documents"]
        for kind in ("tasks", "text")
        for name, group in results.get(kind, {}).items()
        if group["documents"] < FEW_DOCUMENTS
    }
    if few:
        yield (
            f"Few documents, so wide intervals ({', '.join(f'{name} {n}' for name, n in few.items())}). "
            "Raise the samples or the limit before you decide anything."
        )


def choice_histogram(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[int]] | None:
    """How often each choice of a multiple-choice task is the most likely one, and how often it is right.

    Args:
        samples: what lm-eval logged for the task; each with one (log likelihood, greedy) per choice.

    Returns:
        {"choices": counts, "gold": counts}, or None if the task isn't multiple-choice.
    """
    picked, gold = [], []
    for sample in samples:
        scores = [_log_likelihood(response) for response in sample["resps"]]
        target = sample["target"]
        if isinstance(target, str) and target.isdigit():
            target = int(target)
        if len(scores) < 2 or None in scores or isinstance(target, bool) or not isinstance(target, int):
            return None
        if not 0 <= target < len(scores):
            return None
        picked.append(max(range(len(scores)), key=scores.__getitem__))  # type: ignore[arg-type]
        gold.append(target)
    if not picked:
        return None
    width = max(*picked, *gold) + 1
    return {"choices": [picked.count(i) for i in range(width)], "gold": [gold.count(i) for i in range(width)]}


def _log_likelihood(response: Any) -> float | None:
    """The score in `[(log likelihood, greedy)]`; None for a response of another kind."""
    try:
        score, _greedy = response[0]
        return float(score)
    except (TypeError, ValueError, IndexError, KeyError):
        return None
