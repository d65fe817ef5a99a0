"""chunked_kl against the KL of whole matrices of logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from linearize_kernels import kl
from linearize_kernels.kl import chunked_kl
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.numerics.tolerances import assert_close, row_error

VOCABULARY, CHUNK = 1000, 7  # tokens: 2 x 12, no multiple of the chunk
NAMES = ("hidden", "lm_head", "bias")


def make(dtype: torch.dtype = torch.float64, *, teacher_width: int = VOCABULARY, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def draw(*dims: int) -> Tensor:
        return torch.randn(dims, generator=g).to(dtype)

    leaves = {"hidden": draw(2, 12, 16), "lm_head": draw(VOCABULARY, 16) / 2, "bias": draw(VOCABULARY)}
    for x in leaves.values():
        x.requires_grad_()
    return {**leaves, "teacher_hidden": draw(2, 12, 20), "teacher_lm_head": draw(teacher_width, 20) / 2}


def full_kl(inputs: dict[str, Any], temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """The definition, in float64 from the logits on: mean over the tokens that count."""
    student = F.linear(inputs["hidden"], inputs["lm_head"], inputs["bias"]).double() / temperature
    teacher = inputs.get("teacher_logits")
    if teacher is None:
        teacher = F.linear(inputs["teacher_hidden"], inputs["teacher_lm_head"])
    shared = min(student.shape[-1], teacher.shape[-1])
    p = (teacher[..., :shared].double() / temperature).softmax(-1)
    each = (p * (p.log() - student[..., :shared].log_softmax(-1))).nan_to_num(0).sum(-1) * temperature**2
    return each.mean() if mask is None else each[mask].mean()


def both(inputs: dict[str, Any], temperature: float = 1.0, mask: Tensor | None = None, **options: Any) -> Any:
    """(value, gradients) of chunked_kl and of the definition."""
    results = []
    for value in (
        chunked_kl(**inputs, temperature=temperature, mask=mask, chunk=CHUNK, **options),
        full_kl(inputs, temperature, mask),
    ):
        # A factor other than 1, which the backward has to apply.
        grads = torch.autograd.grad(3 * value, [inputs[name] for name in NAMES])
        results.append((value, dict(zip(NAMES, grads, strict=True))))
    return results


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_full_kl(temperature: float, masked: bool) -> None:
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) < 0.7 if masked else None
    (value, grads), (want, want_grads) = both(make(), temperature, mask)
    assert_close(value, want, torch.float64)
    for name in NAMES:
        assert_close(grads[name], want_grads[name], "float64 grad", name)


def test_half_precision_inputs() -> None:
    """The logits and gradients of a chunk are bfloat16, as a model's are; the softmax isn't."""
    (value, grads), (want, want_grads) = both(make(torch.bfloat16), 2.0)
    assert value.dtype == torch.float32
    assert_close(value, want, torch.float32)
    for name in NAMES:
        assert grads[name].dtype == torch.bfloat16
        assert row_error(grads[name], want_grads[name], 1.0) < 8e-3, name  # two roundings to 8 bits


def test_ignored_tokens_may_hold_anything() -> None:
    inputs, mask = make(), torch.ones(2, 12, dtype=torch.bool)
    mask[0, 3:9] = False
    clean = chunked_kl(**inputs, mask=mask, chunk=CHUNK)
    wild = dict(inputs)
    for name in ("hidden", "teacher_hidden"):
        wild[name] = inputs[name].detach().masked_fill(~mask[..., None], torch.nan)
    wild["hidden"].requires_grad_()
    value = chunked_kl(**wild, mask=mask, chunk=CHUNK)
    assert torch.equal(value, clean)
    grads = torch.autograd.grad(value, [wild[name] for name in NAMES])
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][~mask].any()
    nothing = chunked_kl(**inputs, mask=torch.zeros_like(mask))
    assert nothing.item() == 0


def test_other_teachers() -> None:
    """Logits, with tokens that the teacher bans, and heads with more rows or fewer."""
    inputs = make(teacher_width=1024)
    (value, grads), (want, want_grads) = both(inputs)
    assert_close(value, want, torch.float64)
    fewer = make(teacher_width=990)
    (_, grads), (_, want_grads) = both(fewer)
    assert_close(grads["lm_head"], want_grads["lm_head"], "float64 grad")
    assert not grads["lm_head"][990:].any()
    logits = F.linear(inputs.pop("teacher_hidden"), inputs.pop("teacher_lm_head"))
    logits[..., 5] = -torch.inf
    inputs["teacher_logits"] = logits
    (value, grads), (want, want_grads) = both(inputs)
    assert_close(value, want, torch.float64)
    assert_close(grads["hidden"], want_grads["hidden"], "float64 grad")


def test_sum_and_frozen_head() -> None:
    inputs = make()
    total = chunked_kl(**inputs, reduction="sum", chunk=CHUNK)
    assert_close(total, 24 * full_kl(inputs), torch.float64)
    for name in NAMES[1:]:
        inputs[name] = inputs[name].detach()
    (grad,) = torch.autograd.grad(chunked_kl(**inputs, chunk=CHUNK), inputs["hidden"])
    (want,) = torch.autograd.grad(full_kl(inputs), inputs["hidden"])
    assert_close(grad, want, "float64 grad")
    with torch.no_grad():
        assert not chunked_kl(**inputs).requires_grad


def test_gradcheck() -> None:
    inputs = make()
    small = {n: x.detach()[..., :3] if "hidden" in n else x.detach()[:10, :3] for n, x in inputs.items() if n != "bias"}
    leaves = [small["hidden"].clone().requires_grad_(), small["lm_head"].clone().requires_grad_()]
    rest = {n: small[n] for n in ("teacher_hidden", "teacher_lm_head")}
    assert torch.autograd.gradcheck(lambda h, w: chunked_kl(h, w, **rest, chunk=5, temperature=1.5), leaves)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.gradgradcheck(lambda h, w: chunked_kl(h, w, **rest, chunk=5), leaves)


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_logits_of_all_tokens_never_stand_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, dim, chunk = 600, 5000, 16, 20
    g = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(tokens, dim, generator=g) for _ in range(2))
    head = torch.randn(width, dim, generator=g).requires_grad_()
    hidden.requires_grad_()
    loss = partial(chunked_kl, hidden, head, teacher_hidden=teacher, teacher_lm_head=head, chunk=chunk)
    with _Largest() as backward:  # which doesn't look into a custom op
        loss().backward()
    assert backward.elements == head.numel()
    monkeypatch.setattr(kl, "_kl", torch.no_grad()(kl._summed))
    with _Largest() as seen:
        loss()
    assert seen.elements == chunk * width  # and so more than the head's and its gradient's
    assert chunk * width < tokens * width / 10


def test_compiles_into_one_graph() -> None:
    inputs = make(torch.float32)

    def loss(hidden: Tensor, lm_head: Tensor) -> Tensor:
        return 2 * chunked_kl(
            2 * hidden, lm_head, teacher_hidden=inputs["teacher_hidden"], teacher_lm_head=inputs["teacher_lm_head"],
            chunk=CHUNK,
        )  # fmt: skip

    leaves = [inputs["hidden"], inputs["lm_head"]]
    want = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for grad, wanted in zip(torch.autograd.grad(compiled(*leaves), leaves), want, strict=True):
        assert torch.equal(grad, wanted)


def test_autocast_takes_a_float32_head() -> None:
    inputs = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = chunked_kl(**inputs | {"hidden": inputs["hidden"].bfloat16()}, chunk=CHUNK)
    value.backward()
    assert abs(value - full_kl(inputs)) < 0.02 * value
    assert inputs["lm_head"].grad.dtype == torch.float32


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lm_head": torch.zeros(10, 3)}, "lm_head must be"),
    ({"lm_head": torch.zeros(10, 16)}, "hidden is torch.float64, but lm_head is torch.float32"),
    ({"bias": torch.zeros(3)}, "bias must be"),
    ({"teacher_lm_head": None}, "the teacher is given by"),
    ({"teacher_logits": torch.zeros(2, 12, 10)}, "the teacher is given by"),
    ({"teacher_hidden": torch.zeros(2, 11, 20)}, "teacher_hidden must be"),
    ({"temperature": 0.0}, "temperature must be positive"),
    ({"chunk": 0}, "chunk must be at least 1"),
    ({"mask": torch.ones(2, 12)}, "mask must be bool"),
    ({"reduction": "none"}, "reduction must be"),
    ({"backend": "numpy"}, "backend='numpy' is no backend"),
    ({"backend": "triton"}, "backend 'triton' can't run chunked_kl"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[m for _, m in WRONG])
def test_says_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunked_kl(**make() | changed)
