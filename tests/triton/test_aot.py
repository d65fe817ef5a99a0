"""What the Triton kernels cost on each card, held without one: they are compiled ahead of time.

Run without TRITON_INTERPRET: interpreted kernels can't be compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import triton.language as tl
from linearize_kernels import aot
from linearize_kernels.aot_compile import compile_case
from linearize_kernels.triton_ops import configs
from linearize_kernels.triton_ops.launch import Case, jit

KERNELS = sorted(aot.kernels())
# Kernels that multiply no matrices.
NO_PRODUCTS = (
    "linear_bwd_rows", "linear_cumsum", "linear_step", "delta_step", "delta_sums", "delta_sums_by_feature", "kl_rows",
    "window_rows", "window_step_state",
)  # fmt: skip
SCALARS = ("delta_sums", "window_step_state")  # read and write single numbers, so never 16 bytes at once


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was compiled before would hide what this version of Triton makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(kernel: str, arch: str, dim: int, *, last: int = 0) -> list[aot.Cost]:
    """`last`: only so many of the cases. The last one needs most, or the one before: decays by feature most shared
    memory, scalar ones (packed, if there are such) in some kernels more registers.
    """
    found = list(aot.costs([arch], [dim], ["bf16"], [kernel], last=last))
    assert found
    for cost in found:
        assert not cost.error, aot.line(cost)
        assert cost.shared <= cost.limit, aot.line(cost)
        assert not cost.narrow_offsets, aot.line(cost)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dim", "last"), [("sm_80", 64, 2), ("sm_80", 128, 0), ("sm_90", 64, 0), ("sm_90", 128, 2)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_spills_and_tensor_cores(kernel: str, arch: str, dim: int, last: int) -> None:
    for cost in compiled(kernel, arch, dim, last=last):
        assert cost.stack == 0, aot.line(cost)
        assert cost.wide > 0 or kernel in SCALARS, aot.line(cost)
        if kernel not in NO_PRODUCTS:
            assert cost.tensor_core != "-", aot.line(cost)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_memory_of_small_cards(kernel: str) -> None:
    assert configs.SHARED_MEMORY["sm_86"] == 101376
    compiled(kernel, "sm_86", 256, last=1)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["linear_out", "linear_states"])
def test_amd(kernel: str) -> None:
    for cost in compiled(kernel, "gfx942", 64, last=1):
        assert cost.stack == 0
        assert cost.tensor_core.startswith("mfma")


@jit
def _offsets(x, stride_x_t, WIDE: tl.constexpr):
    i = tl.arange(0, 16)
    if WIDE:
        i = i.to(tl.int64)
    tl.store(x + i * stride_x_t, 0.0)


@pytest.mark.parametrize("wide", [True, False])
def test_narrow_offsets_are_found(wide: bool) -> None:
    case = Case("", {"x": "fp32"}, {"WIDE": wide}, configs.Row({}))
    assert compile_case(_offsets, case, "sm_90")["narrow_offsets"] == (0 if wide else 1)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert aot.main(["--arch", "sm_90", "--dim", "64", "--kernel", "linear_cumsum", "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["kernel"] == "linear_cumsum"
    assert 0 < kernel["registers"] <= 255
    with pytest.raises(SystemExit):
        aot.main(["--arch", "sm_20"])
    assert "choose of sm_80" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main(["--kernel", "nothing"])
    assert "linear_out" in capsys.readouterr().err
