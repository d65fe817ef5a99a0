"""Window attention as `torch.library` custom ops; see `custom`."""

# Not `from __future__ import annotations`: the schemas are read from these.
from typing import Any

import torch
from torch import Tensor

from .custom import dense, like, run
from .dispatch import choose

INPUTS = (
    "q", "keys", "values", "valid", "phi_q", "phi_k", "log_q", "log_k", "sink_k", "sink_v", "sink_position", "gamma",
    "S", "z", "m",
)  # fmt: skip


NEAR = (0, 1, 2, 7, 8)  # of the gradients, those of q, keys, values and sinks


@torch.library.custom_op("linearize::window_attention", mutates_args=())
def window(
    q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, phi_q: Tensor, phi_k: Tensor, log_q: Tensor | None,
    log_k: Tensor | None, sink_k: Tensor, sink_v: Tensor, sink_position: Tensor, gamma: Tensor, S: Tensor, z: Tensor,
    m: Tensor, width: int, scale: float, softcap: float, eps: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = (q, keys, values, valid, phi_q, phi_k, log_q, log_k, sink_k, sink_v, sink_position, gamma, S, z, m)
    named: dict[str, Any] = dict(zip(INPUTS, inputs, strict=True))
    out, den, top, S_end, z_end, m_end = run(
        "window_attention", "forward", backend, named, (width, scale, softcap, eps)
    )
    ends = (new.clone() if new is old else new for new, old in zip((S_end, z_end, m_end), (S, z, m), strict=True))
    return tuple(dense((out, den, top, *ends), q))  # pyright: ignore


@window.register_fake
def _(q, keys, values, valid, phi_q, phi_k, log_q, log_k, sink_k, sink_v, sink_position, gamma, S, z, m, *options):
    out = values.new_empty(*q.shape[:3], values.shape[3])
    return out, S.new_empty(q.shape[:3]), S.new_empty(q.shape[:3]), *like(q, S, z, m)


@torch.library.custom_op("linearize::window_attention_backward", mutates_args=())
def window_backward(
    d_out: Tensor, dS: Tensor, dz: Tensor, q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, phi_q: Tensor,
    phi_k: Tensor, log_q: Tensor | None, log_k: Tensor | None, sink_k: Tensor, sink_v: Tensor, sink_position: Tensor,
    gamma: Tensor, S: Tensor, z: Tensor, m: Tensor, out: Tensor, den: Tensor, top: Tensor, width: int, scale: float,
    softcap: float, eps: float, backend: str, exact: bool,
) -> list[Tensor]:  # fmt: skip
    if not exact and not (gamma.device.type == "cpu" and (gamma == 0).any()):
        far = _far_backward(
            d_out, dS, dz, values, phi_q, phi_k, log_q, log_k, gamma, S, z, m, out, den, top, width, eps, backend
        )
        return dense((None, None, None, *far[:4], None, None, *far[4:]), q)
    inputs = (q, keys, values, valid, phi_q, phi_k, log_q, log_k, sink_k, sink_v, sink_position, gamma, S, z, m)
    named: dict[str, Any] = {"d_out": d_out, "dS": dS, "dz": dz} | dict(zip(INPUTS, inputs, strict=True))
    named |= {"out": out, "den": den, "top": top}
    grads = list(run("window_attention", "backward", backend, named, (width, scale, softcap, eps)))
    if not exact:
        grads = [None if i in NEAR else grad for i, grad in enumerate(grads)]
    return dense(grads, q)


@window_backward.register_fake
def _(
    d_out, dS, dz, q, keys, values, valid, phi_q, phi_k, log_q, log_k, sink_k, sink_v, sink_position, gamma, S, z, m,
    out, den, top, width, scale, softcap, eps, backend, exact,
):  # fmt: skip
    near = (q, keys, values, sink_k, sink_v) if exact else (None,) * 5
    return like(q, *near[:3], phi_q, phi_k, log_q, log_k, *near[3:], gamma, S, z)


def _far_backward(
    d_out: Tensor, dS: Tensor, dz: Tensor, values: Tensor, phi_q: Tensor, phi_k: Tensor, log_q: Tensor | None,
    log_k: Tensor | None, gamma: Tensor, S: Tensor, z: Tensor, m: Tensor, out: Tensor, den: Tensor, top: Tensor,
    width: int, eps: float, backend: str,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of phi_q, phi_k, log_q, log_k, gamma, S and z alone, which need no softmax weights.

    Attention transfer trains nothing else. With output and denominator given, the linear part's gradient is that of
    linear attention. Scaling all weights of a query changes nothing, so that gamma's share of the gradient is the
    linear part's with the sign turned; but where the denominator is floored. It is divided by gamma: a gamma of 0 takes
    the long way on a CPU, and gives NaN on a GPU, which would have to be waited for.
    """
    length = phi_q.shape[1]
    folded = max(values.shape[1] - width, 0)
    first = length - folded
    floored = den < eps
    share = torch.zeros_like(den)
    if den.device.type != "cpu" or floored.any():  # which a GPU would have to be waited for
        share = torch.where(floored, (d_out.to(den.dtype) * out.to(den.dtype)).sum(-1), 0.0)
    dphi_q, dphi_k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (phi_q, phi_k))
    dphi_q[:, :first], dphi_k[:, folded:] = 0, 0  # the rest is written below
    dlog_q, dlog_k = (None if x is None else torch.zeros_like(x) for x in (log_q, log_k))
    if not folded:
        return dphi_q, dphi_k, dlog_q, dlog_k, share.sum((0, 1)) / gamma, dS.clone(), dz.clone()
    logs = None if log_k is None else log_k[:, :folded]
    d_out, out, den, floored = (x[:, first:] for x in (d_out, out, den, floored))
    if log_q is not None and logs is not None:
        # As linear attention has it, relative to the largest key so far; a floor stays relative to the top.
        largest = torch.maximum(logs.cummax(1).values, m[:, None]).repeat_interleave(log_q.shape[2] // m.shape[1], 2)
        below = top[:, first:] - log_q[:, first:] - largest
        den = torch.where(floored, -1.0, den * below.exp())
        d_out = d_out * torch.where(floored, (-below).exp(), 1.0)[..., None].to(d_out.dtype)
    named = {
        "d_out": d_out, "dS": dS, "dz": dz, "q": phi_q[:, first:], "k": phi_k[:, :folded], "v": values[:, :folded],
        "log_k": logs, "log_decay": None, "S": S, "z": z, "m": m, "cu_seqlens": None, "out": out, "den": den,
    }  # fmt: skip
    tensors = {n: x for n, x in named.items() if x is not None}
    if choose("linear_attention", tensors, backend or None).backend == "cpu":
        options = (1.0, True, eps, dphi_q[:, first:], dphi_k[:, :folded])
        dlog, dS0, dz0, far = run("linear_attention", "features_backward", backend, named, options)
    else:
        dq, dk, _, dlog, _, dS0, dz0 = run("linear_attention", "backward", backend, named, (1.0, True, eps))
        dphi_q[:, first:], dphi_k[:, :folded] = dq, dk
        far = (phi_q[:, first:].to(den.dtype) * dq.to(den.dtype)).sum(-1)
    share[:, first:] -= far
    if dlog_q is not None and dlog_k is not None:
        dlog_q[:, first:], dlog_k[:, :folded] = far, dlog
    return dphi_q, dphi_k, dlog_q, dlog_k, share.sum((0, 1)) / gamma, dS0, dz0


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:15], *output[:3])
    ctx.options = inputs[15:]


def _gradient(ctx: Any, d_out: Tensor, _den: Any, _top: Any, dS: Tensor, dz: Tensor, _m: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    needed = ctx.needs_input_grad
    exact = any(needed[:3]) or any(needed[8:10])  # q, keys, values, sink_k, sink_v
    grads = window_backward(d_out, dS, dz, *saved, *ctx.options, exact)
    floating = (*saved[:3], *saved[4:10], *saved[11:14])
    dq, dkeys, dvalues, *features, dgamma, dS0, dz0 = (
        None if x is None or (i in NEAR and not exact) else grad
        for i, (x, grad) in enumerate(zip(floating, grads, strict=True))
    )
    return dq, dkeys, dvalues, None, *features, None, dgamma, dS0, dz0, *(None,) * 6


window.register_autograd(_gradient, setup_context=_keep)

STATE = ("S", "z", "m", "ring_k", "ring_v", "ring_valid", "sink_k", "sink_v", "sink_age", "start")


def window_step_now(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, phi_q: Tensor, phi_k: Tensor, log_q: Tensor | None,
    log_k: Tensor | None, gamma: Tensor, S: Tensor, z: Tensor, m: Tensor, ring_k: Tensor, ring_v: Tensor,
    ring_valid: Tensor, sink_k: Tensor, sink_v: Tensor, sink_age: Tensor, start: Tensor, scale: float, softcap: float,
    eps: float, backend: str,
) -> Tensor:  # fmt: skip
    named = {"q": q, "k": k, "v": v, "valid": valid, "phi_q": phi_q, "phi_k": phi_k, "log_q": log_q, "log_k": log_k}
    state = (S, z, m, ring_k, ring_v, ring_valid, sink_k, sink_v, sink_age, start)
    named |= {"gamma": gamma} | dict(zip(STATE, state, strict=True))
    return run("window_attention", "step", backend, named, (scale, softcap, eps)).contiguous()


window_step = torch.library.custom_op("linearize::window_attention_step", window_step_now, mutates_args=STATE)


@window_step.register_fake
def _(q, k, v, *rest):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])
