"""Where documents come from: text files, a folder of them, or a data set of the Hub.

A source walks over its documents in an order that depends on the seed and the epoch alone, and can begin again at any
of them: `Indexed` where every document can be read by its number, `Streamed` where they only come one after another.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

from linearize.errors import LinearizeError, NetworkError, UsageError, first_line
from linearize.training.local_text import Spool, Table, find, load_dataset, part, value_of

BUFFER = 1000  # documents of a stream that are shuffled among themselves


class Found(NamedTuple):
    """A document on its way.

    Attributes:
        place: where `walk` of the same epoch begins again with this document; JSON-able.
        number: the document's number before shuffling by epoch, the same in every epoch.
        text: its text; may be empty.
    """

    place: Any
    number: int
    text: str


def check(data: Any) -> None:
    """Read the first document of every file, or of the data set, so that a bad source is found before any work.

    Args:
        data: the recipe's section `data`; the source `teacher` needs no check.

    Raises:
        UsageError: no such file or column, not what its name says, empty, or a package is missing.
        NetworkError: the data set can't be loaded.
    """
    if data.source == "teacher":
        return
    paths = find(data.source)
    if paths is None:
        if not any(True for _ in islice(Streamed(data).walk(None), 1)):
            raise _empty(data.source)
    else:
        firsts = [part(path, data.column, Spool()).first() for path in paths]  # all, so that every file is read
        if all(text is None for text in firsts):
            raise _empty(data.source)


def open_source(data: Any, teacher_text: Path | None = None) -> Indexed | Streamed:
    """The documents of `data.source`, or of the sampled `teacher_text` where the source is `teacher`.

    Raises:
        UsageError, NetworkError: as `check` does.
    """
    if data.source == "teacher":
        if teacher_text is None:
            raise UsageError("data.source is 'teacher', but nothing was sampled", "Name a text file or a data set")
        paths, column = [Path(teacher_text)], "text"
    else:
        paths, column = find(data.source), data.column
    if paths is None and data.streaming:
        return Streamed(data)
    if paths is None:
        name = data.source
        parts: list[Any] = [Table(_load(name, streaming=False), column, name)]
        names = [name]
    else:
        spool = Spool()
        parts = [part(path, column, spool) for path in paths]
        names = [path.name for path in paths]
    found = Indexed(parts, names, shuffle=data.shuffle, seed=data.seed)
    if not len(found):
        raise _empty(data.source)
    return found


class Indexed:
    """Documents that can be read by number; shuffled, every epoch is another permutation of all of them.

    Args:
        parts: each with a length and `read(number)`.
        names: what each is called.
        shuffle: whether epochs are permuted.
        seed: of the permutations.
    """

    def __init__(self, parts: Sequence[Any], names: Sequence[str], *, shuffle: bool, seed: int) -> None:
        self._parts, self._shuffle, self._seed = parts, shuffle, seed
        sizes = [len(part) for part in parts]
        self._ends = list(accumulate(sizes))
        self.identity = [[name, size, part.size] for name, size, part in zip(names, sizes, parts, strict=True)]
        self._base = self._permuted(array("Q", range(len(self))), "front")

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def walk(self, epoch: int | None, place: int | None = None, first: int = 0) -> Iterator[Found]:
        """The documents of an epoch from `place` on, without those whose number is below `first`.

        Epoch None has them by number: that is a permutation, too, so that its front is like the rest.
        """
        order = array("Q", range(first, len(self)))
        if epoch is not None:
            order = self._permuted(order, str(epoch))
        for at in range(place or 0, len(order)):
            yield Found(at, order[at], self._read(self._base[order[at]]))

    def _permuted(self, order: array[int], name: str) -> array[int]:
        if self._shuffle:
            random.Random(f"{self._seed}:{name}").shuffle(order)
        return order

    def _read(self, number: int) -> str:
        part = bisect_right(self._ends, number)
        return self._parts[part].read(number - (self._ends[part - 1] if part else 0))


class Streamed:
    """A data set of the Hub, read in its own order and never held whole.

    Shuffling permutes each thousand documents among themselves: unlike a buffer that is refilled while it is drawn
    from, a thousand can be read again exactly where a run was interrupted.
    """

    def __init__(self, data: Any) -> None:
        self._name, self._column = data.source, data.column
        self._shuffle, self._seed = data.shuffle, data.seed
        self._dataset: Any = None
        self.identity = [[data.source]]

    def walk(self, epoch: int | None, place: Sequence[Any] | None = None, first: int = 0) -> Iterator[Found]:
        """As `Indexed.walk`; epoch None has the documents as the data set has them."""
        start, state, done = place or (0, None, 0)
        with _explained(self._name):
            if self._dataset is None:
                self._dataset = _load(self._name, streaming=True)
            dataset = deepcopy(self._dataset)  # it holds where it is, and several walks may be on their way
            if state is not None:
                dataset.load_state_dict(state)
            rows = iter(dataset)
        while True:
            with _explained(self._name):
                state = dataset.state_dict() if start and epoch is not None else None
                block = list(islice(rows, BUFFER if epoch is not None else 1))
            if not block:
                return
            order = [at for at in range(len(block)) if start + at >= first]
            if epoch is not None and self._shuffle:
                random.Random(f"{self._seed}:{epoch}:{start}").shuffle(order)
            for index in range(done, len(order)):
                at = order[index]
                yield Found([start, state, index], start + at, value_of(block[at], self._column, self._name))
            start, done = start + len(block), 0


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what goes wrong while a data set is read into one sentence."""
    try:
        yield
    except LinearizeError:
        raise
    except Exception as error:
        what = f"'{name}' is no file, and can't be loaded as a data set ({first_line(error)})"
        if isinstance(error, (ValueError, KeyError, RuntimeError, TypeError)):  # no such configuration or split
            raise UsageError(what, "Name it as name, name:config or name:config:split") from error
        raise NetworkError(what, "Check the name and the connection, or use a local file") from error


def _load(source: str, streaming: bool) -> Any:
    name, config, split, *more = [*source.split(":"), "", ""]
    if any(more) or not name:
        raise UsageError(f"'{source}' can't name a data set", "Name it as name, name:config or name:config:split")
    load = load_dataset(source)
    with _explained(source):
        return load(name, config or None, split=split or "train", streaming=streaming)


def _empty(source: str) -> UsageError:
    return UsageError(f"'{source}' (data.source) holds no text", "Give a file or data set with text in it")
