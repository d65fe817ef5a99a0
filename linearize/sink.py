"""An output folder that appears whole or not at all.

Everything is written to a hidden folder beside OUT (the stage), hashed and flushed to the disk; then one
rename publishes it. An existing OUT is swapped for the new folder by one exchange of names, and removed
after. A process that dies at any moment leaves OUT as it was or as it shall be, and at most a hidden folder,
which the next run with the same OUT removes.

Where the system has no exchange of names (neither renameat2 nor renamex_np), OUT is first renamed to a hidden
folder beside it. A process that dies just between the two renames leaves no OUT; the next run puts the old
one back first.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import linearize
from linearize.digest import Meter, Progress, chunks, hashed, sha256_all
from linearize.errors import ResourceError, UsageError
from linearize.swap import Lock, exchange, sync_folder
from linearize.target import MANIFEST, survey

MANIFEST_VERSION = 1
_CANNOT_LINK = {
    errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP,
    errno.EINVAL,
}  # fmt: skip
_MENDS = {
    errno.ENOSPC: "Free some space, or choose an OUT on another disk",
    errno.EDQUOT: "Your disk quota is used up: free some space, or choose an OUT on another disk",
    errno.EFBIG: "The file system can't hold a file of this size: choose an OUT on another disk",
    errno.EROFS: "The disk is read-only: choose an OUT on another one",
    errno.EIO: "The disk fails: check it (dmesg, smartctl), or choose an OUT on another one",
    errno.EACCES: "Check the permissions, or choose another OUT",
    errno.EPERM: "Check the permissions, or choose another OUT",
    errno.ENAMETOOLONG: "Choose a shorter OUT",
}


@contextmanager
def disk_errors(what: object) -> Iterator[None]:
    """Turn an OSError into a `ResourceError` that names the file and the mend."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        mend = _MENDS.get(error.errno or 0, "Check the disk, or choose another OUT")
        raise ResourceError(f"{what}: {reason}; OUT is as it was", mend) from error


