"""The ops against other people's code: flash-linear-attention's naive loops, and transformers' own PyTorch layers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from linearize_kernels import DeltaState, LinearState, delta_rule, linear_attention
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tests.numerics import oracles
from tests.numerics.kernel_cases import delta_inputs, linear_inputs
from tests.numerics.tolerances import assert_close

# Our names for their arguments.
NAMES = {"g": "log_decay", "gk": "log_decay"}
LINEAR, DELTA = {"normalize": False, "scale": 8**-0.5}, {"scale": 8**-0.5}
# file: function, decay, what theirs is told, whether theirs has heads before time, what ours is told
CALLS: dict[str, list[tuple[str, str | None, dict[str, Any], bool, dict[str, Any]]]] = {
    "linear_attn": [
        ("naive_recurrent_linear_attn", None, {"output_final_state": True}, False, LINEAR),
        ("naive_recurrent_linear_attn", None, {"normalize": True}, False, LINEAR | {"normalize": True}),
        ("naive_chunk_linear_attn", None, {}, False, LINEAR),
        ("naive_chunk_linear_attn", None, {"normalize": True}, False, LINEAR | {"normalize": True}),
    ],
    "retention": [("naive_retention", "retention", {}, True, LINEAR)],
    "simple_gla": [
        ("naive_recurrent_simple_gla", "token", {"output_final_state": True}, False, LINEAR),
        ("naive_chunk_simple_gla", "token", {"output_final_state": True}, False, LINEAR),
    ],
    "gla": [("naive_recurrent_gla", "feature", {"output_final_state": True}, False, LINEAR)],
    "delta_rule": [
        ("delta_rule_recurrence", None, {}, True, DELTA),
        ("delta_rule_chunkwise", None, {}, True, DELTA),
    ],
    "gated_delta_rule": [
        ("naive_recurrent_gated_delta_rule", "token", {"output_final_state": True}, False, DELTA),
        ("naive_chunk_gated_delta_rule", "token", {"output_final_state": True}, False, DELTA),
    ],
    "kda": [
        ("naive_recurrent_kda", "feature", {"output_final_state": True}, False, DELTA),
        ("naive_chunk_kda", "feature", {"output_final_state": True}, False, DELTA),
    ],
}
CASES = {
    f"{file}: {call[0]}{', normalised' if call[2].get('normalize') else ''}": (file, *call)
    for file, calls in CALLS.items()
    for call in calls
}
WITH_STATE = [name for name in CASES if "recurr" in name and "normalised" not in name]
BACKENDS = ["reference", "torch", None]


def inputs_of(name: str) -> dict[str, Tensor]:
    """Ours, in float32: 128 tokens, as some of theirs take whole chunks of 64 only."""
    decay = CASES[name][2]
    make = delta_inputs if CASES[name][5] is DELTA else linear_inputs
    inputs = make(T=128, H=4, F=8, Dv=6, decay=None if decay == "retention" else decay, dtype=torch.float32)
    if decay == "retention":
        inputs["log_decay"] = (1 - torch.exp2(-5 - torch.arange(4.0))).log()
    if name in WITH_STATE:
        inputs["initial_state"] = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(3))
    return inputs


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The results of all their functions, from one process."""
    path = oracles.folder()
    if not (path / "fla" / "ops").is_dir():
        pytest.fail(
            f"{path} doesn't hold the naive loops to compare with: run `make .venv-test/.stamp`, or `pip install "
            f"--no-deps --target {path} fla-core einops`, or set LINEARIZE_ORACLES to where they lie"
        )
    jobs = {}
    for name, (file, function, decay, options, heads_first, _) in CASES.items():
        back = {"log_decay": "gk" if file == "gla" else "g"}
        tensors = {back.get(n, n): x for n, x in inputs_of(name).items() if not (decay == "retention" and x.dim() == 1)}
        job = {"op": file, "function": function, "options": options, "heads_first": heads_first, "tensors": tensors}
        jobs[name] = job | {"weight": weight()}
    folder = tmp_path_factory.mktemp("oracles")
    torch.save(jobs, folder / "jobs.pt")
    command = [sys.executable, oracles.__file__, path, folder / "jobs.pt", folder / "out.pt"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt")


def weight() -> Tensor:
    return torch.randn(2, 128, 4, 6, generator=torch.Generator().manual_seed(4))


def ours(op: Any, inputs: dict[str, Tensor], options: dict[str, Any], backend: str | None) -> dict[str, Tensor]:
    """As `oracles.run`."""
    inputs = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    named = dict(inputs)
    if "initial_state" in named:
        S = named.pop("initial_state")
        state = LinearState(S, S[..., 0] * 0, S[..., 0, 0].detach() * 0) if op is linear_attention else DeltaState(S)
        options = options | {"initial_state": state}
    out, state = op(**named, **options, return_state=True, backend=backend)
    grads = torch.autograd.grad((out * weight()).sum(), list(inputs.values()))
    return {f"d{n}": x for n, x in zip(inputs, grads, strict=True)} | {"out": out, "state": state.S}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_naive_loops_of_flash_linear_attention(theirs, name, backend):
    op = delta_rule if CASES[name][5] is DELTA else linear_attention
    actual = ours(op, inputs_of(name), CASES[name][5], backend)
    for what, expected in theirs[name].items():
        grad = what.startswith("d")
        what = f"d{NAMES.get(what[1:], what[1:])}" if grad else what
        assert_close(actual[what], expected, "float32 oracle grad" if grad else "float32 oracle", what)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 63, 130])
def test_equals_the_gated_delta_rule_of_transformers(T, backend):
    """Qwen3-Next's layer, which expands grouped heads the other way round: one key head for several value heads."""
    inputs = delta_inputs(T=T, H=4, F=8, Dv=6, decay="token", dtype=torch.float32)
    start = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(3))
    expected, last = torch_chunk_gated_delta_rule(
        *(inputs[n] for n in "qkv"), inputs["log_decay"], inputs["beta"], initial_state=start, output_final_state=True
    )
    out, state = delta_rule(**inputs, initial_state=DeltaState(start), return_state=True, backend=backend)
    assert last is not None
    assert_close(out, expected, "float32 oracle")
    assert_close(state.S, last, "float32 oracle", "state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 63, 130])
def test_equals_the_state_space_dual_of_transformers(T, backend):
    """Mamba-2's scan: keys B, queries C and values dt x, with a decay of exp(dt A)."""
    g = torch.Generator().manual_seed(T)
    x, dt = torch.randn(2, T, 4, 6, generator=g), torch.rand(2, T, 4, generator=g)
    B, C = torch.randn(2, T, 2, 8, generator=g), torch.randn(2, T, 2, 8, generator=g)
    A, start = -torch.rand(4, generator=g), torch.randn(2, 4, 6, 8, generator=g)
    expected, last = mamba2_chunk_scan(x, dt, A, B, C, chunk_size=32, initial_states=start, return_final_states=True)
    k, q = (y.repeat_interleave(2, 2) for y in (B, C))
    S = start.transpose(2, 3)
    state = LinearState(S, torch.zeros(2, 4, 8), torch.zeros(2, 4))
    out, after = linear_attention(
        q, k, dt[..., None] * x, log_decay=dt * A, normalize=False, initial_state=state, return_state=True,
        backend=backend,
    )  # fmt: skip
    assert_close(out, expected, "float32 oracle")
    assert_close(after.S.transpose(2, 3), last, "float32 oracle", "state")
