"""Tiny models, a tokenizer of bytes, and documents made by hand, some of whose answers the model would give."""

from __future__ import annotations

import random

import torch
from linearize_evals.document import Document, Span
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import linearize

BYTES = pre_tokenizers.ByteLevel.alphabet()
SPACE = 3 + sorted(BYTES).index("Ġ")
NEWLINE = 3 + sorted(BYTES).index("Ċ")
VOCAB = 3 + len(BYTES)
RECIPES = {
    "default": {"mixer": "window", "feature_map": "favor", "feature_map_options": {"features": 32}, "window": 8},
    "hedgehog-window": {"mixer": "window", "feature_map": "hedgehog", "window": 8, "keep_softmax": [1]},
    "linear": {"mixer": "linear", "feature_map": "elu1"},
}


def byte_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """Each byte is a token; with `bos`, <s> goes before every text."""
    vocab = {"<s>": 0, "</s>": 1, "<pad>": 2} | {byte: 3 + n for n, byte in enumerate(sorted(BYTES))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return tokenizer


def tiny(recipe: str | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, **config):
    """A Llama with GQA 8/2 and head_dim 48, converted by one of `RECIPES`, with weights far from symmetry."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(values | config))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    if recipe:
        model = linearize.linearize_(model, RECIPES[recipe]).eval()
    return model.to(dtype)


def documents(count: int = 13, lengths: tuple[int, ...] = (40, 70, 71, 110), seed: int = 5) -> list[Document]:
    """Random letters with three answers of 1 to 3 tokens; each begins with a space, and no context ends in one."""
    letters = [3 + n for n, byte in enumerate(sorted(BYTES)) if byte.isalpha() and byte.isascii()]
    made = []
    for index in range(count):
        source = random.Random(f"{seed}:{index}")
        length = lengths[index % len(lengths)]
        ids = [source.choice(letters) for _ in range(length)]
        spans = []
        for start in (length // 3, length // 2, length - 4):
            ids[start] = SPACE
            spans.append(Span(start, start + source.randint(1, 3)))
        made.append(Document(tuple(ids), tuple(spans), length, index=index))
    return made


@torch.no_grad()
def continued(model, document: Document, tokens: int = 3) -> Document:
    """The document up to its first answer, which is replaced by what the model would say, found without a cache."""
    ids = list(document.ids[: document.spans[0].start])
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return Document(tuple(ids), (Span(len(ids) - tokens, len(ids)),), len(ids), index=document.index)


@torch.no_grad()
def reference(model, document: Document) -> list[tuple[float, bool, list[int]]]:
    """(log-likelihood, greedy, arg-max) of each span, from the logits of the whole sequence."""
    logits = model(torch.tensor([document.ids]), use_cache=False).logits[0].float()
    found = []
    for span in document.spans:
        total, best = 0.0, []
        for t in range(span.start, span.end):
            row = logits[t - 1].log_softmax(-1)
            total += float(row[document.ids[t]])
            best.append(int(row.argmax()))
        found.append((total, best == list(document.ids[span.start : span.end]), best))
    return found
