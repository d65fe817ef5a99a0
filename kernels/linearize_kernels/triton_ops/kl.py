"""KL of two rows of logits and its gradient: statistics in one pass over the vocabulary, the gradient in a second."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from . import configs, launch
from .launch import LOWEST_SCORE, Case, jit, load32, register, store


@jit
def kl_fold(a, b, top_a, top_b, sum_a, sum_b, gain):
    """The sums of each lane, relative to its new largest logits, with one more of the teacher's and the student's."""
    new_a, new_b = tl.maximum(top_a, a), tl.maximum(top_b, b)
    weight, shrink = tl.exp(a - new_a), tl.exp(top_a - new_a)
    sum_a = sum_a * shrink + weight
    # A token that the teacher bans (a = -inf) isn't missed, whatever b is.
    gain = gain * shrink + weight * (tl.where(weight > 0, a, 0.0) - tl.where(weight > 0, b, 0.0))
    sum_b = sum_b * tl.exp(top_b - new_b) + tl.exp(b - new_b)
    return new_a, new_b, sum_a, sum_b, gain


@jit
def kl_rows(
    student, teacher, counted, each, stride_s, stride_t, V, scale,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """each = scale^-2 KL(softmax(scale t) || softmax(scale s)) of one row; student becomes its gradient by s.

    Sums are taken relative to the largest logit so far: with a of the teacher's and b of the student's,
    KL = sum p (a - b) - log sum exp a + log sum exp b.
    """
    row = tl.program_id(0).to(tl.int64)
    student += row * stride_s
    teacher += row * stride_t
    columns = tl.arange(0, BLOCK)
    counts = 1
    if MASKED:
        counts = tl.load(counted + row).to(tl.int32)
    if counts == 0:
        tl.store(each + row, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                store(student + start + columns, tl.zeros([BLOCK], tl.float32), start + columns < V)
        return
    # One of each lane, joined at the end: a block costs no sum across lanes.
    top_a = tl.full([BLOCK], LOWEST_SCORE, tl.float32)
    top_b = tl.full([BLOCK], LOWEST_SCORE, tl.float32)
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    gain = tl.zeros([BLOCK], tl.float32)
    whole = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        a = tl.load(teacher + start + columns).to(tl.float32) * scale
        b = tl.load(student + start + columns).to(tl.float32) * scale
        top_a, top_b, sum_a, sum_b, gain = kl_fold(a, b, top_a, top_b, sum_a, sum_b, gain)
    rest = whole + columns < V
    a = tl.where(rest, load32(teacher + whole + columns, rest) * scale, float("-inf"))
    b = tl.where(rest, load32(student + whole + columns, rest) * scale, float("-inf"))
    top_a, top_b, sum_a, sum_b, gain = kl_fold(a, b, top_a, top_b, sum_a, sum_b, gain)
    most_a, most_b = tl.max(top_a, 0), tl.max(top_b, 0)
    shrink = tl.exp(top_a - most_a)
    total_a, total_b = tl.sum(sum_a * shrink, 0), tl.sum(sum_b * tl.exp(top_b - most_b), 0)
    log_a, log_b = most_a + tl.log(total_a), most_b + tl.log(total_b)
    found = tl.sum(gain * shrink / total_a, 0) - log_a + log_b  # pyright: ignore
    tl.store(each + row, found / (scale * scale))
    if GRADIENT:
        for start in range(0, whole, BLOCK):
            a = tl.load(teacher + start + columns).to(tl.float32) * scale
            b = tl.load(student + start + columns).to(tl.float32) * scale
            grad = (tl.exp(b - log_b) - tl.exp(a - log_a)) / scale
            tl.store(student + start + columns, grad.to(student.dtype.element_ty))
        a = load32(teacher + whole + columns, rest) * scale
        b = load32(student + whole + columns, rest) * scale
        store(student + whole + columns, (tl.exp(b - log_b) - tl.exp(a - log_a)) / scale, rest)


def divergence(
    student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """(n,) temperature^2 KL of each row of logits (n, V), and its gradient by `student`, in student's memory.

    counted (n, 1) bool or None: rows that don't count give 0 and get 0.
    """
    student, teacher = launch.rows(student), launch.rows(teacher)
    each = torch.empty(len(student), dtype=torch.float32, device=student.device)
    row = configs.find("kl_rows", launch.arch_of(student), student.dtype)
    with launch.on(student):
        kl_rows[(len(student),)](
            student, teacher, counted if counted is None else counted.contiguous(), each, student.stride(0),
            teacher.stride(0), student.shape[1], 1 / temperature,
            MASKED=counted is not None, GRADIENT=gradient, **row.options,
        )  # fmt: skip
    return each, student if gradient else None


def _cases(arch: str, dtype: str, dim: int) -> list[Case]:
    row = configs.find("kl_rows", arch, dtype)
    types = {"student": dtype, "teacher": dtype, "counted": "i1", "each": "fp32"}
    return [Case("", types, {"MASKED": True, "GRADIENT": True, **row.blocks}, row)]


configs.add("kl_rows", [configs.Row({"BLOCK": 4096}, num_warps=8)])
register("kl_rows", kl_rows, _cases)
