"""What a run was asked to do, and the folder that it writes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linearize.digest import sha256_of
from linearize.errors import ResourceError, UsageError
from linearize_evals.catalogue import FAMILIES

RUN = "run.json"
RESULTS = "results.json"
SELF, NONE = "self", "none"  # teachers besides a model's name
SCORES = "scores"  # of the student, kept until it is resumed
PACKAGES = ("linearize", "lm_eval", "torch", "transformers")


@dataclass(frozen=True)
class Settings:
    """What a run was asked for. With the two models' weights, its figures depend on nothing else.

    Attributes:
        student: the model that is judged, as the user named it.
        teacher: the model that it is compared with; "self" for the student with its mixers bypassed, or "none".
        suite: a name of `suites.SUITES`.
        tasks: tasks of ours with their grids; lm_eval: tasks of lm-eval; limit: documents of each of those.
        seed: of all documents of ours.
        text, haystack: see `catalogue.build`.
        generate: whether answers are generated, too.
        ablate: whether the mixers' branches are ablated.
        dtype: what the models run in; device: the kind that they run on.
        batch_size: documents in a forward, which decides how sums are rounded.
    """

    student: str
    teacher: str
    suite: str
    tasks: Mapping[str, Mapping[str, Any]]
    lm_eval: tuple[str, ...]
    limit: int | None
    seed: int
    text: str | None
    haystack: str | None
    generate: bool
    ablate: bool
    dtype: str
    device: str
    batch_size: int | str

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    def decisive(self) -> dict[str, Any]:
        """What has to be equal for scores of one run to be joined with those of another."""
        return self.to_dict() | {
            "task versions": {name: FAMILIES[name].version for name in self.tasks},
            "text": file_digest(self.text),
            "haystack": file_digest(self.haystack),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """Versions of the packages that scores depend on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def file_digest(name: str | None) -> str | None:
    """What names the content of a text: sha256 of the file, or the name itself if it is no file."""
    if name is None or not Path(name).is_file():
        return name
    return f"sha256:{sha256_of(Path(name))}"


def check_place(out: Path, models: Iterable[str], *, resume: bool) -> None:
    """Refuse to write into `out` what doesn't belong there.

    Args:
        models: folders that nothing may be written into.

    Raises:
        UsageError: it is no folder or can't be one, lies in a model's folder, or holds something else or an evaluation
            that isn't to be resumed.
    """
    place = Path(os.path.realpath(out))
    for model in models:
        folder = Path(os.path.realpath(model))
        if folder.is_dir() and (place == folder or folder in place.parents):
            raise UsageError(f"{out} lies in the folder of a model, {model}", "Choose another folder with -o")
    check_folder(out)
    if not os.path.lexists(out) or not any(out.iterdir()):
        return
    if not (out / RUN).is_file():
        raise UsageError(f"{out} holds files that aren't an evaluation's", "Choose another folder with -o")
    if not resume:
        raise UsageError(f"{out} holds an evaluation already", "Add --resume to go on with it, or choose another -o")


def check_folder(out: Path) -> None:
    """Refuse a place where no folder can be written, before what is to be written there takes minutes.

    Raises:
        UsageError: naming what is in the way.
    """
    place = Path(os.path.realpath(out))
    nearest = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UsageError(
            f"{out} can't be a folder: {nearest} isn't one that can be written to", "Choose another with -o"
        )


def check_begun(out: Path, decisive: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of other settings, if `out` holds one.

    Raises:
        UsageError: what decides the scores has changed.
    """
    if not (out / RUN).exists():
        return
    before = _begun(out)
    changed = [key for key, value in decisive.items() if before.get(key) != value]
    if changed:
        key = changed[0]
        raise UsageError(
            f"{out} was begun with other settings ({', '.join(changed)}; {key} was "
            f"{json.dumps(before.get(key))[:200]}, and is {json.dumps(decisive[key])[:200]})",
            "Give the same options to resume it, or choose another -o",
        )


def discard_unless_scored(out: Path) -> None:
    """Take away what a run that failed has begun in `out`, if no score of the student is among it.

    The teacher's scores are kept elsewhere.
    """
    scores = list((out / SCORES).glob("*"))
    if (out / RESULTS).exists() or any(path.suffix == ".jsonl" and _lines(path) > 1 for path in scores):
        return
    samples = [*(out / "teacher").glob("results*.json"), *(out / "teacher").glob("samples_*.jsonl")]
    for path in (*scores, *samples, out / RUN):
        path.unlink(missing_ok=True)
    for folder in (out / SCORES, out / "teacher", out):
        with contextlib.suppress(OSError):  # it isn't there, or holds something else
            folder.rmdir()


def _lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in itertools.islice(file, 2))


def _begun(out: Path) -> dict[str, Any]:
    """What the run in `out` was begun with; empty if that can't be read."""
    try:
        before = json.loads((out / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return before if isinstance(before, dict) else {}


def earlier_dtype(out: Path) -> str | None:
    """The dtype that the run in `out` chose, to go on in it; None for the checkpoint's own, or without a run."""
    dtype = _begun(out).get("dtype")
    return None if dtype == "auto" else dtype


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document whole or not at all; NaN and infinity are refused.

    Raises:
        ResourceError: the disk refuses.
    """
    write_file(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        ResourceError: the disk refuses.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.unlink(missing_ok=True)
        try:
            with open(staged, "xb") as file:  # never through a link that somebody put there
                file.write(content.encode() if isinstance(content, str) else content)
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(f"{path} can't be written: {error.strerror or error}", "Check the disk") from error


def cache_folder() -> Path:
    """Where scores of teachers are kept: LINEARIZE_CACHE, or `linearize` in the user's cache folder."""
    chosen = os.environ.get("LINEARIZE_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "scores"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "linearize" / "scores"
