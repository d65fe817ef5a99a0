"""Linear attention and the delta rule with every kind of decay, in PyTorch, against their float64 definition."""

from __future__ import annotations

import pytest
import torch
from linearize_kernels import DeltaState, LinearState, linear_attention, reference, torch_blocks

from tests.numerics.kernel_cases import FORMS, gradients, linear_inputs, random_like, random_mask, true_sums, with_grad
from tests.numerics.test_kernels_linear import assert_same_result
from tests.numerics.tolerances import assert_close, tolerance

HEADS = [(8, 1), (8, 2), (3, 3)]


def definition(op):
    return getattr(reference, op.__name__)


def started(form, **sizes):
    """A state with something in it."""
    op, make, options = FORMS[form]
    return op(**make(**sizes, **options), backend="torch", return_state=True)[1]


@pytest.mark.parametrize("T", [1, 15, 63, 64, 65, 129])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_definition_at_every_length(form, T):
    op, make, options = FORMS[form]
    for H, Hk in HEADS:
        sizes = {"B": 2, "H": H, "Hk": Hk, "F": 5, "Dv": 7}
        inputs = make(T=T, seed=T, **sizes, **options)
        rest = {"mask": random_mask(2, T), "return_state": True, "initial_state": started(form, T=3, **sizes)}
        assert_same_result(op(**inputs, **rest, backend="torch"), definition(op)(**inputs, **rest), torch.float64)


