"""The compiled CPU code of linear_attention against the loop over tokens in float64, forward, backward and step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linearize_kernels import LinearState, cpu_ops, linear_attention, reference
from torch import Tensor

from tests.cpu.cpu_cases import assert_grads, guarded, needs_library, on_threads
from tests.numerics.kernel_cases import linear_inputs, random_like
from tests.numerics.tolerances import assert_close

pytestmark = needs_library
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GATES = ("none", "logs", "decay", "decays")


def gate_of(kind: str, B: int, T: int, Hk: int, F: int, spread: float = 1.0) -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(5)
    out: dict[str, Tensor | None] = {"log_k": None, "log_decay": None}
    if kind == "logs":
        out["log_k"] = torch.randn(B, T, Hk, generator=g) * 3 * spread
    elif kind == "decay":
        out["log_decay"] = -torch.rand(B, T, Hk, generator=g) * spread
    elif kind == "decays":
        out["log_decay"] = -torch.rand(B, T, Hk, F, generator=g) * spread
    return out


def case(
    kind: str, B: int, T: int, H: int, Hk: int, F: int, Dv: int, dtype: torch.dtype, N: int | None = None, **gate: Any
) -> tuple[dict[str, Any], LinearState]:
    x = linear_inputs(B, T, H, Hk, F, Dv, dtype=dtype)
    x.update(gate_of(kind, B, T, Hk, F, **gate))
    g = torch.Generator().manual_seed(7)
    N = B if N is None else N
    S, z = torch.randn(N, Hk, F, Dv, generator=g), torch.rand(N, Hk, F, generator=g)
    m = torch.randn(N, Hk, generator=g) if kind == "logs" else torch.zeros(N, Hk)
    return x, LinearState(S, z, m)


def expected(x: dict[str, Any], state: LinearState, weights: list[Tensor] | None, **options: Any) -> Any:
    """out and states of the loop, and the gradients of sum(out, S, z times weights)."""
    leaves = {n: None if t is None else t.detach().double().requires_grad_() for n, t in x.items()}
    start = LinearState(*(t.double() for t in state))
    for t in start[:2]:
        t.requires_grad_()
    out, end = reference.linear_attention(**leaves, initial_state=start, return_state=True, **options)
    if weights is None:
        return out, end, None
    if x["log_k"] is not None:  # m is only a scale: the gradient is that of sums held relative to a constant
        shift = (end.m - end.m.detach()).exp()
        end = LinearState(end.S * shift[..., None, None], end.z * shift[..., None], end.m)
    loss = sum((a * w.double()).sum() for a, w in zip((out, *end[:2]), weights, strict=True))
    named = {n: t for n, t in {**leaves, "S": start.S, "z": start.z}.items() if t is not None}
    grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return out, end, dict(zip(named, grads, strict=True))


def run(x: dict[str, Any], state: LinearState, weights: list[Tensor] | None, **options: Any) -> Any:
    given = {n: guarded(t) for n, t in x.items()}
    cu, options = options.get("cu_seqlens"), {"scale": 1.0, "normalize": True, "eps": 1e-6} | options
    scalars = (options["scale"], options["normalize"], options["eps"])
    inputs = (*(given[n] for n in ("q", "k", "v", "log_k", "log_decay")), *state, cu)
    out, den, *end = cpu_ops.linear.forward(*inputs, *scalars)
    if weights is None:
        return out, LinearState(*end), None
    d_out, dS, dz = (guarded(w) for w in weights)
    grads = cpu_ops.linear.backward(d_out, dS, dz, *inputs, out, den, *scalars)
    names = ("q", "k", "v", "log_k", "log_decay", "S", "z")
    return out, LinearState(*end), {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def check(x: dict[str, Any], state: LinearState, name: str = "float32", **options: Any) -> None:
    dtype = x["v"].dtype
    N = state.S.shape[0]
    out_like = torch.zeros(*x["q"].shape[:3], x["v"].shape[3])
    weights = random_like([out_like, state.S, state.z], seed=3)
    weights[0] = weights[0].to(dtype)
    want, end, grads = expected(x, state, weights, **options)
    got, got_end, got_grads = run(x, state, weights, **options)
    assert got.dtype == dtype
    assert got_end.S.shape[0] == N
    assert_close(got, want, name if dtype == F32 else dtype)
    for field in LinearState._fields:
        assert_close(getattr(got_end, field), getattr(end, field), name if dtype == F32 else "float32", field)
    assert_grads(got_grads, grads, dtype)


@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 129])
@pytest.mark.parametrize("kind", GATES)
def test_equals_the_loop_for_any_length(kind: str, T: int) -> None:
    check(*case(kind, 2, T, 4, 2, 12, 20, F32))


@pytest.mark.parametrize(("F", "Dv"), [(1, 8), (8, 1), (48, 64), (64, 48), (100, 100)])
@pytest.mark.parametrize("kind", GATES)
def test_equals_the_loop_for_any_dim(kind: str, F: int, Dv: int) -> None:
    x, state = case(kind, 1, 70, 2, 1, F, Dv, F32)
    if Dv == 1:  # a row of one value may nearly cancel, and its error is taken relative to it
        x["v"], state = x["v"].abs(), state._replace(S=state.S.abs())
    check(x, state, normalize=F > 1, scale=0.3)  # one feature cancels in the ratio: q would get noise


@pytest.mark.parametrize(("H", "Hk"), [(8, 1), (8, 2), (9, 3), (12, 1), (20, 1)])
@pytest.mark.parametrize("kind", GATES)
def test_query_heads_share_key_heads(kind: str, H: int, Hk: int) -> None:
    check(*case(kind, 1, 66, H, Hk, 8, 8, F32), normalize=kind == "logs")


@pytest.mark.parametrize("kind", GATES)
def test_unnormalised(kind: str) -> None:
    check(*case(kind, 1, 70, 2, 2, 8, 8, F32), normalize=False)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", GATES)
def test_half_precision_is_summed_in_float32(kind: str, dtype: torch.dtype) -> None:
    check(*case(kind, 1, 130, 4, 2, 16, 24, dtype))


@pytest.mark.parametrize(
    ("H", "Hk", "F", "Dv"), [(1, 1, 64, 64), (9, 3, 33, 15), (20, 1, 8, 16), (2, 1, 100, 130), (2, 1, 1, 95)]
)
@pytest.mark.parametrize("kind", ["none", "logs", "decay"])
def test_bfloat16_of_any_dim(kind: str, H: int, Hk: int, F: int, Dv: int) -> None:
    """Processors that multiply matrices of it have code of their own, with other paddings."""
    check(*case(kind, 1, 100, H, Hk, F, Dv, BF16), normalize=F > 33, scale=0.3)


@pytest.mark.parametrize("kind", GATES)
def test_packed_sequences_with_an_empty_one(kind: str) -> None:
    cu = torch.tensor([0, 5, 5, 70, 135])
    x, state = case(kind, 1, 135, 4, 2, 8, 12, F32, N=4)
    check(x, state, cu_seqlens=cu)
    _, end, _ = run(x, state, None, cu_seqlens=cu)
    assert torch.equal(end.S[1], state.S[1])


@pytest.mark.parametrize("kind", GATES)
def test_sequences_cut_for_threads(kind: str) -> None:
    # Three heads for two threads: the sequence is cut in parts, which are worked on at once.
    x, state = case(kind, 1, 1100, 3, 3, 4, 4, F32, spread=0.05)
    with on_threads(2):
        check(x, state)
        first, again = (run(x, state, None)[0] for _ in range(2))
    assert torch.equal(first, again)
    with on_threads(1):
        assert_close(run(x, state, None)[0], first.double(), "float32 split")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ["decay", "decays"])
def test_gates_that_forget_everything(kind: str, dtype: torch.dtype) -> None:
    x, state = case(kind, 1, 80, 2, 1, 6, 6, dtype)
    gate = x["log_decay"]
    for value in (-50.0, -1e4, 0.0):
        gate[:, 30:] = value
        check(x, state)
    gate.zero_()
    gate[:, 40] = -1e4
    check(x, state)
    if kind == "decays":
        gate.zero_()
        gate[..., 2] = -5.0
        check(x, state)


def test_a_gate_of_zero_is_no_gate() -> None:
    x, state = case("none", 1, 70, 2, 1, 8, 8, F32)
    want = run(x, state, None)[0]
    for shape in ((1, 70, 1), (1, 70, 1, 8)):
        assert torch.equal(run(x | {"log_decay": torch.zeros(shape)}, state, None)[0], want)


def test_log_scales_far_apart() -> None:
    x, state = case("logs", 1, 140, 2, 1, 6, 6, F32)
    x["log_k"][:, 20:90] += 500
    x["log_k"][:, 100:] = -1e30
    state = state._replace(m=torch.full_like(state.m, -1e30), S=0 * state.S, z=0 * state.z)
    check(x, state, "float32 logs")


def test_65536_equal_bf16_keys() -> None:
    T = 65536
    k = torch.full((1, T, 1, 8), 4.0, dtype=BF16)
    v = torch.linspace(-1, 1, T)[None, :, None, None].expand(-1, -1, -1, 8).to(BF16)
    state = LinearState(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8), torch.zeros(1, 1))
    out, den, *_ = cpu_ops.linear.forward(k, k, v, None, None, *state, None, 1.0, True, 1e-6)
    mean = v.double().cumsum(1) / torch.arange(1, T + 1)[None, :, None, None]
    assert (out.double() - mean).abs().max() < 4e-3
    assert den[0, -1, 0] == T * 16 * 8


def test_zero_denominators() -> None:
    x, state = case("none", 1, 20, 2, 1, 4, 4, F32)
    state = state._replace(S=0 * state.S, z=0 * state.z)
    x["k"][:, :7] = 0
    check(x, state)
    x["q"].zero_()
    check(x, state)


def test_denominators_at_their_floor_get_no_gradient() -> None:
    x, state = case("none", 1, 30, 2, 1, 4, 4, F32)
    check(x, state, eps=12.0)


def test_an_expanded_gradient_and_strided_inputs() -> None:
    x, state = case("decay", 2, 70, 4, 2, 8, 8, F32)
    x = {n: None if t is None else t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in x.items()}
    x["q"] = x["q"].transpose(2, 3).contiguous().transpose(2, 3)
    x["log_decay"] = torch.tensor([-0.1, -0.5]).expand(2, 70, 2)
    d_out = torch.ones(()).expand(2, 70, 4, 8)
    weights = [d_out, torch.ones(()).expand_as(state.S), torch.ones(()).expand_as(state.z)]
    want = expected(x, state, weights)[2]
    out, den, *_ = cpu_ops.linear.forward(**x, **state._asdict(), cu_seqlens=None, scale=1.0, normalize=True, eps=1e-6)
    inputs = (*(x[n] for n in ("q", "k", "v", "log_k", "log_decay")), *state, None)
    got = cpu_ops.linear.backward(*weights, *inputs, out, den, 1.0, True, 1e-6)
    names = ("q", "k", "v", "log_k", "log_decay", "S", "z")
    assert_grads({n: g for n, g in zip(names, got, strict=True) if g is not None}, want, F32)


def test_no_gradient_stays_none_where_exp_overflows() -> None:
    """exp(m) is inf, but what a padded query's output weighs is 0."""
    inputs = linear_inputs(T=20, dtype=torch.float32, logs=0.0)
    leaves = {n: x.requires_grad_() for n, x in (inputs | {"log_k": inputs["log_k"] + 100}).items()}
    out = linear_attention(**leaves, normalize=False, backend="cpu")
    for grad in torch.autograd.grad(out, list(leaves.values()), torch.zeros_like(out)):
        assert not grad.any()
