"""The three things that POSIX gives an atomic output folder: a lock, a durable directory, and an exchange of
names."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from linearize.errors import ResourceError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux, renameat2
_RENAME_SWAP = 2  # macOS, renamex_np
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(a: Path, b: Path) -> bool:
    """Swap the names of two folders in one atomic step; False (and nothing done) where the system can't.

    Raises:
        OSError: the system can, and failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(a), os.fsencode(b)
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        result = libc.renamex_np(first, second, ctypes.c_uint(_RENAME_SWAP))
    elif sys.platform.startswith("linux") and hasattr(libc, "renameat2"):
        result = libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, ctypes.c_uint(_RENAME_EXCHANGE))
    else:
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    if sys.platform == "win32":
        return  # folders can't be opened there
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some network file systems can't, and sync by themselves
            raise
    finally:
        os.close(handle)


class Lock:
    """One writer per output folder. The kernel drops the lock when its process dies, however it dies."""

    def __init__(self, path: Path, out: Path) -> None:
        """Take the lock, or raise `ResourceError` at once if another process holds it."""
        self._path = path
        self._handle = -1
        self._fallback = None
        try:
            import fcntl
        except ImportError:
            self._lock_elsewhere(out)
            return
        while True:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EISDIR):
                    raise _no_lock_file(path) from None
                raise
            try:
                _check_lock_file(path, os.fstat(handle))
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its holder removes the file before letting go: what was locked may be a file without a name.
                if os.fstat(handle).st_nlink and os.path.samestat(os.fstat(handle), os.stat(path)):
                    break
            except FileNotFoundError:
                pass
            except ResourceError:
                os.close(handle)
                raise
            except OSError as error:
                holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
                os.close(handle)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise _busy(out, holder) from None
                if error.errno in {errno.ENOLCK, *_UNSUPPORTED}:  # some network file systems
                    os.unlink(path)
                    self._lock_elsewhere(out)
                    return
                raise
            os.close(handle)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._handle = handle

    def _lock_elsewhere(self, out: Path) -> None:
        """Without flock: a file that exists while the lock is held, with its holder's process and host in it."""
        import filelock

        self._fallback = filelock.SoftFileLock(f"{self._path}-soft", timeout=0)
        try:
            self._fallback.acquire()
        except filelock.Timeout:
            raise _busy(out, "") from None

    def release(self) -> None:
        if self._fallback is not None:
            self._fallback.release()
        elif self._handle >= 0:
            handle, self._handle = self._handle, -1
            with suppress(OSError):  # else it stays, as a file that nobody holds, which does no harm
                os.unlink(self._path)
            os.close(handle)


def _check_lock_file(path: Path, info: os.stat_result) -> None:
    """Refuse a file that somebody put in the lock's place: the holder's process number is written into it."""
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        raise _no_lock_file(path)


def _no_lock_file(path: Path) -> ResourceError:
    return ResourceError(
        f"{path} isn't a lock file of linearize (it is a link, or no regular file)", "Look at it, and remove it"
    )


def _busy(out: Path, holder: str) -> ResourceError:
    who = f"process {holder}" if holder.isdigit() else "another process"
    return ResourceError(f"{out} is being written by {who}", "Wait until it is done, or choose another folder")
