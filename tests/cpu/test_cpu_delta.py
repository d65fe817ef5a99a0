"""The compiled CPU code of delta_rule against the loop over tokens in float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linearize_kernels import cpu_ops, reference
from linearize_kernels.state import DeltaState
from torch import Tensor

from tests.cpu.cpu_cases import assert_grads, guarded, needs_library, on_threads
from tests.numerics.kernel_cases import random_like
from tests.numerics.tolerances import assert_close

pytestmark = needs_library
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GATES = ("none", "decay", "decays")
NAMES = ("q", "k", "v", "beta", "log_decay", "S")


def case(
    kind: str, B: int, T: int, H: int, Hk: int, F: int, Dv: int, dtype: torch.dtype = F32, *,
    N: int | None = None, spread: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    g = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(B, T, Hk, F, generator=g), dim=-1)
    shape = {"decay": (B, T, Hk), "decays": (B, T, Hk, F)}.get(kind)
    return {
        "q": torch.randn(B, T, H, F, generator=g).to(dtype),
        "k": k.to(dtype),
        "v": torch.randn(B, T, Hk, Dv, generator=g).to(dtype),
        "beta": torch.rand(B, T, Hk, generator=g).to(dtype),
        "log_decay": None if shape is None else -spread * torch.rand(shape, generator=g),
        "S": torch.randn(B if N is None else N, Hk, F, Dv, generator=g),
    }


def check(x: dict[str, Any], cu: Tensor | None = None) -> None:
    dtype = x["v"].dtype
    weights = random_like([torch.zeros(*x["q"].shape[:3], x["v"].shape[3]), x["S"]], seed=3)
    weights[0] = weights[0].to(dtype)
    leaves = {n: None if t is None else t.detach().double().requires_grad_() for n, t in x.items()}
    inputs = {n: t for n, t in leaves.items() if n != "S"}
    start = DeltaState(leaves["S"])
    out, end = reference.delta_rule(**inputs, initial_state=start, return_state=True, scale=0.4, cu_seqlens=cu)
    loss = (out * weights[0].double()).sum() + (end.S * weights[1].double()).sum()
    named = {n: t for n, t in leaves.items() if t is not None}
    want = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)

    given = [guarded(x[n]) for n in NAMES]
    got, got_end = cpu_ops.delta.forward(*given, cu, 0.4)
    assert_close(got, out, dtype)
    assert_close(got_end, end.S, "float32", "S")
    grads = cpu_ops.delta.backward(*(guarded(w) for w in weights), *given, cu, 0.4)
    got_grads = {n: g for n, g in zip(NAMES, grads, strict=True) if g is not None}
    assert_grads(got_grads, dict(zip(named, want, strict=True)), dtype)


@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 129])
@pytest.mark.parametrize("kind", GATES)
def test_equals_the_loop_for_any_length(kind: str, T: int) -> None:
    check(case(kind, 2, T, 4, 2, 12, 20))


@pytest.mark.parametrize(("F", "Dv"), [(1, 8), (8, 2), (48, 64), (64, 48), (100, 100)])
@pytest.mark.parametrize("kind", GATES)
def test_equals_the_loop_for_any_dim(kind: str, F: int, Dv: int) -> None:
    check(case(kind, 1, 70, 2, 1, F, Dv))


@pytest.mark.parametrize(("H", "Hk"), [(8, 1), (8, 2), (9, 3)])
@pytest.mark.parametrize("kind", GATES)
def test_query_heads_share_key_heads(kind: str, H: int, Hk: int) -> None:
    with on_threads(2):
        check(case(kind, 1, 66, H, Hk, 8, 8))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", GATES)
def test_half_precision_is_summed_in_float32(kind: str, dtype: torch.dtype) -> None:
    check(case(kind, 1, 130, 4, 2, 16, 24, dtype))


@pytest.mark.parametrize("kind", GATES)
def test_packed_sequences_with_an_empty_one(kind: str) -> None:
    check(case(kind, 1, 135, 4, 2, 8, 12, N=4), torch.tensor([0, 5, 5, 70, 135]))


@pytest.mark.parametrize("kind", ["decay", "decays"])
def test_gates_that_forget_everything(kind: str) -> None:
    x = case(kind, 1, 80, 2, 1, 6, 6)
    gate = x["log_decay"]
    for value in (-50.0, -1e4, 0.0):
        gate[:, 30:] = value
        check(x)
    gate.zero_()
    gate[:, 40] = -1e4
    check(x)
    if kind == "decays":
        gate.zero_()
        gate[..., 2] = -5.0
        check(x)


def test_many_chunks() -> None:
    check(case("decays", 1, 1500, 2, 1, 4, 4, spread=0.1))


def test_equal_keys_that_are_written_whole() -> None:
    x = case("none", 1, 140, 2, 1, 8, 8)
    x["k"][:] = x["k"][:, :1]
    x["beta"].fill_(1.0)
    check(x)
