"""KL divergence of two language models' next-token distributions, without the logits of all tokens in memory."""

# Not `from __future__ import annotations`: the custom op's schema is read from these.
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import floating, require, shape
from .dispatch import choose, implementation
from .state import accumulate_dtype

CHUNK_ELEMENTS = 1 << 25  # of one model's logits at a time: 128 MiB of float32


def chunked_kl(
    hidden: Tensor,
    lm_head: Tensor,
    *,
    teacher_hidden: Tensor | None = None,
    teacher_lm_head: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """temperature^2 KL(teacher || student) of softmax(logits / temperature), logits = hidden lm_head^T + bias.

    The factor keeps the gradients' size (Hinton et al. 2015, arXiv:1503.02531). Tokens are taken `chunk` at a time, and
    gradients are taken with them: logits of more tokens never stand in memory, neither in the forward nor in the
    backward. The softmax is float32 (float64 for float64 inputs).

    Args:
        hidden: (..., D), lm_head (V, D) of the same dtype, bias (V,) or None: gradients for each that requires one.
        teacher_hidden: (..., D'), with teacher_lm_head (V', D'); or teacher_logits (..., V'). No gradient.
            Heads of one tokenizer's models may differ in padding rows: the first min(V, V') tokens are compared.
        chunk: tokens at a time; by default as many as make 2^25 logits.
        mask: (...) bool, False where a token doesn't count (whatever its values are).
        reduction: "mean" over the tokens that count, or "sum".
        backend: "torch" or "triton"; by default Triton's kernel on GPUs that have it.

    Returns:
        A scalar, float32 or float64.

    Raises:
        ValueError: for arguments that don't fit together.
    """
    _check(hidden, lm_head, teacher_hidden, teacher_lm_head, teacher_logits, bias, temperature, chunk, mask, reduction)
    width = lm_head.shape[0]
    size = chunk or max(1, CHUNK_ELEMENTS // max(width, 1))
    grads = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, lm_head, bias)]
    flat = hidden.reshape(-1, hidden.shape[-1])
    total = _kl(
        flat, lm_head, bias,
        *(None if x is None else x.detach().reshape(-1, x.shape[-1]) for x in (teacher_hidden, teacher_logits)),
        None if teacher_lm_head is None else teacher_lm_head.detach(),
        None if mask is None else mask.reshape(-1), float(temperature), size, grads, backend or "",
    )[0]  # fmt: skip
    if reduction == "sum":
        return total
    return total / (max(flat.shape[0], 1) if mask is None else mask.sum().clamp_min(1))


