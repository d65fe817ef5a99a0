"""Calls of linear attention in Triton and their comparison with the float64 definition, on any device."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from linearize_kernels import LinearState, reference
from linearize_kernels.triton_ops import linear as kernels
from torch import Tensor

from tests.numerics.kernel_cases import guarded, linear_inputs, true_sums
from tests.numerics.tolerances import row_error

NAMES = ("q", "k", "v", "log_k", "log_decay", "S", "z")


class Tolerance(NamedTuple):
    """Of rows for outputs and states, of whole tensors for gradients, as in tests/numerics/tolerances.py."""

    out: float
    state: float
    grad: float


# Sums of up to 200 terms; after gates that add up to -264 a chunk's sums of gates are good to 3e-5, and exp makes that
# relative.
FLOAT32 = Tolerance(1e-4, 1e-4, 1e-4)
# Interpreted, terms stay float32: outputs, states before chunks and gradients are rounded to 8 bits, 2^-8 at most.
BFLOAT16 = Tolerance(5e-3, 1e-4, 8e-3)
# On a card scores and weighted keys are rounded to 8 bits before they are multiplied, too.
BFLOAT16_CARD = Tolerance(2e-2, 1e-2, 2e-2)
FLOAT16_CARD = Tolerance(3e-3, 2e-3, 3e-3)


class Call(NamedTuple):
    """Arguments of the op; S (N, Hk, F, V), z (N, Hk, F), m (N, Hk)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_k: Tensor | None
    log_decay: Tensor | None
    S: Tensor
    z: Tensor
    m: Tensor
    cu: Tensor | None
    scale: float = 0.7
    normalize: bool = True
    eps: float = 1e-6


def make_call(
    T: int, kind: str = "plain", *, B: int = 1, H: int = 2, Hk: int = 1, F: int = 16, Dv: int = 16,
    dtype: torch.dtype = torch.float32, cu: list[int] | None = None, normalize: bool = True, device: str = "cpu",
    seed: int = 0,
) -> Call:  # fmt: skip
    """`kind`: "plain", "logs", or a decay by "head", "token" or "feature", with gates of -50 and -1e4 among them."""
    decay = kind if kind in ("head", "token", "feature") else None
    inputs = linear_inputs(
        B, T, H, Hk, F, Dv, dtype=dtype, logs=2.0 if kind == "logs" else None, decay=decay, seed=seed
    )
    log = inputs.get("log_decay")
    if log is not None and log.dim() > 1 and T > 40:
        log[:, 20] = -1e4
        log[:, 33:37] = -50.0
        if log.dim() == 4:
            log[..., 0] = -5.0
    g = torch.Generator().manual_seed(seed + 1)
    N = B if cu is None else len(cu) - 1
    S, z = torch.randn(N, Hk, F, Dv, generator=g), torch.rand(N, Hk, F, generator=g)
    m = torch.randn(N, Hk, generator=g) if kind == "logs" else torch.zeros(N, Hk)
    tensors = [inputs["q"], inputs["k"], inputs["v"], inputs.get("log_k"), log, S, z, m]
    tensors = [None if x is None else guarded(x.to(device)) for x in tensors]
    if log is not None and log.dim() == 1:
        tensors[4] = tensors[4].expand(B, T, Hk)  # type: ignore[union-attr]
    return Call(*tensors, None if cu is None else torch.tensor(cu, device=device), normalize=normalize)  # type: ignore


def definition(call: Call, tensors: list[Tensor | None]) -> tuple[Tensor, LinearState]:
    q, k, v, log_k, log_decay, S, z = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    assert S is not None
    assert z is not None
    return reference.linear_attention(
        q, k, v, scale=call.scale, normalize=call.normalize, eps=call.eps, log_k=log_k, log_decay=log_decay,
        initial_state=LinearState(S, z, call.m.double()), return_state=True, cu_seqlens=call.cu,
    )  # fmt: skip


