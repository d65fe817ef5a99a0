"""What every mixer must do: one function, however its tokens are cut, batched, padded and packed.

In float64, so that only another function can differ, and not another order of summation.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from linearize.mixers import FEATURE_MAPS, MIXERS, grows, state_bytes
from tests.mixers.specs import SPECS, in_pieces, inputs_of, mixer_of, run, shape_of

SAME = {"atol": 1e-9, "rtol": 1e-9}
ALL = pytest.mark.parametrize("name", SPECS)


def test_every_mixer_and_feature_map_is_tested_here():
    named = {spec["name"] for spec in SPECS.values()} | {spec.get("over") for spec in SPECS.values()}
    assert named >= {name for name, entry in MIXERS.items() if str(entry.target).startswith("linearize.")}
    maps = {spec.get("feature_map") for spec in SPECS.values()}
    assert maps >= {name for name, entry in FEATURE_MAPS.items() if str(entry.target).startswith("linearize.")}


@ALL
@pytest.mark.parametrize("length", [1, 63, 64, 65, 129])
def test_any_cut_equals_one_call(name, length):
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, length)
    whole, _ = run(mixer, x)
    with torch.no_grad():
        for lengths in ([1] * length, [length - 1, 1], [min(length, 64), max(length - 64, 0)], [1, length - 1]):
            if 0 not in lengths:
                torch.testing.assert_close(in_pieces(mixer, x, lengths), whole, **SAME)


@ALL
def test_pieces_with_gradients_equal_one_call(name):
    shape = shape_of(dim=48)
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 20)
    torch.testing.assert_close(in_pieces(mixer, x, [7, 1, 1, 11]), run(mixer, x)[0], **SAME)


@ALL
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (4, 4)])
def test_padded_equals_alone(name, heads):
    """On both sides, then continued in steps; what stands in the padding doesn't matter."""
    if SPECS[name]["name"] == "heads" and heads[1] == 1:
        pytest.skip("one key/value head can't be shared out")
    shape = shape_of(*heads, dim=8, v_dim=8)
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :9] = False
    mask[1, 25:] = False
    alone = [run(mixer, x.part(slice(0, 1), slice(9, None)))[0], run(mixer, x.part(slice(1, 2), slice(0, 25)))[0]]
    wild = type(x)(*(torch.where(mask.view(2, 30, *(1,) * (t.dim() - 2)), t, 7 * t + 3) for t in x))
    with torch.no_grad():
        for lengths in ([30], [12, *[1] * 18], [5, 4, 21]):
            out = in_pieces(mixer, wild, lengths, mask)
            torch.testing.assert_close(out[:1, 9:], alone[0], **SAME)
            torch.testing.assert_close(out[1:, :25], alone[1], **SAME)


@ALL
def test_calls_without_tokens_or_rows_change_nothing(name):
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 20)
    torch.testing.assert_close(in_pieces(mixer, x, [0, 8, 0, 0, 1, 11]), run(mixer, x)[0], **SAME)
    with torch.no_grad():
        assert in_pieces(mixer, x.part(slice(0, 0)), [8, 1, 11]).shape == (0, 20, 4, 24)


@ALL
def test_padding_of_nan_reaches_nothing(name):
    """Neither outputs, its own among them, nor gradients of what reads the hidden input and the values."""
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :9] = mask[1, 25:] = False
    expected, _ = run(mixer, x, mask=mask)
    wild = type(x)(*(t.masked_fill(~mask.view(2, 30, *(1,) * (t.dim() - 2)), torch.nan) for t in x))
    with torch.no_grad():
        for lengths in ([30], [5, *[1] * 4, 21], [1] * 30):
            out = in_pieces(mixer, wild, lengths, mask)
            assert out.isfinite().all()
            torch.testing.assert_close(out[mask], expected[mask], **SAME)
    out, _ = run(mixer, x._replace(v=wild.v, hidden_states=wild.hidden_states), mask=mask)
    if out.requires_grad:
        out.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())


@ALL
def test_packed_equals_separate(name):
    """One of the sequences is empty."""
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 40, batch=1)
    bounds = [0, 11, 11, 12, 40]
    out, _ = run(mixer, x, cu_seqlens=torch.tensor(bounds))
    parts = [run(mixer, x.part(slice(None), slice(a, b)))[0] for a, b in itertools.pairwise(bounds) if a < b]
    torch.testing.assert_close(out, torch.cat(parts, 1), **SAME)


@ALL
def test_later_tokens_change_nothing_earlier(name):
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 70)
    torch.testing.assert_close(run(mixer, x)[0][:, :40], run(mixer, x.part(slice(None), slice(0, 40)))[0], **SAME)


@ALL
def test_every_token_and_parameter_counts(name):
    """Each parameter gets a gradient, and each input takes part in what comes later."""
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 24)
    x = type(x)(*(t.requires_grad_() for t in x))
    out, _ = run(mixer, x)
    out[:, -1].square().sum().backward()
    for parameter, value in mixer.named_parameters():
        assert value.grad is not None, parameter
        assert value.grad.isfinite().all(), parameter
        assert value.grad.abs().sum() > 0, parameter
    assert (x.k.grad.abs().sum((0, 2, 3)) > 0).all()
    assert (x.v.grad.abs().sum((0, 2, 3)) > 0).all()


@ALL
def test_the_state_is_small_constant_and_announced(name):
    shape = shape_of()
    mixer = mixer_of(SPECS[name], shape, torch.float32)
    sizes, state = [], None
    with torch.no_grad():
        for length in (1, 1, 90, 1):
            _, state = run(mixer, inputs_of(shape, length, dtype=torch.float32), state=state, return_state=True)
            assert all(tensor.shape[0] == 2 for tensor in state.values())
            sizes.append({key: (tensor.dtype, tensor.nbytes) for key, tensor in state.items()})
    if grows(SPECS[name]):
        assert SPECS[name]["name"] == "heads"  # no other mixer may
        total = [sum(count for _, count in size.values()) for size in sizes]
        seen = (1, 2, 92, 93)
        assert total == [state_bytes(SPECS[name], shape, batch=2, dtype=torch.float32, tokens=t) for t in seen]
        return
    assert all(size == sizes[0] for size in sizes)
    announced = state_bytes(SPECS[name], shape, batch=2, dtype=torch.float32)
    assert announced == sum(count for _, count in sizes[0].values())


@ALL
def test_rows_of_the_state_can_be_chosen_and_repeated(name):
    """As beam search does."""
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape), inputs_of(shape, 30, batch=3)
    rows = torch.tensor([2, 0, 0])
    with torch.no_grad():
        _, state = run(mixer, x.part(slice(None), slice(0, 29)), return_state=True)
        chosen = {key: tensor[rows] for key, tensor in state.items()}
        last = x.part(rows, slice(29, None))
        out, _ = run(mixer, last, state=chosen, return_state=True)
        torch.testing.assert_close(out, run(mixer, x.part(rows))[0][:, 29:], **SAME)


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_stays_near_double(name, dtype):
    """Inputs and output are rounded to 8 bits, what lies between isn't."""
    shape = shape_of()
    mixer, x = mixer_of(SPECS[name], shape, torch.float32), inputs_of(shape, 100, dtype=dtype)
    out, _ = run(mixer, x)
    assert out.dtype == dtype
    exact, _ = run(mixer_of(SPECS[name], shape), type(x)(*(t.double() for t in x)))
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 2e-5), error
