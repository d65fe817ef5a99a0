"""Feature maps that are ops of their own: their steps, one by one, would cost more than the attention after them."""

# Not `from __future__ import annotations`: the schemas are read from these.
from typing import Any

import torch
from torch import Tensor

from . import checks
from .custom import dense, dispatched, run
from .state import accumulate_dtype


def hedgehog_features(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """[softmax(x W), softmax(-x W)] head by head (Zhang et al. 2024, arXiv:2402.04347).

    x (B, T, H, D), weight W (H, D, E), each floating point: (B, T, H, 2 E) in x's dtype, float32 inside (float64 for
    float64 inputs). Raises ValueError for arguments that don't fit together, and for an unusable backend.
    """
    if not torch.compiler.is_compiling():
        checks.shape("x", x, (None, None, None, None), "(B, T, H, D)")
        checks.shape("weight", weight, (x.shape[2], x.shape[3], None), "(H, D, E)")
        checks.floating(x, "x", x=x, weight=weight)
    if not x.numel() or not weight.numel():
        return x.new_zeros(*x.shape[:3], 2 * weight.shape[2])
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return (_hedgehog if grad or dispatched(x) else _hedgehog_now)(x, weight, backend or "")


def favor_features(
    x: Tensor, omega: Tensor, *, scale: float, hyperbolic: bool = True, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Positive random features of the softmax kernel, FAVOR+ (Choromanski et al. 2020, arXiv:2009.14794).

        exp(log) phi = exp(w.u - |u|^2 / 2) / sqrt(F)    u = sqrt(scale) x

    for each row w of omega (M, D), and for -w, too, if `hyperbolic`: x (B, T, H, D), both floating point, gives phi
    (B, T, H, F) in x's dtype, the largest of each row 1 / sqrt(F), and log (B, T, H) in float32 (float64 for float64
    inputs). F is 2 M if `hyperbolic`, else M. With rows from N(0, I), E[phi(q).phi(k)] = exp(scale q.k).

    Gradients flow to x alone, and are those of the true features: what moves between phi and log has none. Raises
    ValueError for arguments that don't fit together, an omega that requires a gradient, and an unusable backend.
    """
    if not torch.compiler.is_compiling():
        checks.shape("x", x, (None, None, None, None), "(B, T, H, D)")
        checks.shape("omega", omega, (None, x.shape[3]), "(M, D)")
        checks.floating(x, "x", x=x, omega=omega)
        checks.require(scale >= 0, f"scale must be at least 0, not {scale}")
        checks.require(omega.shape[0] > 0, "omega has no rows")
        checks.require(not omega.requires_grad, "omega takes no gradient: detach it")
    if not x.numel():
        size = omega.shape[0] * (2 if hyperbolic else 1)
        return x.new_zeros(*x.shape[:3], size), x.new_zeros(x.shape[:3], dtype=accumulate_dtype(x))
    grad = torch.is_grad_enabled() and x.requires_grad
    op = _favor if grad or dispatched(x) else _favor_now
    return op(x, omega, float(scale), hyperbolic, backend or "")


def _hedgehog_now(x: Tensor, weight: Tensor, backend: str) -> Tensor:
    return run("hedgehog_features", "forward", backend, {"x": x, "weight": weight}).contiguous()


_hedgehog = torch.library.custom_op("linearize::hedgehog_features", _hedgehog_now, mutates_args=())


@_hedgehog.register_fake
def _(x, weight, backend):
    return x.new_empty(*x.shape[:3], 2 * weight.shape[2])


@torch.library.custom_op("linearize::hedgehog_features_backward", mutates_args=())
def _hedgehog_backward(
    d_phi: Tensor, x: Tensor, weight: Tensor, phi: Tensor, backend: str, wanted: bool
) -> list[Tensor]:
    named = {"d_phi": d_phi, "x": x, "weight": weight, "phi": phi}
    return dense(run("hedgehog_features", "backward", backend, named, (wanted,)), x)


@_hedgehog_backward.register_fake
def _(d_phi, x, weight, phi, backend, wanted):
    return [torch.empty_like(x) if wanted else x.new_empty(0), torch.empty_like(weight)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output)
    ctx.backend = inputs[2]


def _gradient(ctx: Any, d_phi: Tensor) -> tuple[Any, ...]:
    wanted = ctx.needs_input_grad[0]
    dx, d_weight = _hedgehog_backward(d_phi, *ctx.saved_tensors, ctx.backend, wanted)
    return dx if wanted else None, d_weight, None


_hedgehog.register_autograd(_gradient, setup_context=_keep)


def _favor_now(x: Tensor, omega: Tensor, scale: float, hyperbolic: bool, backend: str) -> tuple[Tensor, Tensor]:
    phi, log = run("favor_features", "forward", backend, {"x": x, "omega": omega}, (scale, hyperbolic))
    return phi.contiguous(), log.contiguous()


_favor = torch.library.custom_op("linearize::favor_features", _favor_now, mutates_args=())


@_favor.register_fake
def _(x, omega, scale, hyperbolic, backend):
    phi = x.new_empty(*x.shape[:3], omega.shape[0] * (2 if hyperbolic else 1))
    return phi, x.new_empty(x.shape[:3], dtype=accumulate_dtype(x))


@torch.library.custom_op("linearize::favor_features_backward", mutates_args=())
def _favor_backward(
    d_phi: Tensor, d_log: Tensor, x: Tensor, omega: Tensor, phi: Tensor, scale: float, hyperbolic: bool, backend: str
) -> Tensor:
    named = {"d_phi": d_phi, "d_log": d_log, "x": x, "omega": omega, "phi": phi}
    return run("favor_features", "backward", backend, named, (scale, hyperbolic)).contiguous()


@_favor_backward.register_fake
def _(d_phi, d_log, x, omega, phi, scale, hyperbolic, backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_favor(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[0])
    ctx.options = inputs[2:]


def _favor_gradient(ctx: Any, d_phi: Tensor, d_log: Tensor) -> tuple[Any, ...]:
    return _favor_backward(d_phi, d_log, *ctx.saved_tensors, *ctx.options), None, None, None, None


_favor.register_autograd(_favor_gradient, setup_context=_keep_favor)
