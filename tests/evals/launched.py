"""What each process of test_processes does: scores under lm-eval, written to OUT/<rank>.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from linearize_evals import catalogue, processes, scoring
from linearize_evals.lm import RecallLM
from linearize_evals.store import Store, document_key
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from linearize.errors import UsageError
from tests.evals.engine import byte_tokenizer, documents, tiny


def resumed(out, model, made, responses):
    """Forwards of this process where every other batch is in the store, as its share would be of two processes."""
    batches = scoring.plan_likelihood(model, made, 2)
    store = Store(out, {"model": "half"})
    if processes.start().is_main_process:
        store.append((document_key(made[n], "likelihood"), responses[n]["spans"]) for b in batches[::2] for n in b)
    processes.start().wait_for_everyone()
    forwards = []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    lm = RecallLM(model, byte_tokenizer(), batch_size=2, store=Store(out, {"model": "half"}))
    asked = [Instance("loglikelihood", d.to_dict(), ("x", ""), 0, ("t", n, 1)) for n, d in enumerate(made)]
    assert lm.loglikelihood(asked) == responses
    hook.remove()
    return len(forwards)


def refused():
    """What an error in the first process is in each."""

    def refuse():
        raise UsageError("a wrong option", "Leave it out")

    try:
        processes.first(refuse)
    except UsageError as error:
        return str(error)


def main(out: Path, fail: bool) -> None:
    state = processes.start()
    made = documents(13, (60,))
    catalogue.build = lambda name, tokenizer, **options: made
    tokenizer, model, reports = byte_tokenizer(), tiny("default"), []
    if fail and state.process_index == 1:
        model.lm_head.weight.data[:] = float("nan")

    def report(label, done, total):
        reports.append(total)

    store = Store(out, {"model": 1})
    lm = RecallLM(model, tokenizer, batch_size=2, store=store, progress=report)
    metadata = {"tokenizer": tokenizer, "packed": True}
    manager = TaskManager(include_path=str(catalogue.tasks_path()), include_defaults=False, metadata=metadata)
    local, name = scoring.score(model, made, batch_size=2) if not fail else [], "linearize_niah_single"
    task = manager.load([name])["tasks"][name]
    task.build_all_requests()
    responses = lm.loglikelihood(task.instances)
    tokens = reports[-1]
    plain = [
        Instance("loglikelihood", {"q": n}, (f"context {n}", f" answer {n}"), 0, ("theirs", n, 1)) for n in range(100)
    ]
    generated = [
        Instance("generate_until", {"q": n}, ("x" * (n + 1), {"until": ["\n"], "max_gen_toks": 4}), 0, ("theirs", n, 1))
        for n in range(3)
    ]
    alone = [Instance("loglikelihood", documents(1, (50,), seed=9)[0].to_dict(), ("x", ""), 0, ("t", 0, 1))]
    found = {
        "scores": [[span.to_dict() for span in spans] for spans in local],
        "plain": [logprob for logprob, _ in lm.loglikelihood(plain)],
        "generated": lm.generate_until(generated),
        "one": [lm.loglikelihood(alone), lm.loglikelihood(plain[:1])[0][1]],
        "tokens": tokens,
        "resumed": resumed(out, model, made, responses),
        "same": processes.same(state.process_index),
        "first": refused(),
    }
    assert [response["spans"] for response in responses] == found["scores"]
    result = simple_evaluate(lm, tasks=[name], task_manager=manager, bootstrap_iters=0)
    assert (result is None) == (state.process_index > 0)  # lm-eval hands its results to the first process only
    samples = result["samples"][name] if result else []
    found["packed"] = [{key: sample[key] for key in ("doc_hash", "resps", "acc", "nll")} for sample in samples]
    (out / f"{state.process_index}.json").write_text(json.dumps(found))
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "fail" in sys.argv[2:])