@pytest.mark.parametrize("D", [1, 8, 48, 60, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_definition_at_every_head_dim_and_dtype(form, dtype, D):
    op, make, options = FORMS[form]
    inputs = make(B=1, T=129, H=4, Hk=2, F=D, dtype=dtype, **options)
    if "delta" in form and dtype == torch.bfloat16:  # rounded keys are no longer of length 1
        inputs["beta"] = inputs["beta"] * 0.9
    out, state = op(**inputs, return_state=True, backend="torch")
    exact = {n: x.double() for n, x in inputs.items()}
    expected, expected_state = definition(op)(**exact, return_state=True)
    assert out.dtype == dtype
    assert all(x.dtype == torch.float32 for x in state)
    assert_close(out, expected, "float32 delta" if "delta" in form and dtype == torch.float32 else dtype)
    assert_close(state.S, expected_state.S, torch.float32, "state.S")


@pytest.mark.parametrize("T", [1, 2, 3, 64, 130])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_the_definition(form, T):
    """By every input and the state before, with gradients on the output and the state after."""
    op, make, options = FORMS[form]
    sizes = {"H": 4, "Hk": 2, "F": 5, "Dv": 3}
    base = make(T=T, seed=T, **sizes, **options)
    state = started(form, T=5, seed=50, **sizes)
    base |= {f"state {n}": x for n, x in zip(state._fields, state, strict=True)}
    mask, weights, results = random_mask(2, T, 0.85), [], []
    for run in (op, definition(op)):
        inputs = with_grad(base)
        start = type(state)(*(inputs[f"state {n}"] for n in state._fields))
        named = {n: x for n, x in inputs.items() if " " not in n}
        if run is op:
            named["backend"] = "torch"
        out, final = run(**named, initial_state=start, mask=mask, scale=0.4, return_state=True)
        outputs = [out, *true_sums(final)]
        weights = weights or random_like(outputs)
        results.append(gradients({n: x for n, x in inputs.items() if n != "state m"}, outputs, weights))
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, "float64 grad", f"d{name}")


@pytest.mark.parametrize("form", FORMS)
def test_float32_gradients_equal_the_definition(form):
    """With a gradient that is one number, expanded, and one that is transposed; q, k and v are not contiguous."""
    op, make, options = FORMS[form]
    base = make(T=100, H=4, Hk=2, dtype=torch.float32, **options)
    weight, results = random_like([base["q"].transpose(1, 2)])[0].transpose(1, 2), []
    for run, dtype in ((op, torch.float32), (definition(op), torch.float64)):
        inputs = with_grad({n: x.to(dtype) for n, x in base.items()})
        named = {n: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x for n, x in inputs.items()}
        if run is op:
            named["backend"] = "torch"
        sums = torch.autograd.grad(run(**named).sum(), list(inputs.values()))
        products = torch.autograd.grad((run(**named) * weight).sum(), list(inputs.values()))
        results.append(dict(zip(inputs, zip(sums, products, strict=True), strict=True)))
    for name, expected in results[1].items():
        for actual, wanted in zip(results[0][name], expected, strict=True):
            assert_close(actual, wanted, "float32 grad", f"d{name}")


def test_a_floored_denominator_has_no_gradient():
    """eps floors a third of the denominators."""
    base, results = linear_inputs(T=70, H=4, Hk=2), []
    for run in (linear_attention, reference.linear_attention):
        inputs = with_grad(base)
        out = run(**inputs, eps=70.0, backend="torch")
        results.append({"out": out} | gradients(inputs, [out], random_like([out])))
    for name, expected in results[1].items():
        assert_close(results[0][name], expected, "float64" if name == "out" else "float64 grad", name)


def test_masked_queries_have_no_gradient_where_the_scale_overflows():
    """Without a denominator, outputs are multiplied by exp(m): inf, and inf * 0 must not be what they give."""
    inputs = with_grad(linear_inputs(B=1, T=5, dtype=torch.float32, logs=0.0))
    mask = torch.tensor([[True, False, False, False, False]])
    log_k = torch.full_like(inputs["log_k"], -1000.0).index_fill(1, torch.tensor(0), 1000.0)
    out = linear_attention(**inputs | {"log_k": log_k}, normalize=False, mask=mask, backend="torch")
    for grad in torch.autograd.grad(out[:, 1:].sum(), [inputs[n] for n in "qkv"]):
        assert not grad.any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_over_chunk_borders(monkeypatch, form, normalize):
    monkeypatch.setattr(torch_blocks, "CHUNK", 3)
    monkeypatch.setattr(torch_blocks, "ROWS", 12)
    op, make, options = FORMS[form]
    rest = {"normalize": normalize} if op is linear_attention else {"scale": 0.7}
    state = started(form, B=1, T=2, H=2, Hk=1, F=2, Dv=2)
    inputs = with_grad(make(B=1, T=8, H=2, Hk=1, F=2, Dv=2, **options) | {"S": state.S})
    names, mask = list(inputs), torch.arange(8)[None] != 4

    def run(*tensors):
        named = dict(zip(names, tensors, strict=True))
        start = state._replace(S=named.pop("S"))
        out, final = op(**named, **rest, mask=mask, initial_state=start, return_state=True, backend="torch")
        return out, *true_sums(final)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


@pytest.mark.parametrize("kind", ["head", "token", "feature"])
@pytest.mark.parametrize("op", ["linear", "delta"])
def test_decay_of_one_is_no_decay(op, kind):
    op, make, _ = FORMS[op]
    inputs = make(T=130, H=4, Hk=2, decay=kind, dtype=torch.float32)
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    out = op(**inputs, backend="torch")
    del inputs["log_decay"]
    assert_close(out, op(**inputs, backend="torch"), "float32 split")


STEEP = {
    "-50 a token": lambda g: g.fill_(-50),
    "one of -1e4": lambda g: g[:, 70].fill_(-1e4),
    "forgets all, twice": lambda g: g[:, 70:72].fill_(-torch.inf),
    "one channel or head at -5": lambda g: g.transpose(1, -1)[:, 0].fill_(-5),
    "steep, then flat": lambda g: g[:, 64:75].fill_(-60),
}


@pytest.mark.parametrize("steep", STEEP)
@pytest.mark.parametrize("kind", ["token", "feature"])
@pytest.mark.parametrize("op", ["linear", "delta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steep_decay_is_finite_and_equals_the_definition(op, kind, steep, dtype):
    """Values and gradients: no exp of a positive difference, and no digits lost behind a steep step."""
    op, make, _ = FORMS[op]
    base = make(B=1, T=140, H=4, Hk=2, decay=kind, dtype=dtype)
    STEEP[steep](base["log_decay"])
    weight, results = random_like([base["q"]])[0], []
    for run, kind_of in ((op, dtype), (definition(op), torch.float64)):
        inputs = with_grad({n: x.to(kind_of) for n, x in base.items()})
        out, state = run(**inputs, return_state=True, **({"backend": "torch"} if run is op else {}))
        results.append(({"out": out, "S": state.S}, gradients(inputs, [out, state.S], [weight, torch.ones(())])))
    name = str(dtype).removeprefix("torch.")
    for what, expected in results[1][0].items():
        assert_close(results[0][0][what], expected, name, what)
    for what, expected in results[1][1].items():
        assert results[0][1][what].isfinite().all()
        # Terms of size 1 may cancel to nothing: where all is forgotten at once, q and log_decay have no effect.
        error = (results[0][1][what] - expected).abs().max() / expected.abs().max().clamp_min(1.0)
        assert error <= tolerance(f"{name} grad"), f"d{what}"


def test_long_memory_keeps_its_digits():
    """GLA over 4096 tokens with a decay of 6.5e-12 a token, and one of 0."""
    inputs = linear_inputs(B=1, T=4096, H=1, F=4, dtype=torch.float32, decay="feature")
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -6.5e-12)
    out = linear_attention(**inputs, backend="torch")
    del inputs["log_decay"]
    assert_close(out, linear_attention(**inputs, backend="torch"), "float32 split")


def test_states_have_the_types_they_say():
    for form in FORMS:
        assert type(started(form, T=2)) is (DeltaState if "delta" in form else LinearState)
