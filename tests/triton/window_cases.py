"""Window attention called as its public op prepares it for a backend, to compare a backend with the reference."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from linearize_kernels import WindowState, reference
from linearize_kernels.state import NOTHING_SEEN, empty_window_state
from linearize_kernels.window_keys import all_keys, find_sinks, is_sink
from torch import Tensor

from tests.numerics.kernel_cases import Inputs, random_like, time_slice, window_inputs
from tests.numerics.tolerances import row_error, tolerance

NEVER = 2**62  # the position of a sink slot that holds no token
# Largest errors of gradients over the largest value of each (0.1 at least: without keys in the sums nothing depends
# on gamma, or on a single key, and the zeros are differences of terms near 1), and of outputs in bfloat16.
LIMITS = {
    "float32 grad": (4e-5, "sums of 300 terms, two of them in one product"),
    "float16 grad": (3e-3, "gradients are rounded to 11 bits, and sums of such roundings"),
    "bfloat16": (6e-3, "outputs are rounded to 8 bits, 2^-8 at most, and so are the sums that they read"),
    "bfloat16 grad": (1e-2, "as the outputs, whose rounding they see, too"),
    "float16 S": (2e-3, "on cards weighted keys are multiplied in tf32, of 11 bits"),
    "bfloat16 S": (1e-2, "on cards weighted keys are rounded to 8 bits before they are multiplied"),
}
GAMMA = 4  # times as much for gamma: terms of all queries, which cancel


class Call(NamedTuple):
    """float64 inputs of the public op, its options, and the state of the tokens before, if there were any."""

    inputs: Inputs
    options: dict[str, Any]
    state: WindowState | None

    def leaves(self) -> dict[str, Tensor]:
        return {n: x for n, x in self.inputs.items() if x is not None}


def make_call(
    T: int, window: int, sinks: int = 0, *, past: int = 0, padded: bool = False, softcap: float | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, **shape: Any,
) -> Call:  # fmt: skip
    """`past` tokens come before the call, and are held in its state. Values can be held in `dtype`."""
    inputs = window_inputs(T=past + T, dtype=torch.float64, seed=seed, **shape)
    inputs = {n: x.to(dtype).double() for n, x in inputs.items()}
    options: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap}
    mask = torch.ones(inputs["q"].shape[:2], dtype=torch.bool)
    if padded:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(mask.shape, generator=generator) < 0.8
        mask[0, : (past + T) // 2] = False
    state = None
    if past:
        piece = time_slice(inputs, 0, past)
        state = reference.window_attention(**piece, **options, mask=mask[:, :past], return_state=True)[1]
        index = (torch.arange(past, past + T) - window).clamp_min(0)
        keys = {n: inputs[n][:, index] for n in ("phi_k", "log_k") if n in inputs}
        inputs = time_slice(inputs, past, past + T) | keys
    return Call(inputs, options | {"mask": mask[:, past:] if padded else None}, state)


def by_reference(call: Call, leaves: dict[str, Tensor], state: WindowState | None) -> tuple[Tensor, ...]:
    """(out, S, z, m)"""
    out, end = reference.window_attention(**leaves, **call.options, initial_state=state, return_state=True)
    return out, end.S, end.z, end.m


def prepared(
    call: Call, leaves: dict[str, Tensor], state: WindowState | None, dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[Any], list[Any]]:
    """The arguments of a backend's forward: tensors, then numbers."""
    call_options, window = call.options, call.options["window"]
    x = {n: value.to(device, dtype) for n, value in leaves.items()}
    q, k, v, phi_q, phi_k = (x[n] for n in ("q", "k", "v", "phi_q", "phi_k"))
    log_q, log_k = x.get("log_q"), x.get("log_k")
    gamma = leaves["gamma"].to(device, torch.float32)
    valid = torch.ones(q.shape[:2], dtype=torch.bool, device=device)
    if call_options["mask"] is not None:
        valid = call_options["mask"].to(device)
        q, k, v, phi_q = (value.masked_fill(~valid[..., None, None], 0) for value in (q, k, v, phi_q))
    given = state
    if state is None:
        state = empty_window_state(
            k, v, rows=q.shape[0], features=phi_q.shape[3], window=window, sinks=call_options["sinks"],
            logs=log_k is not None, dtype=torch.float32,
        )  # fmt: skip
    else:
        sums = (value.to(device, torch.float32) for value in state[:3])
        rest = (value.to(device, dtype) if value.is_floating_point() else value.to(device) for value in state[3:])
        state = WindowState(*sums, *rest)
    keys = all_keys(None if given is None else state, k, v, valid)
    kept = find_sinks(state, k, v, valid, call_options["sinks"])
    folded = max(q.shape[1] + keys.before - window, 0)
    counts = keys.valid[:, :folded] & ~is_sink(kept, keys, folded)
    phi_k = torch.cat([phi_k[:, :folded].masked_fill(~counts[..., None, None], 0), phi_k[:, folded:]], 1)
    if log_k is not None:
        log_k = log_k[:, :folded].float().masked_fill(~counts[..., None], NOTHING_SEEN)
    position = torch.where(kept.filled, kept.position, NEVER)
    tensors = [
        q, keys.k, keys.v, keys.valid, phi_q, phi_k, log_q, log_k, kept.k, kept.v, position, gamma, state.S, state.z,
        state.m,
    ]  # fmt: skip
    return tensors, [window, q.shape[3] ** -0.5, call_options["softcap"] or 0.0, 1e-6]


