"""What the ops refuse, how a backend is chosen, and what the package may import."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import linearize_kernels
import pytest
import torch
from linearize_kernels import (
    available,
    choose,
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
STATE = linear_attention(**LINEAR, return_state=True)[1]
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
    r"log_q must be \(B, T, H\)": {"log_q": WINDOW["phi_q"]},
    r"log_k must be .*as long as phi_k": {"log_k": WINDOW["phi_k"][:, 1:, :, 0]},
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


def test_steps_take_one_token():
    with pytest.raises(ValueError, match=r"q must be one token, \(B, 1, H, F\), not \(2, 6, 4, 8\)"):
        linear_attention_step(LINEAR["q"], LINEAR["k"], LINEAR["v"], STATE)
    args = (WINDOW[n] for n in ("q", "k", "v", "phi_q", "phi_k"))
    with pytest.raises(ValueError, match="q must be one token"):
        window_attention_step(*args, WINDOW_STATE, window=4, sinks=2)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuda", "backend='cuda' is no backend of {}; usable backends: torch, reference"),
        ("triton", "backend='triton' can't run {}: not built yet"),
    ],
)
def test_unusable_backends_are_refused(backend, message):
    with pytest.raises(ValueError, match=message.format("linear_attention")):
        linear_attention(**LINEAR, backend=backend)
    with pytest.raises(ValueError, match=message.format("window_attention")):
        window_attention(**WINDOW, window=3, backend=backend)


def test_a_backend_is_chosen_by_caller_then_environment_then_device(monkeypatch):
    monkeypatch.delenv("LINEARIZE_BACKEND", raising=False)
    x = LINEAR["q"]
    assert choose("linear_attention", x).backend == "torch"
    assert "cpu" in choose("linear_attention", x).because
    monkeypatch.setenv("LINEARIZE_BACKEND", "reference")
    assert choose("linear_attention", x) == ("reference", "forced by LINEARIZE_BACKEND")
    assert choose("linear_attention", x, "torch").backend == "torch"
    monkeypatch.setenv("LINEARIZE_BACKEND", "tirton")
    with pytest.raises(ValueError, match="LINEARIZE_BACKEND='tirton' is no backend"):
        linear_attention(**LINEAR)


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
    assert {n for n, b in backends.items() if b.usable} == {"torch", "reference"}
    assert "not built yet" in backends["triton"].because
    assert all(b.because for b in backends.values())


def test_the_package_stands_alone():
    """It imports nothing of `linearize`; an __init__.py in `kernels/` would shadow Hugging Face's package."""
    assert linearize_kernels.__file__
    folder = Path(linearize_kernels.__file__).parent
    for path in folder.glob("*.py"):
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


@pytest.mark.slow
def test_ops_compile_without_graph_breaks():
    def both(linear, window):
        first = linear_attention(**linear, return_state=True)
        return first, window_attention(**window, window=3, sinks=1, return_state=True)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for a, e in zip(compiled(LINEAR, WINDOW), both(LINEAR, WINDOW), strict=True):
        assert_close(a[0], e[0], torch.float64)
        assert type(a[1]) is type(e[1])


def test_shapes_come_out_on_the_meta_device():
    """So that a model's state can be sized without its weights."""
    inputs = {n: x.to("meta") for n, x in WINDOW.items()}
    out, state = window_attention(**inputs, window=3, sinks=1, return_state=True)
    expected = window_attention(**WINDOW, window=3, sinks=1, return_state=True)
    assert [x.shape for x in (out, *state)] == [x.shape for x in (expected[0], *expected[1])]
