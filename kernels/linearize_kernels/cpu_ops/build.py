"""The compiled library: found in the cache, or compiled there on first use, by whichever compiler is present.

Plain C functions called through ctypes, so that no header of PyTorch is parsed: a build takes seconds, and one
library serves every version of Python. `LINEARIZE_CXX` or `CXX` choose the compiler, `LINEARIZE_CACHE` the
folder (else XDG_CACHE_HOME/linearize, else ~/.cache/linearize).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("csrc")
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-Wno-psabi", "-Wno-unknown-pragmas"),
]
# The first that the compiler takes: `-march=native` is what makes it fast, but some compilers call it -mcpu.
NATIVE = (["-march=native"], ["-mcpu=native"], [])
TIMEOUT = 300


LOGGER = logging.getLogger(__name__)


class Unavailable(RuntimeError):
    """Why the library can't be used."""


class NoCompiler(Unavailable):
    """There is nothing to compile it with, as on many machines."""


def cache_folder() -> Path:
    if chosen := os.environ.get("LINEARIZE_CACHE"):
        return Path(chosen).expanduser() / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linearize" / "kernels"


def _check_owner(path: Path) -> None:
    """What is loaded from a cache runs as this user: nobody else may have put it there."""
    if not hasattr(os, "getuid"):
        return
    found = path.stat()
    if found.st_uid not in (0, os.getuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"{path} belongs to or can be written by other users: remove it, or set LINEARIZE_CACHE")


def compiler() -> list[str]:
    """The compiler's command."""
    for name in ("LINEARIZE_CXX", "CXX"):
        if os.environ.get(name):
            command = shlex.split(os.environ[name])
            found = shutil.which(command[0])
            if found is None:
                raise Unavailable(f"{name} is {os.environ[name]!r}, which is no program on the PATH")
            return [found, *command[1:]]
    for name in ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise NoCompiler("there is no C++ compiler (g++ or clang++) on the PATH")


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    """The first line of the compiler's --version."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{command[0]} --version failed: {error}") from None
    return done.stdout.splitlines()[0].strip() if done.stdout else command[0]


def _cpu() -> str:
    """What the processor can do, so that a cache on a shared disk never serves code for another one."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
        return "\n".join(sorted(set(flags)))
    return f"{platform.machine()} {platform.processor()} {platform.node()}"


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _key(command: list[str], extra: tuple[str, ...]) -> str:
    parts = [_version(tuple(command)), " ".join([*command, *FLAGS, *extra]), _cpu(), platform.platform()]
    parts += [torch.__version__, sys.platform]
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            parts += [path.name, path.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock, where the system has them; the publishing rename is atomic with and without."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as file:
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{command[0]} failed: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise Unavailable(f"{command[0]} failed: {lines[0].strip()}")


def compile_library(target: Path, extra: tuple[str, ...] = (), trial: bool = True) -> None:
    """Compile into `target`, which appears whole or not at all, and only after a trial in another process."""
    command = compiler()
    failure: Unavailable | None = None
    for native in NATIVE:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            try:
                built = _compile([*command, *FLAGS, *native, *extra], Path(folder))
                if trial:
                    _try_out(built)
            except Unavailable as error:
                failure = failure or error
                continue
            built.chmod(0o755)  # whatever the umask is
            os.replace(built, target)
            return
    raise failure or Unavailable("nothing was compiled")


def _compile(command: list[str], folder: Path) -> Path:
    def one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        _run([*command, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(one, sources()))
    library = folder / "library.so"
    _run([*command, "-shared", *objects, "-o", str(library)])
    return library


def _try_out(library: Path) -> None:
    """Run the library in another process: an instruction that this machine lacks would end this one."""
    code = "import ctypes, sys; sys.exit(int(ctypes.CDLL(sys.argv[1]).lz_self_test()))"
    try:
        done = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the compiled library couldn't be tried: {error}") from None
    if done.returncode:
        raise Unavailable(f"the compiled library failed its test (exit status {done.returncode})")


def library_path() -> Path:
    return cache_folder() / f"cpu-{_key(compiler(), ())}.so"


_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None
_failure: str | None = None


def library() -> ctypes.CDLL:
    """The library, compiled if need be. Raises Unavailable; a failed build is not tried again in this process."""
    global _loaded, _failure
    with _lock:
        if _failure is not None:
            raise Unavailable(_failure)
        if _loaded is None:
            try:
                _loaded = _found()
            except (RuntimeError, OSError) as error:
                _failure = str(error)
                if not isinstance(error, NoCompiler):
                    warnings.warn(
                        f"the CPU kernels can't be compiled, so PyTorch runs instead: {_failure}", stacklevel=2
                    )
                raise Unavailable(_failure) from None
        return _loaded


def _found() -> ctypes.CDLL:
    """The library in the cache; compiled if it isn't there, or is damaged."""
    path = library_path()
    failed = path.with_suffix(".failed")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(path.parent)
    for trial in range(2):
        if not path.exists():
            with _locked(path.with_suffix(".lock")):
                if not path.exists():
                    if failed.exists():  # the same compiler and sources would fail again
                        raise Unavailable(f"{failed.read_text(encoding='utf-8')} (remove {failed} to try again)")
                    LOGGER.warning("compiling the CPU kernels, once for this machine, into %s", path.parent)
                    try:
                        compile_library(path)
                    except Unavailable as error:
                        failed.write_text(str(error), encoding="utf-8")
                        raise
        _check_owner(path)
        try:
            return _open(path)
        except (OSError, AttributeError):
            if trial:
                raise
            path.unlink(missing_ok=True)  # cut short by a crash, or not what was written
    raise AssertionError


def _open(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.lz_set_team.argtypes = [ctypes.c_void_p]
    loaded.lz_set_team.restype = None
    loaded.lz_set_team(team())
    return loaded


def team() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that PyTorch has loaded; None: work on one thread."""
    candidates: list[str] = []
    with contextlib.suppress(OSError):
        fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
        paths = dict.fromkeys(field[5] for field in fields if len(field) == 6)
        candidates += [path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp5"))]
    folder = Path(torch.__file__).parent
    if not candidates:
        candidates += [str(p) for p in sorted((folder / "lib").glob("lib*omp*.dylib"))]
    # The one that came with PyTorch first: another package may have brought its own.
    candidates.sort(key=lambda path: not path.startswith(str(folder.parent)))
    for path in candidates:
        with contextlib.suppress(OSError, AttributeError):
            runtime = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
    return None


def status() -> tuple[bool, str]:
    """(usable, why): without compiling anything."""
    if _failure is not None:
        return False, _failure
    if _loaded is not None:
        return True, "compiled and loaded" if team() else "compiled; on one thread, since no OpenMP runtime was found"
    try:
        command = compiler()
        version = _version(tuple(command))
        there = library_path().exists()
        failed = library_path().with_suffix(".failed")
        if failed.exists() and not there:
            return False, failed.read_text(encoding="utf-8")
    except (RuntimeError, OSError) as error:
        return False, str(error)
    return True, f"compiled by {version}" if there else f"will be compiled on first use by {version}"
