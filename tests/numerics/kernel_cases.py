"""Inputs of the kernel tests, and calls that feed a sequence to an op piece by piece."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from linearize_kernels import DeltaState, WindowState, delta_rule, linear_attention, window_attention
from torch import Tensor

Inputs = dict[str, Any]


def linear_inputs(
    B: int = 2, T: int = 64, H: int = 2, Hk: int | None = None, F: int = 8, Dv: int | None = None, *,
    dtype: torch.dtype = torch.float64, logs: float | None = None, decay: str | None = None, seed: int = 0,
) -> Inputs:  # fmt: skip
    """q, k = rand + 0.1, v normal; `logs`: spread of log_k; `decay`: by "head", "token" or "feature"."""
    g = torch.Generator().manual_seed(seed)
    Hk = H if Hk is None else Hk
    inputs = {
        "q": (torch.rand(B, T, H, F, generator=g) + 0.1).to(dtype),
        "k": (torch.rand(B, T, Hk, F, generator=g) + 0.1).to(dtype),
        "v": torch.randn(B, T, Hk, F if Dv is None else Dv, generator=g).to(dtype),
    }
    if logs is not None:
        inputs["log_k"] = (torch.randn(B, T, Hk, generator=g) * logs).to(dtype)
    return inputs | _decay(decay, inputs["k"], g)


def delta_inputs(
    B: int = 2, T: int = 64, H: int = 2, Hk: int | None = None, F: int = 8, Dv: int | None = None, *,
    dtype: torch.dtype = torch.float64, decay: str | None = None, seed: int = 0,
) -> Inputs:  # fmt: skip
    """q, v normal, k of length 1, beta in (0, 1); `decay` as in `linear_inputs`."""
    g = torch.Generator().manual_seed(seed)
    Hk = H if Hk is None else Hk
    k = torch.randn(B, T, Hk, F, generator=g)
    inputs = {
        "q": torch.randn(B, T, H, F, generator=g).to(dtype),
        "k": (k / k.norm(dim=-1, keepdim=True)).to(dtype),
        "v": torch.randn(B, T, Hk, F if Dv is None else Dv, generator=g).to(dtype),
        "beta": torch.rand(B, T, Hk, generator=g).to(dtype),
    }
    return inputs | _decay(decay, inputs["k"], g)


def _decay(kind: str | None, k: Tensor, g: torch.Generator) -> Inputs:
    """log_decay, most of it near 0, some at -3."""
    if kind is None:
        return {}
    dims = {"head": k.shape[2:3], "token": k.shape[:3], "feature": k.shape}[kind]
    return {"log_decay": (-3 * torch.rand(dims, generator=g) ** 3).to(k.dtype)}


# Every form of the two recurrent ops: the op, what makes its inputs, and the options of that.
FORMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "linear": (linear_attention, linear_inputs, {}),
    "linear, log scales": (linear_attention, linear_inputs, {"logs": 1.5}),
    "linear, decay by head": (linear_attention, linear_inputs, {"decay": "head"}),
    "linear, decay by token": (linear_attention, linear_inputs, {"decay": "token"}),
    "linear, decay by feature": (linear_attention, linear_inputs, {"decay": "feature"}),
    "delta": (delta_rule, delta_inputs, {}),
    "delta, decay by head": (delta_rule, delta_inputs, {"decay": "head"}),
    "delta, decay by token": (delta_rule, delta_inputs, {"decay": "token"}),
    "delta, decay by feature": (delta_rule, delta_inputs, {"decay": "feature"}),
}


def true_sums(state: Any) -> list[Tensor]:
    """The sums of a state, but for its scale m, which is no differentiable quantity."""
    if isinstance(state, DeltaState):
        return [state.S]
    return [state.S * state.m.exp()[..., None, None], state.z * state.m.exp()[..., None]]


def in_order(state: Any) -> Any:
    """The state with the oldest slot of its ring first, if it has one."""
    if not isinstance(state, WindowState):
        return state
    ring = {name: state.ring(getattr(state, name)) for name in ("k", "v", "valid")}
    return state._replace(**ring, start=torch.zeros_like(state.start))


def window_inputs(
    B: int = 2, T: int = 64, H: int = 2, Hk: int | None = None, D: int = 8, Dv: int | None = None, F: int = 6,
    *, dtype: torch.dtype = torch.float64, logs: float | None = None, seed: int = 0,
) -> Inputs:  # fmt: skip
    """q, k, v normal, features rand + 0.1, gamma in (0, 1); `logs`: spread of log_q, log_k."""
    g = torch.Generator().manual_seed(seed)
    Hk = H if Hk is None else Hk
    inputs = {
        "q": torch.randn(B, T, H, D, generator=g).to(dtype),
        "k": torch.randn(B, T, Hk, D, generator=g).to(dtype),
        "v": torch.randn(B, T, Hk, D if Dv is None else Dv, generator=g).to(dtype),
        "phi_q": (torch.rand(B, T, H, F, generator=g) + 0.1).to(dtype),
        "phi_k": (torch.rand(B, T, Hk, F, generator=g) + 0.1).to(dtype),
        "gamma": torch.rand(H, generator=g).to(dtype),
    }
    if logs is not None:
        inputs["log_q"] = (torch.randn(B, T, H, generator=g) * logs).to(dtype)
        inputs["log_k"] = (torch.randn(B, T, Hk, generator=g) * logs).to(dtype)
    return inputs


def guarded(x: Tensor) -> Tensor:
    """x in memory that goes on with NaN, which whatever reads past the end would bring in."""
    memory = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype, device=x.device)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


def random_mask(B: int, T: int, keep: float = 0.7, seed: int = 0) -> Tensor:
    return torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < keep


def random_like(tensors: list[Tensor], seed: int = 0) -> list[Tensor]:
    """Normal draws, one tensor for each."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in tensors]


