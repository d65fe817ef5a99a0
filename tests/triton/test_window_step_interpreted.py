"""One token of window attention at a time, interpreted, against the float64 definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linearize_kernels import WindowState, reference
from linearize_kernels.triton_ops import window as kernels

from tests.numerics.kernel_cases import window_inputs
from tests.numerics.tolerances import row_error, tolerance

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of 1": {"window": 1, "sinks": 1},
    "long window": {"window": 40, "steps": 8},
    "groups of 8": {"H": 8, "logs": 2.0, "steps": 8},
    "logs": {"logs": 3.0},
    "large logs": {"logs": 300.0},
    "no sinks": {"sinks": 0, "logs": 1.0},
    "softcap": {"softcap": 1.5},
    "odd dims": {"D": 48, "Dv": 40, "F": 100, "steps": 6},
    "bfloat16": {"dtype": torch.bfloat16, "logs": 1.0},
}


@pytest.mark.parametrize("name", CASES)
def test_steps(name: str) -> None:
    check_steps(name)


def check_steps(name: str, device: str = "cpu") -> None:
    """Tokens one by one, some of them padded, from the empty state on."""
    given = {"window": 5, "sinks": 2, "steps": 14, "softcap": None, "dtype": torch.float32} | CASES[name]
    options = {n: given[n] for n in ("window", "sinks", "softcap")}
    window, steps, dtype = given["window"], given["steps"], given["dtype"]
    shape = {"B": 2, "H": 2, "Hk": 1, "D": 16, "F": 24}
    shape |= {n: x for n, x in given.items() if n in ("H", "D", "Dv", "F", "logs")}
    inputs = window_inputs(T=steps, dtype=torch.float64, **shape)
    inputs = {n: x.to(dtype).double() for n, x in inputs.items()}
    mask = torch.rand(2, steps, generator=torch.Generator().manual_seed(0)) < 0.8
    mask[0, :3] = False
    expected = None
    state = None
    for t in range(steps):
        token = {n: x if n == "gamma" else x[:, t : t + 1] for n, x in inputs.items()}
        leaving = {n: inputs[n][:, [max(t - window, 0)]] for n in ("phi_k", "log_k") if n in inputs}
        if expected is None:  # the reference's empty state is its own
            first = {n: x if n == "gamma" else x[:, :0] for n, x in token.items()}
            expected = reference.window_attention(**first, **options, return_state=True)[1]
            state = as_held(expected, dtype, device)
        out, expected = reference.window_attention(
            **token | leaving, **options, initial_state=expected, return_state=True, mask=mask[:, t : t + 1]
        )
        assert state is not None
        actual = one_step(token | leaving, state, mask[:, t].to(device), options["softcap"], dtype)
        limit = tolerance("float32 logs") if name == "large logs" else tolerance("float32")
        error = row_error(actual.cpu(), out[:, 0])
        # bfloat16 rounds by 2^-8 at most, the output and, on a card, the weights.
        assert error <= (6e-3 if dtype == torch.bfloat16 else limit), f"token {t}: {error:.1e}"
        found = in_order(WindowState(*(x.cpu() for x in state)))
        for x, other, what in zip(found, expected, expected._fields, strict=True):
            if what in ("S", "z", "m"):
                assert row_error(x, other) <= limit, f"token {t}: {what}"
            else:
                assert torch.equal(x.double(), other.double()), f"token {t}: {what}"


def as_held(state: WindowState, dtype: torch.dtype, device: str) -> WindowState:
    sums = (x.to(device, torch.float32).clone() for x in state[:3])
    rest = (x.to(device, dtype if x.is_floating_point() else x.dtype).clone() for x in state[3:])
    return WindowState(*sums, *rest)


def in_order(state: WindowState) -> WindowState:
    ring = {n: state.ring(getattr(state, n)) for n in ("k", "v", "valid")}
    return state._replace(**ring, start=torch.zeros_like(state.start))


def one_step(
    token: dict[str, torch.Tensor], state: WindowState, valid: torch.Tensor, softcap: float | None, dtype: torch.dtype
) -> torch.Tensor:
    device = valid.device
    x = {n: (value if n == "gamma" else value[:, 0]).to(device, dtype) for n, value in token.items()}
    q, k, v, phi_q = (x[n].masked_fill(~valid[:, None, None], 0) for n in ("q", "k", "v", "phi_q"))
    logs = [None if x.get(n) is None else x[n].float() for n in ("log_q", "log_k")]
    if logs[0] is not None:
        logs[0] = logs[0].masked_fill(~valid[:, None], 0)
    out = kernels.step(
        q, k, v, valid, phi_q, x["phi_k"], *logs, x["gamma"].float(), *state, q.shape[2] ** -0.5, softcap or 0.0, 1e-6
    )
    return out.masked_fill(~valid[:, None, None], 0)
