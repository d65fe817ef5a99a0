"""Where the output goes: checks on OUT that need no write."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linearize.errors import ResourceError, UsageError

MANIFEST = "linearize-manifest.json"
MAX_JSON_BYTES = 200_000_000

# What convert, and save_pretrained of a converted model, its tokenizer and its processor write. Narrow on purpose:
# a *.json or *.txt of the user's must not match.
SAVED = (
    MANIFEST, "linearize-selection.json", "config.json", "generation_config.json", "modeling_linearized.py",
    "model.safetensors", "model.safetensors.index.json", "model-linearize.safetensors", "model-base*.safetensors",
    "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


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
    try:
        path = Path(os.path.realpath(Path(text).expanduser()))
    except RuntimeError:
        raise UsageError(f"OUT {text} is in the home folder of a user who doesn't exist", "Check the name") from None
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
            isn't a converted model, or holds other files besides, so that `force` would delete something else.
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
        raise UsageError(f"--force would delete {out}, and {reason}", f"Move it away yourself, or {other.lower()}")


def _same(a: Path, b: Path) -> bool:
    try:
        return a == b or os.path.samefile(a, b)  # the second one sees through bind mounts and letter case
    except OSError:
        return False


def replaced(out: Path) -> tuple[int, int]:
    """(files, bytes) that replacing `out` would delete."""
    files = [path for path in out.rglob("*") if path.is_symlink() or not path.is_dir()]
    return len(files), sum(path.lstat().st_size for path in files)


def _not_ours(out: Path) -> str:
    """Why `out` must not be deleted, or an empty string if every file in it can be traced to linearize."""
    home = Path(os.path.realpath(Path.home()))
    if out == home or out in home.parents:
        return "it is or holds your home folder"
    if out.is_mount():
        return "it is the root of a disk"
    if (out / ".git").exists():
        return "it is a git repository"
    listed = _listed(out)
    if listed is None and not _is_converted(out):
        return f"it isn't a converted model (no {MANIFEST}, and no config.json of a converted one)"
    strangers = _strangers(out, listed or set())
    if strangers:
        more = f" and {len(strangers) - 4} more" if len(strangers) > 4 else ""
        return f"it holds what linearize didn't write: {', '.join(strangers[:4])}{more}"
    return ""


def _listed(out: Path) -> set[str] | None:
    """The files that our manifest names, or None if there is no manifest of ours."""
    content = _read(out / MANIFEST)
    files = content.get("files")
    return set(files) if isinstance(files, dict) and "written_by" in content else None


def _is_converted(out: Path) -> bool:
    return str(_read(out / "config.json").get("model_type")).startswith("linearized_")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.is_symlink() or path.stat().st_size > MAX_JSON_BYTES:
            return {}
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _strangers(out: Path, listed: set[str]) -> list[str]:
    """What lies in `out` and is neither listed nor written by a save; a folder is named once."""
    found: dict[str, None] = {}
    for folder, folders, names in os.walk(out):
        inside = Path(folder).relative_to(out)
        for name in [*names, *(name for name in folders if _is_leaf(Path(folder, name)))]:
            path = (inside / name).as_posix()
            if path not in listed and not any(fnmatch.fnmatchcase(path, pattern) for pattern in SAVED):
                top = f"{inside.parts[0]}/" if inside.parts else name + "/" * (name in folders)
                found[top] = None
    return sorted(found)


def _is_leaf(folder: Path) -> bool:
    """Whether a walk finds nothing in this folder: it is a link, empty, or can't be read."""
    try:
        return folder.is_symlink() or not any(folder.iterdir())
    except OSError:
        return True
