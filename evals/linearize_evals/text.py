"""Natural text: where it comes from, and the two tasks on it.

Windows of a text are scored token by token, either by whether in-context recall could have told the token
(`ar_text`) or by position (`perplexity`).
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from linearize.errors import NetworkError, UsageError, first_line
from linearize_evals.document import Cell, Document, Make, Setting, Span, Tokens, front

BUNDLED = "data/text.txt.gz"
MAX_CHARACTERS = 2_000_000  # what is read of a text: some 500,000 tokens, tokenised in two or three seconds
CHUNK = 64  # tokens of a span of `perplexity`
SNAP = 16  # tokens that a window may lose at either end
SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, lie evenly however many there are


def read_text(source: str | None) -> str:
    """The first two million characters of a text; its documents are joined by a blank line.

    Args:
        source: a file (.txt or .jsonl with a key "text", either also as .gz), the name of a data set for `datasets`
            ("name", "name:config" or "name:config:split", the split "test" by default; its column "text"), or None
            for the bundled text.

    Raises:
        UsageError: there is no such file, or it isn't what its name says.
        NetworkError: the data set can't be loaded.
    """
    if source is None:
        return _decode(files("linearize_evals").joinpath(BUNDLED).read_bytes(), BUNDLED)
    path = Path(source)
    if path.is_file():
        try:
            return _decode(path.read_bytes(), source)
        except OSError as error:
            raise UsageError(f"'{source}' can't be read ({error.strerror})", "Check the file") from None
    if path.exists() or source.endswith(SUFFIXES) or source.startswith((".", "/", "~")):
        raise UsageError(f"there is no text file '{source}'", f"Give a {', '.join(SUFFIXES)} file")
    return _dataset(source)


def _decode(data: bytes, source: str) -> str:
    if not source.endswith(SUFFIXES):
        raise UsageError(f"'{source}' isn't a text that can be read", f"Give a {', '.join(SUFFIXES)} file")
    try:
        if source.endswith(".gz"):
            data = gzip.decompress(data)
        text = data.decode("utf-8")
        if ".jsonl" in Path(source).name:
            text = "\n\n".join(json.loads(line)["text"] for line in text.split("\n") if line.strip())
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"'{source}' can't be read as text ({first_line(error)})", "Check the file") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UsageError(f"'{source}' isn't lines of JSON with a key \"text\"", "Check the file") from None
    return text[:MAX_CHARACTERS]


def _dataset(source: str) -> str:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UsageError(
            f"'{source}' isn't a file, and data sets need a package", "Check the path, or pip install datasets"
        ) from None
    name, config, split = (*source.split(":"), "", "")[:3]
    texts, characters = [], 0
    try:
        for row in load_dataset(name, config or None, split=split or "test", streaming=True):
            texts.append(row["text"])
            characters += len(row["text"])
            if characters > MAX_CHARACTERS:
                break
    except KeyError:
        raise UsageError(f"the data set '{source}' has no column \"text\"", "Give a text file instead") from None
    except Exception as error:
        raise NetworkError(
            f"'{source}' is no file, and can't be loaded as a data set ({first_line(error)})",
            "Check the name (name:config:split), or give a text file",
        ) from error
    return "\n\n".join(texts)[:MAX_CHARACTERS]


def ar_text(setting: Setting) -> Make:
    """Every token of a window is an answer, labelled "hit" if it completes a pair of tokens that stood earlier in the
    window, else "other". As in zoology, nothing is skipped; its second condition, pairs that are rare in the training
    data, needs that data and isn't applied."""
    window = Windows(setting)

    def make(cell: Cell, index: int, _: random.Random) -> Document:
        ids, begin = window.ids(cell, index)
        spans, seen = [], {}
        for at in range(begin + 1, len(ids)):
            pair = (ids[at - 1], ids[at])
            distance = at - seen[pair] if pair in seen else None
            spans.append(Span(at, at + 1, 0.0, distance, "other" if distance is None else "hit"))
            seen[pair] = at - 1
        return Document(ids, tuple(spans), cell.length or len(ids), index=index)

    return make


def perplexity(setting: Setting) -> Make:
    """Every token of a window is scored, in spans of 64. Windows of the same number end at the same token whatever
    their length, so that the last tokens differ only in how much context they have."""
    window = Windows(setting)

    def make(cell: Cell, index: int, _: random.Random) -> Document:
        ids, begin = window.ids(cell, index)
        first = max(begin, 1)
        edges = [first, *range(CHUNK, len(ids), CHUNK), len(ids)]
        spans = (Span(start, end, label="position") for start, end in pairwise(edges))
        return Document(ids, tuple(spans), cell.length or len(ids), index=index)

    return make


class Windows:
    """Windows of a tokenised text."""

    def __init__(self, setting: Setting) -> None:
        self.name = setting.text or "the bundled text"
        found = Tokens(setting.tokenizer, read_text(setting.text))
        self.tokens, self.words = found.ids, found.words()
        self.front = front(setting.tokenizer)
        self.offset = random.Random(f"windows:{setting.seed}").random()

    def ids(self, cell: Cell, index: int) -> tuple[tuple[int, ...], int]:
        """The tokens of window `index`, with the tokenizer's special tokens, and how many of these there are.

        Windows lie evenly over the text; they overlap where there are more than fit beside each other.
        """
        assert cell.length is not None
        size, total = cell.length - len(self.front), len(self.tokens)
        if size < 2:
            raise UsageError(f"{cell.length} tokens are too few for a window", f"Use at least {len(self.front) + 2}")
        if total < size:
            raise UsageError(
                f"{self.name} has {total} tokens, of {size} needed", "Use a longer text, or a shorter length"
            )
        low = max(size, total // 2)  # the same for all lengths up to half of the text
        end = low + int(((self.offset + index * GOLDEN) % 1) * (total - low + 1))
        # Whole words, so that the window as text gives the same tokens again; where words are short enough for it.
        most = min(SNAP, size // 8)
        end = next((at for at in range(end, end - most, -1) if at in self.words), end)
        begin = next((at for at in range(end - size, end - size + most) if at in self.words), end - size)
        return (*self.front, *self.tokens[begin:end]), len(self.front)