def time_slice(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The tokens from start to stop of every tensor that has a time dim: not of gamma, nor of a decay by head."""
    return {n: x if x is None or x.dim() == 1 else x[:, start:stop] for n, x in inputs.items()}


def run_split(
    op: Any, inputs: Inputs, cuts: list[int], *, state: Any = None, window: int | None = None, **options: Any
) -> tuple[Tensor, Any]:
    """Feed [0, cuts..., T) to `op`, carrying the state; the outputs joined, and the last state."""
    length = inputs["q"].shape[1]
    borders = [0, *sorted(cuts), length]
    outs = []
    for start, stop in pairwise(borders):
        piece = time_slice(inputs, start, stop)
        if window is not None:
            options["window"] = window
            if state is not None:
                # The keys that leave the window are `window` positions back; before the first, any will do.
                index = (torch.arange(start, stop) - window).clamp_min(0)
                for name in ("phi_k", "log_k"):
                    if inputs.get(name) is not None:
                        piece[name] = inputs[name][:, index]
        out, state = op(**piece, initial_state=state, return_state=True, **options)
        outs.append(out)
    return torch.cat(outs, 1), state


def split_linear(inputs: Inputs, cuts: list[int], **options: Any) -> tuple[Tensor, Any]:
    return run_split(linear_attention, inputs, cuts, **options)


def split_window(inputs: Inputs, cuts: list[int], *, window: int, **options: Any) -> tuple[Tensor, Any]:
    return run_split(window_attention, inputs, cuts, window=window, **options)


def gradients(inputs: Inputs, outputs: list[Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of sum(output * weight) by every input that requires one; zeros where it has no effect."""
    wanted = {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    loss = sum((o.double() * w.double()).sum() for o, w in zip(outputs, weights, strict=True))
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True), strict=True))


def with_grad(inputs: Inputs) -> Inputs:
    """Fresh leaves with the same values, the floating ones requiring gradients."""
    return {
        n: x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in inputs.items()
    }
