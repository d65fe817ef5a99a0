"""Our tasks as lm-eval sees them: `lm_eval --include_path "$(linearize tasks-path)" --tasks linearize_recall`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, weighted_perplexity
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig

from linearize.errors import LinearizeError, UsageError, first_line
from linearize_evals.document import Document

OPTIONS = ("seed", "lengths", "depths", "pairs", "samples", "text", "haystack")
GENERATION = {"answers": True}  # the arguments of a request to continue the prompts of a document's first answers
NEEDS_TOKENIZER = (
    'Give its folder as "tokenizer" in the metadata: `lm_eval --metadata \'{"tokenizer": "FOLDER"}\'`, or '
    "TaskManager(metadata=...)"
)


def is_packed(request: Instance) -> bool:
    """Whether a request asks for all answers of a document at once, which only `RecallLM` understands."""
    document = isinstance(request.doc, dict) and {"ids", "spans"} <= request.doc.keys()
    return document and len(request.args) == 2 and request.args[1] in ("", GENERATION)


class RecallTask(Task):
    """One family of documents.

    Options come as lm-eval metadata: `tokenizer` (folder, or a tokenizer object; else `pretrained` is used), those of
    `catalogue.build`, `vocab_size` (for linearize_mqar_tokens without a tokenizer), and from `linearize eval`:
    `packed` (a whole document is one request) and `generate` (with another one for the generated answers).

    A document is a dict as from `Document.to_dict`, plus "text" for people to read.

    Metrics: recall tasks have acc (share of answers that greedy decoding would give), nll (nats per answer token) and,
    where asked for, gen_acc (share of the first answers that were generated); text tasks have nll and perplexity.

    Raises:
        UsageError: no tokenizer, an option out of range, or text that doesn't give the same tokens again.
    """

    OUTPUT_TYPE = "loglikelihood"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:  # Task.__init__ loads a dataset
        from linearize_evals.catalogue import FAMILIES

        values = dict(config or {})
        metadata = dict(values.get("metadata") or {})
        self.family = FAMILIES[values["task"].split("::")[-1]]
        self.VERSION = self.family.version
        self.packed, self.generated = (_flag(metadata, name) for name in ("packed", "generate"))
        self.tokenizer = _tokenizer(metadata)
        self._source: Any = self.tokenizer
        if self.family.name == "linearize_mqar_tokens" and metadata.get("vocab_size") is not None:
            self._source = _parsed(metadata["vocab_size"])
        if self._source is None:
            raise UsageError(f"{self.family.name} needs a tokenizer", NEEDS_TOKENIZER)
        self._options = {name: _parsed(metadata[name]) for name in OPTIONS if metadata.get(name) is not None}
        self._options |= {name: metadata[name] for name in ("text", "haystack") if name in self._options}
        shown = {key: value for key, value in metadata.items() if isinstance(value, (str, int, float, list, tuple))}
        if self.tokenizer is not None:
            shown["tokenizer"] = self.tokenizer.name_or_path
        self._config = TaskConfig(
            task=values["task"], output_type="loglikelihood", num_fewshot=0, target_delimiter="", metadata=shown
        )
        self._documents: list[dict[str, Any]] | None = None
        self._instances = None
        self._filters = [_take_first()]
        self.fewshot_rnd = None

    # What lm-eval asks of a task

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return False

    def has_test_docs(self) -> bool:
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        if self._documents is None:
            from linearize_evals.catalogue import build

            built = build(self.family.name, self._source, **self._options)
            self._documents = [document.to_dict() | {"text": self._text(document.ids)} for document in built]
        return self._documents

    def doc_to_text(self, doc: Mapping[str, Any]) -> str:
        return doc["text"]

    def doc_to_target(self, doc: Mapping[str, Any]) -> str:
        return " ".join(self._text(doc["ids"][span["start"] : span["end"]]).strip() for span in doc["spans"])

    def fewshot_context(self, doc: Mapping[str, Any], *args: Any, **kwargs: Any) -> str:
        """Nothing goes before a document: no examples, no chat template."""
        return ""

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        common = {"doc": doc, "metadata": kwargs["metadata"]}
        if self.packed:
            asked: list[tuple[Any, tuple]] = [("loglikelihood", (doc["text"], ""))]
            if self.generated and self.family.kind == "recall":
                asked.append(("generate_until", (doc["text"], GENERATION)))
        else:
            asked = [("loglikelihood", pair) for pair in self._pairs(Document.from_dict(doc))]
        return [
            Instance(request_type=kind, arguments=arguments, idx=number, **common)
            for number, (kind, arguments) in enumerate(asked)
        ]

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        if self.packed:
            scored = [(span["logprob"], span["greedy"]) for span in results[0]["spans"]]
            ranges = [(span["start"], span["end"]) for span in doc["spans"]]
        else:
            scored, ranges = results, self._ranges(doc["spans"])
        sizes = [end - start for start, end in ranges]
        if self.family.kind == "text":
            total, count = sum(logprob for logprob, _ in scored), sum(sizes)
            return {"nll": -total / count, "perplexity": (total, count)}  # lm-eval divides the sums
        values = {
            "acc": mean([float(greedy) for _, greedy in scored]),
            "nll": mean([-logprob / size for (logprob, _), size in zip(scored, sizes, strict=True)]),
        }
        if self.packed and self.generated:
            answers = [doc["ids"][start:end] for start, end in ranges]
            found = results[1]["spans"]
            values["gen_acc"] = mean([float(list(a) == list(b)) for a, b in zip(found, answers, strict=False)])
        return values

    def aggregation(self) -> dict[str, Any]:
        if self.family.kind == "text":
            return {"nll": mean, "perplexity": weighted_perplexity}
        return {"acc": mean, "nll": mean, "gen_acc": mean}

    def higher_is_better(self) -> dict[str, bool]:
        if self.family.kind == "text":
            return {"nll": False, "perplexity": False}
        return {"acc": True, "nll": False, "gen_acc": True}

    # Documents as text, for models that take nothing else

    def _text(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return " ".join(str(token) for token in ids)
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _ranges(self, spans: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
        """What is asked for as one request: an answer; in text tasks, where only the sum counts, adjoining spans."""
        ranges: list[tuple[int, int]] = []
        for span in spans:
            if self.family.kind == "text" and ranges and ranges[-1][1] == span["start"]:
                ranges[-1] = (ranges[-1][0], span["end"])
            else:
                ranges.append((span["start"], span["end"]))
        return ranges

    def _pairs(self, document: Document) -> list[tuple[str, str]]:
        """(context, continuation) of every request.

        Raises:
            UsageError: if a model that tokenises them would see other tokens than the document's.
        """
        if self.tokenizer is None:
            raise UsageError(f"{self.family.name} needs a tokenizer to put token ids into text", NEEDS_TOKENIZER)
        pairs = []
        for start, end in self._ranges([{"start": span.start, "end": span.end} for span in document.spans]):
            context, whole = self._text(document.ids[:start]), self._text(document.ids[:end])
            same = (
                context == context.rstrip()  # lm-eval moves trailing space to the continuation
                and whole.startswith(context)
                and self._encode(context) == list(document.ids[:start])
                and self._encode(whole) == list(document.ids[:end])
            )
            if not same:
                name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
                raise UsageError(
                    f"document {document.index} of {self.family.name} can't be asked as text: the tokenizer {name!r} "
                    f"splits the text up to token {end} otherwise",
                    "Use `linearize eval`, which passes token ids, or another task",
                )
            pairs.append((context, whole[len(context) :]))
        return pairs

    def _encode(self, text: str) -> list[int]:
        """As lm-eval's Hugging Face model does: special tokens are the tokenizer's, or already in the text."""
        first = self.tokenizer.bos_token_id
        first = self.tokenizer.eos_token_id if first is None else first
        bos = None if first is None else self.tokenizer.decode(first)
        special = {"add_special_tokens": False} if bos and text.startswith(bos) else {}
        return list(self.tokenizer.encode(text, verbose=False, **special))


def _take_first() -> Any:
    from lm_eval.filters import build_filter_ensemble

    return build_filter_ensemble("none", [("take_first", None)])


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer that metadata names or holds; None if there is none."""
    given = metadata.get("tokenizer") or metadata.get("pretrained")
    if given is None or not isinstance(given, (str, Path)):
        return given
    from transformers import AutoTokenizer

    options = {key: metadata[key] for key in ("revision", "trust_remote_code", "subfolder") if metadata.get(key)}
    try:
        return AutoTokenizer.from_pretrained(str(given), **options)
    except LinearizeError:
        raise
    except Exception as error:  # transformers raises all kinds
        raise UsageError(f"no tokenizer can be loaded from {given} ({first_line(error)})", NEEDS_TOKENIZER) from error


def _parsed(value: Any) -> Any:
    """An option from the command line: JSON ("[128, 256]", "0.5"), or else text. Numbers alone are lists of one."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _flag(metadata: Mapping[str, Any], name: str) -> bool:
    value = _parsed(metadata.get(name, False))
    if not isinstance(value, bool) and value not in (0, 1):
        lowered = str(value).lower()
        if lowered not in ("true", "false"):
            raise UsageError(f"{name} is {value!r}, neither true nor false", f"Leave {name} out")
        return lowered == "true"
    return bool(value)
