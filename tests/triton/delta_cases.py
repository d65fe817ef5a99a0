"""Calls of the Triton delta rule and their comparison with the float64 definition, on any device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from linearize_kernels import DeltaState, reference
from linearize_kernels.triton_ops import delta as kernels
from torch import Tensor

from tests.numerics.kernel_cases import delta_inputs, guarded
from tests.triton.cases import Tolerance, close

NAMES = ("q", "k", "v", "beta", "log_decay", "S")


# Rows for outputs and states, whole tensors for gradients, as in tests/numerics/tolerances.py.
# Differences, which may cancel; and after gates of -264 in a chunk float32 sums of gates are good to 1.5e-5.
FLOAT32 = Tolerance(2e-4, 2e-4, 5e-5)
# The interpreter computes in float32: what is left is the rounding of outputs and gradients to 8 bits, 2^-8 at most.
BFLOAT16 = Tolerance(5e-3, 2e-4, 5e-3)
# On a card terms of products and what is kept for them are rounded to 8 bits, too, once in every pass: 1.1e-2 where
# the interpreter was made to round so.
BFLOAT16_CARD = Tolerance(2e-2, 2e-2, 2e-2)
# The same with 11 bits, of fp16 or of tf32.
FLOAT16_CARD = Tolerance(3e-3, 3e-3, 3e-3)


class Call(NamedTuple):
    """Arguments of the op; S (N, Hk, F, Dv)."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    S: Tensor
    cu: Tensor | None
    scale: float = 0.3


def make_call(
    T: int, decay: str | None = None, *, B: int = 1, H: int = 2, Hk: int = 1, F: int = 16, Dv: int = 16,
    dtype: torch.dtype = torch.float32, cu: list[int] | None = None, device: str = "cpu", seed: int = 0,
) -> Call:  # fmt: skip
    """`decay`: by "head", "token" or "feature", with gates of -50 and -1e4 among those by token and feature."""
    inputs: dict[str, Any] = delta_inputs(B, T, H, Hk, F, Dv, dtype=dtype, decay=decay, seed=seed)
    log = inputs.pop("log_decay", None)
    if log is not None:
        log = log.float()
        if decay == "head":
            log = log.expand(B, T, Hk)
        elif T > 5:
            log[:, T // 3, 0] = -1e4
            log[:, T // 2 : T // 2 + 4, -1] = -50.0
        log = log.to(device) if decay == "head" else guarded(log.to(device))
    rows = B if cu is None else len(cu) - 1
    S = torch.randn(rows, Hk, F, Dv, generator=torch.Generator().manual_seed(seed + 1))
    tensors = [guarded(inputs[name].to(device)) for name in NAMES[:4]]
    at = None if cu is None else torch.tensor(cu, device=device)
    return Call(*tensors, log, guarded(S.to(device)), at)


def expected(call: Call) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves in float64, the output, and the final states."""
    leaves = [x.double().requires_grad_() for x in call[:6] if x is not None]
    log = leaves[4] if call.log_decay is not None else None
    out, state = reference.delta_rule(
        *leaves[:4], log_decay=log, scale=call.scale, initial_state=DeltaState(leaves[-1]), return_state=True,
        cu_seqlens=call.cu,
    )  # fmt: skip
    return leaves, out, state.S


def check_forward(call: Call, tolerance: Tolerance = FLOAT32) -> None:
    _, want, want_S = expected(call)
    out, S = kernels.forward(*call)
    assert (out.dtype, S.dtype) == (call.v.dtype, torch.float32)
    close(out, want, tolerance.out, "output")
    close(S, want_S, tolerance.state, "state")


def check_gradients(call: Call, tolerance: Tolerance = FLOAT32, d_out: Tensor | None = None) -> None:
    leaves, want, want_S = expected(call)
    g = torch.Generator().manual_seed(7)
    if d_out is None:
        d_out = torch.randn(want.shape, generator=g).to(call.v)
    dS = torch.randn(want_S.shape, generator=g).to(call.S)
    wanted = iter(torch.autograd.grad((want * d_out).sum() + (want_S * dS).sum(), leaves))
    found = kernels.backward(guarded(d_out) if d_out.is_contiguous() else d_out, guarded(dS), *call)
    for name, x, grad in zip(NAMES, call[:6], found, strict=True):
        if x is None:
            assert grad is None
            continue
        assert grad is not None
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype), name
        close(grad, next(wanted), tolerance.grad, f"d{name}", 1.0)


def check_step(call: Call, tolerance: Tolerance = FLOAT32) -> None:
    """The first token alone; S changes in place."""
    first = Call(*(x[:, :1] for x in call[:4]), None if call.log_decay is None else call.log_decay[:, :1], *call[5:])
    _, want, want_S = expected(first)
    S = call.S.clone()
    log = None if call.log_decay is None else call.log_decay[:, 0]
    out = kernels.step(call.q[:, 0], call.k[:, 0], call.v[:, 0], call.beta[:, 0], log, S, call.scale)
    close(out, want[:, 0], tolerance.out, "output")
    close(S, want_S, min(tolerance.state, 2e-4), "state")
