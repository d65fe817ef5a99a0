"""What the ops refuse, how a backend is chosen, and what the package may import."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import linearize_kernels
import pytest
import torch
from linearize_kernels import (
    DeltaState,
    available,
    choose,
    custom,
    custom_window,
    delta_rule,
    delta_rule_step,
    dispatch,
    linear_attention,
    linear_attention_step,
    reference,
    window_attention,
    window_attention_step,
)

from tests.numerics.kernel_cases import linear_inputs, window_inputs
from tests.numerics.tolerances import assert_close

INT = torch.tensor


def wrong(inputs, **changes):
    return {n: changes.get(n, x) for n, x in inputs.items()} | changes


LINEAR = linear_inputs(T=6, H=4, Hk=2)
WINDOW = window_inputs(T=6, H=4, Hk=2)
DELTA = LINEAR | {"beta": LINEAR["v"][..., 0].sigmoid()}
STATE = linear_attention(**LINEAR, return_state=True)[1]
DELTA_STATE = delta_rule(**DELTA, return_state=True)[1]
WINDOW_STATE = window_attention(**WINDOW, window=4, sinks=2, return_state=True)[1]

LINEAR_FAULTS = {
    r"q must be .*not \(2, 6, 4\)": {"q": LINEAR["q"][..., 0]},
    r"k must be \(B, T, Hk, F\) = \(2, 6, any, 8\), not \(2, 5, 2, 8\)": {"k": LINEAR["k"][:, 1:]},
    r"v must be .*\(2, 6, 2, any\), not \(2, 6, 1, 8\)": {"v": LINEAR["v"][:, :, :1]},
    r"q \(2, 6, 3, 8\) has 3 heads, no multiple of the 2": {"q": LINEAR["q"][:, :, :3]},
    r"q .* is torch.float32, but k .* is torch.float64": {"q": LINEAR["q"].float()},
    r"v must be floating point, not torch.int64": {"v": LINEAR["v"].long()},
    r"k is on meta, but q is on cpu": {"k": LINEAR["k"].to("meta")},
    r"log_k must be \(B, T, Hk\)": {"log_k": LINEAR["k"]},
    r"log_decay must be .*\(2,\), \(2, 6, 2\), \(2, 6, 2, 8\), not \(2, 6\)": {"log_decay": LINEAR["k"][:, :, 0, 0]},
    r"log_decay must be floating point": {"log_decay": INT([0, 0])},
    r"log_k and log_decay can't be combined": {"log_k": LINEAR["k"][..., 0], "log_decay": -LINEAR["k"][..., 0]},
    r"mask must be \(B, T\) = \(2, 6\), not \(2, 7\)": {"mask": torch.ones(2, 7, dtype=torch.bool)},
    r"mask \(2, 6\) must be bool": {"mask": torch.ones(2, 6)},
    r"cu_seqlens \(2,\) needs inputs packed into one row": {"cu_seqlens": INT([0, 6])},
    r"initial_state.S must be .*\(2, 2, 8, 8\)": {"initial_state": STATE._replace(S=STATE.z)},
    r"initial_state.m must be .*not \(1, 2\)": {"initial_state": STATE._replace(m=STATE.m[:1])},
}
PACKED_FAULTS = {
    r"must start at 0, not 1": [1, 6],
    r"must end at T = 6, not 5": [0, 5],
    r"must never decrease": [0, 4, 2, 6],
    r"must be \(N \+ 1,\)": [[0, 6]],
    r"must be int32 or int64": [0.0, 6.0],
}
WINDOW_FAULTS = {
    r"window must be an integer of at least 1, not 0": {"window": 0},
    r"window must be an integer of at least 1, not 2.0": {"window": 2.0},
    r"sinks must be .* not -1": {"sinks": -1},
    r"softcap must be positive": {"softcap": 0.0},
    r"gamma must be \(H,\) = \(4\), not \(2,\)": {"gamma": torch.ones(2)},
    r"phi_q must be .*\(2, 6, 4, any\)": {"phi_q": WINDOW["phi_q"][:, :, :2]},
    r"phi_k must be .*\(2, any, 2, 6\), not \(2, 6, 2, 5\)": {"phi_k": WINDOW["phi_k"][..., 1:]},
    r"phi_k \(2, 1, 2, 6\) must hold at least 2 keys": {"phi_k": WINDOW["phi_k"][:, :1]},
    r"phi_q .* is torch.float32, but phi_k": {"phi_q": WINDOW["phi_q"].float()},
    r"log_k is given alone": {"log_k": WINDOW["phi_k"][..., 0]},
    r"log_q is given alone": {"log_q": WINDOW["phi_q"][..., 0]},
    r"log_q must be \(B, T, H\)": {"log_q": WINDOW["phi_q"], "log_k": WINDOW["phi_k"][..., 0]},
    r"log_k must be .*as long as phi_k": {"log_q": WINDOW["phi_q"][..., 0], "log_k": WINDOW["phi_k"][:, 1:, :, 0]},
    r"initial_state.sink_age must be int64, not torch.int32": {
        "initial_state": WINDOW_STATE._replace(sink_age=WINDOW_STATE.sink_age.int()),
        "sinks": 2,
    },
    r"initial_state.start must be \(B,\)": {
        "initial_state": WINDOW_STATE._replace(start=WINDOW_STATE.start[:1]),
        "sinks": 2,
    },
    r"initial_state.k must be \(B, w, Hk, D\) = \(2, 5, 2, 8\)": {"initial_state": WINDOW_STATE, "window": 5},
    r"initial_state.sink_k must be .*\(2, 1, 2, 8\)": {"initial_state": WINDOW_STATE, "sinks": 1},
    r"initial_state.valid must be bool": {
        "initial_state": WINDOW_STATE._replace(valid=WINDOW_STATE.valid.float()),
        "sinks": 2,
    },
    r"phi_k \(2, 5, 2, 6\) must hold at least 6 keys": {
        "initial_state": WINDOW_STATE,
        "sinks": 2,
        "phi_k": WINDOW["phi_k"][:, 1:],
    },
}


@pytest.mark.parametrize("message", LINEAR_FAULTS)
@pytest.mark.parametrize("op", [linear_attention, reference.linear_attention])
def test_linear_attention_refuses(message, op):
    with pytest.raises(ValueError, match=message):
        op(**wrong(LINEAR, **LINEAR_FAULTS[message]))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"beta must be \(B, T, Hk\) = \(2, 6, 2\), not \(2, 6, 2, 8\)", {"beta": LINEAR["k"]}),
        (r"initial_state.S must be .*\(2, 2, 8, 8\), not \(1, 2, 8, 8\)", {"initial_state": DeltaState(STATE.S[:1])}),
        (r"log_decay must be", {"log_decay": LINEAR["k"][..., :1]}),
    ],
)
@pytest.mark.parametrize("op", [delta_rule, reference.delta_rule])
def test_delta_rule_refuses(op, message, changes):
    with pytest.raises(ValueError, match=message):
        op(**wrong(DELTA, **changes))


@pytest.mark.parametrize("message", PACKED_FAULTS)
def test_cu_seqlens_are_checked(message):
    row, features = linear_inputs(B=1, T=6), window_inputs(B=1, T=6)
    with pytest.raises(ValueError, match=message):
        linear_attention(**row, cu_seqlens=INT(PACKED_FAULTS[message]))
    with pytest.raises(ValueError, match=message):
        window_attention(**features, window=2, cu_seqlens=INT(PACKED_FAULTS[message]))


@pytest.mark.parametrize("message", WINDOW_FAULTS)
@pytest.mark.parametrize("op", [window_attention, reference.window_attention])
def test_window_attention_refuses(message, op):
    with pytest.raises(ValueError, match=message):
        op(**{"window": 4, **wrong(WINDOW, **WINDOW_FAULTS[message])})


def test_packed_sequences_with_a_state_are_refused_for_the_window():
    row = window_inputs(B=1, T=6)
    _, state = window_attention(**row, window=2, return_state=True)
    with pytest.raises(ValueError, match=r"cu_seqlens .* with initial_state is ambiguous"):
        window_attention(**row, window=2, initial_state=state, cu_seqlens=INT([0, 6]))
    with pytest.raises(ValueError, match=r"phi_k must be \(1, T, Hk, F\) with cu_seqlens"):
        window_attention(**wrong(row, phi_k=row["phi_k"][:, :4]), window=2, cu_seqlens=INT([0, 6]))


def first_token(inputs, *names):
    return [inputs[name][:, :1].clone() for name in names]


def test_steps_take_one_token_and_a_state_they_can_update():
    with pytest.raises(ValueError, match=r"q must be one token, \(B, 1, H, \.\), not \(2, 6, 4, 8\)"):
        linear_attention_step(LINEAR["q"], LINEAR["k"], LINEAR["v"], STATE)
    args = (WINDOW[n] for n in ("q", "k", "v", "phi_q", "phi_k"))
    with pytest.raises(ValueError, match="q must be one token"):
        window_attention_step(*args, WINDOW_STATE, window=4, sinks=2)
    token = first_token(LINEAR, "q", "k", "v")
    with pytest.raises(ValueError, match=r"state.S .* must be contiguous: it is updated in place"):
        linear_attention_step(*token, STATE._replace(S=STATE.S.transpose(2, 3)))
    with pytest.raises(ValueError, match=r"state.z must be float32 or float64, not torch.float16"):
        linear_attention_step(*token, STATE._replace(z=STATE.z.half()))
    token = [x.requires_grad_() for x in first_token(DELTA, "q", "k", "v", "beta")]
    with pytest.raises(ValueError, match="a step updates its state in place and has no gradient"):
        delta_rule_step(*token, DELTA_STATE)


OPS = {
    "linear_attention": lambda **options: linear_attention(**LINEAR, **options),
    "delta_rule": lambda **options: delta_rule(**DELTA, **options),
    "window_attention": lambda **options: window_attention(**WINDOW, window=3, **options),
}


@pytest.mark.parametrize("op", OPS)
def test_unusable_backends_are_refused(op, monkeypatch):
    with pytest.raises(ValueError, match=f"backend='cuda' is no backend of {op}; there are torch, cpu, triton and"):
        OPS[op](backend="cuda")
    with pytest.raises(ValueError, match=f"backend 'cpu' can't run {op}: .*float64"):
        OPS[op](backend="cpu")
    monkeypatch.setenv("LINEARIZE_BACKEND", "triton")
    with pytest.raises(ValueError, match=rf"backend 'triton' \(which is LINEARIZE_BACKEND\) can't run {op}: "):
        OPS[op]()


def test_a_backend_is_chosen_by_caller_then_environment_then_device(monkeypatch):
    monkeypatch.delenv("LINEARIZE_BACKEND", raising=False)
    x = LINEAR["q"]
    assert choose("linear_attention", x).backend == "torch"
    assert "float64" in choose("linear_attention", x).because
    assert choose("linear_attention", x.to("meta")) == (
        "torch", "the tensors are on meta, and there is no kernel written for that device"
    )  # fmt: skip
    monkeypatch.setenv("LINEARIZE_BACKEND", "reference")
    assert choose("linear_attention", x) == ("reference", "forced by LINEARIZE_BACKEND")
    assert choose("linear_attention", x, "torch").backend == "torch"
    monkeypatch.setenv("LINEARIZE_BACKEND", "tirton")
    with pytest.raises(ValueError, match="LINEARIZE_BACKEND='tirton' is no backend"):
        linear_attention(**LINEAR)


def test_float32_on_the_cpu_is_compiled_code_where_there_is_a_compiler(monkeypatch):
    from linearize_kernels import cpu_ops

    monkeypatch.delenv("LINEARIZE_BACKEND", raising=False)
    usable, because = cpu_ops.status()
    choice = choose("linear_attention", LINEAR["q"].float())
    assert choice.backend == ("cpu" if usable else "torch")
    assert usable or because in choice.because


@pytest.mark.parametrize("reason", [None, "a reason"])
def test_a_gpu_without_triton_is_told(monkeypatch, reason):
    """By a warning, once: plain PyTorch would be many times slower there."""
    from types import SimpleNamespace

    monkeypatch.delenv("LINEARIZE_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "_refusal", lambda name, op, tensors: reason)
    dispatch._slow.cache_clear()
    tensor = SimpleNamespace(device=torch.device("cuda"))
    if reason is None:
        assert choose("linear_attention", {"q": tensor}).backend == "triton"
        return
    with pytest.warns(RuntimeWarning, match="linear_attention runs in plain PyTorch, not in Triton: a reason"):
        assert choose("linear_attention", {"q": tensor}).backend == "torch"


def test_the_reference_runs_as_a_backend(monkeypatch):
    def run(**options):
        half = {n: x.half() for n, x in LINEAR.items()}
        first = linear_attention(**half, return_state=True, **options)
        half = {n: x.half() for n, x in WINDOW.items()}
        return first, window_attention(**half, window=3, sinks=1, return_state=True, **options)

    for actual, expected in zip(run(backend="reference"), run(backend="torch"), strict=True):
        for a, e in zip((actual[0], *actual[1]), (expected[0], *expected[1]), strict=True):
            assert a.dtype == e.dtype
            assert_close(a, e, torch.float16)
    monkeypatch.setattr(reference, "linear_attention", lambda *args, **options: "called")
    assert linear_attention(**LINEAR, backend="reference") == "called"


def test_available_gives_every_backend_a_reason():
    backends = {b.name: b for b in available()}
    assert list(backends) == ["torch", "cpu", "triton", "reference"]
    assert backends["torch"].usable
    assert backends["reference"].usable
    assert all(b.because for b in backends.values())


def test_the_package_stands_alone():
    """It imports nothing of `linearize`; an __init__.py in `kernels/` would shadow Hugging Face's package."""
    assert linearize_kernels.__file__
    folder = Path(linearize_kernels.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert not any(n.split(".")[0] == "linearize" for n in names), path
    if folder.parent.name == "kernels":
        assert not (folder.parent / "__init__.py").exists()
    assert importlib.util.find_spec("linearize_kernels") is not None


def test_autocast_does_not_lower_the_precision():
    expected = linear_attention(**LINEAR), window_attention(**WINDOW, window=3)
    linear, window = ({n: x.float() for n, x in inputs.items()} for inputs in (LINEAR, WINDOW))
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_attention(**linear), window_attention(**window, window=3)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, torch.float32)


