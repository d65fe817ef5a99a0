"""The Triton kernels of linear attention, interpreted, against the float64 definition."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language
from linearize_kernels import choose, triton_ops
from linearize_kernels.triton_ops import linear as kernels

from tests.triton.cases import BFLOAT16, FLOAT32, check_forward, check_gradients, check_step, guarded, make_call

KINDS = ["plain", "logs", "head", "token", "feature"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 15, 64, 65])
def test_equals_the_definition(T: int, kind: str) -> None:
    call = make_call(T, kind, B=2 if T < 16 else 1, H=4, Hk=2, F=16, Dv=24)
    check_forward(call)
    check_gradients(call)


@pytest.mark.parametrize(
    ("T", "F", "Dv", "kind"),
    [
        (63, 48, 64, "logs"),
        (129, 64, 48, "plain"),
        (129, 96, 96, "token"),
        (65, 128, 128, "feature"),
        (65, 64, 128, "token"),
    ],
)
def test_head_dims(T: int, F: int, Dv: int, kind: str) -> None:
    call = make_call(T, kind, H=1, F=F, Dv=Dv)
    check_forward(call)
    check_gradients(call)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str) -> None:
    """One of them empty: its state stays what it was, and its gradient comes through untouched."""
    call = make_call(135, kind, cu=[0, 5, 5, 70, 135])
    check_forward(call)
    check_gradients(call)
    out, den, *state = kernels.forward(*call)
    for x, y in zip(state, call[5:8], strict=True):
        assert torch.equal(x[1], y[1])
    grads = kernels.backward(out, *state[:2], *call[:9], out, den, *call[9:])
    assert torch.equal(grads[5][1], state[0][1])


@pytest.mark.parametrize("kind", ["plain", "logs", "token", "feature"])
def test_without_the_normaliser(kind: str) -> None:
    call = make_call(70, kind, normalize=False)
    check_forward(call)
    check_gradients(call)


@pytest.mark.parametrize("kind", ["logs", "token", "feature"])
def test_bfloat16(kind: str) -> None:
    call = make_call(70, kind, F=48, Dv=48, dtype=torch.bfloat16)
    check_forward(call, BFLOAT16)
    check_gradients(call, BFLOAT16)
    check_step(call, BFLOAT16)


def test_floor_of_the_normaliser() -> None:
    """Where it holds, outputs are sums over eps, and no gradient goes through the denominator."""
    call = make_call(40)._replace(eps=20.0)
    den = kernels.forward(*call)[1]
    assert 0 < (den < call.eps).sum() < den.numel()
    check_forward(call)
    check_gradients(call)


def test_any_strides() -> None:
    call = make_call(70, "feature", B=2, H=2, Hk=1, F=16, Dv=24)
    tensors = [guarded(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in (call.q, call.k, call.v)]
    tensors[0] = guarded(call.q.transpose(1, 3).contiguous()).transpose(1, 3)
    log_decay = guarded(call.log_decay.transpose(2, 3).contiguous()).transpose(2, 3)  # type: ignore[union-attr]
    call = call._replace(q=tensors[0], k=tensors[1], v=tensors[2], log_decay=log_decay)
    d_out = guarded(torch.randn(24, 2, 70, 2)).permute(3, 2, 1, 0)
    check_forward(call)
    check_gradients(call, d_out=d_out)
    check_gradients(call, d_out=torch.ones(1, 1, 1, 1).expand(2, 70, 2, 24))


@pytest.mark.parametrize("kind", ["plain", "logs", "token", "feature"])
@pytest.mark.parametrize("normalize", [True, False])
def test_step(kind: str, normalize: bool) -> None:
    check_step(make_call(2, kind, B=2, H=6, Hk=2, F=48, Dv=80, normalize=normalize), FLOAT32)


def test_values_wider_than_keys() -> None:
    """Keys in bfloat16 don't cut values, and states, to it."""
    call = make_call(130, "token", F=48, Dv=48)
    call = call._replace(q=call.q.bfloat16(), k=call.k.bfloat16())
    check_forward(call)
    check_gradients(call, BFLOAT16)


@pytest.mark.parametrize("op", ["linear_attention", "delta_rule", "window_attention", "chunked_kl"])
def test_chosen_by_one_tensor(op: str) -> None:
    assert choose(op, torch.empty(1, 1, 1, 16), "triton").backend == "triton"


def test_refuses_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.language, "range", lambda start, stop=None, num_stages=None: None)
    triton_ops._too_old.cache_clear()
    try:
        assert "is too old: pip install -U triton" in (triton_ops.refuses("linear", {"q": torch.empty(1)}) or "")
        usable, because = triton_ops.status()
        assert not usable
        assert "is too old: pip install -U triton" in because
    finally:
        triton_ops._too_old.cache_clear()


def test_refuses_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(2)
    assert triton_ops.refuses("linear", {"q": call.q}) is None
    assert "float64" in (triton_ops.refuses("linear", {"q": call.q.double()}) or "")
    monkeypatch.setattr(triton_ops, "interpreted", lambda: False)
    assert "cpu" in (triton_ops.refuses("linear", {"q": call.q}) or "")
    monkeypatch.setattr(triton_ops, "find_spec", lambda name: None)
    assert "pip install triton" in (triton_ops.refuses("linear", {"q": call.q}) or "")
