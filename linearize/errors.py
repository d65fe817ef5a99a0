"""The one error family of linearize. Every message says what is wrong, where, and what to do about it.

The exit code says which kind of thing failed, so that a script can tell a typo from a full disk:
2 usage or recipe, 3 input model, 4 disk or memory, 5 network or gated repository, 130 interrupted.
Exit code 1 means that linearize itself is at fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LinearizeError(Exception):
    """An error that a user can mend.

    Args:
        what: one sentence naming the file, key or layer at fault.
        fix: what to do about it, as an imperative sentence.
    """

    exit_code = 1

    def __init__(self, what: str, fix: str = "") -> None:
        self.what = what.rstrip(". ")
        self.fix = fix.rstrip(". ")
        super().__init__(" ".join(_sentence(part) for part in (self.what, self.fix) if part))


def _sentence(text: str) -> str:
    return text if text.endswith(("?", "!", ":")) else f"{text}."


class UsageError(LinearizeError):
    """A wrong option, recipe or request."""

    exit_code = 2


class TooLong(UsageError, ValueError):
    """More tokens than a mixer can take."""


class ModelError(LinearizeError):
    """The input model (or a converted folder) can't be used as it is."""

    exit_code = 3


class ResourceError(LinearizeError):
    """Not enough disk or memory, or a file system that refuses."""

    exit_code = 4


class NetworkError(LinearizeError):
    """The Hub can't be reached, or it refuses this user."""

    exit_code = 5


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, a device's, or what torch's allocator asked the CPU's for."""
    # By its name, so that torch needn't be imported to ask.
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def first_line(error: BaseException | str) -> str:
    """The first line of what an error of another library says, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"did you mean 'hedgehog'?"`, or an empty string if nothing known is close to `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""
