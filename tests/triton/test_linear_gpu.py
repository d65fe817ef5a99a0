"""The Triton kernels of linear attention on a card."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels.triton_ops import linear as kernels

from tests.triton.cases import (
    BFLOAT16_CARD,
    FLOAT16_CARD,
    FLOAT32,
    check_forward,
    check_gradients,
    check_step,
    make_call,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16_CARD, torch.float16: FLOAT16_CARD}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "logs", "head", "token", "feature"])
@pytest.mark.parametrize("D", [16, 48, 64, 96, 128, 256])
def test_equals_the_definition(D: int, kind: str, dtype: torch.dtype) -> None:
    call = make_call(200, kind, B=2, H=8, Hk=2, F=D, Dv=D, dtype=dtype, device="cuda")
    check_forward(call, DTYPES[dtype])
    check_gradients(call, DTYPES[dtype])
    check_step(call, DTYPES[dtype])


@pytest.mark.parametrize("kind", ["plain", "logs", "token", "feature"])
def test_packed_sequences(kind: str) -> None:
    call = make_call(330, kind, H=4, Hk=2, F=64, Dv=64, cu=[0, 5, 5, 70, 199, 200, 330], device="cuda")
    check_forward(call)
    check_gradients(call)


def test_more_programs_than_a_grid_axis_holds() -> None:
    call = make_call(1, B=70000, H=1, device="cuda")
    out, _, S, z, m = kernels.forward(*call)
    few = call._replace(**{n: getattr(call, n)[-3:] for n in ("q", "k", "v", "S", "z", "m")})
    small = kernels.forward(*few)
    for x, y in zip((out, S, z, m), (small[0], *small[2:]), strict=True):
        assert torch.equal(x[-3:], y)


def test_sums_beyond_the_largest_fp16_number() -> None:
    """65536 keys of 4: sums of 262144, which fp16 can't hold."""
    k = torch.full((1, 65536, 1, 64), 4.0, dtype=torch.float16, device="cuda")
    S, z, m = (torch.zeros(shape, device="cuda") for shape in ((1, 1, 64, 64), (1, 1, 64), (1, 1)))
    out, *_ = kernels.forward(k, k, torch.ones_like(k), None, None, S, z, m, None, 1.0, True, 1e-6)
    assert (out - 1).abs().max() < 1e-2


def test_offsets_past_32_bits() -> None:
    """Tokens that begin past the 2^31st element: those before are 0 and don't count."""
    wide = torch.zeros(1, 2**15 + 128, 2**16 + 64, dtype=torch.bfloat16, device="cuda")
    tail = torch.rand(1, 128, 1, 64, device="cuda").to(wide)
    wide[:, -128:, -64:] = tail[:, :, 0]
    x = wide[:, :, None, -64:]
    S, z, m = (torch.zeros(shape, device="cuda") for shape in ((1, 1, 64, 64), (1, 1, 64), (1, 1)))
    found = kernels.forward(x, x, x, None, None, S, z, m, None, 1.0, True, 1e-6)
    expected = kernels.forward(tail, tail, tail, None, None, S, z, m, None, 1.0, True, 1e-6)
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(a[:, -128:], b)
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(a, b)
