"""Triton's kernel of chunked_kl, interpreted, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels import kl
from linearize_kernels.triton_ops import configs
from linearize_kernels.triton_ops import kl as kernels

from tests.numerics.tolerances import assert_close, row_error


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(configs.TABLE, "kl_rows", [configs.Row({"BLOCK": 128})])


def rows(n: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Logits of a matrix whose rows go on with NaN."""
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * 4
    return torch.cat([x, torch.full((n, 24), torch.nan)], 1).to(dtype)[:, :width]


@pytest.mark.parametrize("width", [1, 128, 300])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_rows_equal_pytorch(width: int, temperature: float) -> None:
    student, teacher = rows(5, width, torch.float32, 0), rows(5, width, torch.float32, 1)
    counted = torch.tensor([True, False, True, True, True])[:, None]
    student[1] = torch.nan
    if width > 5:
        teacher[2, 5:9] = -torch.inf
        student[3, 7] = 500.0
    want = kl.divergence(student.double(), teacher.double(), temperature, counted, True)
    each, grad = kernels.divergence(student, teacher, temperature, counted, True)
    assert grad is not None
    assert want[1] is not None
    assert grad.data_ptr() == student.data_ptr()
    assert_close(each[:, None], want[0][:, None], "float32")
    assert_close(grad, want[1], "float32")
    assert kernels.divergence(teacher, teacher, temperature, None, False)[1] is None


def test_the_whole_loss() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(2, 5, 16, generator=g) for _ in range(2))
    head = torch.randn(300, 16, generator=g).requires_grad_()
    hidden.requires_grad_()
    found = []
    for backend in ("triton", "torch"):
        value = kl.chunked_kl(
            hidden, head, teacher_hidden=teacher, teacher_lm_head=head, chunk=3, temperature=2.0, backend=backend
        )
        found.append([value, *torch.autograd.grad(value, [hidden, head])])
    for triton, pytorch in zip(*found, strict=True):
        assert_close(triton, pytorch, "float32 grad")


def test_half_precision() -> None:
    student, teacher = rows(3, 300, torch.bfloat16, 0), rows(3, 300, torch.bfloat16, 1)
    each, want = kl.divergence(student, teacher, 1.0, None, True)
    found, grad = kernels.divergence(student, teacher, 1.0, None, True)
    assert grad is not None
    assert want is not None
    assert_close(found, each, "float32")
    assert row_error(grad, want) < 8e-3  # the interpreter cuts off to 8 bits
