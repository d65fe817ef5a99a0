"""`length_switch` against the sum over every pair of tokens, on both sides of its switch and across it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from linearize.errors import UsageError
from linearize.mixers import build_mixer, state_bytes, switch
from tests.mixers.specs import in_pieces, inputs_of, mixer_of, run, shape_of

SAME = {"atol": 1e-10, "rtol": 1e-10}
L = 65
SPEC = {"name": "length_switch", "feature_map": "elu1", "length": L}


def loop(x, shape, limit, valid=None):
    """(B, T, H, Dv): softmax for the first `limit` tokens of a row, elu + 1 for the others, each over all before."""
    batch, length, heads, _ = x.q.shape
    valid = torch.ones(batch, length, dtype=torch.bool) if valid is None else valid
    out = torch.zeros(batch, length, heads, x.v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for t in range(length):
            seen = [j for j in range(t + 1) if valid[b, j]]
            if not valid[b, t]:
                continue
            for h in range(heads):
                g = h // (heads // x.k.shape[2])
                q, k = x.q[b, t, h], x.k[b, seen, g]
                score = shape.scaling * (k @ q)
                if shape.softcap:
                    score = shape.softcap * torch.tanh(score / shape.softcap)
                feature = [torch.where(y > 0, y + 1, y.exp()) for y in (k, q)]
                weight = score.exp() if len(seen) <= limit else feature[0] @ feature[1]
                out[b, t, h] = weight @ x.v[b, seen, g] / weight.sum()
    return out


@pytest.mark.parametrize("length", [1, L - 1, L, L + 1, L + 63])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_one_call_and_any_cut_equal_the_loop(length, softcap):
    shape = dataclasses.replace(shape_of(), softcap=softcap, scaling=0.7)
    mixer, x = mixer_of(SPEC, shape), inputs_of(shape, length, batch=1)
    expected = loop(x, shape, L)
    torch.testing.assert_close(run(mixer, x)[0], expected, **SAME)
    for first in {1, L - 1, L, L + 1, length - 1} & set(range(1, length)):
        with torch.no_grad():
            # Prefill up to, or across, the switch; then the rest at once, and in steps.
            torch.testing.assert_close(in_pieces(mixer, x, [first, length - first]), expected, **SAME)
            torch.testing.assert_close(in_pieces(mixer, x, [first, *[1] * (length - first)]), expected, **SAME)
        torch.testing.assert_close(in_pieces(mixer, x, [first, length - first]), expected, **SAME)


def test_rows_switch_each_by_its_own_count():
    """Padding in front, behind and between doesn't count: one row is past its first tokens, another one isn't."""
    shape = shape_of(2, 1, 8, 8)
    spec = {**SPEC, "length": 9}
    mixer, x = mixer_of(spec, shape), inputs_of(shape, 30, batch=4)
    valid = torch.ones(4, 30, dtype=torch.bool)
    valid[1, :12] = False
    valid[2, 1::3] = False
    valid[3, 6:] = False
    expected = loop(x, shape, 9, valid)
    for lengths in ([30], [7, 23], [1] * 30, [12, *[1] * 5, 13]):
        with torch.no_grad():
            out = in_pieces(mixer, x, lengths, valid)
        torch.testing.assert_close(out * valid[..., None, None], expected, **SAME)


def test_padding_of_packed_sequences_does_not_count():
    shape = shape_of(2, 1, 8, 8)
    mixer, x = mixer_of({**SPEC, "length": 5}, shape), inputs_of(shape, 30, batch=1)
    valid = torch.arange(30)[None] % 4 != 1
    out, _ = run(mixer, x, cu_seqlens=torch.tensor([0, 13, 30]), mask=valid)
    for part in (slice(0, 13), slice(13, 30)):
        alone = loop(x.part(slice(None), part), shape, 5, valid[:, part])
        torch.testing.assert_close(out[:, part] * valid[:, part, None, None], alone, **SAME)


def test_only_the_first_tokens_are_computed_exactly(monkeypatch):
    shape = shape_of()
    mixer, x = mixer_of({**SPEC, "length": 16}, shape), inputs_of(shape, 300)
    sizes = []
    op = switch.window_attention
    monkeypatch.setattr(switch, "window_attention", lambda q, *a, **b: sizes.append(q.shape[1]) or op(q, *a, **b))
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, :50] = False
    run(mixer, x)
    run(mixer, x, mask=mask)
    assert sizes == [16, 16]
    with torch.no_grad():
        _, state = run(mixer, x, return_state=True)
        monkeypatch.setattr(switch, "window_attention_step", None)  # rows that are all past need no step of it
        run(mixer, x.part(slice(None), slice(0, 1)), state=state, return_state=True)


def test_the_jump_at_the_switch_is_the_error_of_the_estimate():
    """With FAVOR+ of ever more features, the first linear token gets ever nearer to its softmax attention."""
    shape = shape_of(4, 4, 8, 8)
    x = inputs_of(shape, L + 1, batch=4)
    x = x._replace(q=x.q / 2, k=x.k / 2)  # where the estimate's error follows its variance already
    exact = loop(x, shape, L + 1)[:, L]
    jumps = []
    for features in (64, 4096):
        options = {"feature_map": "favor", "feature_map_options": {"features": features}}
        mixer = build_mixer({**SPEC, **options}, shape, layer=0, seed=0).double()
        out = run(mixer, x)[0]
        torch.testing.assert_close(out[:, :L], loop(x, shape, L + 1)[:, :L], **SAME)
        jumps.append(float((out[:, L] - exact).norm() / exact.norm()))
        linear = run(build_mixer({"name": "linear", **options}, shape, layer=0, seed=0).double(), x)[0]
        torch.testing.assert_close(out[:, L], linear[:, L], **SAME)
    # The error falls as features^-1/2.
    assert jumps[1] < 2 * jumps[0] / math.sqrt(64), jumps
    assert jumps[1] < 0.1, jumps


def test_a_map_that_played_no_part_has_gradients_of_zero():
    """Data-parallel training waits for the gradients of every parameter."""
    shape = shape_of()
    mixer, x = mixer_of({**SPEC, "feature_map": "hedgehog"}, shape), inputs_of(shape, L)
    run(mixer, x)[0].square().sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in mixer.parameters())


def test_the_state_is_that_of_linear_and_a_cache_of_the_first_tokens():
    shape, maps = shape_of(), {"feature_map": "elu1"}
    linear = state_bytes({"name": "linear", **maps}, shape)
    assert state_bytes({**SPEC, **maps}, shape) == linear + 2 * L * 2 * (16 + 24) + 8


def test_a_map_that_takes_no_more_tokens_is_refused():
    """It would be refused where a state is kept, and not where none is."""
    options = {"feature_map": "cosformer", "feature_map_options": {"length": 50}}
    with pytest.raises(UsageError, match="length=50 with a feature map that takes 50 tokens"):
        build_mixer({"name": "length_switch", **options, "length": 50}, shape_of(), layer=0, seed=0)
    build_mixer({"name": "length_switch", **options, "length": 49}, shape_of(), layer=0, seed=0)


def test_a_length_below_one_is_refused():
    with pytest.raises(UsageError, match="can't have length=0"):
        build_mixer({"name": "length_switch", "length": 0}, shape_of(), layer=0, seed=0)
