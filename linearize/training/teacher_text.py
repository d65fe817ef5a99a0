"""Text that the teacher itself writes, for those who have no text that it was trained on.

It is what the teacher believes its training text to be like, and so what a student is best taught it on; LLM-QAT
(arXiv:2305.17888) recovers quantised models so. B is the number of rows, T their length, V the vocabulary.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.digest import Progress
from linearize.errors import ModelError, ResourceError, out_of_memory
from linearize.sink import disk_errors
from linearize.training.packing import front

if TYPE_CHECKING:
    import torch

ROWS = {"cuda": 64}  # sampled at once; a batch costs hardly more than a row there
FEW_ROWS = 32  # anywhere else


def sample(
    model: Any, tokenizer: Any, tokens: int, length: int, out: Path, seed: int = 0, progress: Progress | None = None
) -> int:
    """Sample text from a model, as it is, and write it as lines of JSON, one document each.

    Plain sampling at temperature 1 from the token that begins a text (BOS, else EOS), in rows of `length`. A row is
    one document, or several where EOS stands between documents; a chat model ends its turns with EOS, and there the
    row goes on. Special tokens are written out, so that a tokenizer gives them back. What row r holds depends on the
    seed and r, not on how many are sampled at once.

    Args:
        model: a causal LM; a converted one runs as its softmax teacher.
        tokenizer: its tokenizer.
        tokens: how many to sample, rounded up to whole rows.
        length: T, within the model's context.
        out: a .jsonl.gz with the key "text", which appears whole or not at all.
        seed: of the samples.
        progress: hears of the tokens sampled so far, and of all.

    Returns:
        The tokens sampled.

    Raises:
        ModelError: the model's logits aren't finite, it writes nothing, or its tokenizer has neither BOS nor EOS.
        ResourceError: too little memory for a single row, or the disk refuses.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise ModelError("the tokenizer has neither a BOS nor an EOS token to begin a text with", "Use a text file")
    rows = -(-tokens // length)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    written = 0
    training = model.training
    try:
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        model.eval()
        with disk_errors(out), open(part, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
            for row in _all_rows(model, start, rows, length, seed, len(tokenizer), progress):
                for text in _documents(tokenizer, row):
                    file.write((json.dumps({"text": text}, ensure_ascii=False) + "\n").encode())
                    written += 1
        if not written:
            raise ModelError("the teacher ends every text at once, so there is nothing to train on", "Use a text file")
        with disk_errors(out):
            os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
        model.train(training)
    return rows * length


def _as_teacher(model: Any) -> Any:
    """The model with softmax attention, however it comes."""
    from linearize.modeling.attach import SWITCH
    from linearize.modeling.bypass import bypass, is_bypassed

    converted = any(SWITCH in vars(module) for module in model.modules())
    bypassed = any(is_bypassed(module) for module in model.modules())
    return bypass(model) if converted and not bypassed else nullcontext()


def _all_rows(
    model: Any, start: int, rows: int, length: int, seed: int, vocabulary: int, progress: Progress | None
) -> Iterator[list[int]]:
    most = ROWS.get(_device(model).type, FEW_ROWS)
    done = 0
    while done < rows:
        numbers = range(done, min(done + most, rows))

        def tick(step: int, done: int = done, count: int = len(numbers)) -> None:
            if progress is not None:
                progress("sample", done * length + step * count, rows * length)

        try:
            with _as_teacher(model):
                found = _sample(model, start, numbers, length, seed, vocabulary, tick)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if most == 1:
                what = f"there is too little memory to sample {length} tokens from the teacher"
                raise ResourceError(what, "Sample shorter rows, or use a text file") from error
            most = max(1, most // 2)
            continue
        yield from found.tolist()
        done += len(numbers)


def _sample(
    model: Any, start: int, numbers: Sequence[int], length: int, seed: int, vocabulary: int, tick: Callable[[int], None]
) -> torch.Tensor:
    """Rows of the given numbers, (B, T) int64."""
    import torch
    from transformers import GenerationConfig, LogitsProcessorList

    sources = [random.Random(f"{seed}:teacher:{number}") for number in numbers]
    ids = torch.full((len(numbers), 1), start, dtype=torch.long, device=_device(model))

    def choose(ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """Leave the token that each row's own random number falls on, so that "greedy" generation takes it."""
        # Some models have more rows in their head than their tokenizer has tokens.
        sums_BV = logits_BV[:, :vocabulary].float().softmax(-1).cumsum(-1)
        drawn_B1 = torch.tensor([[source.random()] for source in sources], device=sums_BV.device) * sums_BV[:, -1:]
        if not torch.isfinite(drawn_B1).all():
            raise ModelError(f"the teacher's logits aren't finite after {ids_BT.shape[1]} tokens", "Check its weights")
        chosen_B1 = torch.searchsorted(sums_BV, drawn_B1, right=True).clamp_max(sums_BV.shape[-1] - 1)
        tick(ids_BT.shape[1] + 1)
        return torch.full_like(logits_BV, -torch.inf).scatter(1, chosen_B1, 0.0)

    settings = GenerationConfig(do_sample=False, max_new_tokens=length - 1, pad_token_id=0)
    own, model.generation_config = model.generation_config, GenerationConfig()  # fills in what a call leaves open
    try:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            logits_processor=LogitsProcessorList([choose]),
        )
    finally:
        model.generation_config = own


def _device(model: Any) -> torch.device:
    return model.get_input_embeddings().weight.device


def _documents(tokenizer: Any, ids: list[int]) -> Iterator[str]:
    """The texts of a sampled row, without what a tokenizer adds by itself."""
    eos = tokenizer.eos_token_id
    added = {*front(tokenizer), eos}
    if eos is not None and tokenizer.eos_token in str(tokenizer.chat_template or ""):
        cuts = [len(ids)]
    else:
        cuts = [*(at for at, token in enumerate(ids) if token == eos), len(ids)]
    begin = 0
    for cut in cuts:
        while begin < cut and ids[begin] in added:
            begin += 1
        text = tokenizer.decode(ids[begin:cut], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = text.rstrip("\ufffd")  # a character that the row's end cut in two
        if text.strip():
            yield text
        begin = cut
