"""States, padding and packing: a sequence gives the same result however it is cut, padded or packed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linearize_kernels import LinearState, WindowState, linear_attention, reference, window_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.numerics.kernel_cases import (
    in_order,
    linear_inputs,
    random_mask,
    split_linear,
    split_window,
    time_slice,
    window_inputs,
    with_grad,
)
from tests.numerics.test_kernels_linear import assert_same_result
from tests.numerics.tolerances import assert_close

LOGS = [None, 2.0]


def run_split_masked(op, inputs, cuts, mask, **options):
    """`split_linear` or `split_window` with the mask cut as the inputs are."""
    return op(inputs | {"mask": mask}, cuts, **options)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), logs=st.sampled_from(LOGS), normalize=st.booleans())
def test_any_split_of_linear_attention_equals_one_call(data, logs, normalize):
    T = data.draw(st.integers(1, 150))
    cuts = data.draw(st.lists(st.integers(0, T), max_size=5))
    inputs = linear_inputs(T=T, H=4, Hk=2, F=3, logs=logs, seed=T)
    mask = random_mask(2, T, data.draw(st.sampled_from([0.0, 0.5, 0.95])), seed=T)
    expected = linear_attention(**inputs, mask=mask, normalize=normalize, return_state=True)
    actual = run_split_masked(split_linear, inputs, cuts, mask, normalize=normalize)
    assert_same_result(actual, expected, torch.float64)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data(), logs=st.sampled_from(LOGS), sinks=st.integers(0, 3), window=st.integers(1, 20))
def test_any_split_of_window_attention_equals_one_call(data, logs, sinks, window):
    T = data.draw(st.integers(1, 150))
    cuts = data.draw(st.lists(st.integers(0, T), max_size=5))
    inputs = window_inputs(T=T, H=4, Hk=2, D=3, F=3, logs=logs, seed=T)
    mask = random_mask(2, T, data.draw(st.sampled_from([0.0, 0.5, 0.95])), seed=T)
    expected = window_attention(**inputs, window=window, sinks=sinks, mask=mask, return_state=True)
    actual = run_split_masked(split_window, inputs, cuts, mask, window=window, sinks=sinks)
    assert_same_result(actual, expected, torch.float64)


@pytest.mark.parametrize("T", [2, 64, 65, 129])
def test_prefill_then_single_steps_in_float32(T):
    inputs = window_inputs(T=T, dtype=torch.float32)
    expected = window_attention(**inputs, window=16, sinks=2)
    for k in (1, 5, 70):
        if k < T:
            out, _ = split_window(inputs, list(range(T - k, T)), window=16, sinks=2)
            assert_close(out, expected, "float32 split")


def test_a_padded_step_without_any_key_has_finite_gradients():
    """Its exact set is empty, so its largest score is none."""
    state = window_attention(**window_inputs(T=0), window=4, sinks=1, return_state=True)[1]
    inputs = with_grad(window_inputs(T=1))
    mask = torch.tensor([[True], [False]])
    out = window_attention(**inputs, window=4, sinks=1, initial_state=state, mask=mask)
    out.sum().backward()
    for name, x in inputs.items():
        assert x.grad is None or x.grad.isfinite().all(), name


def test_splits_pass_gradients_through_the_state():
    base = window_inputs(T=40, logs=1.0)
    grads = []
    for cuts in ([], [7, 8, 25]):
        inputs = with_grad(base)
        split_window(inputs, cuts, window=5, sinks=2)[0].pow(3).sum().backward()
        grads.append({n: x.grad for n, x in inputs.items()})
    for name, expected in grads[0].items():
        assert_close(grads[1][name], expected, "float64 grad", f"d{name}")


def padded(inputs, lengths, side):
    """A mask of lengths[row] real tokens a row, with padding to their left, their right or between them."""
    T = inputs["q"].shape[1]
    mask = torch.zeros(len(lengths), T, dtype=torch.bool)
    for row, n in enumerate(lengths):
        places = {
            "left": slice(T - n, T),
            "right": slice(0, n),
            "inside": torch.randperm(T)[:n].sort().values,
        }
        mask[row, places[side]] = True
    return mask


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("logs", LOGS)
def test_padded_rows_of_linear_attention_equal_each_row_alone(side, logs):
    inputs = linear_inputs(B=4, T=100, H=4, Hk=2, logs=logs)
    lengths = [3, 17, 100, 0]
    mask = padded(inputs, lengths, side)
    out, state = linear_attention(**inputs, mask=mask, return_state=True)
    assert not out[~mask].any()
    for row, n in enumerate(lengths):
        alone = {name: x[row, mask[row]][None] for name, x in inputs.items()}
        expected, expected_state = linear_attention(**alone, return_state=True)
        assert_close(out[row, mask[row]][None], expected, torch.float64)
        assert expected.shape[1] == n
        for a, e in zip(state, expected_state, strict=True):
            assert_close(a[row][None], e, torch.float64, "state")


@pytest.mark.parametrize("logs", LOGS)
def test_left_padded_rows_of_window_attention_equal_each_row_alone(logs):
    """At prefill and at every decoded token, sinks counted from each row's own first token."""
    lengths, new, window = [3, 17, 64], 12, 8
    inputs = window_inputs(B=3, T=64 + new, H=4, Hk=2, logs=logs)
    mask = padded(time_slice(inputs, 0, 64), lengths, "left")
    mask = torch.cat([mask, torch.ones(3, new, dtype=torch.bool)], 1)
    options = {"window": window, "sinks": 2}
    out, state = run_split_masked(split_window, inputs, list(range(64, 64 + new)), mask, **options)
    for row, n in enumerate(lengths):
        start = 64 - n
        alone = {name: x if name == "gamma" else x[row : row + 1, start:] for name, x in inputs.items()}
        expected, expected_state = reference.window_attention(**alone, **options, return_state=True)
        assert_close(out[row : row + 1, start:], expected, torch.float64)
        for name, a, e in zip(state._fields, in_order(state), expected_state, strict=True):
            assert_close(a[row : row + 1].double(), e.double(), torch.float64, f"state.{name}")