class Stage:
    """A folder in the making.

    Use: `link`, `copy` and `write` files, then `publish`. After any exception (Ctrl-C as well) call `abandon`,
    which leaves OUT untouched; calling it after `publish` does no harm.
    """

    def __init__(self, out: str | Path, *, force: bool = False, progress: Progress | None = None) -> None:
        """Lock OUT, clean up after dead writers, and make the stage; `progress` hears of copying and hashing.

        Raises:
            UsageError: OUT isn't empty, and `force` is off.
            ResourceError: another process writes to OUT, or the disk refuses.
        """
        self.out = survey(out).path
        self.force = force
        self._progress = progress
        self.files: dict[str, tuple[int, str]] = {}  # name -> (bytes, sha256)
        self.folder = self._hidden()
        self._aside: Path | None = None  # where OUT waits, on systems without an exchange of names
        self._scratch: list[Path] = []
        self._linked: list[str] = []
        self._made_parents: list[Path] = []
        self._lock: Lock | None = None
        try:
            with disk_errors(self.out.parent):
                self._make_parents()
                self._lock = Lock(self.out.parent / f".{self._tag()}.linearize-lock", self.out)
                self._clean_up_after_the_dead()
                if not force and self.out.is_dir() and any(self.out.iterdir()):
                    raise UsageError(f"OUT {self.out} exists and isn't empty", "Replace it with --force")
                os.mkdir(self.folder)
        except BaseException:
            self.abandon()
            raise

    def _tag(self) -> str:
        name = self.out.name
        return name if len(os.fsencode(name)) <= 180 else sha256(os.fsencode(name)).hexdigest()

    def _hidden(self, kind: str = "") -> Path:
        return self.out.parent / f".{self._tag()}.linearize-{kind}{os.getpid()}-{secrets.token_hex(4)}"

    def _make_parents(self) -> None:
        missing = [parent for parent in self.out.parents if not parent.exists()]
        for parent in reversed(missing):
            os.mkdir(parent)
            self._made_parents.append(parent)

    def _clean_up_after_the_dead(self) -> None:
        """Remove what killed writers left. All of it is of dead ones, since every live one holds the lock."""
        pattern = re.compile(rf"\.{re.escape(self._tag())}\.linearize-(old-)?\d+-[0-9a-f]{{8}}")
        found = sorted(
            (path for path in self.out.parent.iterdir() if pattern.fullmatch(path.name)),
            key=lambda path: "linearize-old-" not in path.name,
        )
        for path in found:
            if path.is_symlink() or not path.is_dir():
                continue
            if "linearize-old-" in path.name and not self.out.exists():
                os.rename(path, self.out)  # died between the two renames: put the old folder back
            else:
                shutil.rmtree(path, ignore_errors=True)

    def scratch(self) -> Path:
        """An empty folder on the same disk for files on their way; it goes when the stage goes."""
        path = self._hidden()
        with disk_errors(path):
            os.mkdir(path)
        self._scratch.append(path)
        return path

    def _place(self, name: str) -> Path:
        path = self.folder / name
        if path.parent != self.folder:
            path.parent.mkdir(exist_ok=True)
        return path

    def write(self, name: str, data: bytes | Iterable[bytes | memoryview]) -> None:
        """Write a file from bytes, or from pieces as they come."""
        pieces = [data] if isinstance(data, bytes) else data
        with disk_errors(name), open(self._place(name), "xb", buffering=0) as file:
            self.files[name] = hashed(pieces, lambda piece: _write_all(file, piece))
            os.fsync(file.fileno())

    def copy(self, origin: Path, name: str) -> None:
        """Copy a file byte for byte."""
        with disk_errors(name), open(origin, "rb", buffering=0) as file:
            meter = Meter(f"copy {name}", os.fstat(file.fileno()).st_size, self._progress)
            self.write(name, meter.through(chunks(file)))  # type: ignore[arg-type]

    def link(self, origin: Path, name: str) -> bool:
        """Hard-link a file, or copy it where that isn't possible; True if it is linked. Hashed by `publish`.

        A linked file shares its bytes with the original, so it is never opened for writing.
        """
        try:
            os.link(os.path.realpath(origin), self._place(name))
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                with disk_errors(name):
                    raise
            self.copy(origin, name)
            return False
        self._linked.append(name)
        return True

    def publish(self) -> list[str]:
        """Hash what is linked, write the manifest, flush everything, and give the folder its name.

        Returns:
            Notes on what couldn't be cleaned up.

        Raises:
            ResourceError: the disk refuses; OUT is as it was.
            UsageError: OUT has been filled by someone else meanwhile.
        """
        with disk_errors(self.folder):
            paths = {name: self.folder / name for name in self._linked}
            for name, digest in sha256_all(paths, "hash", self._progress).items():
                self.files[name] = (paths[name].stat().st_size, digest)
                flush(paths[name])
        self.write(MANIFEST, manifest_bytes(self.files))
        with disk_errors(self.out):
            for folder in sorted({path.parent for path in self.folder.rglob("*")}, reverse=True):
                sync_folder(folder)
            self._rename()
        try:
            for folder in {self.out.parent, *(parent.parent for parent in self._made_parents)}:
                sync_folder(folder)
        except OSError as error:
            raise ResourceError(
                f"{self.out} is complete, but its name could not be flushed to the disk ({error.strerror})",
                "Check the disk before you rely on it",
            ) from error
        self._made_parents = []
        self.abandon()
        left = [path for path in (self.folder, self._aside) if path is not None and path.exists()]
        return [f"the old folder could not be removed: {path}" for path in left]

    def _rename(self) -> None:
        try:
            os.rename(self.folder, self.out)  # also replaces an empty folder
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not self.force:
            raise UsageError(f"OUT {self.out} was filled by someone else meanwhile", "Choose another folder")
        if exchange(self.folder, self.out):
            return
        self._aside = self._hidden("old-")
        os.rename(self.out, self._aside)
        os.rename(self.folder, self.out)

    def abandon(self) -> None:
        """Remove the stage and let go of the lock; OUT stays as it is."""
        try:
            self._remove()
        finally:  # a second Ctrl-C may end the removal: the next run finishes it, if it can have the lock
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.release()
        while self._made_parents:
            try:
                os.rmdir(self._made_parents.pop())
            except OSError:
                self._made_parents = []  # somebody else put something there

    def _remove(self) -> None:
        if self._aside is not None and not self.out.exists() and self._aside.exists():
            os.rename(self._aside, self.out)
        for path in (self.folder, self._aside, *self._scratch):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)


def _write_all(file, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while len(view):  # an unbuffered write may take less than it is given
        view = view[file.write(view) :]


def flush(path: Path) -> None:
    """Wait until a file's bytes are on the disk, whoever wrote them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.EBADF):
            raise
    finally:
        os.close(handle)


def manifest_bytes(files: dict[str, tuple[int, str]]) -> bytes:
    entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in sorted(files.items())}
    content = {
        "version": MANIFEST_VERSION,
        "written_by": f"linearize {linearize.__version__}",
        "files": entries,
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
