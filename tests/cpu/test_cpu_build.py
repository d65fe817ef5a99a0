"""The compiled CPU code: how it is built and cached, and what happens without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.cpu_cases import needs_library

ROOT = Path(__file__).parents[2]
LINEAR = """
import torch
from linearize_kernels import cpu_ops
q = torch.rand(1, 5, 2, 4)
state = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4), torch.zeros(1, 2)
out = cpu_ops.linear.forward(q, q, q, None, None, *state, None, 1.0, True, 1e-6)[0]
assert torch.allclose(out[:, 0], q[:, 0])
"""


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)]), **environment}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=subprocess.STDOUT, text=True)


def output(process: subprocess.Popen[str]) -> str:
    printed = process.communicate(timeout=240)[0]
    assert process.returncode == 0, printed
    return printed


REFUSAL = "from linearize_kernels import cpu_ops; print(cpu_ops.status(), cpu_ops.refuses('linear', {}))"


def test_without_a_compiler_the_reason_is_given(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "CXX": "", "LINEARIZE_CXX": "", "LINEARIZE_CACHE": str(tmp_path)}
    printed = output(start(REFUSAL, **environment))
    assert printed.count("there is no C++ compiler") == 2
    assert printed.startswith("(False,")


def test_a_compiler_that_does_not_exist(tmp_path: Path) -> None:
    printed = output(start(REFUSAL, LINEARIZE_CXX="no-such-compiler -v", LINEARIZE_CACHE=str(tmp_path)))
    assert printed.count("LINEARIZE_CXX is 'no-such-compiler -v'") == 3  # a warning, too
    assert "PyTorch runs instead" in printed


@needs_library
def test_a_failed_build_is_not_tried_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    script = tmp_path / "cxx"
    version = '[ "$1" = --version ] && exec g++ --version'
    script.write_text(f'#!/bin/sh\necho x >> {calls}\n{version}\necho "error: broken" >&2\nexit 1\n')
    script.chmod(0o755)
    code = REFUSAL + "; n = open(%r).read(); assert cpu_ops.refuses('linear', {}) and open(%r).read() == n"
    environment = {"LINEARIZE_CXX": str(script), "LINEARIZE_CACHE": str(tmp_path / "c")}
    printed = output(start(code % (str(calls), str(calls)), **environment))
    assert "(True, 'will be compiled on first use" in printed
    assert "error: broken" in printed
    assert {p.suffix for p in (tmp_path / "c" / "kernels").iterdir()} == {".lock", ".failed"}
    # Neither does the next process, which says so before.
    before = calls.read_text().count("x")
    printed = output(start(REFUSAL, **environment))
    assert printed.count("error: broken") == 3  # status, a warning, refuses
    assert "remove " in printed
    assert calls.read_text().count("x") == before + 1  # --version


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    printed = output(start(REFUSAL, LINEARIZE_CACHE=str(tmp_path / "file" / "cache")))
    assert "Not a directory" in printed.splitlines()[-1]


@needs_library
def test_what_others_can_write_is_not_loaded(tmp_path: Path) -> None:
    output(start(LINEAR, LINEARIZE_CACHE=str(tmp_path)))
    (library,) = (tmp_path / "kernels").glob("*.so")
    for place in (library, library.parent):
        mode = place.stat().st_mode
        assert not mode & 0o022
        place.chmod(mode | 0o020)
        assert "can be written by other users" in output(start(REFUSAL, LINEARIZE_CACHE=str(tmp_path)))
        place.chmod(mode)
    assert output(start(REFUSAL, LINEARIZE_CACHE=str(tmp_path))).strip().endswith("None")


@needs_library
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    output(start(LINEAR, LINEARIZE_CACHE=str(tmp_path)))
    (library,) = (tmp_path / "kernels").glob("*.so")
    library.write_bytes(b"")
    assert "compiling the CPU kernels" in output(start(LINEAR, LINEARIZE_CACHE=str(tmp_path)))
    assert library.stat().st_size > 10_000


@needs_library
def test_two_processes_compile_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    script = tmp_path / "cxx"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo x >> {calls};; esac\nexec g++ "$@"\n')
    script.chmod(0o755)
    cache = tmp_path / "cache"
    environment = {"LINEARIZE_CXX": str(script), "LINEARIZE_CACHE": str(cache)}
    for process in [start(LINEAR, **environment) for _ in range(2)]:
        output(process)
    assert calls.read_text().split() == ["x"]
    (library,) = cache.glob("kernels/*.so")
    assert "(True, 'compiled by" in output(start(REFUSAL + "\n" + LINEAR, **environment))
    assert calls.read_text().split() == ["x"]
    assert not list(cache.glob("kernels/build-*"))
    assert library.stat().st_size > 10_000


@needs_library
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_no_second_openmp_runtime() -> None:
    code = """
import re, torch
torch.ones(1 << 22).exp()
def runtimes():
    return set(re.findall(r"/\\S*lib(?:gomp|omp|iomp5)\\S*", open("/proc/self/maps").read()))
before = runtimes()
from linearize_kernels import cpu_ops
from linearize_kernels.cpu_ops import build
q = torch.rand(64, 65, 2, 4)
state = torch.zeros(64, 2, 4, 4), torch.zeros(64, 2, 4), torch.zeros(64, 2)
torch.set_num_threads(2)
cpu_ops.linear.forward(q, q, q, None, None, *state, None, 1.0, True, 1e-6)
assert build.team() is not None
assert runtimes() == before, (before, runtimes())
print(len(before), len(list(__import__("pathlib").Path("/proc/self/task").iterdir())))
"""
    assert output(start(code, OMP_NUM_THREADS="2")).split()[0] == "1"


def test_refuses_what_it_cannot_do() -> None:
    import torch
    from linearize_kernels import cpu_ops

    assert "float64" in (cpu_ops.refuses("linear", {"q": torch.zeros(1, dtype=torch.float64)}) or "")
    assert "meta" in (cpu_ops.refuses("linear", {"q": torch.zeros(1, device="meta")}) or "")


@needs_library
@pytest.mark.slow
def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The same sources with address and undefined-behaviour checks, every tile an allocation of its own full of NaN."""
    from linearize_kernels.cpu_ops import build

    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    if runtime.returncode or not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip("g++ has no address sanitizer here")
    library = tmp_path / "checked.so"
    checks = ("-O1", "-g", "-DLZ_CHECKED", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    build.compile_library(library, (*checks, "-fno-omit-frame-pointer"), trial=False)
    code = f"""
import pathlib
from linearize_kernels.cpu_ops import build
build.library_path = lambda: pathlib.Path({str(library)!r})
import pytest, sys
files = [f"tests/cpu/test_cpu_{{n}}.py" for n in ("linear", "window", "delta", "steps")]
long = "not 65536 and not cut_for and not many_chunks"
assert build.library()._name == {str(library)!r}
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files, "-k", long]))
"""
    preload = {"LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT)]), **preload},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = process.communicate(timeout=600)[0]
    assert process.returncode == 0, printed[-5000:]
