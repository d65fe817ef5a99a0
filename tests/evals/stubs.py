"""Models whose recall is known, the tokenizers that they share, and a plain scorer.

`Oracle` reads the text before a position, finds what is asked and copies the answer; `Guesser` picks one of the
values in view; with `window`, either sees only that many tokens.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace

import torch
from linearize_evals import words
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# What a statement looks like (key, value), and the question whose answer is to be continued. None of this is taken
# from the package: a change of wording there has to be made here too.
FORMS = [
    (r"The secret code for (\w+) is( \d+)\.", r"The secret code for (\w+) is((?: \d*)?)$"),
    (r"(The pass key is)( \d+)\. Remember", r"(The pass key is)((?: \d*)?)$"),
    (r"VAR (\w+) is in( \w+)\.", r"VAR (\w+) is in((?: \w*)?)$"),
    (r"(?:^|\n)(\w+):( \w+)(?=\n)", r"(?:^|\n)(\w+):((?: \w*)?)$"),
    (r'"(\w+)": "(\w+)"', r'"(\w+)": "(\w*)$'),
]


@lru_cache
def bpe(digits: str = "single") -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on our words; numbers are single digits ("single") or groups of up to 3 ("groups")."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r"\d" if digits == "single" else r"\d{1,3}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    corpus = [words.sentence(rng) for _ in range(500)]
    corpus += [f"\n{noun}: {noun}\nThe secret code for {noun} is in\n{noun}" for noun in words.NOUNS]
    corpus += [str(number) for number in range(1000)]
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


class Stub(torch.nn.Module, ABC):
    """A causal LM that puts all its weight on `predict(ids before the position)`."""

    def __init__(self, vocabulary: int, window: int | None = None) -> None:
        super().__init__()
        self.vocabulary, self.window = vocabulary, window

    @abstractmethod
    def predict(self, ids: list[int]) -> int:
        """The token after `ids`."""

    def forward(self, input_ids, logits_to_keep=0, **_):
        places = list(range(input_ids.shape[1]))
        keep = logits_to_keep.tolist() if torch.is_tensor(logits_to_keep) else places[-logits_to_keep:]
        logits = torch.zeros(len(input_ids), len(keep), self.vocabulary)
        for row, ids in enumerate(input_ids.tolist()):
            for column, place in enumerate(keep):
                seen = ids[: place + 1]
                logits[row, column, self.predict(seen[-self.window :] if self.window else seen)] = 20.0
        return SimpleNamespace(logits=logits)


class Oracle(Stub):
    """Recalls every fact that stands whole in its window, in the text formats of `FORMS`."""

    def __init__(self, tokenizer, window: int | None = None) -> None:
        super().__init__(len(tokenizer), window)
        self.text = lru_cache(None)(lambda token: tokenizer.decode([token]))

    def predict(self, ids: list[int]) -> int:
        parts = [self.text(token) for token in ids]
        text = "".join(parts)
        starts = [0, *accumulate(map(len, parts))]
        for statement, question in FORMS:
            cue = re.search(question, text)
            if cue:
                found = self.answer(text, list(re.finditer(statement, text)), cue)
                if found is None:
                    return 0
                done = sum(cue.start(2) <= start < len(text) for start in starts[:-1])
                at = starts.index(found.start(2)) + done
                return ids[at] if starts[at] < found.end(2) else 0
        return 0

    def answer(self, text: str, statements: list[re.Match], cue: re.Match) -> re.Match | None:
        """The statement to copy: of the asked key, and where it has several values, the first not given yet."""
        mine = [found for found in statements if found[1] == cue[1]]
        begin = text.rfind("\n")
        while begin > 0 and text.startswith("\nThe secret", text.rfind("\n", 0, begin)):
            begin = text.rfind("\n", 0, begin)
        given = {found[2] for found in mine if found.start() > begin} if "secret" in cue[0] else set()
        return next((found for found in mine if found[2] not in given), None)


class Guesser(Oracle):
    """Answers with one of the values in its window, each as likely, the same for every token of an answer."""

    def answer(self, text: str, statements: list[re.Match], cue: re.Match) -> re.Match | None:
        asked = text[: cue.start(2)]
        question = max(asked.rfind("\n\n"), 0) or asked.find("\n")  # what was answered there is no candidate
        values = {found[2]: found for found in statements if found.start() < question}
        return random.Random(asked).choice(list(values.values()))


class TokenOracle(Stub):
    """Copies what followed the first occurrence of the last token: token MQAR's solution."""

    def predict(self, ids: list[int]) -> int:
        at = ids.index(ids[-1])
        return ids[at + 1] if at + 1 < len(ids) else 0


def correct(model, document) -> list[bool]:
    """Whether each answer of a document is the model's most likely one, one forward for each token of it."""
    results = []
    for span in document.spans:
        seen = [document.ids[:place] for place in range(span.start, span.end)]
        guesses = [model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].argmax().item() for ids in seen]
        results.append(tuple(guesses) == document.ids[span.start : span.end])
    return results
