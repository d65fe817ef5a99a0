"""linear_attention against its float64 definition, on values and on gradients."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels import (
    LinearState,
    empty_linear_state,
    linear_attention,
    linear_attention_step,
    reference,
    torch_blocks,
)

from tests.numerics.kernel_cases import (
    gradients,
    in_order,
    linear_inputs,
    random_like,
    random_mask,
    split_linear,
    time_slice,
    true_sums,
    with_grad,
)
from tests.numerics.tolerances import assert_close

LENGTHS = [0, 1, 2, 63, 64, 65, 127, 128, 129, 300]
HEADS = [(8, 1), (8, 2), (3, 3)]


def assert_same_result(actual, expected, name):
    """Outputs, and every tensor of the states."""
    assert_close(actual[0], expected[0], name)
    for field, a, e in zip(actual[1]._fields, in_order(actual[1]), in_order(expected[1]), strict=True):
        assert a.dtype == e.dtype
        if a.numel() and a.is_floating_point():
            assert_close(a, e, name, f"state.{field}")
        else:
            assert torch.equal(a, e), f"state.{field}"


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("logs", [None, 3.0])
def test_equals_the_definition_at_every_length(T, logs):
    for (H, Hk), normalize in zip(HEADS, [True, False, True], strict=True):
        inputs = linear_inputs(T=T, H=H, Hk=Hk, F=5, Dv=7, logs=logs, seed=T)
        options = {"normalize": normalize, "scale": 0.3, "mask": random_mask(2, T), "return_state": True}
        expected = reference.linear_attention(**inputs, **options)
        assert_same_result(linear_attention(**inputs, **options), expected, torch.float64)


@pytest.mark.parametrize("D", [1, 8, 48, 60, 64, 100])
@pytest.mark.parametrize(("H", "Hk"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition_at_every_head_dim_and_dtype(D, H, Hk, dtype):
    inputs = linear_inputs(B=1, T=129, H=H, Hk=Hk, F=D, Dv=D, dtype=dtype)
    out, state = linear_attention(**inputs, return_state=True)
    expected, expected_state = reference.linear_attention(
        **{n: x.double() for n, x in inputs.items()}, return_state=True
    )
    assert out.dtype == dtype
    assert all(x.dtype == torch.float32 for x in state)
    assert_close(out, expected, dtype)
    assert_close(state.S, expected_state.S, torch.float32, "state.S")


@pytest.mark.parametrize("T", [1, 2, 3, 7, 63, 64, 130])
@pytest.mark.parametrize("logs", [None, 2.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_equal_the_definition(T, logs, normalize):
    """Through the denominator, and with gradients on the final state and from an initial one."""
    base = linear_inputs(T=T, H=4, Hk=2, logs=logs, seed=T)
    start = linear_attention(**linear_inputs(T=5, H=4, Hk=2, logs=logs, seed=99), return_state=True)[1]
    base |= dict(zip(("S", "z", "m"), start, strict=True))
    weights, results = None, []
    for op in (linear_attention, reference.linear_attention):
        inputs = with_grad(base)
        leaves = {n: x for n, x in inputs.items() if n != "m"}
        state = LinearState(inputs["S"], inputs["z"], inputs["m"])
        qkv = {n: x for n, x in inputs.items() if n not in ("S", "z", "m")}
        out, final = op(**qkv, normalize=normalize, initial_state=state, return_state=True, mask=random_mask(2, T, 0.9))
        outputs = [out, *true_sums(final)]
        weights = weights or random_like(outputs)
        results.append(gradients(leaves, outputs, weights))
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, "float64 grad", f"d{name}")


@pytest.mark.parametrize("T", [1, 7, 64])
def test_float32_gradient_of_a_sum(T):
    """An expanded gradient, q, k = rand + 0.1: dk is wrong where the denominator's path is lost."""
    base = linear_inputs(T=T, dtype=torch.float32)
    grads = []
    for op, dtype in ((linear_attention, torch.float32), (reference.linear_attention, torch.float64)):
        inputs = with_grad({n: x.to(dtype) for n, x in base.items()})
        op(**inputs).pow(3).sum().backward()
        plain = with_grad({n: x.to(dtype) for n, x in base.items()})
        op(**plain).sum().backward()
        grads.append({n: x.grad for n, x in inputs.items()} | {f"sum {n}": x.grad for n, x in plain.items()})
    for name, expected in grads[1].items():
        if T == 1 and not name.endswith("v"):  # the one output is v, whatever q and k
            assert grads[0][name].abs().max() < 1e-5
        else:
            assert_close(grads[0][name], expected, "float32 grad", f"d{name}")