def differentiable(inputs):
    return {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}


@pytest.mark.slow
def test_compiled_ops_equal_eager_ones_without_a_graph_break():
    """Outputs, states and gradients; a state goes from one op to the next."""

    def run(linear, delta, window):
        parts = []
        for op, inputs, options in (
            (linear_attention, linear, {}),
            (linear_attention, linear, {"log_decay": -linear["k"]}),
            (delta_rule, delta, {}),
            (window_attention, window, {"window": 3, "sinks": 1}),
        ):
            out, state = op(**inputs, return_state=True, **options)
            parts += [out, op(**inputs, initial_state=state, **options)]
        return parts

    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        inputs = [differentiable(x) for x in (LINEAR, DELTA, WINDOW)]
        outs = function(*inputs)
        sum(x.square().sum() for x in outs).backward()
        results.append(outs + [x.grad for part in inputs for x in part.values()])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "decay", "delta", "window"])
def test_custom_ops_keep_what_they_promise(name):
    """Schemas, shapes and gradients, by torch's own checks."""
    state = [x.contiguous() for x in STATE]
    linear = [differentiable(LINEAR)[n] for n in "qkv"]
    if name in ("linear", "decay"):
        decay = -LINEAR["k"] if name == "decay" else None
        call = custom.linear, (*linear, None, decay, *state, None, 0.5, True, 1e-6, "torch")
    elif name == "delta":
        call = custom.delta, (*linear, DELTA["beta"], None, state[0], None, 0.5, "torch")
    else:
        given = differentiable(WINDOW)
        valid = torch.ones(2, 6, dtype=torch.bool)
        none = WINDOW["k"][:, :0]
        sums = [x[..., :6, :] if i == 0 else x[..., :6] if i == 1 else x for i, x in enumerate(state)]
        call = custom_window.window, (
            given["q"], given["k"], given["v"], valid, given["phi_q"], given["phi_k"][:, :3], None, None, none, none,
            torch.zeros(2, 0, dtype=torch.int64), given["gamma"], *sums, 3, 0.5, 0.0, 1e-6, "torch",
        )  # fmt: skip
    torch.library.opcheck(*call)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exact", [True, False])
