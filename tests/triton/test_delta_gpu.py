"""The Triton kernels of the delta rule and of KL on a card."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels import kl
from linearize_kernels.triton_ops import delta as kernels
from linearize_kernels.triton_ops.launch import INTERPRETED

from tests.numerics.tolerances import assert_close
from tests.triton.delta_cases import (
    BFLOAT16_CARD,
    FLOAT16_CARD,
    FLOAT32,
    check_forward,
    check_gradients,
    check_step,
    make_call,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU, and compiled kernels"),
]

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16_CARD, torch.float16: FLOAT16_CARD}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [None, "head", "token", "feature"])
@pytest.mark.parametrize("D", [16, 48, 64, 128, 256])
def test_equals_the_definition(D: int, decay: str | None, dtype: torch.dtype) -> None:
    call = make_call(200, decay, B=2, H=8, Hk=2, F=D, Dv=D, dtype=dtype, device="cuda")
    check_forward(call, DTYPES[dtype])
    check_gradients(call, DTYPES[dtype])
    check_step(call, DTYPES[dtype])


@pytest.mark.parametrize("decay", [None, "token", "feature"])
def test_packed_sequences(decay: str | None) -> None:
    call = make_call(330, decay, H=4, Hk=2, F=64, Dv=64, cu=[0, 5, 5, 70, 199, 200, 330], device="cuda")
    check_forward(call)
    check_gradients(call)
    assert torch.equal(kernels.forward(*call)[1][1], call.S[1])


def test_more_programs_than_a_grid_axis_holds() -> None:
    call = make_call(1, "token", B=70000, H=1, device="cuda")
    out, S = kernels.forward(*call)
    few = [x[-3:] for x in call[:6] if x is not None]
    small_out, small_S = kernels.forward(*few, None, call.scale)
    assert_close(out[-3:], small_out, "float32")
    assert_close(S[-3:], small_S, "float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_kl(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(100, 64, generator=g).cuda().to(dtype) for _ in range(2))
    head = torch.randn(5003, 64, generator=g).cuda().to(dtype).requires_grad_()
    hidden.requires_grad_()
    found = []
    for backend in ("triton", "torch"):
        value = kl.chunked_kl(hidden, head, teacher_hidden=teacher, teacher_lm_head=head, chunk=33, backend=backend)
        found.append([value, *torch.autograd.grad(value, [hidden, head])])
    for triton, pytorch in zip(*found, strict=True):
        assert_close(triton, pytorch, "float32" if dtype == torch.float32 else dtype)
