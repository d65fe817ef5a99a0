"""Feature maps that are ops of their own: their steps, one by one, would cost more than the attention after them."""

# Not `from __future__ import annotations`: the schemas are read from these.
from typing import Any

import torch
from torch import Tensor

from . import checks
from .custom import dense, dispatched, run


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
