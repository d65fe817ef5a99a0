"""python -m linearize_kernels.aot: compile every Triton kernel ahead of time and print what it costs on each card.

No GPU is needed: Triton's wheel brings the assemblers. For each kernel, shipped configuration and card it says
registers, spilled bytes (none wanted), shared memory against the card's limit, 16-byte loads and stores, and
tensor-core instructions. Exits with 1 if a kernel doesn't compile or needs more shared memory than the card has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from .triton_ops.configs import ARCHS, SHARED_MEMORY


@dataclass
class Cost:
    """What one compiled kernel needs. registers: per thread (VGPRs on AMD). stack: bytes (AMD: registers) spilled."""

    kernel: str
    case: str
    arch: str
    dtype: str
    dim: int
    warps: int
    stages: int
    registers: int = 0
    stack: int = 0
    shared: int = 0
    limit: int = 0
    wide: int = 0
    tensor_core: str = "-"
    narrow_offsets: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error) or self.shared > self.limit


def kernels() -> dict[str, Any]:
    """The registry, after every kernel module was imported."""
    package = import_module(".triton_ops", __package__)
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return import_module(".triton_ops.launch", __package__).KERNELS


def chosen(names: Iterable[str]) -> list[str]:
    """The kernels with these names, or, of a name that none has, those that begin with it."""
    known, wanted = sorted(kernels()), list(names)
    if not wanted:
        return known
    return [k for k in known if any(k == n or (n not in known and k.startswith(n)) for n in wanted)]


def costs(
    archs: Iterable[str] = ARCHS,
    dims: Iterable[int] = (64, 128),
    dtypes: Iterable[str] = ("bf16",),
    names: Iterable[str] = (),
    *,
    last: int = 0,
) -> Iterator[Cost]:
    """Compile every case (or the `last` few) of the kernels called `names`, or so beginning, or of all."""
    from .aot_compile import compile_case

    for name in chosen(names):
        kernel = kernels()[name]
        for arch in archs:
            for dtype in dtypes:
                for dim in dims:
                    for case in kernel.cases(arch, dtype, dim)[-last:]:
                        cost = Cost(name, case.label, arch, dtype, dim, case.row.num_warps, case.row.num_stages)
                        cost.limit = SHARED_MEMORY[arch]
                        start = time.perf_counter()
                        try:
                            for key, value in compile_case(kernel.fn, case, arch).items():
                                setattr(cost, key, value)
                        except Exception as error:  # any compiler's; the table goes on and says so
                            cost.error = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
                        cost.seconds = round(time.perf_counter() - start, 2)
                        yield cost


HEADER = (
    f"{'kernel':22} {'case':22} {'card':7} {'dtype':5} {'dim':>4} {'warps':>5} {'stages':>6} {'regs':>5} "
    f"{'spilled':>7} {'shared':>7} {'limit':>7} {'16-byte':>7}  tensor cores"
)


def line(c: Cost) -> str:
    head = f"{c.kernel:22} {c.case:22} {c.arch:7} {c.dtype:5} {c.dim:4} {c.warps:5} {c.stages:6} "
    if c.error:
        return head + c.error
    over = "  more shared memory than the card has" if c.failed else ""
    narrow = f"  {c.narrow_offsets} 32-bit offsets" if c.narrow_offsets else ""
    return head + f"{c.registers:5} {c.stack:7} {c.shared:7} {c.limit:7} {c.wide:7}  {c.tensor_core}{over}{narrow}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m linearize_kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", default=",".join(ARCHS), help="cards, of %(default)s")
    parser.add_argument("--dim", default="64,128", help="head dims (default %(default)s)")
    parser.add_argument("--dtype", default="bf16", help="of bf16,fp16,fp32 (default %(default)s)")
    parser.add_argument("--kernel", default="", help="names, or their beginnings (default: all)")
    parser.add_argument("--json", action="store_true", help="one object, with a list `kernels`")
    given = parser.parse_args(arguments)
    archs, names = given.arch.split(","), [n for n in given.kernel.split(",") if n]
    unknown = [a for a in archs if a not in ARCHS]
    if unknown:
        parser.error(f"unknown card {', '.join(unknown)}: choose of {', '.join(ARCHS)}")
    if find_spec("triton") is None:
        parser.error("Triton isn't installed (`pip install triton`)")
    import triton

    if import_module(".triton_ops.launch", __package__).INTERPRETED:
        parser.error("TRITON_INTERPRET is set: the interpreter's kernels can't be compiled; unset it")
    if not chosen(names):
        parser.error(f"no kernel is called {given.kernel}: choose of {', '.join(chosen(()))}")
    failed, found = False, []
    if not given.json:
        print(f"Triton {triton.__version__}")
        print(HEADER)
    for cost in costs(archs, [int(d) for d in given.dim.split(",")], given.dtype.split(","), names):
        failed |= cost.failed
        found.append(asdict(cost))
        if not given.json:
            print(line(cost), flush=True)
    if given.json:
        print(json.dumps({"triton": triton.__version__, "kernels": found}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