def test_backward_ops_keep_what_they_promise(dtype, exact):
    """The tensors of a trace are those of a run: dtypes, shapes, empty ones where there is nothing."""
    sums = [x.float() for x in STATE]
    q, k, v, beta = (DELTA[n].to(dtype) for n in ("q", "k", "v", "beta"))
    out = torch.zeros(2, 6, 4, 8, dtype=dtype)
    den = torch.ones(2, 6, 4)
    linear = (out, sums[0], sums[1], q, k, v, None, None, *sums, None, out, den, 1.0, True, 1e-6, "torch")
    torch.library.opcheck(custom.linear_backward, linear)
    torch.library.opcheck(
        custom.delta_backward, (out, sums[0], q, k, v, beta.float(), None, sums[0], None, 1.0, "torch")
    )
    none = k[:, :0]
    position = torch.zeros(2, 0, dtype=torch.int64)
    valid, gamma = torch.ones(2, 6, dtype=torch.bool), torch.ones(4)
    for window in (3, 9):  # with and without keys that leave it
        features = (q.float(), k.float()[:, : max(6 - window, 0)], None, None)
        inputs = (q, k, v, valid, *features, none, none, position, gamma, *sums)
        options = (window, 1.0, 0.0, 1e-6, "torch", exact)
        call = (out, sums[0], sums[1], *inputs, out, den, den, *options)
        torch.library.opcheck(custom_window.window_backward, call)


