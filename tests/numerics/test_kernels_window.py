"""window_attention against its float64 definition, on values and on gradients."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels import (
    WindowState,
    empty_window_state,
    linear_attention,
    reference,
    torch_blocks,
    torch_softmax,
    window_attention,
    window_attention_step,
)
from torch.nn import functional as F

from tests.numerics.kernel_cases import (
    gradients,
    random_like,
    random_mask,
    time_slice,
    true_sums,
    window_inputs,
    with_grad,
)
from tests.numerics.test_kernels_linear import HEADS, LENGTHS, assert_same_result
from tests.numerics.tolerances import assert_close

# Log scales of queries and keys: none, or both (FAVOR+).
SCALES = ["none", "both"]


def scaled_inputs(scales, **sizes):
    return window_inputs(logs=None if scales == "none" else 2.0, **sizes)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("scales", SCALES)
def test_equals_the_definition_at_every_length(T, scales):
    for i, ((H, Hk), window) in enumerate(zip(HEADS, [1, 64, 20], strict=True)):
        inputs = scaled_inputs(scales, T=T, H=H, Hk=Hk, D=5, Dv=7, seed=T)
        options = {
            "window": window,
            "sinks": [0, 3, 2][i],
            "softcap": [None, 2.0, None][i],
            "scale": [None, 0.7, None][i],
            "mask": random_mask(2, T) if i else None,
            "return_state": True,
        }
        expected = reference.window_attention(**inputs, **options)
        assert_same_result(window_attention(**inputs, **options), expected, torch.float64)


@pytest.mark.parametrize("window", [2, 31, 33, 65, 256, 257, 1000])
def test_equals_the_definition_at_every_window(window):
    """Windows above 256 take one block at a time; the last is longer than the call."""
    inputs = window_inputs(B=1, T=290, D=4, F=3)
    for options in ({}, {"sinks": 2, "mask": random_mask(1, 290)}):
        options |= {"window": window, "return_state": True}
        expected = reference.window_attention(**inputs, **options)
        assert_same_result(window_attention(**inputs, **options), expected, torch.float64)


@pytest.mark.parametrize("D", [1, 8, 48, 60, 64, 100])
@pytest.mark.parametrize(("H", "Hk"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition_at_every_head_dim_and_dtype(D, H, Hk, dtype):
    inputs = window_inputs(B=1, T=80, H=H, Hk=Hk, D=D, F=2 * D, dtype=dtype)
    out, state = window_attention(**inputs, window=16, return_state=True)
    expected = reference.window_attention(**{n: x.double() for n, x in inputs.items()}, window=16)
    assert out.dtype == dtype
    assert (state.S.dtype, state.k.dtype, state.v.dtype) == (torch.float32, dtype, dtype)
    assert_close(out, expected, dtype)


def test_window_beyond_the_sequence_is_softmax_attention():
    """With and without gamma, which cancels where there is no linear part."""
    inputs = window_inputs(T=130, H=4, Hk=2, dtype=torch.float32)
    q, k, v = (inputs[n].transpose(1, 2) for n in "qkv")
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    for gamma in (None, inputs.pop("gamma")):
        assert_close(window_attention(**inputs, gamma=gamma, window=130), expected, torch.float32)


def test_gamma_zero_is_linear_attention_over_the_keys_before_the_window():
    inputs = window_inputs(T=130, dtype=torch.float32)
    inputs["gamma"] = torch.zeros(2)
    out = window_attention(**inputs, window=10)
    lagged = linear_attention(inputs["phi_q"][:, 10:], inputs["phi_k"][:, :-10], inputs["v"][:, :-10])
    assert_close(out[:, 10:], lagged, torch.float32)
    assert not out[:, :10].any()


def test_exact_features_make_it_full_softmax_attention():
    """D = 1 and four key values: one-hot features hold exp(s) exactly: on that scale nothing is lost."""
    g = torch.Generator().manual_seed(0)
    values = torch.tensor([-2.0, -0.5, 1.0, 3.0], dtype=torch.float64)
    place = torch.randint(4, (2, 100, 2), generator=g)
    k = values[place][..., None]
    q, v = torch.randn(2, 100, 2, 1, generator=g).double(), torch.randn(2, 100, 2, 3, generator=g).double()
    exponent = q * values  # (2, 100, 2, 4)
    log_q = exponent.amax(-1)
    features = {"phi_q": (exponent - log_q[..., None]).exp(), "phi_k": F.one_hot(place, 4).double()}
    out = window_attention(q, k, v, **features, log_q=log_q, log_k=torch.zeros(2, 100, 2), window=7, sinks=2)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    assert_close(out, expected.transpose(1, 2), torch.float64)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("T", "window", "sinks"), [(1, 1, 0), (2, 1, 1), (3, 2, 0), (70, 5, 2), (100, 33, 0)])
def test_gradients_equal_the_definition(T, window, sinks, scales):
    """By every input, gamma and the state before, with gradients on the output and the state after."""
    base = scaled_inputs(scales, T=T, H=4, Hk=2, D=3, F=4, seed=T)
    first = scaled_inputs(scales, T=window + 3, H=4, Hk=2, D=3, F=4, seed=50)
    start = window_attention(**first, window=window, sinks=sinks, return_state=True)[1]
    base |= {f"state {n}": x for n, x in zip(start._fields, start, strict=True)}
    if T > 3:  # phi_k starts with the ring's features
        extra = scaled_inputs(scales, T=T + window, H=4, Hk=2, D=3, F=4, seed=7)
        base |= {n: extra[n] for n in ("phi_k", "log_k") if n in base}
    mask = random_mask(2, T, 0.85)
    weights, results = None, []
    for op in (window_attention, reference.window_attention):
        inputs = with_grad(base)
        state = WindowState(*(inputs[f"state {n}"] for n in WindowState._fields))
        out, final = op(
            **{n: x for n, x in inputs.items() if " " not in n},
            window=window, sinks=sinks, initial_state=state, return_state=True, mask=mask,
        )  # fmt: skip
        by = {n: x for n, x in inputs.items() if n != "state m"}
        outputs = [out, *true_sums(final), final.k, final.v, final.sink_k, final.sink_v]
        weights = weights or random_like(outputs)
        results.append(gradients(by, outputs, weights))
    assert len(results[0]) >= 10
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, "float64 grad", f"d{name}")


def test_float32_gradient_of_a_sum():
    base = window_inputs(T=100, H=4, Hk=2, dtype=torch.float32)
    grads = []
    for op, dtype in ((window_attention, torch.float32), (reference.window_attention, torch.float64)):
        inputs = with_grad({n: x.to(dtype) for n, x in base.items()})
        op(**inputs, window=16).sum().backward()
        grads.append({n: x.grad for n, x in inputs.items()})
    for name, expected in grads[1].items():
        assert_close(grads[0][name], expected, "float32 grad", f"d{name}")


@pytest.mark.parametrize("scales", SCALES)
def test_gradcheck_over_block_borders(monkeypatch, scales):
    monkeypatch.setattr(torch_blocks, "CHUNK", 2)
    monkeypatch.setattr(torch_blocks, "ROWS", 8)
    monkeypatch.setattr(torch_softmax, "RUN", 2)
    inputs = with_grad(scaled_inputs(scales, B=1, T=8, H=2, Hk=1, D=2, F=2))
    names = list(inputs)
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[0, 3] = False

    def run(*tensors):
        named = dict(zip(names, tensors, strict=True))
        out, state = window_attention(**named, window=3, sinks=1, softcap=3.0, mask=mask, return_state=True)
        return out, *true_sums(state)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


def test_log_scales_over_many_orders_of_magnitude():
    """log_q and log_k within +-1000, scores within +-100: finite, and equal to the definition."""
    base = window_inputs(B=3, T=150, dtype=torch.float32)
    slope = torch.linspace(-1000, 1000, 150)
    noise = torch.rand(150, generator=torch.Generator().manual_seed(1)) * 2000 - 1000
    base["log_k"] = torch.stack([slope, -slope, noise])[..., None].expand(-1, -1, 2).contiguous()
    base["log_q"] = -base["log_k"].cummax(1).values + torch.randn(3, 150, 2)
    base["q"] = base["q"] * 30
    results = []
    for op, dtype in ((window_attention, torch.float32), (reference.window_attention, torch.float64)):
        inputs = with_grad({n: x.to(dtype) for n, x in base.items()})
        out, state = op(**inputs, window=20, return_state=True)
        results.append((out, *state[:3]))
        (out * torch.linspace(-1, 1, 150)[:, None, None]).sum().backward()
        assert all(x.grad.isfinite().all() for x in inputs.values())
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, "float32 logs")


def test_appended_tokens_never_change_earlier_outputs():
    inputs = window_inputs(T=200, logs=1.0, dtype=torch.float32)
    before = window_attention(**time_slice(inputs, 0, 90), window=20, sinks=2)
    for name in ("k", "v", "phi_k"):
        inputs[name][:, 90:] *= 1e4
    inputs["log_k"][:, 90:] += 1000
    assert_close(window_attention(**inputs, window=20, sinks=2)[:, :90], before, "float32 split")


def test_permuting_heads_permutes_outputs():
    inputs = window_inputs(H=3, T=130, dtype=torch.float32)
    order = [2, 0, 1]
    permuted = {n: x[order] if n == "gamma" else x[:, :, order] for n, x in inputs.items()}
    expected = window_attention(**inputs, window=30)[:, :, order]
    assert_close(window_attention(**permuted, window=30), expected, torch.float32)


@pytest.mark.parametrize("scales", SCALES)
def test_values_of_one_give_one(scales):
    inputs = scaled_inputs(scales, T=130, dtype=torch.float32)
    inputs["v"] = torch.ones_like(inputs["v"])
    assert_close(window_attention(**inputs, window=16, sinks=2), inputs["v"], torch.float32)


def test_degenerate_tokens_are_finite():
    for value in (0.0, 1.0):
        for T in (1, 70):
            x = torch.full((1, T, 1, 4), value)
            out = window_attention(x, x, torch.ones_like(x), x, x, window=8)
            assert_close(out, torch.ones_like(x), torch.float32)


def test_only_keys_that_leave_the_window_are_read():
    """phi_k may stop after them, and what stands behind them has no effect."""
    inputs = window_inputs(T=100, logs=1.0)
    expected, state = window_attention(**inputs, window=16, return_state=True)
    short = inputs | {"phi_k": inputs["phi_k"][:, :84], "log_k": inputs["log_k"][:, :84]}
    assert torch.equal(window_attention(**short, window=16), expected)
    more = inputs | {"phi_k": torch.rand(2, 116, 2, 6).double(), "log_k": torch.rand(2, 116, 2).double()}
    expected = window_attention(**more, window=16, initial_state=state)
    more |= {"phi_k": more["phi_k"][:, :100], "log_k": more["log_k"][:, :100]}
    assert torch.equal(window_attention(**more, window=16, initial_state=state), expected)


def test_layout_of_the_inputs_does_not_matter():
    inputs = window_inputs(B=2, T=70, H=4, Hk=2, dtype=torch.float32)
    strided = {n: x if n == "gamma" else x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs.items()}
    assert not strided["q"].is_contiguous()
    out = window_attention(**strided, window=10, sinks=1)
    assert torch.equal(out, window_attention(**inputs, window=10, sinks=1))


@pytest.mark.parametrize("scales", SCALES)
def test_step_equals_the_definition_and_updates_its_state_in_place(scales):
    inputs = scaled_inputs(scales, T=12, H=4, Hk=2)
    mask = random_mask(2, 12)
    mask[:, 0] = False
    options = {"window": 3, "sinks": 2, "softcap": 3.0, "gamma": inputs.pop("gamma")}
    expected = reference.window_attention(**inputs, **options, mask=mask, return_state=True)
    state = empty_window_state(
        inputs["k"], inputs["v"], rows=2, features=6, window=3, sinks=2, logs=scales == "both", dtype=torch.float64
    )
    places, outs = [x.data_ptr() for x in state], []
    for t in range(12):
        token = time_slice(inputs, t, t + 1)
        at = max(t - 3, 0)
        token |= {n: inputs[n][:, at : at + 1] for n in ("phi_k", "log_k") if n in inputs}
        args = [token.pop(n) for n in ("q", "k", "v", "phi_q", "phi_k")]
        outs.append(window_attention_step(*args, state, mask=mask[:, t : t + 1], **token, **options))
    assert places == [x.data_ptr() for x in state]
    assert state.start.tolist() == [0, 0]  # after 12 tokens, the ring of 3 is in order again
    assert_same_result((torch.cat(outs, 1), state), expected, torch.float64)


@pytest.mark.parametrize("logs", [None, 3.0])
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 2.0])  # 2 is a floor that holds for many tokens
def test_gradients_of_the_features_alone_equal_those_of_a_full_backward(logs, continued, eps):
    """Attention transfer trains nothing else, and goes a shorter way."""
    base = window_inputs(T=70, H=4, Hk=2, logs=logs)
    state = None
    if continued:
        before = window_inputs(T=30, H=4, Hk=2, logs=logs, seed=4)
        state = window_attention(**before, window=9, sinks=2, return_state=True)[1]
        older = window_inputs(T=9, H=4, Hk=2, logs=logs, seed=5)
        for name in ("phi_k", "log_k") if logs else ("phi_k",):
            base[name] = torch.cat([older[name], base[name]], 1)
    base["gate"] = base.pop("gamma").log()
    grads = []
    for trained in (set(base), set(base) - {"q", "k", "v"}):
        inputs = {n: x.clone().requires_grad_(n in trained) for n, x in base.items()}
        features = {n: x for n, x in inputs.items() if n != "gate"}
        out, after = window_attention(
            **features, gamma=inputs["gate"].exp(), window=9, sinks=2, initial_state=state, return_state=True,
            mask=random_mask(2, 70, 0.8), eps=eps,
        )  # fmt: skip
        outputs = [out, after.S, after.z]
        grads.append(gradients(inputs, outputs, random_like(outputs)))
    assert set(grads[1]) == set(base) - {"q", "k", "v"}
    for name, actual in grads[1].items():
        assert_close(actual, grads[0][name], "float64 grad", f"d{name}")


@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("T", [1, 9])
def test_features_alone_are_trained_on_rows_within_the_window(backend, T):
    """Nothing is folded, so they play no part: zeros, and not an error."""
    base = window_inputs(T=T, H=4, Hk=2, dtype=torch.float32)
    inputs = {n: x.requires_grad_(n not in ("q", "k", "v")) for n, x in base.items()}
    inputs["gamma"] = inputs["gamma"] * 2
    inputs["phi_k"] = inputs["phi_k"][:, :0]
    out, state = window_attention(**inputs, window=9, return_state=True, backend=backend)
    loss = out.sum() + (state.S * torch.randn_like(state.S)).sum()
    grads = torch.autograd.grad(loss, [base["phi_q"], base["gamma"]])
    assert not any(x.any() for x in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gamma_of_zero_has_a_gradient(dtype):
    base = window_inputs(T=40, H=4, Hk=2, dtype=torch.float32)
    base["gamma"][0] = 0
    grads = []
    for trained in ("gamma", "gamma q"):
        inputs = {n: x.clone() for n, x in base.items()}
        inputs["gamma"] = inputs["gamma"].to(dtype).requires_grad_()
        inputs["q"].requires_grad_("q" in trained)
        window_attention(**inputs, window=9).square().sum().backward()
        grads.append(inputs["gamma"].grad.float())
    assert_close(grads[0], grads[1], "float32 grad" if dtype == torch.float32 else dtype)


def test_a_state_holds_its_own_memory_alone():
    """Not the keys of the call that made it."""
    _, state = window_attention(**window_inputs(B=1, T=500), window=4, sinks=2, return_state=True)
    assert all(x.untyped_storage().nbytes() <= x.nbytes for x in state)


def test_a_step_stays_within_the_ring_whatever_its_start_says():
    inputs = window_inputs(T=12, dtype=torch.float32)
    _, state = window_attention(**inputs, window=4, return_state=True)
    token = [inputs[n][:, :1] for n in ("q", "k", "v", "phi_q", "phi_k")]
    for start in (-1, 7):
        broken = type(state)(*(x.clone() for x in state))._replace(start=torch.tensor([start, 0]))
        assert window_attention_step(*token, broken, window=4).isfinite().all()
        assert (broken.start % 4 == torch.tensor([(start + 1) % 4, 1])).all()