def denominators(call: Call) -> Tensor:
    """scale q_t.z_t (B, T, H), relative to exp(m_t): outputs that aren't normalised, of values and states of 1."""
    q, k, ones = (x.double() for x in (call.q, call.k, torch.ones_like(call.k[..., :1])))
    log_k, log_decay = (None if x is None else x.double() for x in (call.log_k, call.log_decay))
    z = call.z.double()
    plain = call._replace(normalize=False)
    found = definition(plain, [q, k, ones, log_k, log_decay, z[..., None], z])[0][..., 0]
    if log_k is None:
        return found
    ends = [0, q.shape[1]] if call.cu is None else call.cu.tolist()
    before = call.m.double()[:, None]
    largest = [
        torch.cat([before if call.cu is None else before[i : i + 1], log_k[:, a:b]], 1).cummax(1).values[:, 1:]
        for i, (a, b) in enumerate(pairwise(ends))
    ]
    return found * (-torch.cat(largest, 1)).exp().repeat_interleave(q.shape[2] // k.shape[2], 2)


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str, floor: float = 1e-3) -> None:
    error = row_error(actual, expected, floor)
    assert error <= tolerance, f"{what}: error {error:.2e} > {tolerance:.0e}"


def check_forward(call: Call, tolerance: Tolerance = FLOAT32) -> None:
    given = [None if x is None else x.clone() for x in call[:8]]
    out, den, *state = kernels.forward(*call)
    for x, kept in zip(call[:8], given, strict=True):
        assert x is None or torch.equal(x, kept)  # type: ignore[arg-type]
    expected, expected_state = definition(call, [None if x is None else x.double() for x in call[:7]])
    assert out.dtype == call.v.dtype
    assert den.dtype == torch.float32
    close(out, expected, tolerance.out, "out")
    if call.normalize:
        close(den[..., None], denominators(call)[..., None], tolerance.state, "den")
    for name, x, y in zip("Szm", state, expected_state, strict=True):
        assert x.is_contiguous()
        close(x, y, tolerance.state, f"final {name}")


def check_gradients(call: Call, tolerance: Tolerance = FLOAT32, d_out: Tensor | None = None) -> None:
    """Against autograd through the definition, the final states' true sums being part of the loss."""
    g = torch.Generator().manual_seed(7)
    out, den, *state = kernels.forward(*call)
    if d_out is None:
        d_out = guarded(torch.randn(out.shape, generator=g).to(out))
    leaves = [None if x is None else x.double().requires_grad_() for x in call[:7]]
    expected, expected_state = definition(call, leaves)
    weights = [torch.randn(x.shape, generator=g).to(x) for x in state[:2]]
    loss = (expected.double() * d_out.double()).sum()
    expected_state = LinearState(*(x.double() for x in expected_state))
    loss = loss + sum((x * w).sum() for x, w in zip(true_sums(expected_state), weights, strict=True))
    wanted = torch.autograd.grad(loss, [x for x in leaves if x is not None], materialize_grads=True)
    # A true sum is exp(m) S.
    unit = state[2].exp()
    weights = [weights[0] * unit[..., None, None], weights[1] * unit[..., None]]
    arguments = (*call[:9], out, den, call.scale, call.normalize, call.eps)
    found = kernels.backward(d_out, *weights, *arguments)
    given = [(n, x, y) for n, x, y in zip(NAMES, call[:7], found, strict=True) if x is not None]
    for (name, x, actual), y in zip(given, wanted, strict=True):
        assert actual.dtype == x.dtype
        assert actual.shape == x.shape
        close(actual, y, tolerance.grad, f"d{name}", 1.0)


def check_step(call: Call, tolerance: Tolerance = FLOAT32) -> None:
    """The first token by `step`, in place."""
    first = [None if x is None else x[:, :1] for x in call[:5]]
    expected, expected_state = definition(
        call, [*(None if x is None else x.double() for x in first), call.S.double(), call.z.double()]
    )
    state = [guarded(x) for x in (call.S, call.z, call.m)]
    token = [None if x is None else x[:, 0] for x in first]
    out = kernels.step(*token, *state, call.scale, call.normalize, call.eps)  # type: ignore[arg-type]
    close(out, expected[:, 0], tolerance.out, "out")
    for name, x, y in zip("Szm", state, expected_state, strict=True):
        close(x, y, FLOAT32.state, f"state {name}")
