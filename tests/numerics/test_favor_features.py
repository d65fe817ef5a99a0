"""favor_features against the formula, written out, and the expectation that makes it an estimate of softmax."""

from __future__ import annotations

import math

import pytest
import torch
from linearize_kernels import favor_features

from tests.numerics.tolerances import assert_close

BACKENDS = pytest.mark.parametrize("backend", [None, "torch"])


def formula(x, omega, scale, hyperbolic):
    """exp(+-w.u - |u|^2 / 2) / sqrt(F), (B, T, H, F)."""
    u = math.sqrt(scale) * x
    rows = torch.cat([omega, -omega]) if hyperbolic else omega
    features = [(u * w).sum(-1) - (u * u).sum(-1) / 2 for w in rows]
    return torch.stack(features, -1).exp() / math.sqrt(len(rows))


def true(pair):
    phi, log = pair
    return log.exp()[..., None] * phi


def inputs(T, H, D, M, dtype=torch.float32):
    g = torch.Generator().manual_seed(T + M)
    return torch.randn(2, T, H, D, generator=g).to(dtype), torch.randn(M, D, generator=g)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "H", "D", "M"), [(1, 1, 1, 1), (63, 3, 48, 24), (65, 2, 64, 40), (1100, 1, 16, 8)])
@pytest.mark.parametrize("hyperbolic", [True, False])
def test_equals_the_formula(backend, dtype, T, H, D, M, hyperbolic):
    x, omega = inputs(T, H, D, M, dtype)
    exact = x.double().requires_grad_()
    x = x.requires_grad_()
    expected = formula(exact, omega.double(), 0.125, hyperbolic)
    phi, log = favor_features(x, omega, scale=0.125, hyperbolic=hyperbolic, backend=backend)
    assert phi.dtype == dtype
    assert log.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(phi.amax(-1), torch.full(phi.shape[:3], phi.shape[3] ** -0.5, dtype=torch.float64), dtype)
    half = dtype == torch.bfloat16
    actual = log.exp()[..., None] * phi.to(log.dtype)
    assert_close(actual, expected, dtype)
    d = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (grad,) = torch.autograd.grad(actual, [x], d.to(actual.dtype))
    (wanted,) = torch.autograd.grad(expected, [exact], d)
    assert_close(grad, wanted, "bfloat16 features grad" if half else f"{str(dtype)[6:]} grad")


@BACKENDS
def test_huge_exponents_and_layouts(backend):
    """exp would overflow in float32; strides are free; nothing behind a row is read."""
    base = torch.full((1, 5, 2, 40), float("nan"))
    x = base[..., :24]
    x.copy_(torch.randn(1, 5, 2, 24, generator=torch.Generator().manual_seed(0)) * 100)
    omega = torch.randn(24, 12, generator=torch.Generator().manual_seed(1)).T
    phi, log = favor_features(x, omega, scale=1.0, backend=backend)
    exponents = torch.einsum("bthd,md->bthm", x.double(), omega.double())
    exponents = torch.cat([exponents, -exponents], -1)
    top = exponents.amax(-1)
    torch.testing.assert_close(log.double(), top - x.double().square().sum(-1) / 2, rtol=1e-6, atol=0)
    # An exponent of some hundreds is good to 2^-24 of itself in float32, its exp to as many times that.
    torch.testing.assert_close(phi.double(), (exponents - top[..., None]).exp() / 24**0.5, rtol=1e-3, atol=1e-7)
    assert not favor_features(x[:, :0], omega, scale=1.0, backend=backend)[0].numel()


@BACKENDS
def test_estimates_the_softmax_kernel(backend):
    """E[phi(q).phi(k)] = exp(scale q.k): the mean of 200k draws, within five standard errors."""
    g = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 1, 8, generator=g) for _ in range(2))
    omega = torch.randn(100_000, 8, generator=g)
    products = true(favor_features(q, omega, scale=0.3, backend=backend)) * true(
        favor_features(k, omega, scale=0.3, backend=backend)
    )
    terms = products.flatten() * products.numel()
    error = (terms.mean() - (0.3 * (q * k).sum()).exp()).abs()
    assert error < 5 * terms.std() / math.sqrt(len(terms))


def test_gradcheck_and_promises():
    x, omega = inputs(3, 2, 3, 4, torch.float64)
    x, omega = x.requires_grad_(), omega.double()
    assert torch.autograd.gradcheck(lambda x: true(favor_features(x, omega, scale=0.5, backend="torch")), (x,))
    torch.library.opcheck(torch.ops.linearize.favor_features.default, (x, omega, 0.5, True, "torch"))
    compiled = torch.compile(lambda x: true(favor_features(x, omega, scale=0.5)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), true(favor_features(x, omega, scale=0.5)))


def test_what_does_not_fit_is_named():
    x, omega = inputs(3, 2, 4, 4)
    with pytest.raises(ValueError, match=r"omega must be \(M, D\) = \(any, 4\), not \(4, 3\)"):
        favor_features(x, omega[:, :3], scale=1.0)
    with pytest.raises(ValueError, match="scale must be at least 0"):
        favor_features(x, omega, scale=-1.0)
    with pytest.raises(ValueError, match="omega takes no gradient"):
        favor_features(x, omega.requires_grad_(), scale=1.0)
