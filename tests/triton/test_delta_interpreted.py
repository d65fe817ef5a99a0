"""The Triton kernels of the delta rule, interpreted, against the float64 definition."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels.triton_ops import delta as kernels

from tests.triton.delta_cases import BFLOAT16, Call, check_forward, check_gradients, check_step, close, make_call

LENGTHS = [1, 15, 63, 64, 65, 129]
DECAYS = [None, "head", "token", "feature"]
# Blocks of chunks of 64 are 16 tokens: decays by feature pair them one by one, which the interpreter takes long for.
SHORT = {"feature": [1, 15, 65]}


@pytest.mark.parametrize(("decay", "T"), [(d, T) for d in DECAYS for T in SHORT.get(str(d), LENGTHS)])
def test_equals_the_definition(decay: str | None, T: int) -> None:
    """With padding bytes of NaN after every input, gates of -50 and -1e4, and an initial state."""
    call = make_call(T, decay)
    check_forward(call)
    check_gradients(call)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cu", [[0, 5, 5, 70]])
def test_packed_sequences(decay: str | None, cu: list[int]) -> None:
    """An empty sequence keeps its state, and its gradient is that on the final one."""
    call = make_call(cu[-1], decay, cu=cu)
    check_forward(call)
    check_gradients(call)
    empty = next(i for i in range(len(cu) - 1) if cu[i] == cu[i + 1])
    assert torch.equal(kernels.forward(*call)[1][empty], call.S[empty])


@pytest.mark.parametrize(
    ("decay", "dims"),
    [
        ("token", {"B": 2, "H": 8, "Hk": 2, "F": 48, "Dv": 16, "T": 5}),
        ("token", {"F": 128, "Dv": 64, "T": 65}),
        (None, {"F": 64, "Dv": 128, "T": 17}),
        ("feature", {"H": 4, "Hk": 2, "F": 80, "Dv": 24, "T": 17}),
        ("token", {"F": 1, "Dv": 3, "T": 20}),
        ("feature", {"F": 5, "Dv": 1, "T": 9}),
    ],
)
def test_heads_and_dims(decay: str | None, dims: dict[str, int]) -> None:
    call = make_call(decay=decay, **dims)
    check_forward(call)
    check_gradients(call)
    check_step(call)


@pytest.mark.parametrize("decay", DECAYS)
def test_step(decay: str | None) -> None:
    check_step(make_call(2, decay, B=3, H=8, Hk=2, F=48, Dv=40))


@pytest.mark.parametrize("decay", ["token", "feature"])
def test_half_inputs(decay: str) -> None:
    call = make_call(66 if decay == "token" else 20, decay, dtype=torch.bfloat16)
    check_forward(call, BFLOAT16)
    check_gradients(call, BFLOAT16)
    check_step(call, BFLOAT16)


def test_any_strides() -> None:
    """Inputs with another order of dims in memory, or every second head or feature; d_out expanded from one number."""
    call = make_call(66, "token", B=2)
    strided = Call(
        call.q.permute(1, 3, 2, 0).contiguous().permute(3, 0, 2, 1),
        torch.stack([call.k, torch.full_like(call.k, torch.nan)], -1).flatten(-2)[..., ::2],
        torch.stack([call.v, torch.full_like(call.v, torch.nan)], 2).flatten(2, 3)[:, :, ::2],
        call.beta.transpose(0, 1).contiguous().transpose(0, 1),
        *call[4:],
    )
    check_forward(strided)
    check_gradients(strided, d_out=torch.full((), 0.7).expand(2, 66, 2, 16))


@pytest.mark.parametrize("decay", ["token", "feature"])
def test_gates_that_shut_everything(decay: str) -> None:
    """-50 at every token: finite, and no gradient on the gate but rounding."""
    call = make_call(65, decay, H=1)
    assert call.log_decay is not None
    call = call._replace(log_decay=torch.full_like(call.log_decay, -50.0))
    check_forward(call)
    found = kernels.backward(torch.ones_like(call.v), torch.ones_like(call.S), *call)
    assert all(x is not None and x.isfinite().all() for x in found)
    assert found[4].abs().max() < 1e-5  # pyright: ignore


def test_a_gate_of_one_is_no_gate() -> None:
    call = make_call(70)
    out, S = kernels.forward(*call)
    for shape in (call.beta.shape, call.k.shape):
        gated_out, gated_S = kernels.forward(*call._replace(log_decay=torch.zeros(shape)))
        close(gated_out, out, 1e-5, "output")
        close(gated_S, S, 1e-5, "state")


def test_equal_keys_do_not_blow_up_the_inverse() -> None:
    """beta 1 and one key for all tokens: the worst triangular system there is, whose solution is the last value."""
    call = make_call(64)
    key = torch.nn.functional.normalize(torch.ones_like(call.k), dim=-1)
    call = call._replace(q=key.expand_as(call.q).contiguous(), k=key, beta=torch.ones_like(call.beta), scale=1.0)
    check_forward(call)
    close(kernels.forward(*call)[0], call.v.expand_as(call.q), 1e-5, "output")