@pytest.mark.parametrize("logs", LOGS)
@pytest.mark.parametrize("op", ["linear", "window"])
@pytest.mark.parametrize("filler", [7.0, 1e30, float("nan")])
def test_masked_content_has_no_effect_and_no_gradient(op, logs, filler):
    """Bit for bit, in the outputs and the state, whatever stands at padded tokens."""
    make, run = {
        "linear": (linear_inputs, lambda x, m: linear_attention(**x, mask=m, return_state=True)),
        "window": (
            window_inputs,
            lambda x, m: window_attention(**x, mask=m, window=9, sinks=3, return_state=True),
        ),
    }[op]
    mask = random_mask(4, 90, 0.6)
    mask[1, 30:50] = False
    mask[2, :35] = False
    mask[3] = False
    base = make(B=4, T=90, H=4, Hk=2, logs=logs, dtype=torch.float32)
    changed = {n: x.clone() for n, x in base.items()}
    for name, x in changed.items():
        if name != "gamma":
            x[~mask] = filler
    results = []
    for values in (base, changed):
        inputs = with_grad(values)
        out, state = run(inputs, mask)
        out.sum().backward()
        results.append((out, *state))
        for name, x in inputs.items():
            assert x.grad.isfinite().all(), name
            assert name == "gamma" or not x.grad[~mask].any(), name
    assert all(map(torch.equal, *results))


# Lengths 5, 7, 4 and 65, 100 share a padded batch each; two sequences are empty.
CU_SEQLENS = [0, 5, 5, 70, 71, 78, 178, 182, 200, 200]


@pytest.mark.parametrize("logs", LOGS)
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_linear_attention_equals_separate_calls(logs, with_state):
    cu = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    inputs = with_grad(linear_inputs(B=1, T=200, H=4, Hk=2, logs=logs))
    mask = random_mask(1, 200, 0.9)
    state = None
    if with_state:
        state = linear_attention(**linear_inputs(B=9, T=3, H=4, Hk=2, logs=logs, seed=1), return_state=True)[1]
    options = {"cu_seqlens": cu, "mask": mask, "initial_state": state, "return_state": True}
    out, final = linear_attention(**inputs, **options)
    outs = []
    for i, (a, b) in enumerate(pairwise(CU_SEQLENS)):
        row = None if state is None else LinearState(*(x[i : i + 1] for x in state))
        piece, expected = linear_attention(
            **time_slice(inputs, a, b), mask=mask[:, a:b], initial_state=row, return_state=True
        )
        outs.append(piece)
        for x, e in zip(final, expected, strict=True):
            assert_close(x[i : i + 1], e, torch.float64, f"state of sequence {i}")
        if a == b and row is not None:
            assert all(torch.equal(x[i : i + 1], e) for x, e in zip(final, row, strict=True))
    assert_close(out, torch.cat(outs, 1), torch.float64)
    assert_same_result(reference.linear_attention(**inputs, **options), (out, final), torch.float64)
    packed, apart = (
        torch.autograd.grad(x.pow(3).sum(), inputs["k"], retain_graph=True)[0] for x in (out, torch.cat(outs, 1))
    )
    assert_close(packed, apart, "float64 grad")


