"""Triton reads TRITON_INTERPRET when a kernel is defined: one process interprets kernels, another compiles them."""

from __future__ import annotations

import os
from importlib.util import find_spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = ("test_aot.py",)

collect_ignore_glob = [*COMPILED, "test_*_gpu.py"] if INTERPRETED else ["test_*_interpreted.py"]
if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    if find_spec("triton") is None:
        return "Triton isn't installed, so none of its kernels is tested: pip install triton"
    if INTERPRETED:
        return f"Triton's kernels are interpreted; {', '.join(COMPILED)} runs without TRITON_INTERPRET"
    return "interpreted Triton kernels are tested by: TRITON_INTERPRET=1 pytest tests/triton"
