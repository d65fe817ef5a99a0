"""Every form of the recurrent ops in PyTorch: cut, packed, permuted, stepped, and in bounded memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from linearize_kernels import (
    delta_rule_step,
    empty_delta_state,
    empty_linear_state,
    linear_attention,
    linear_attention_step,
    reference,
)

from tests.numerics.kernel_cases import FORMS, random_mask, run_split, time_slice, true_sums, with_grad
from tests.numerics.test_kernels_linear import assert_same_result
from tests.numerics.test_kernels_sequences import CU_SEQLENS, LargestTensor
from tests.numerics.test_torch_forms import definition, started
from tests.numerics.tolerances import assert_close


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), form=st.sampled_from(list(FORMS)))
def test_any_split_equals_one_call(data, form):
    op, make, options = FORMS[form]
    T = data.draw(st.integers(1, 150))
    cuts = data.draw(st.lists(st.integers(0, T), max_size=5))
    inputs = make(T=T, H=4, Hk=2, F=3, seed=T, **options)
    inputs["mask"] = random_mask(2, T, data.draw(st.sampled_from([0.0, 0.5, 0.95])), seed=T)
    expected = op(**inputs, return_state=True, backend="torch")
    assert_same_result(run_split(op, inputs, cuts, backend="torch"), expected, torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_a_split_passes_gradients_through_the_state(form):
    op, make, options = FORMS[form]
    base, results = make(T=80, H=4, Hk=2, F=3, **options), []
    for cuts in ([], [1, 30, 64]):
        inputs = with_grad(base)
        out, state = run_split(op, inputs, cuts, backend="torch")
        loss = out.pow(3).sum() + sum(x.pow(2).sum() for x in true_sums(state))
        results.append(torch.autograd.grad(loss, list(inputs.values())))
    for name, actual, expected in zip(base, *results, strict=True):
        assert_close(actual, expected, "float64 grad", f"d{name}")


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_equal_separate_calls(form):
    """Values, gradients and states, two of the sequences empty, each with a state before it."""
    op, make, options = FORMS[form]
    sizes = {"H": 4, "Hk": 2, "F": 3}
    base = make(B=1, T=200, **sizes, **options)
    start = started(form, B=9, T=3, seed=1, **sizes)
    base |= {f"state {n}": x for n, x in zip(start._fields, start, strict=True)}
    mask, cu = random_mask(1, 200, 0.9), torch.tensor(CU_SEQLENS, dtype=torch.int32)
    results, grads = [], []
    for packed in (True, False):
        inputs = with_grad(base)
        state = type(start)(*(inputs[f"state {n}"] for n in start._fields))
        named = {n: x for n, x in inputs.items() if " " not in n}
        rest = {"return_state": True, "backend": "torch"}
        if packed:
            out, final = op(**named, mask=mask, cu_seqlens=cu, initial_state=state, **rest)
        else:
            pieces = [
                op(
                    **time_slice(named | {"mask": mask}, a, b),
                    initial_state=type(state)(*(x[i : i + 1] for x in state)),
                    **rest,
                )
                for i, (a, b) in enumerate(pairwise(CU_SEQLENS))
            ]
            out = torch.cat([piece[0] for piece in pieces], 1)
            final = type(state)(*(torch.cat(x) for x in zip(*(piece[1] for piece in pieces), strict=True)))
        results.append((out, final))
        by = {n: x for n, x in inputs.items() if n != "state m"}
        loss = out.pow(3).sum() + sum(x.pow(2).sum() for x in true_sums(final))
        grads.append(dict(zip(by, torch.autograd.grad(loss, list(by.values()), materialize_grads=True), strict=True)))
    assert_same_result(*results, torch.float64)
    assert all(torch.equal(x[1], y[1]) for x, y in zip(results[0][1], start, strict=True))  # the empty sequence's
    for name, expected in grads[1].items():
        assert_close(grads[0][name], expected, "float64 grad", f"d{name}")


@pytest.mark.parametrize("form", FORMS)
def test_permuting_heads_permutes_outputs(form):
    op, make, options = FORMS[form]
    inputs = make(H=3, T=130, dtype=torch.float32, **options)
    order = [2, 0, 1]
    permuted = {n: x[order] if x.dim() == 1 else x[:, :, order] for n, x in inputs.items()}
    assert_close(op(**permuted, backend="torch"), op(**inputs, backend="torch")[:, :, order], torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_appended_tokens_never_change_earlier_outputs(form):
    op, make, options = FORMS[form]
    inputs = make(T=150, dtype=torch.float32, **options)
    before = op(**time_slice(inputs, 0, 70), backend="torch")
    for name in ("v", "log_k", *(["k"] if op is linear_attention else [])):  # the delta rule's keys have length 1
        if name in inputs:
            inputs[name][:, 70:] *= 1e4
    assert_close(op(**inputs, backend="torch")[:, :70], before, "float32 split")


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("linear")])
def test_values_of_one_give_one(form):
    _, make, options = FORMS[form]
    inputs = make(T=130, dtype=torch.float32, **options)
    inputs["v"] = torch.ones_like(inputs["v"])
    assert_close(linear_attention(**inputs, backend="torch"), inputs["v"], torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_masked_content_has_no_effect_and_no_gradient(form):
    op, make, options = FORMS[form]
    mask = random_mask(3, 90, 0.6)
    mask[1, 30:50] = False
    mask[2] = False
    base, results = make(B=3, T=90, H=4, Hk=2, dtype=torch.float32, **options), []
    for filler in (None, float("nan")):
        inputs = with_grad(base)
        for name, x in inputs.items():
            if filler is not None and name != "log_decay":
                x.data[~mask] = filler
        out, state = op(**inputs, mask=mask, return_state=True, backend="torch")
        out.sum().backward()
        results.append((out, *state))
        assert not out[~mask].any()
        for name, x in inputs.items():
            assert x.grad.isfinite().all(), name
            assert x.dim() == 1 or not x.grad[~mask].any(), name
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("form", FORMS)
def test_steps_equal_the_definition_and_update_their_state_in_place(form):
    op, make, options = FORMS[form]
    inputs, mask = make(T=9, H=4, Hk=2, F=3, **options), random_mask(2, 9)
    expected = definition(op)(**inputs, mask=mask, return_state=True)
    kind = {"dtype": torch.float64, "device": torch.device("cpu")}
    if op is linear_attention:
        step, state = linear_attention_step, empty_linear_state(2, 2, 3, 3, logs="log_k" in inputs, **kind)
    else:
        step, state = delta_rule_step, empty_delta_state(2, 2, 3, 3, **kind)
    places, outs = [x.data_ptr() for x in state], []
    for t in range(9):
        token = time_slice(inputs, t, t + 1) | {"mask": mask[:, t : t + 1]}
        args = [token.pop(n) for n in ("q", "k", "v", "beta") if n in token]
        outs.append(step(*args, state, **token, backend="torch"))
    assert places == [x.data_ptr() for x in state]
    assert_same_result((torch.cat(outs, 1), state), expected, torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_memory_grows_with_the_length_not_its_square(form):
    """Beyond the blocks, of bounded size, the largest tensors are the inputs and the output."""
    op, make, options = FORMS[form]
    inputs = with_grad(make(B=1, T=10_000, H=2, Hk=1, F=4, dtype=torch.float32, **options))
    with LargestTensor() as largest:
        op(**inputs, backend="torch").sum().backward()
    assert largest.most <= max(10_000 * 2 * 8, 4096 * 128)


def test_the_definition_of_the_delta_rule_stores_and_overwrites():
    """One key of length 1, written with beta 1, reads its value back; written again, the newer value."""
    k = torch.zeros(1, 2, 1, 4)
    k[..., 2] = 1
    v = torch.tensor([[3.0, 5.0], [-1.0, 7.0]]).view(1, 2, 1, 2)
    for op in (reference.delta_rule, FORMS["delta"][0]):
        assert_close(op(k, k, v, torch.ones(1, 2, 1), scale=1.0), v, torch.float32)
