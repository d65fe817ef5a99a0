"""The ops as `torch.library` custom ops: one node in a compiled graph each, whichever backend runs.

The backend is chosen inside, on real tensors, so that tracing never has to look at compilers or drivers. Masks,
defaults and checks are `ops`'s: here all tensors fit together, T and N are at least 1, and states are given.
Every op has its shapes (`register_fake`) and, but for the one-token steps, its gradient, which is an op of its own.
"""

# Not `from __future__ import annotations`: the schemas are read from these.
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import layout
from .dispatch import choose, implementation

Grads = list[Tensor]


@contextmanager
def _full_precision(x: Tensor) -> Iterator[None]:
    """Autocast off: it would run the products of float32 sums in half precision."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            yield
    else:
        yield


def dispatched(x: Tensor) -> bool:
    """Whether a call has to go through torch's dispatcher: in a trace, and for anything but plain tensors.

    Otherwise a step, which has no gradient, is run at once: the way there takes longer than its arithmetic on a CPU.
    """
    return torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type == "meta"


def run(op: str, function: str, backend: str, named: dict[str, Any], options: tuple[Any, ...] = ()) -> Any:
    """`function` of the chosen backend on the values of `named`, in order, then `options`."""
    layout.check(op, function == "step", named)
    chosen = choose(op, {n: x for n, x in named.items() if isinstance(x, Tensor)}, backend or None).backend
    with _full_precision(next(iter(named.values()))):
        return getattr(implementation(chosen, op), function)(*named.values(), *options)


def dense(tensors: Any, place: Tensor) -> Grads:
    """Contiguous tensors, and an empty one like `place` for each None, which custom ops can't return."""
    return [place.new_empty(0) if x is None else x.contiguous() for x in tensors]


def like(place: Tensor, *tensors: Tensor | None) -> Grads:
    """What `dense` gives for tensors shaped like these, in a trace."""
    return [
        place.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors
    ]


def _or_none(grads: Grads, inputs: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if x is None else grad for grad, x in zip(grads, inputs, strict=True)]


# Linear attention


@torch.library.custom_op("linearize::linear_attention", mutates_args=())
def linear(
    q: Tensor, k: Tensor, v: Tensor, log_k: Tensor | None, log_decay: Tensor | None, S: Tensor, z: Tensor, m: Tensor,
    cu_seqlens: Tensor | None, scale: float, normalize: bool, eps: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    named = {"q": q, "k": k, "v": v, "log_k": log_k, "log_decay": log_decay, "S": S, "z": z, "m": m}
    named["cu_seqlens"] = cu_seqlens
    out, den, S_end, z_end, m_end = run("linear_attention", "forward", backend, named, (scale, normalize, eps))
    den = den if normalize else S.new_empty(0)
    m_end = m_end.clone() if m_end is m else m_end
    return tuple(dense((out, den, S_end, z_end, m_end), q))  # pyright: ignore


@linear.register_fake
def _(q, k, v, log_k, log_decay, S, z, m, cu_seqlens, scale, normalize, eps, backend):
    out = v.new_empty(*q.shape[:3], v.shape[3])
    den = S.new_empty(q.shape[:3] if normalize else 0)
    return out, den, *like(q, S, z, m)


@torch.library.custom_op("linearize::linear_attention_backward", mutates_args=())
def linear_backward(
    d_out: Tensor, dS: Tensor, dz: Tensor, q: Tensor, k: Tensor, v: Tensor, log_k: Tensor | None,
    log_decay: Tensor | None, S: Tensor, z: Tensor, m: Tensor, cu_seqlens: Tensor | None, out: Tensor, den: Tensor,
    scale: float, normalize: bool, eps: float, backend: str,
) -> list[Tensor]:  # fmt: skip
    named = {"d_out": d_out, "dS": dS, "dz": dz, "q": q, "k": k, "v": v, "log_k": log_k, "log_decay": log_decay}
    named |= {"S": S, "z": z, "m": m, "cu_seqlens": cu_seqlens, "out": out, "den": den}
    return dense(run("linear_attention", "backward", backend, named, (scale, normalize, eps)), q)


@linear_backward.register_fake
def _(d_out, dS, dz, q, k, v, log_k, log_decay, S, z, m, cu_seqlens, out, den, scale, normalize, eps, backend):
    return like(q, q, k, v, log_k, log_decay, S, z)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9], output[0], output[1])
    ctx.options = inputs[9:]


def _linear_gradient(ctx: Any, d_out: Tensor, _den: Any, dS: Tensor, dz: Tensor, _m: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv, dlog_k, dlog_decay, dS0, dz0 = _or_none(linear_backward(d_out, dS, dz, *saved, *ctx.options), saved[:7])
    return dq, dk, dv, dlog_k, dlog_decay, dS0, dz0, None, None, None, None, None, None


linear.register_autograd(_linear_gradient, setup_context=_keep_linear)


def linear_step_now(
    q: Tensor, k: Tensor, v: Tensor, log_k: Tensor | None, log_decay: Tensor | None, S: Tensor, z: Tensor, m: Tensor,
    scale: float, normalize: bool, eps: float, backend: str,
) -> Tensor:  # fmt: skip
    named = {"q": q, "k": k, "v": v, "log_k": log_k, "log_decay": log_decay, "S": S, "z": z, "m": m}
    return run("linear_attention", "step", backend, named, (scale, normalize, eps)).contiguous()


linear_step = torch.library.custom_op("linearize::linear_attention_step", linear_step_now, mutates_args=("S", "z", "m"))


@linear_step.register_fake
def _(q, k, v, log_k, log_decay, S, z, m, scale, normalize, eps, backend):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


# Delta rule


@torch.library.custom_op("linearize::delta_rule", mutates_args=())
def delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor, cu_seqlens: Tensor | None,
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    named = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "S": S, "cu_seqlens": cu_seqlens}
    return tuple(dense(run("delta_rule", "forward", backend, named, (scale,)), q))  # pyright: ignore


@delta.register_fake
def _(q, k, v, beta, log_decay, S, cu_seqlens, scale, backend):
    return v.new_empty(*q.shape[:3], v.shape[3]), *like(q, S)


@torch.library.custom_op("linearize::delta_rule_backward", mutates_args=())
def delta_backward(
    d_out: Tensor, dS: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor,
    cu_seqlens: Tensor | None, scale: float, backend: str,
) -> list[Tensor]:  # fmt: skip
    named = {"d_out": d_out, "dS": dS, "q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "S": S}
    named["cu_seqlens"] = cu_seqlens
    return dense(run("delta_rule", "backward", backend, named, (scale,)), q)


@delta_backward.register_fake
def _(d_out, dS, q, k, v, beta, log_decay, S, cu_seqlens, scale, backend):
    return like(q, q, k, v, beta, log_decay, S)


def _keep_delta(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _delta_gradient(ctx: Any, d_out: Tensor, dS: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    grads = _or_none(delta_backward(d_out, dS, *saved, *ctx.options), saved[:6])
    return *grads, None, None, None


delta.register_autograd(_delta_gradient, setup_context=_keep_delta)


def delta_step_now(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor, scale: float, backend: str
) -> Tensor:
    named = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "S": S}
    return run("delta_rule", "step", backend, named, (scale,)).contiguous()


delta_step = torch.library.custom_op("linearize::delta_rule_step", delta_step_now, mutates_args=("S",))


@delta_step.register_fake
def _(q, k, v, beta, log_decay, S, scale, backend):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])
