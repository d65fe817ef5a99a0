"""A Llama made by hand, whose recall and whose language modelling live in one layer each.

Vocabulary: a fact (key k, value v) is one token; then queries, answers and words. The lookup layer sends a query to the
fact of its key, and writes the fact's value, which the head turns into an answer. The echo layer does the same for
words: a word attends to where it stood before, and makes another word likelier. The other layers do next to nothing.
"""

from __future__ import annotations

import random

import torch
from linearize_evals.document import Document, Span
from transformers import LlamaConfig, LlamaForCausalLM

import linearize
from linearize.select_samples import Samples

N = 16  # keys, values, words
FACTS, QUERIES, ANSWERS, WORDS = 0, N * N, N * N + N, N * N + 2 * N
VOCAB = N * N + 3 * N
KEY, QUERY, VALUE, WORD = (slice(N * part, N * (part + 1)) for part in range(4))  # of the hidden states
SLOW = slice(16, 32)  # dims of a head that RoPE hardly turns
RECIPE = {"mixer": "window", "feature_map": "elu1", "window": 4, "sinks": 0}


@torch.no_grad()
def model(lookup: int, echo: int, layers: int = 4, heads: int = 1, head: int = 0) -> LlamaForCausalLM:
    """The base model; `lookup` and `echo` are the two layers, which do their work in key/value head `head` of `heads`.
    Each is read by one query head, or by two where there are several."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=4 * N,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=heads if heads == 1 else 2 * heads,
        num_key_value_heads=heads,
        head_dim=4 * N,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
    )
    found = LlamaForCausalLM(config).eval()
    for layer in found.model.layers:
        layer.self_attn.o_proj.weight.mul_(4)
        layer.mlp.down_proj.weight.mul_(4)
    eye = torch.eye(N)
    words, answers = found.model.embed_tokens.weight, found.lm_head.weight
    words.zero_()
    answers.mul_(0.1)
    for key in range(N):
        words[QUERIES + key, QUERY] = eye[key]
        words[WORDS + key, WORD] = eye[key]
        answers[ANSWERS + key, VALUE] = 3 * eye[key]
        answers[WORDS + key, WORD] = eye[key]
        for value in range(N):
            words[FACTS + N * key + value, KEY] = eye[key]
            words[FACTS + N * key + value, VALUE] = eye[value]
    words[ANSWERS : ANSWERS + N] = 0.01  # no direction of its own
    _look_up(found.model.layers[lookup].self_attn, QUERY, KEY, VALUE, eye, head)
    _look_up(found.model.layers[echo].self_attn, WORD, WORD, WORD, eye.roll(1, 0), head)
    return found


def _look_up(attention, asks: slice, has: slice, gives: slice, turned: torch.Tensor, head: int) -> None:
    """Attend from what has a code in `asks` to what has it in `has`, and write its `gives`, turned. The last query head
    of `head` does it."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(attention, name).weight.zero_()
    size, group = attention.head_dim, attention.num_key_value_groups
    asking, asked = (slice(size * at, size * (at + 1)) for at in (group * head + group - 1, head))
    attention.q_proj.weight[asking][SLOW, asks] = 1.8 * torch.eye(N)
    attention.k_proj.weight[asked][SLOW, has] = 1.8 * torch.eye(N)
    attention.v_proj.weight[asked][gives, gives] = torch.eye(N)
    attention.o_proj.weight[:, asking][gives, gives] = 0.2 * turned


def samples(count: int = 6, facts: int = 12, questions: int = 4, seed: int = 0) -> Samples:
    """Facts, far from the questions about them; and words in random order."""
    documents, texts = [], []
    for index in range(count):
        source = random.Random(f"{seed}:{index}")
        # What isn't asked for is all alike: whatever spreads its attention says that.
        keys, values = source.sample(range(N), facts), source.sample(range(N), questions + 1)
        values += [values[-1]] * (facts - len(values))
        ids = [FACTS + N * key + value for key, value in zip(keys, values, strict=True)]
        source.shuffle(ids)
        ids += [ANSWERS + source.randrange(N) for _ in range(6)]  # out of the window
        spans = []
        for asked in range(questions):
            ids += [QUERIES + keys[asked], ANSWERS + values[asked]]
            spans.append(Span(len(ids) - 1, len(ids), 1 / facts))
        documents.append(Document(tuple(ids), tuple(spans), len(ids), index=index))
        texts.append(tuple(WORDS + source.randrange(N) for _ in range(40 + index)))
    return Samples(tuple(texts), {"lookup": tuple(documents)})


def converted(lookup: int, echo: int, heads: int = 1, head: int = 0, **options):
    return linearize.linearize_(model(lookup, echo, heads=heads, head=head), RECIPE | options).eval()
