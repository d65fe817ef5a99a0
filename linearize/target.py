"""Where the output goes: checks on OUT that need no write."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from linearize.errors import ResourceError, UsageError

MANIFEST = "linearize-manifest.json"


@dataclass(frozen=True)
class Destination:
    """OUT and the file system that it will be on.

    Attributes:
        path: OUT with links followed; it may not exist yet.
        parent: the nearest folder above it that exists.
        device: st_dev of that file system, to tell whether hard links are possible.
        free_bytes: what this user may still write there.
        exists: whether OUT is there and not empty, so that it has to be swapped.
    """

    path: Path
    parent: Path
    device: int
    free_bytes: int
    exists: bool

    @property
    def disk(self) -> str:
        return f"the disk of {self.parent}"


def survey(out: str | Path) -> Destination:
    """Look at OUT and its disk; raises `UsageError` if OUT can't be a folder."""
    text = os.fspath(out)
    if not text or "\0" in text:
        raise UsageError("the output folder has no name", "Give one with -o OUT")
    path = Path(os.path.realpath(Path(text).expanduser()))
    if path == path.parent:
        raise UsageError(f"OUT can't be {path}", "Choose another output folder")
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"OUT {path} is a file", "Choose another output folder")
        parent = path.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise UsageError(f"OUT {path} is below the file {parent}", "Choose another output folder")
        space = os.statvfs(parent)
        exists = path.is_dir() and any(path.iterdir())
        device = parent.stat().st_dev
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError("the name of OUT is too long for its disk", "Choose a shorter one") from None
        raise ResourceError(f"{error.filename or path} can't be read ({error.strerror})") from None
    return Destination(path, parent, device, space.f_bavail * space.f_frsize, exists)


def check_target(destination: Destination, source: Path, *, force: bool) -> None:
    """Refuse an OUT that would harm the source or something that isn't ours.

    Args:
        source: the source's folder, or its file.

    Raises:
        UsageError: OUT is the source, or holds it, or lies in it; OUT isn't empty and `force` is off; or OUT
            isn't a model folder, so that `force` would delete something else.
    """
    out = destination.path
    source = Path(os.path.realpath(source))
    other = "Choose another output folder"
    if _same(out, source):
        raise UsageError(f"OUT and MODEL are the same folder ({out})", other)
    if any(_same(parent, source) for parent in out.parents):
        raise UsageError(f"OUT {out} is inside MODEL ({source})", other)
    if any(_same(parent, out) for parent in source.parents):
        raise UsageError(f"MODEL {source} is inside OUT ({out}), which would be replaced", other)
    if not destination.exists:
        return
    if not force:
        raise UsageError(f"OUT {out} exists and isn't empty", "Choose another folder, or replace it with --force")
    reason = _not_ours(out)
    if reason:
        raise UsageError(f"--force would delete {out}, and {reason}", f"Remove it yourself, or {other.lower()}")


def _same(a: Path, b: Path) -> bool:
    try:
        return a == b or os.path.samefile(a, b)  # the second one sees through bind mounts and letter case
    except OSError:
        return False


def _not_ours(out: Path) -> str:
    home = Path(os.path.realpath(Path.home()))
    if out == home or out in home.parents:
        return "it is or holds your home folder"
    if out.is_mount():
        return "it is the root of a disk"
    if (out / ".git").exists():
        return "it is a git repository"
    if not (out / MANIFEST).is_file() and not (out / "config.json").is_file():
        return f"it doesn't look like a model folder (neither {MANIFEST} nor config.json is in it)"
    return ""
