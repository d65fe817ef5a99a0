"""Window attention in PyTorch, whatever backend a device prefers: what its own gradients and steps may get wrong."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels import WindowState, reference, torch_softmax, window_attention, window_attention_step

from tests.numerics.kernel_cases import gradients, random_like, random_mask, time_slice, window_inputs, with_grad
from tests.numerics.test_kernels_linear import assert_same_result
from tests.numerics.tolerances import assert_close

torch_window = {"backend": "torch"}


@pytest.mark.parametrize("logs", [None, 2.0])
@pytest.mark.parametrize("window", [1, 20, 64, 257])
@pytest.mark.parametrize(("H", "Hk"), [(8, 1), (8, 2), (3, 3)])
def test_float32_values_and_gradients_equal_the_definition(H, Hk, window, logs):
    base = window_inputs(T=290, B=1, H=H, Hk=Hk, D=5, Dv=7, F=6, logs=logs, dtype=torch.float32)
    options = {"window": window, "sinks": 2, "softcap": 3.0, "mask": random_mask(1, 290, 0.9), "return_state": True}
    weight = torch.randn(1, 290, H, 7, generator=torch.Generator().manual_seed(1))
    results = []
    for op, dtype in ((window_attention, torch.float32), (reference.window_attention, torch.float64)):
        inputs = with_grad({n: x.to(dtype) for n, x in base.items()})
        out, state = op(**inputs, **options, backend="torch")
        results.append(((out, state), gradients(inputs, [out], [weight])))
    (actual, grads), (expected, wanted) = results
    assert_close(actual[0], expected[0], "float32")
    assert_close(actual[1].S, expected[1].S, "float32", "state.S")
    for name, x in wanted.items():
        assert_close(grads[name], x, "float32 grad", f"d{name}")


@pytest.mark.parametrize("D", [1, 48, 60, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_definition(D, dtype):
    inputs = window_inputs(B=1, T=80, H=4, Hk=2, D=D, F=2 * D, dtype=dtype)
    expected = reference.window_attention(**{n: x.double() for n, x in inputs.items()}, window=16)
    assert_close(window_attention(**inputs, window=16, **torch_window), expected, dtype)


@pytest.mark.parametrize("T", [9, 70])
def test_equal_scores_share_the_gradient_of_the_largest(T):
    """The scale of the exact part is the largest score, so it moves with the keys that attain it: here, with many."""
    base = window_inputs(T=T, H=2, D=3)
    base["k"] = base["k"][:, :1].expand(-1, T, -1, -1)
    results = []
    for op in (window_attention, reference.window_attention):
        inputs = with_grad(base)
        out = op(**inputs, window=4, sinks=1, **torch_window)
        results.append(gradients(inputs, [out], random_like([base["v"]])))
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, "float64 grad", f"d{name}")


def test_a_floored_denominator_has_no_gradient():
    """But the numerator has, through the largest score as well; eps floors a fifth of the denominators."""
    base, results = window_inputs(T=70, H=4, Hk=2), []
    for op in (window_attention, reference.window_attention):
        inputs = with_grad(base)
        out = op(**inputs, window=6, eps=20.0, **torch_window)
        results.append({"out": out} | gradients(inputs, [out], random_like([out])))
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, "float64" if name == "out" else "float64 grad", name)


def test_a_gradient_that_is_expanded_or_transposed():
    inputs = with_grad(window_inputs(T=70, H=4, Hk=2))
    out = window_attention(**inputs, window=9, **torch_window)
    for grad in (torch.ones(()).double().expand_as(out), random_like([out.transpose(1, 2)])[0].transpose(1, 2)):
        strided, dense = (
            torch.autograd.grad(out, list(inputs.values()), g, retain_graph=True) for g in (grad, grad.contiguous())
        )
        for a, e in zip(strided, dense, strict=True):
            assert_close(a, e, "float64 grad")


@pytest.mark.parametrize("logs", [None, 2.0])
def test_long_decoding_in_place_equals_one_call_for_reordered_rows(logs):
    """40 tokens, then 23 steps: after 7 of them the rows are reordered, in the midst of the ring."""
    inputs = window_inputs(B=2, T=63, H=4, Hk=2, logs=logs)
    rows = torch.tensor([1, 1, 0])
    gamma = inputs["gamma"]
    options = {"window": 5, "sinks": 3}
    _, state = window_attention(**time_slice(inputs, 0, 40), **options, return_state=True, **torch_window)
    copies = {n: x if n == "gamma" else x[rows] for n, x in inputs.items()}
    expected = window_attention(**copies, **options, return_state=True, **torch_window)
    for t in range(40, 63):
        if t == 47:
            state = WindowState(*(x.index_select(0, rows) for x in state))
        source = inputs if t < 47 else copies
        token = {n: x for n, x in time_slice(source, t, t + 1).items() if n != "gamma"}
        token |= {n: source[n][:, t - 5 : t - 4] for n in ("phi_k", "log_k") if n in source}
        args = [token.pop(n) for n in ("q", "k", "v", "phi_q", "phi_k")]
        out = window_attention_step(*args, state, gamma=gamma, **token, **options, **torch_window)
        wanted = expected[0][:, t : t + 1]
        assert_close(out, wanted if t >= 47 else wanted[[2, 0]], torch.float64)
    assert_same_result((out, state), (wanted, expected[1]), torch.float64)


def test_blocks_of_every_kind_agree(monkeypatch):
    """Stacked runs, one by one, and single large ones; of a window that is longer than a run, and a ragged end."""
    inputs = with_grad(window_inputs(B=1, T=101, H=2, D=3))
    results = []
    for run, large in ((32, 256), (7, 256), (7, 10)):
        monkeypatch.setattr(torch_softmax, "RUN", run)
        monkeypatch.setattr(torch_softmax, "LARGE_RUN", 2 * run)
        monkeypatch.setattr(torch_softmax, "LARGE_WINDOW", large)
        out = window_attention(**inputs, window=23, sinks=2, **torch_window)
        results.append((out, *torch.autograd.grad(out.pow(2).sum(), list(inputs.values()))))
    for other in results[1:]:
        for a, e in zip(other, results[0], strict=True):
            assert_close(a, e, "float64 grad")
