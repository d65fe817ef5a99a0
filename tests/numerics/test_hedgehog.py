"""hedgehog_features against the formula, written out."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels import hedgehog_features

from tests.numerics.tolerances import assert_close


def formula(x, weight):
    y = torch.stack([x[:, :, h] @ weight[h] for h in range(x.shape[2])], 2)
    up, down = y.exp(), (-y).exp()
    return torch.cat([up / up.sum(-1, keepdim=True), down / down.sum(-1, keepdim=True)], -1)


def inputs(T, H, D, E, dtype):
    g = torch.Generator().manual_seed(T + D)
    x = torch.randn(2, T, H, D, generator=g).to(dtype)
    return x, (torch.eye(D, E) + 0.1 * torch.randn(H, D, E, generator=g)).to(dtype)


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "H", "D", "E"), [(1, 1, 1, 1), (63, 3, 48, 48), (65, 2, 64, 40), (1100, 1, 16, 16)])
def test_equals_the_formula(backend, dtype, T, H, D, E):
    x, weight = inputs(T, H, D, E, dtype)
    expected_x, expected_w = (a.double().requires_grad_() for a in (x, weight))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    phi, expected = hedgehog_features(x, weight, backend=backend), formula(expected_x, expected_w)
    assert phi.dtype == dtype
    half = dtype == torch.bfloat16
    assert_close(phi, expected, dtype)
    d_phi = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad(phi, [x, weight], d_phi.to(dtype))
    for actual, wanted in zip(grads, torch.autograd.grad(expected, [expected_x, expected_w], d_phi), strict=True):
        assert_close(actual, wanted, "bfloat16 features grad" if half else f"{str(dtype)[6:]} grad")
    (alone,) = torch.autograd.grad(hedgehog_features(x.detach(), weight, backend=backend), [weight], d_phi.to(dtype))
    assert torch.equal(alone, grads[1])


@pytest.mark.parametrize("backend", [None, "torch"])
def test_huge_projections_and_layouts(backend):
    """exp would overflow in float32; strides are free; nothing behind a row is read."""
    base = torch.full((1, 5, 2, 40), float("nan"))
    x = base[..., :24]
    x.copy_(torch.randn(1, 5, 2, 24, generator=torch.Generator().manual_seed(0)) * 100)
    weight = torch.eye(24).expand(2, 24, 24).transpose(1, 2)
    phi = hedgehog_features(x, weight, backend=backend)
    assert_close(phi, formula(x.double(), weight.double()), torch.float32)
    assert_close(phi.sum(-1), torch.full((1, 5, 2), 2.0), torch.float32)
    assert not hedgehog_features(x[:, :0], weight, backend=backend).numel()


def test_gradcheck_and_promises():
    x, weight = (a.requires_grad_() for a in inputs(3, 2, 3, 4, torch.float64))
    assert torch.autograd.gradcheck(lambda x, w: hedgehog_features(x, w, backend="torch"), (x, weight))
    torch.library.opcheck(torch.ops.linearize.hedgehog_features.default, (x, weight, "torch"))


def test_what_does_not_fit_is_named():
    x, weight = inputs(3, 2, 4, 4, torch.float32)
    with pytest.raises(ValueError, match=r"weight must be \(H, D, E\) = \(2, 4, any\), not \(1, 4, 4\)"):
        hedgehog_features(x, weight[:1])
    with pytest.raises(ValueError, match="backend 'triton' can't run hedgehog_features: it isn't written"):
        hedgehog_features(x, weight, backend="triton")