class Backend(torch.autograd.Function):
    """A backend's forward and backward as one differentiable function of the prepared tensors."""

    @staticmethod
    def forward(ctx: Any, module: Any, numbers: list[Any], *tensors: Any) -> Any:
        out, den, top, S, z, m = module.forward(*tensors, *numbers)
        ctx.save_for_backward(*tensors, out, den, top)
        ctx.module, ctx.numbers = module, numbers
        ctx.mark_non_differentiable(m)
        return out, S, z, m.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        d_out, dS, dz, _ = grads
        saved = ctx.saved_tensors
        found = ctx.module.backward(d_out, dS, dz, *saved, *ctx.numbers)
        dq, dk, dv, dphi_q, dphi_k, dlog_q, dlog_k, dsink_k, dsink_v, dgamma, dS0, dz0 = found
        return (
            None, None, dq, dk, dv, None, dphi_q, dphi_k, dlog_q, dlog_k, dsink_k, dsink_v, None, dgamma, dS0, dz0,
            None,
        )  # fmt: skip


def by_backend(
    module: Any, call: Call, leaves: dict[str, Tensor], state: WindowState | None, dtype: torch.dtype,
    device: str = "cpu",
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors, numbers = prepared(call, leaves, state, dtype, device)
    out, S, z, m = Backend.apply(module, numbers, *tensors)
    if call.options["mask"] is not None:
        out = out.masked_fill(~call.options["mask"].to(device)[..., None, None], 0)
    return out, S, z, m


def with_gradients(call: Call) -> tuple[dict[str, Tensor], WindowState | None, dict[str, Tensor]]:
    """(inputs, state, all of their floating tensors by name) as fresh leaves; m is a constant."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in call.leaves().items()}
    state = call.state
    if state is not None:
        fresh = {
            n: x.detach().clone().requires_grad_()
            for n, x in state._asdict().items()
            if x.is_floating_point() and n != "m" and x.numel()
        }
        state = state._replace(**fresh)
        return leaves, state, leaves | {f"state.{n}": x for n, x in fresh.items()}
    return leaves, None, dict(leaves)


def check(
    module: Any, call: Call, name: Any = "float32", dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    """Output, final sums, and the gradients of all inputs and of the state, against the definition's."""
    found = []
    names: list[str] = []
    for run in (by_reference, partial(by_backend, module, dtype=dtype, device=device)):
        leaves, state, wanted = with_gradients(call)
        outputs = run(call, leaves, state)
        out, S, z, m = outputs
        # The sums are held relative to exp(m). That is their scale and nothing else, in the definition no less.
        scale = (m - m.detach()).exp()
        ends = [out, S * scale[..., None, None], z * scale[..., None]]
        weights = random_like([x.double().cpu() for x in ends], seed=1)
        loss = sum((x.double().cpu() * w).sum() for x, w in zip(ends, weights, strict=True))
        grads = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
        found.append([x.detach().cpu() for x in (*outputs, *grads)])
        names = ["out", "S", "z", "m", *wanted]
    kind = str(name).removeprefix("torch.")
    for i, (what, a, e) in enumerate(zip(names, found[1], found[0], strict=True)):
        if i < 4:
            weighted = what == "S" and "log_k" in call.inputs and device != "cpu" and kind != "float32"
            row = kind if i == 0 else f"{kind} S" if weighted else "float32"
            error, limit = row_error(a, e), LIMITS[row][0] if row in LIMITS else tolerance(row)
        else:
            error = ((a.double() - e.double()).abs().max() / e.abs().max().clamp_min(0.1)).item()
            limit = LIMITS[f"{kind} grad"][0] * (GAMMA if what == "gamma" else 1)
        assert error <= limit, f"{what}: error {error:.2e} > {limit:.0e} ({kind})"