def _summed(
    hidden: Tensor, lm_head: Tensor, bias: Tensor | None, teacher_hidden: Tensor | None, teacher_logits: Tensor | None,
    teacher_lm_head: Tensor | None, mask: Tensor | None, temperature: float, chunk: int, grads: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum over tokens (n, D), and its gradients by hidden, lm_head and bias: empty where grads says no."""
    dtype = accumulate_dtype(hidden, lm_head)
    divergence = _divergence(hidden, dtype, backend)
    sizes = (hidden, lm_head, hidden.new_empty(0) if bias is None else bias)
    # Weights get a little from each chunk: summed in the accumulation dtype, rounded once.
    d_hidden, d_weight, d_bias = (
        x.new_zeros(x.shape if need else (0,), dtype=x.dtype if i == 0 else dtype)
        for i, (x, need) in enumerate(zip(sizes, grads, strict=True))
    )
    total = torch.zeros((), dtype=dtype, device=hidden.device)
    other = teacher_logits.shape[-1] if teacher_logits is not None else teacher_lm_head.shape[0]  # pyright: ignore
    shared = min(lm_head.shape[0], other)
    weight, short_bias = lm_head[:shared], None if bias is None else bias[:shared]
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        counted = None if mask is None else mask[part, None]
        x = hidden[part] if counted is None else hidden[part].masked_fill(~counted, 0)
        student = F.linear(x, weight, short_bias)
        if teacher_logits is not None:
            teacher = teacher_logits[part, :shared]
        else:
            teacher = F.linear(teacher_hidden[part], teacher_lm_head[:shared])  # pyright: ignore
        each, d_student = divergence(student, teacher, temperature, counted, any(grads))
        total += each.sum()
        if d_student is None:
            continue
        if grads[0]:
            d_hidden[part] = d_student @ weight
        if grads[1]:
            d_weight[:shared] += d_student.T @ x
        if grads[2]:
            d_bias[:shared] += d_student.sum(0, dtype=dtype)
    return total, d_hidden, d_weight.to(lm_head.dtype), d_bias.to(sizes[2].dtype)


_kl = torch.library.custom_op("linearize::chunked_kl", _summed, mutates_args=())


@_kl.register_fake
def _(hidden, lm_head, bias, teacher_hidden, teacher_logits, teacher_lm_head, mask, temperature, chunk, grads, backend):
    sizes = (hidden, lm_head, hidden.new_empty(0) if bias is None else bias)
    made = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else x.new_empty(0)
        for x, need in zip(sizes, grads, strict=True)
    )
    return hidden.new_empty((), dtype=accumulate_dtype(hidden, lm_head)), *made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # zeros as large as the head, for outputs that nobody differentiates
    ctx.grads = inputs[9]
    ctx.save_for_backward(*output[1:])


def _gradient(ctx: Any, by: Tensor | None, *second: Tensor | None) -> tuple[Any, ...]:
    if any(x is not None for x in second):
        raise RuntimeError("chunked_kl has no second derivative: its gradients are made in the forward")
    if by is None:
        return (None,) * 11
    # In the gradients' dtypes: a number in float32 would make copies of them in float32.
    found = [by.to(x.dtype) * x if need else None for x, need in zip(ctx.saved_tensors, ctx.grads, strict=True)]
    return (*found, *(None,) * 8)


_kl.register_autograd(_gradient, setup_context=_keep)


def _divergence(x: Tensor, dtype: torch.dtype, backend: str) -> Any:
    """The function that takes a chunk's logits, by backend and device."""
    return implementation(choose("chunked_kl", x, backend or None).backend, "chunked_kl").divergence


def divergence(
    student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """(n,) temperature^2 KL of each row of logits (n, V), and its gradient by `student` in student's dtype.

    counted (n, 1) bool or None: rows that don't count give 0 and get 0.
    """
    dtype = accumulate_dtype(student)
    log_q = F.log_softmax(student.to(dtype) / temperature, -1)
    log_p = F.log_softmax(teacher.to(dtype) / temperature, -1)
    p = log_p.exp()
    # Where p is 0 its logarithm may be -inf, as a banned token's is: nothing of p is there to be missed.
    each = log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0).sum(-1) * temperature**2
    if counted is not None:
        each = each.masked_fill(~counted[:, 0], 0)
    if not gradient:
        return each, None
    # (softmax(s / T) - p) / T, times T^2
    d_student = log_q.exp_().sub_(p).mul_(temperature)
    if counted is not None:
        d_student.masked_fill_(~counted, 0)
    return each, d_student.to(student.dtype)


def _check(
    hidden: Tensor, lm_head: Tensor, teacher_hidden: Tensor | None, teacher_lm_head: Tensor | None,
    teacher_logits: Tensor | None, bias: Tensor | None, temperature: float, chunk: int | None, mask: Tensor | None,
    reduction: str,
) -> None:  # fmt: skip
    require(hidden.dim() >= 1, "hidden must be (..., D), not a scalar")
    lead, dim = tuple(hidden.shape[:-1]), hidden.shape[-1]
    shape("lm_head", lm_head, (None, dim), "(V, D)")
    floating(hidden, "hidden", hidden=hidden, lm_head=lm_head, bias=bias, teacher_logits=teacher_logits)
    require(
        hidden.dtype == lm_head.dtype or torch.is_autocast_enabled(hidden.device.type),
        f"hidden is {hidden.dtype}, but lm_head is {lm_head.dtype}: cast one of them",
    )
    if bias is not None:
        shape("bias", bias, (lm_head.shape[0],), "(V,)")
        require(bias.dtype == lm_head.dtype, f"bias is {bias.dtype}, but lm_head is {lm_head.dtype}")
    require(
        (teacher_hidden is None) == (teacher_lm_head is None) and (teacher_hidden is None) != (teacher_logits is None),
        "the teacher is given by teacher_hidden and teacher_lm_head, or by teacher_logits alone",
    )
    if teacher_logits is not None:
        shape("teacher_logits", teacher_logits, (*lead, None), "(..., V') with hidden's leading dims")
    elif teacher_hidden is not None and teacher_lm_head is not None:
        shape("teacher_hidden", teacher_hidden, (*lead, None), "(..., D') with hidden's leading dims")
        shape("teacher_lm_head", teacher_lm_head, (None, teacher_hidden.shape[-1]), "(V', D')")
        floating(hidden, "hidden", teacher_hidden=teacher_hidden, teacher_lm_head=teacher_lm_head)
        require(
            teacher_hidden.dtype == teacher_lm_head.dtype,
            f"teacher_hidden is {teacher_hidden.dtype}, but teacher_lm_head is {teacher_lm_head.dtype}",
        )
    require(temperature > 0, f"temperature must be positive, not {temperature}")
    require(chunk is None or chunk >= 1, f"chunk must be at least 1, not {chunk}")
    require(reduction in ("mean", "sum"), f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if mask is not None:
        shape("mask", mask, lead, "hidden's leading dims")
        require(mask.dtype == torch.bool, f"mask must be bool (True = counts), not {mask.dtype}")
        require(mask.device == hidden.device, f"mask is on {mask.device}, but hidden is on {hidden.device}")
