"""Run one action again and again, each time in a fork that dies at the next file-system call.

Started as a program: `killer.py SPECS`, a JSON list (see `kill_everywhere`). Prints one JSON line: for each,
how often it killed, and what it found that should not be. A fork costs milliseconds where a new process would
import torch each time.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

CALLS = ("link", "rename", "mkdir", "rmdir", "unlink", "fsync", "pwrite")
HEAL_EVERY = 8  # the run after a kill is tried at each 8th kill: it takes longer than the kill


class Killer:
    """Counts calls; at the `at`-th one the process dies, before or after (or, of a write, in the middle of)
    it."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def here(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def around(self, function):
        def call(*args, **kwargs):
            self.here()
            result = function(*args, **kwargs)
            self.here()
            return result

        return call

    def around_write(self, function):
        def call(file, piece):
            self.here()
            view = memoryview(piece)
            function(file, view[: len(view) // 2])
            self.here()
            function(file, view[len(view) // 2 :])
            self.here()

        return call

    def install(self, without_exchange: bool) -> None:
        from linearize import sink

        for name in CALLS:
            setattr(os, name, self.around(getattr(os, name)))
        sink._write_all = self.around_write(sink._write_all)
        sink.exchange = (lambda a, b: False) if without_exchange else self.around(sink.exchange)


def tree(folder: Path) -> dict[str, str] | None:
    if not folder.exists():
        return None
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def convert(spec: dict) -> None:
    import linearize

    linearize.convert(spec["model"], spec["out"], overrides={"window": 8}, force=spec["force"])


def in_fork(action) -> int:
    """Status of a child that runs `action`."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def warm_up(model: str, out: Path) -> None:
    """Imports, and what transformers and torch do on first use, happen once, here, for all forks."""
    import linearize

    linearize.convert(model, out)
    gc.collect()
    gc.freeze()  # or each fork's collector would copy every page that it looks at


def kill_everywhere(spec: dict) -> dict:
    """`spec`: model, out, old (a folder that `out` starts as, or none), force, without_exchange, limit."""
    model, out = Path(spec["model"]), Path(spec["out"])
    old = Path(spec["old"]) if spec["old"] else None

    def reset() -> None:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        if old:
            shutil.copytree(old, out)

    reset()
    assert in_fork(lambda: convert(spec)) == 0
    new_tree, old_tree, model_tree = tree(out), tree(old) if old else None, tree(model)
    assert new_tree is not None
    assert new_tree != old_tree
    kills, wrong = {"before": 0, "after": 0, "absent": 0}, []
    for at in range(spec["limit"]):
        reset()
        killer = Killer(at)

        def doomed(killer=killer) -> None:
            killer.install(spec["without_exchange"])
            convert(spec)

        status = in_fork(doomed)
        if status == 0:
            break
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            wrong.append(f"kill {at}: ended with status {status}")
        found = tree(out)
        if found is None and old:
            kills["absent"] += 1
            if not spec["without_exchange"]:
                wrong.append(f"kill {at}: OUT is gone")
        elif found is None or found == old_tree:
            kills["before"] += 1
        elif found == new_tree:
            kills["after"] += 1
        else:
            wrong.append(f"kill {at}: OUT is mixed: {sorted(found)}")
        if tree(model) != model_tree:
            wrong.append(f"kill {at}: the source has changed")
        # The next run heals: what is visible is old or new before it writes, and nothing is left over after.
        if found is None and old:
            in_fork(lambda: __import__("linearize.sink").sink.Stage(out, force=True).abandon())
            if tree(out) != old_tree:
                wrong.append(f"kill {at}: the old folder did not come back")
        if at % HEAL_EVERY and (found is not None or not old):
            continue
        if in_fork(lambda: convert(spec | {"force": True})) != 0 or tree(out) != new_tree:
            wrong.append(f"kill {at}: the next run did not heal")
        left = sorted(path.name for path in out.parent.iterdir() if path != out)
        if left:
            wrong.append(f"kill {at}: the next run left {left}")
    return {"kills": kills, "wrong": wrong}


if __name__ == "__main__":
    specs = json.loads(sys.argv[1])
    warm_up(specs[0]["model"], Path(specs[0]["out"]).parent.with_name("warm-up"))
    print(json.dumps([kill_everywhere(spec) for spec in specs]))
