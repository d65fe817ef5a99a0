"""Kill a training again and again, and go on with it; started as a program, since each go is a fork of one process.

`killed.py SPEC` with a JSON of `checkpoint`, `folder`, `stages`, `settings` and `kills` trains once without a kill into
`folder`/whole, and once with all of them into `folder`/killed. A kill is ["step", stage, step]: after the optimiser
step, whose line of metrics is written; ["save", stage, step]: in the middle of writing that training checkpoint;
["saved", stage, step]: right after it; ["publish"]: when OUT is written.
Prints a JSON list of how each go ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.reliability.killer import in_fork
from tests.training import engine


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kind: str, *place: int) -> None:
    """Let this process die at a place."""
    from linearize.training import output, state
    from linearize.training.metrics import Metrics

    if kind == "step":
        write = Metrics.write

        def write_and_die(self: Any, line: Any) -> None:
            write(self, line)
            if "loss" in line and [line["stage"], line["step"]] == [*place]:
                die()

        Metrics.write = write_and_die
    elif kind == "publish":
        output.Stage.publish = lambda self: die()
    else:
        save, rename = state.save, os.rename

        def save_and_die(folder: Path, parameters: Any, optimizer: Any, position: Any, keep: int) -> Path:
            here = [position["stage"], position["step"]] == [*place]
            if here and kind == "save":
                os.rename = lambda *paths: die()
            made = save(folder, parameters, optimizer, position, keep)
            os.rename = rename
            if here:
                die()
            return made

        state.save = save_and_die


def main(spec: dict[str, Any]) -> list[Any]:
    checkpoint, folder = Path(spec["checkpoint"]), Path(spec["folder"])
    folder.mkdir(parents=True, exist_ok=True)

    def go(out: str, kill: Any = None, **options: Any) -> int:
        def action() -> None:
            if kill is not None:
                arm(*kill)
            engine.train(checkpoint, folder / out, *spec["stages"], **spec["settings"], **options)

        return in_fork(action)

    # Imports, and what transformers and torch do on first use, happen once, here, for all forks.
    first = {"stages": [engine.CALIBRATE]}
    engine.train(checkpoint, folder / "warm", *first["stages"])
    ended: list[Any] = [go("whole")]
    for number, kill in enumerate(spec["kills"]):
        status = go("killed", kill, resume=number > 0)
        ended.append("killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else status)
        assert not (folder / "killed").exists()
    ended.append(go("killed", resume=bool(spec["kills"])))
    return ended


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
