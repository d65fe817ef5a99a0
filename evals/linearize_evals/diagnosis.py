"""What the figures of a run mean for the one who converted the model, each with what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from linearize_evals.branches import RECALL_GONE, SAME_NLL, WIDE, ablations, gone, window
from linearize_evals.compare import GATE, NO_TEACHER, OK, TOO_WEAK
from linearize_evals.phrases import of_gate, percent, short

FEW_DOCUMENTS = 10
PERPLEXITY_KEPT = 1.1
MOSTLY, ALL = 0.5, 0.9  # shares of the rise in loss
COLLAPSED = 0.6

Results = Mapping[str, Any]


def findings(results: Results) -> list[str]:
    """Plain sentences about a run, in the order of the rules; nothing is said without the figures that show it."""
    rules = (
        _teacher,
        gone,
        window,
        _perplexity_hides_it,
        _gap,
        ablations,
        _generation,
        _collapse,
        _quiet_loss,
        _kept,
        _few,
    )
    return [sentence for rule in rules for sentence in rule(results)]


def _teacher(results: Results) -> Iterator[str]:
    weak = of_gate(results, TOO_WEAK)
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
    if results.get("tasks") and len(of_gate(results, NO_TEACHER)) == len(results["tasks"]):
        yield "No teacher was run, so nothing is said about what was lost. Give the unconverted model as the teacher."


def _perplexity_hides_it(results: Results) -> Iterator[str]:
    kept = {
        short(name): text["ratio"]["value"]
        for name, text in results.get("text", {}).items()
        if text["ratio"] and (text["ratio"]["high"] or text["ratio"]["value"] or 9) <= PERPLEXITY_KEPT
    }
    gone = {
        name: task["retention"]["value"]
        for name, task in of_gate(results, OK).items()
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
        yield f"{words} {_what_suffered(share, hit['tokens'] / text['tokens'])}"


def _what_suffered(share: Mapping[str, float], of_text: float) -> str:
    """What an interval of recall's share in the rise shows, beside its share of the tokens."""
    if share["low"] > max(MOSTLY, of_text):
        return "Recall, more than the language, is what the model lacks: give it a wider window or more state."
    if share["high"] < of_text:
        return "The language itself suffered at least as much: the model needs more training."
    if share["high"] < ALL:
        return "Recall and the language both suffered: the model needs more training; then look at recall again."
    return "This text is too short to tell whether recall or the language suffered more."


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
        histograms = scores.get("histogram") or {}
        found, before = (_most_chosen(histograms.get(side)) for side in ("student", "teacher"))
        if not found:
            continue
        top, share, due, n = found
        words = f"{percent(share)} are choice {chr(ord('A') + top)}, which is right in {percent(due)} ({n} questions)"
        if before:
            yield (
                f"{name}: answers collapsed, but so do the teacher's: {words}; of the teacher's, {percent(before[1])} "
                f"are choice {chr(ord('A') + before[0])}. This task says nothing about the conversion."
            )
        else:
            yield (
                f"{name}: answers collapsed: {words}. The score is chance in disguise: train further, and look at the "
                "answers before the score."
            )


def _most_chosen(histogram: Mapping[str, Sequence[int]] | None) -> tuple[int, float, float, int] | None:
    """(choice, its share of the answers, its share of the right ones, questions) of answers that collapsed on one."""
    if not histogram or sum(histogram["choices"]) < 20:
        return None
    choices, gold, n = histogram["choices"], histogram["gold"], sum(histogram["choices"])
    top = max(range(len(choices)), key=choices.__getitem__)
    share, due = choices[top] / n, gold[top] / n
    return (top, share, due, n) if share >= COLLAPSED and share - due >= 0.25 else None


def _quiet_loss(results: Results) -> Iterator[str]:
    for name, task in of_gate(results, OK).items():
        before, after = task["teacher"]["nll"], task["student"]["nll"]
        missed = task["difference"]
        if not before or after is None or missed["low"] is None:
            continue
        same = missed["low"] <= 0 <= missed["high"] and max(-missed["low"], missed["high"]) <= WIDE
        if same and after > max(1.2 * before, before + SAME_NLL):
            yield (
                f"{name}: accuracy hasn't moved (difference {missed['value']:+.3f}), but the answers' loss rose "
                f"from {before:.2f} to {after:.2f} nats a token. Harder cells would show a loss: raise the length "
                "or the pairs."
            )


def _kept(results: Results) -> Iterator[str]:
    tasks = of_gate(results, OK)
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
