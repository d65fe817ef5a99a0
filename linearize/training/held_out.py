"""A look at the student between steps: perplexity of rows that it never trains on, and a small recall task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from linearize.training.objectives import Logits
from linearize.training.packing import Row, batch
from linearize.training.trainable import as_teacher

PAIRS = (8, 16)  # facts in a list: what a small model answers nearly perfectly
SAMPLES = 2  # lists of each; 16 questions in one


class HeldOut:
    """The rows and documents that every look takes.

    The recall documents are `linearize_mqar_lines`', a task of the evaluation; the synthetic documents of training
    share no template and no vocabulary with it.
    """

    def __init__(self, rows: Sequence[Row], tokenizer: Any) -> None:
        self.rows = list(rows)
        self.documents: list[Any] = []
        if tokenizer is not None:
            from linearize_evals.catalogue import build

            self.documents = build("linearize_mqar_lines", tokenizer, pairs=PAIRS, samples=SAMPLES, seed=1)

    def look(self, module: Any, logits: Logits, *, teacher: bool = False) -> dict[str, float]:
        """`perplexity`, `recall` (accuracy) and `recall_nll` (nats an answer) of the student, or its teacher.

        Args:
            module: what runs the model (see `parallel.wrap`).
        """
        with torch.no_grad():
            return module(self._look, logits, teacher)

    def _look(self, logits: Logits, teacher: bool) -> dict[str, float]:
        model = logits.model
        training = model.training
        model.eval()
        try:
            found: dict[str, float] = {}
            device = next(model.parameters()).device
            if self.rows:
                sums = torch.zeros(2, dtype=torch.float64)
                for row in self.rows:
                    inputs = {key: value.to(device) for key, value in batch([row]).items()}
                    sums += logits.judge(inputs["input_ids"], inputs.get("position_ids"), teacher).double().cpu()
                found["perplexity"] = math.exp(min(700.0, float(sums[0] / sums[1])))
            if self.documents:
                found |= self._recall(logits, teacher)
            return found
        finally:
            model.train(training)

    def _recall(self, logits: Logits, teacher: bool) -> dict[str, float]:
        from linearize_evals.scoring import score

        if not teacher:
            scores = score(logits.model, self.documents)
        elif logits.teacher is not None:
            scores = logits.with_teacher(score, self.documents)
        else:
            with as_teacher(logits.model, logits.adapter):
                scores = score(logits.model, self.documents)
        spans = [span for document in scores for span in document]
        return {
            "recall": sum(span.greedy for span in spans) / len(spans),
            "recall_nll": -sum(span.logprob for span in spans) / len(spans),
        }
