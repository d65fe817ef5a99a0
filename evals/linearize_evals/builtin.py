"""lm-eval's own tasks, found without reading all of them.

A `TaskManager` with lm-eval's defaults parses some 14,000 YAML files before it can answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from linearize.errors import UsageError, did_you_mean

_NAME = re.compile(rb"^(?:task|group|tag):[ \t]*['\"]?([\w.-]+)['\"]?[ \t]*(?:#.*)?$", re.MULTILINE)


def task_folders(names: Sequence[str]) -> list[Path]:
    """The folders of lm-eval whose YAML files define `names`, for `TaskManager(include_path=...)`.

    Raises:
        UsageError: for a name that no file defines.
    """
    if not names:
        return []
    places = _index()
    for name in names:
        if name not in places:
            mend = did_you_mean(name, places) or "`lm-eval ls tasks` lists all"
            raise UsageError(f"neither linearize nor lm-eval has a task '{name}'", mend)
    # A group's members may be defined anywhere below its folder's top.
    return sorted({_top(places[name]) for name in names})


def _root() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def _index() -> dict[str, Path]:
    """The file of every task, group and tag."""
    found: dict[str, Path] = {}
    for path in sorted(_root().rglob("*.yaml")):
        for match in _NAME.finditer(path.read_bytes()):
            found.setdefault(match[1].decode(), path)
    return found


def _top(path: Path) -> Path:
    return _root() / path.relative_to(_root()).parts[0]
