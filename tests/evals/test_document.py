"""Documents: the ids of a user's text, and spans that are exactly the answers, or a clear error."""

from __future__ import annotations

import json

import pytest
from linearize_evals.document import Ask, Cell, Document, Fact, Span, compose
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from linearize.errors import UsageError
from tests.evals.stubs import bpe

PIECES = [Fact("garden: 345", "g"), "\n", Fact("river: 62", "r"), "\n", Fact("garden: 345", "g"), "\n\n"]
PIECES += ["garden:", Ask(" 345", "g", 0.5), "\n", "river:", Ask(" 62", "r", 0.5, "other"), "\n"]
TEXT = "garden: 345\nriver: 62\ngarden: 345\n\ngarden: 345\nriver: 62\n"


def word_level(*words: str, **kwargs) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(("[UNK]", *words))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **kwargs)


def merging(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A BPE of single characters and the given merges, which go across words."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789: \n", *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(letters)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("digits", ["single", "groups"])
def test_ids_are_those_of_the_whole_text_and_spans_are_the_answers(digits):
    tokenizer = bpe(digits)
    document = compose(tokenizer, PIECES, Cell(64, 0.5, 2), index=3)
    assert list(document.ids) == tokenizer(TEXT)["input_ids"]
    assert [tokenizer.decode(document.ids[span.start : span.end]) for span in document.spans] == [" 345", " 62"]
    assert (document.length, document.depth, document.pairs, document.index) == (64, 0.5, 2, 3)
    assert [(span.chance, span.label) for span in document.spans] == [(0.5, "query"), (0.5, "other")]
    assert json.loads(json.dumps(document.to_dict())) == document.to_dict()
    assert Document.from_dict(document.to_dict()) == document


def test_distance_reaches_back_to_the_start_of_the_nearest_statement():
    document = compose(merging(), PIECES)  # a token is a character
    # The last character of an answer, and the statement's first: the second one of garden, the only one of river.
    assert [span.distance for span in document.spans] == [
        TEXT.rindex("345") + 2 - TEXT.index("garden", 1),
        TEXT.rindex("62") + 1 - TEXT.index("river"),
    ]


def test_a_slow_tokenizer_with_an_end_token_gives_the_same_spans():
    document = compose(ByT5Tokenizer(), PIECES)  # one token a byte, offset by its 3 special tokens, then </s>
    assert list(document.ids) == [byte + 3 for byte in TEXT.encode()]
    assert [bytes(token - 3 for token in document.ids[s.start : s.end]) for s in document.spans] == [b" 345", b" 62"]
    assert document.spans == compose(merging(), PIECES).spans


def test_special_tokens_stay_in_front_only():
    tokenizer = word_level("<s>", "</s>", ":", "garden", "345")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    document = compose(tokenizer, ["garden:", Ask(" 345", "g"), "\n"])
    assert document.ids == (1, 4, 3, 5)
    assert document.spans == (Span(3, 4),)


def test_a_tokenizer_that_marks_words_instead_of_spaces():
    letters = ["▁", *"garden:345"]
    vocabulary = {token: at for at, token in enumerate(dict.fromkeys(letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    document = compose(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ["garden:", Ask(" 345", "g")])
    assert [document.ids[span.start : span.end] for span in document.spans] == [
        tuple(vocabulary[letter] for letter in "▁345")
    ]


@pytest.mark.parametrize("merge", [("5", "\n"), (":", " "), ("2", "\n")])
def test_an_answer_that_shares_a_token_with_its_surroundings_is_refused(merge):
    with pytest.raises(UsageError, match=r"'(345|62)' doesn't tokenise.*first or last token holds other text"):
        compose(merging(merge), PIECES)


def test_an_answer_without_tokens_is_refused():
    with pytest.raises(UsageError, match=r"'345' doesn't tokenise.*no tokens for it"):
        compose(word_level("garden", ":"), ["garden:", Ask(" 345", "g")])
    with pytest.raises(UsageError, match=r"'garden: 345' doesn't tokenise"):
        compose(word_level("345", ":"), [Fact("garden: 345", "g"), "\n345:", Ask(" 345", "g")])


def test_an_answer_that_doesnt_decode_to_itself_is_refused():
    tokenizer = merging()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("5", "6")
    with pytest.raises(UsageError, match=r"'345' doesn't tokenise.*its tokens give ' 346'"):
        compose(tokenizer, PIECES)


def test_spans_have_to_be_in_order_and_inside():
    for spans in ([(0, 1)], [(2, 2)], [(3, 5)], [(2, 4), (3, 4)], [(3, 4), (1, 2)]):
        with pytest.raises(ValueError, match="span"):
            Document((1, 2, 3, 4), tuple(Span(*span) for span in spans), 4)