@pytest.mark.parametrize("logs", LOGS)
def test_packed_window_attention_equals_separate_calls(logs):
    cu = torch.tensor(CU_SEQLENS)
    inputs = window_inputs(B=1, T=200, H=4, Hk=2, logs=logs)
    mask = random_mask(1, 200, 0.9)
    options = {"window": 20, "sinks": 2, "return_state": True}
    out, final = window_attention(**inputs, cu_seqlens=cu, mask=mask, **options)
    outs, states = [], []
    for a, b in pairwise(CU_SEQLENS):
        piece, state = window_attention(**time_slice(inputs, a, b), mask=mask[:, a:b], **options)
        outs.append(piece)
        states.append(state)
    joined = WindowState(*(torch.cat(x) for x in zip(*states, strict=True)))
    assert_same_result((out, final), (torch.cat(outs, 1), joined), torch.float64)
    expected = reference.window_attention(**inputs, cu_seqlens=cu, mask=mask, **options)
    assert_same_result((out, final), expected, torch.float64)


def test_no_sequences_and_no_tokens():
    cu = torch.tensor([0])
    for op in (linear_attention, reference.linear_attention):
        out, state = op(**linear_inputs(B=1, T=0), cu_seqlens=cu, return_state=True)
        assert out.shape == (1, 0, 2, 8)
        assert [x.shape[0] for x in state] == [0] * 3
    for op in (window_attention, reference.window_attention):
        out, state = op(**window_inputs(B=1, T=0), cu_seqlens=cu, window=3, sinks=2, return_state=True)
        assert out.shape == (1, 0, 2, 8)
        assert [x.shape[0] for x in state] == [0] * 10


def test_a_call_without_tokens_returns_the_state_it_was_given():
    empty = window_inputs(T=0)
    state = window_attention(**window_inputs(T=9), window=4, sinks=1, return_state=True)[1]
    out, after = window_attention(**empty, window=4, sinks=1, initial_state=state, return_state=True)
    assert out.shape == (2, 0, 2, 8)
    assert all(map(torch.equal, after, state))


def test_state_size_does_not_depend_on_the_length():
    def size(T):
        linear = linear_attention(**linear_inputs(T=T), return_state=True)[1]
        window = window_attention(**window_inputs(T=T), window=16, sinks=4, return_state=True)[1]
        return [x.shape for x in (*linear, *window)]

    assert size(0) == size(1) == size(15) == size(100) == size(1000)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and not func.is_view:
                self.most = max(self.most, x.numel())
        return out


@pytest.mark.parametrize("window", [16, 300])
@pytest.mark.parametrize("grad", [False, True])
def test_memory_grows_with_the_length_not_its_square(window, grad):
    """Beyond the blocks, of bounded size, the largest tensors are the inputs and the output."""
    sizes = {"B": 1, "T": 10_000, "H": 2, "Hk": 1, "F": 4, "Dv": 4, "logs": 1.0, "dtype": torch.float32}
    for op, make, options in (
        (linear_attention, linear_inputs, {}),
        (window_attention, window_inputs, {"window": window, "sinks": 1}),
    ):
        inputs = with_grad(make(**sizes)) if grad else make(**sizes)
        with LargestTensor() as largest:
            out = op(**inputs, **options)
            if grad:
                out.sum().backward()
        assert largest.most <= max(10_000 * 2 * 8, 4096 * 128)


def test_states_are_reordered_by_index_select():
    """Beam search: rows 1, 1, 0 of the state continue as the copies of these rows would."""
    inputs = window_inputs(B=2, T=30, logs=1.0)
    rows = torch.tensor([1, 1, 0])
    _, state = window_attention(**time_slice(inputs, 0, 20), window=6, sinks=2, return_state=True)
    state = WindowState(*(x.index_select(0, rows) for x in state))
    copies = {n: x if n == "gamma" else x[rows] for n, x in inputs.items()}
    expected = window_attention(**copies, window=6, sinks=2)
    tail = time_slice(copies, 20, 30)
    tail |= {n: copies[n][:, 14:24] for n in ("phi_k", "log_k")}
    assert_close(window_attention(**tail, window=6, sinks=2, initial_state=state), expected[:, 20:], torch.float64)