@pytest.mark.slow
def test_compiled_ops_check_what_they_are_given():
    """A trace can't look at sizes; reading past a tensor's end is no way to find out."""
    compiled = torch.compile(linear_attention, backend="eager", dynamic=True)
    with pytest.raises(ValueError, match=r"k must be \(B=1, T=128, K=any, F=4\), not \(1, 64, 2, 4\)"):
        compiled(torch.rand(1, 128, 2, 4), torch.rand(1, 64, 2, 4), torch.rand(1, 64, 2, 4))
    row = torch.rand(1, 9, 2, 4)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to T = 9, not \[0, 4, 30\]"):
        compiled(row, row, row, cu_seqlens=INT([0, 4, 30]))
    step = torch.compile(linear_attention_step, backend="eager", dynamic=True, fullgraph=True)
    token = first_token(LINEAR, "q", "k", "v")
    states = [type(STATE)(*(x.clone() for x in STATE)) for _ in range(2)]
    assert_close(step(*token, states[0]), linear_attention_step(*token, states[1]), torch.float64)
    assert_close(states[0].S, states[1].S, torch.float64)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_are_refused(op):
    inputs = differentiable({"linear_attention": LINEAR, "delta_rule": DELTA, "window_attention": WINDOW}[op])
    options = {"window": 3} if op == "window_attention" else {}
    out = getattr(linearize_kernels, op)(**inputs, **options)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        grad.sum().backward()


def test_shapes_come_out_on_the_meta_device():
    """So that a model's state can be sized without its weights."""
    inputs = {n: x.to("meta") for n, x in WINDOW.items()}
    out, state = window_attention(**inputs, window=3, sinks=1, return_state=True)
    expected = window_attention(**WINDOW, window=3, sinks=1, return_state=True)
    assert [x.shape for x in (out, *state)] == [x.shape for x in (expected[0], *expected[1])]