@pytest.mark.parametrize("logs", [None, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradcheck_over_chunk_borders(monkeypatch, logs, normalize):
    monkeypatch.setattr(torch_blocks, "CHUNK", 2)
    monkeypatch.setattr(torch_blocks, "ROWS", 8)
    inputs = with_grad(linear_inputs(B=1, T=7, H=2, Hk=1, F=2, Dv=2, logs=logs))
    names = list(inputs)
    mask = torch.tensor([[True, True, False, True, True, True, True]])

    def run(*tensors):
        out, state = linear_attention(
            **dict(zip(names, tensors, strict=True)), normalize=normalize, mask=mask, return_state=True
        )
        return out, *true_sums(state)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_scales_over_many_orders_of_magnitude(dtype):
    """log_k within +-1000, rising, falling and random: finite, and equal to the definition, gradients too."""
    base = linear_inputs(B=3, T=150, H=2, dtype=dtype)
    slope = torch.linspace(-1000, 1000, 150)
    noise = torch.rand(150, generator=torch.Generator().manual_seed(1)) * 2000 - 1000
    base["log_k"] = torch.stack([slope, -slope, noise])[..., None].expand(-1, -1, 2).to(dtype)
    name = "float32 logs" if dtype == torch.float32 else dtype
    weight = torch.randn(base["v"].shape, generator=torch.Generator().manual_seed(2))
    results = []
    for op, kind in ((linear_attention, dtype), (reference.linear_attention, torch.float64)):
        inputs = with_grad({n: x.to(kind) for n, x in base.items()})
        out, state = op(**inputs, return_state=True)
        results.append({"out": out} | state._asdict() | gradients(inputs, [out], [weight]))
    for what, expected in results[1].items():
        assert results[0][what].isfinite().all()
        kind = f"{str(dtype).removeprefix('torch.')} grad" if what in inputs else name
        assert_close(results[0][what], expected, kind, what)


def test_masked_outputs_are_zero_even_where_unnormalised_ones_overflow():
    inputs = linear_inputs(B=1, T=70, dtype=torch.float32, logs=0.0)
    inputs["log_k"] += 1000
    state = linear_attention(**time_slice(inputs, 0, 1), return_state=True)[1]
    for length in (1, 70):
        mask = torch.zeros(1, length, dtype=torch.bool)
        out = linear_attention(**time_slice(inputs, 0, length), normalize=False, mask=mask, initial_state=state)
        assert not out.any()
        assert not out.isnan().any()


def test_appended_tokens_never_change_earlier_outputs():
    """Even if they are huge: a maximum over the chunk or the sequence would wipe the past out."""
    inputs = linear_inputs(T=150, logs=1.0, dtype=torch.float32)
    before = linear_attention(**time_slice(inputs, 0, 70))
    inputs["log_k"][:, 70:] += 1000
    inputs["k"][:, 70:] *= 1e4
    inputs["v"][:, 70:] *= 1e4
    assert_close(linear_attention(**inputs)[:, :70], before, "float32 split")


def test_permuting_heads_permutes_outputs():
    inputs = linear_inputs(H=3, T=130, dtype=torch.float32)
    order = [2, 0, 1]
    permuted = linear_attention(**{n: x[:, :, order] for n, x in inputs.items()})
    assert_close(permuted, linear_attention(**inputs)[:, :, order], torch.float32)


@pytest.mark.parametrize(("logs", "shift"), [(None, 0), (5.0, 0), (5.0, -1000), (5.0, 1000)])
def test_values_of_one_give_one(logs, shift):
    """Whatever the keys' common scale, which cancels."""
    inputs = linear_inputs(T=130, logs=logs, dtype=torch.float32)
    if logs is not None:
        inputs["log_k"] += shift
    inputs["v"] = torch.ones_like(inputs["v"])
    assert_close(linear_attention(**inputs), inputs["v"], torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_stay_float32(dtype):
    """65537 equal keys of 4: the sum passes float16's largest number, and bfloat16 stops counting at 256."""
    T = 65537
    k = torch.full((1, T, 1, 2), 4.0, dtype=dtype)
    v = torch.randn(1, T, 1, 2, generator=torch.Generator().manual_seed(0)).to(dtype) + 1
    out, state = linear_attention(k, k, v, return_state=True)
    count = torch.arange(1, T + 1, dtype=torch.float64)[None, :, None, None]
    assert_close(out, v.double().cumsum(1) / count, dtype)
    assert_close(state.z, torch.full((1, 1, 2), 4.0 * T), torch.float32, "state.z")


def test_degenerate_tokens_are_finite():
    for q, k in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5)):
        for T in (1, 70):
            shape = (1, T, 1, 4)
            out = linear_attention(torch.full(shape, q), torch.full(shape, k), torch.ones(shape))
            expected = 1.0 if k else 0.0
            assert_close(out, torch.full(shape, expected), torch.float32)


def test_many_rows_of_one_token():
    inputs = linear_inputs(B=8750, T=1, H=8, F=2, dtype=torch.float32)
    assert_close(linear_attention(**inputs), inputs["v"], torch.float32)


def test_layout_of_the_inputs_does_not_matter():
    inputs = linear_inputs(B=2, T=70, H=4, Hk=2, dtype=torch.float32, logs=1.0)
    expected = linear_attention(**inputs)
    strided = {n: x.transpose(0, 1).contiguous().transpose(0, 1) for n, x in inputs.items()}
    strided["v"] = torch.stack([inputs["v"]] * 2, -1)[..., 0]
    assert not strided["q"].is_contiguous()
    assert torch.equal(linear_attention(**strided), expected)
    one = {n: x[:, :1].expand(-1, 70, *x.shape[2:]) for n, x in inputs.items()}
    assert_close(linear_attention(**one), one["v"][:, :, [0, 0, 1, 1]], torch.float32)


@pytest.mark.parametrize("options", [{}, {"normalize": False, "scale": 0.5}])
def test_step_equals_the_definition_and_updates_its_state_in_place(options):
    inputs = linear_inputs(T=6, H=4, Hk=2, logs=2.0)
    mask = random_mask(2, 6)
    expected = reference.linear_attention(**inputs, mask=mask, return_state=True, **options)
    state, outs = empty_linear_state(2, 2, 8, 8, logs=True, dtype=torch.float64, device=torch.device("cpu")), []
    places = [x.data_ptr() for x in state]
    for t in range(6):
        token = time_slice(inputs, t, t + 1) | {"mask": mask[:, t : t + 1]} | options
        q, k, v = (token.pop(n) for n in "qkv")
        outs.append(linear_attention_step(q, k, v, state, **token))
    assert_same_result((torch.cat(outs, 1), state), expected, torch.float64)
    assert places == [x.data_ptr() for x in state]


def test_prefill_then_steps_equals_one_call():
    for T in (2, 64, 129):
        inputs = linear_inputs(T=T, dtype=torch.float32)
        for k in (1, 5, 70):
            if k < T:
                out, _ = split_linear(inputs, list(range(T - k, T)))
                assert_close(out, linear_attention(**inputs), "float32 split")
