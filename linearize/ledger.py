"""What each step of `linearize run` was made from, so that nothing is made again from the same."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from linearize_evals.settings import write_file

import linearize
from linearize.checkpoint import read_json
from linearize.conversion import to_json
from linearize.digest import sha256_of
from linearize.errors import UsageError
from linearize.faults import BadFiles
from linearize.target import MANIFEST

RUN = "run.json"
VERSION = 1
HASHED_BYTES = 1 << 30  # more is told apart by names, sizes and times: hashing it would take minutes
Values = Mapping[str, Any]


class Ledger:
    """run.json of a run's folder: what every step was made from, and what came out.

    A step that has begun and not ended keeps its entry, without `output`.
    """

    def __init__(self, folder: Path) -> None:
        """Read the file, if there is one.

        Raises:
            UsageError: the folder holds something else than a run.
        """
        self.path = folder / RUN
        self.steps: dict[str, dict[str, Any]] = {}
        self.exists = os.path.lexists(self.path)
        if self.exists:
            self.steps = _read_steps(folder)
        elif os.path.lexists(folder) and (not folder.is_dir() or not _is_bare(folder)):
            raise UsageError(f"{folder} holds files that aren't a run's", "Choose another folder with -o")

    def begin(self, step: str, inputs: Values) -> None:
        self.steps[step] = {"inputs": _plain(inputs)}
        self._save()

    def end(self, step: str, output: str, seconds: float, summary: Values | None = None) -> None:
        self.steps[step] |= {"output": output, "seconds": round(seconds, 3)}
        if summary is not None:
            self.steps[step]["summary"] = _plain(summary)
        self._save()

    def same(self, step: str, inputs: Values) -> bool:
        """Whether the step was begun with these inputs the last time."""
        return step in self.steps and self.steps[step]["inputs"] == _plain(inputs)

    def why_again(self, step: str, inputs: Values, output: str | None) -> str:
        """Why the step has to be carried out, in a clause; empty if it needn't be.

        Args:
            output: the digest of what is there now, None if it is missing or damaged.
        """
        entry = self.steps.get(step)
        if entry is None:
            return "it wasn't there yet"
        changed = list(differences(entry["inputs"], _plain(inputs)))
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            return "; ".join(changed[:3]) + more
        if "output" not in entry:
            return "it was interrupted"
        if output is None:
            return "what it made is missing or damaged"
        return "" if entry["output"] == output else "what it made has been changed since"

    def _save(self) -> None:
        content = {"version": VERSION, "written_by": f"linearize {linearize.__version__}", "steps": self.steps}
        write_file(self.path, to_json(content))


def _is_bare(folder: Path) -> bool:
    """Whether a folder holds nothing but what a run left that was killed while it wrote its first line."""
    return all(path.name.startswith(f".{RUN}.") for path in folder.iterdir())


def _read_steps(folder: Path) -> dict[str, dict[str, Any]]:
    other = "Choose another folder with -o"
    try:
        content = read_json(folder, RUN)
    except BadFiles as error:
        raise UsageError(f"{folder}: {error}", other) from None
    steps = content.get("steps")
    if not isinstance(steps, dict):
        raise UsageError(f"{folder / RUN} isn't that of `linearize run`", other)
    if content.get("version") != VERSION:
        raise UsageError(f"{folder / RUN} has version {content.get('version')}, this release reads {VERSION}", other)
    if not all(isinstance(one, dict) and isinstance(one.get("inputs"), dict) for one in steps.values()):
        raise UsageError(f"{folder / RUN} is damaged", other)
    return steps


def _plain(values: Any) -> Any:
    """As it will be read again."""
    return json.loads(json.dumps(values, default=str))


def differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """What has changed between two JSON documents, a clause for each key: "train.0.lr: 0.01 -> 0.003"."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{key}.{number}")
    elif before != now:
        shown = "changed" if _is_digest(before) or _is_digest(now) else f"{_shown(before)} -> {_shown(now)}"
        yield f"{key}: {shown}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("sha256:")


def digest(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of packages; None for one that isn't installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def of_path(name: str | Path | None, *, content: bool = True) -> str | None:
    """What tells a file or folder from what it was before; None for what isn't on this disk."""
    if name is None or not os.path.exists(path := Path(os.path.expanduser(name))):
        return None
    paths = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
    return of_files(paths, path, content=content)


def of_files(paths: Sequence[Path], root: Path, *, content: bool = True) -> str:
    """As `of_path`, for some files of `root`, or for that file.

    Args:
        content: whether a copy of the same bytes is the same, which means to read them all.
    """
    states = {found: found.stat() for found in paths}
    content = content and sum(state.st_size for state in states.values()) <= HASHED_BYTES
    return digest(
        [
            [str(found.relative_to(root)), sha256_of(found) if content else [state.st_size, state.st_mtime_ns]]
            for found, state in states.items()
        ]
    )


def of_checkpoint(folder: Path, leaving_out: Sequence[str] = ()) -> str | None:
    """The digest of a folder that linearize wrote, from its manifest; None if files of it are missing or cut off.

    Args:
        leaving_out: files that don't matter.
    """
    try:
        listed = read_json(folder, MANIFEST)["files"]
        files = {name: entry for name, entry in listed.items() if name not in leaving_out}
        if not all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()):
            return None
        return digest({name: entry["sha256"] for name, entry in files.items()})
    except (BadFiles, OSError, KeyError, TypeError, AttributeError):
        return None
