"""Feature maps against what their papers prove of them, and mixers against softmax where they must equal it."""

from __future__ import annotations

import math

import pytest
import torch

from linearize.errors import UsageError
from linearize.mixers import FEATURE_MAPS, AttentionShape, build_mixer
from linearize.mixers.linear import build_feature_map

SHAPE = AttentionShape(num_heads=4, num_key_value_heads=2, head_dim=16, v_head_dim=12, hidden_size=64, scaling=0.25)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def kernel(feature_map, q, k):
    """phi(q) . phi(k) with log scales put back: q, k (B, T, 2, D), the map built for 2 heads."""
    a, b = feature_map(q, "q"), feature_map(k, "k")
    dot = (a.phi * b.phi).sum(-1)
    return dot if a.log_scale is None else dot * (a.log_scale + b.log_scale).exp()


def draws(options, count, q, k, dim=16):
    shape = AttentionShape(2, 2, dim, dim, 2 * dim, dim**-0.5)
    return torch.stack(
        [kernel(build_feature_map("favor", options, shape, generator(seed)), q, k) for seed in range(count)]
    )


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("hyperbolic", [True, False])
def test_favor_estimates_the_softmax_kernel_without_bias(orthogonal, hyperbolic):
    """E[phi(q) . phi(k)] = exp(q.k / sqrt(D)) (Choromanski et al. 2020, lemma 1). 400 maps of 64 features."""
    q, k = 0.5 * torch.randn(2, 1, 20, 2, 16, generator=generator(5), dtype=torch.float64)
    found = draws({"features": 64, "orthogonal": orthogonal, "hyperbolic": hyperbolic}, 400, q, k)
    exact = ((q * k).sum(-1) / 4).exp()
    error = (found.mean(0) - exact).abs()
    assert (error < 5 * found.std(0) / math.sqrt(400)).all()


def relative_error(options, q, k, count=200):
    exact = ((q * k).sum(-1) / 4).exp()
    return (((draws(options, count, q, k) - exact) / exact) ** 2).mean().sqrt().item()


def test_favor_error_falls_as_one_over_root_features_and_orthogonal_rows_lower_it():
    q, k = 0.4 * torch.randn(2, 1, 30, 2, 16, generator=generator(6), dtype=torch.float64)
    few, many = (relative_error({"features": m, "orthogonal": False}, q, k) for m in (32, 512))
    slope = math.log(many / few) / math.log(512 / 32)
    assert -0.6 < slope < -0.4
    assert relative_error({"features": 32}, q, k) < few
    assert relative_error({"features": 32, "hyperbolic": False}, q, k) > relative_error({"features": 32}, q, k)


def test_favor_rows_are_orthogonal_in_blocks_with_gaussian_norms():
    shape = AttentionShape(1, 1, 16, 16, 16, 0.25)
    rows = build_feature_map("favor", {"features": 2 * 400}, shape, generator()).omega.double()
    block = torch.nn.functional.normalize(rows[:16], dim=1)
    torch.testing.assert_close(block @ block.T, torch.eye(16, dtype=torch.float64), atol=1e-5, rtol=0)
    # |w|^2 of Gaussian rows is chi-squared with D degrees: mean D, variance 2 D. (Rows of one norm would have 0.)
    squares = rows.square().sum(1)
    assert abs(squares.mean() - 16) < 1.2
    assert 20 < squares.var() < 50


def test_favor_stays_finite_where_exp_overflows():
    q, k = 60 * torch.randn(2, 1, 8, 4, 16, generator=generator(7))
    mixer = build_mixer(
        {"name": "linear", "feature_map": "favor"}, AttentionShape(4, 4, 16, 16, 64, 1.0), layer=0, seed=0
    )
    out, state = mixer(q, k, torch.ones(1, 8, 4, 16), return_state=True)
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in state.values())


def test_favor_gives_ones_for_values_of_one_at_any_width():
    """The denominator's floor must not bite where a query is far from the largest key (q, k of std 3)."""
    q, k = 3 * torch.randn(2, 1, 200, 4, 64, generator=generator(8))
    mixer = build_mixer(
        {"name": "linear", "feature_map": "favor"}, AttentionShape(4, 4, 64, 64, 256, 0.125), layer=0, seed=0
    )
    out, _ = mixer(q, k, torch.ones(1, 200, 4, 64))
    torch.testing.assert_close(out, torch.ones_like(out), atol=1e-3, rtol=0)


def test_taylor_is_the_second_order_series_of_exp():
    """1 + s + s^2/2 with s = scaling * q.k, exactly, when nothing is projected away."""
    shape = AttentionShape(2, 2, 8, 8, 16, 0.3)
    taylor = build_feature_map("taylor", {"project_dim": 8}, shape, None).double()
    with torch.no_grad():
        taylor.q_weight.copy_(torch.eye(8))
        taylor.k_weight.copy_(torch.eye(8))
    q, k = torch.randn(2, 1, 10, 2, 8, generator=generator(9), dtype=torch.float64)
    s = 0.3 * (q * k).sum(-1)
    torch.testing.assert_close(kernel(taylor, q, k), 1 + s + s**2 / 2)
    assert taylor.feature_dim == 1 + 8 + 36


def test_taylor_projection_keeps_the_product_in_expectation():
    q, k = torch.randn(2, 1, 10, 2, 32, generator=generator(10), dtype=torch.float64)
    shape = AttentionShape(2, 2, 32, 32, 64, 1.0)
    products = []
    for seed in range(400):
        taylor = build_feature_map("taylor", {"project_dim": 8}, shape, generator(seed)).double()
        projected = [taylor(x, side).phi[..., 1:9] for x, side in ((q, "q"), (k, "k"))]
        products.append((projected[0] * projected[1]).sum(-1))
    found = torch.stack(products)
    assert ((found.mean(0) - (q * k).sum(-1)).abs() < 5 * found.std(0) / 20).all()


def test_hedgehog_and_t2r_start_at_the_identity_and_are_per_head():
    x = torch.randn(1, 5, 4, 16, generator=generator(11))
    hedgehog = build_feature_map("hedgehog", {}, SHAPE, None)
    torch.testing.assert_close(hedgehog.q(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))
    t2r = build_feature_map("t2r", {}, SHAPE, None)
    torch.testing.assert_close(t2r.q(x), x.clamp(min=0))
    with torch.no_grad():
        t2r.q_weight[1].mul_(2)
    changed = t2r.q(x) != x.clamp(min=0)
    assert changed[:, :, 1].any()
    assert not changed[:, :, [0, 2, 3]].any()


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("sinks", [0, 3])
def test_within_the_window_every_hybrid_is_softmax_attention(name, sinks):
    """Also with grouped heads, a scaling of its own and soft-capped logits: against torch's own softmax."""
    shape = AttentionShape(4, 2, 16, 12, 64, scaling=0.37, softcap=2.0, max_length=64)
    mixer = build_mixer({"name": "window", "feature_map": name, "window": 20, "sinks": sinks}, shape, layer=0, seed=0)
    q, k, v = (torch.randn(2, 20, h, d, generator=generator(12)) for h, d in ((4, 16), (2, 16), (2, 12)))
    scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) * 0.37
    scores = (2 * torch.tanh(scores / 2)).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.repeat_interleave(2, 2))
    torch.testing.assert_close(mixer(q, k, v)[0], expected, atol=1e-5, rtol=1e-5)


def test_window_with_favor_estimates_full_softmax():
    """Both parts are on one scale: with many features the whole tends to softmax over all tokens."""
    shape = AttentionShape(1, 1, 8, 8, 8, 8**-0.5)
    q, k, v = torch.randn(3, 1, 60, 1, 8, generator=generator(13))
    q, k = q / 2, k / 2
    scores = torch.einsum("bthd,bshd->bhts", q, k) * 8**-0.5
    scores = scores.masked_fill(torch.ones(60, 60).triu(1).bool(), -torch.inf)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
    errors = []
    for features in (64, 16384):
        mixer = build_mixer(
            {
                "name": "window",
                "feature_map": "favor",
                "feature_map_options": {"features": features},
                "window": 8,
            },
            shape,
            layer=0,
            seed=0,
        )
        with torch.no_grad():
            mixer.gate.zero_()  # gamma is 1: the exact part on the scale of the linear one
        errors.append((mixer(q, k, v)[0] - expected).norm() / expected.norm())
    assert errors[1] < 0.03 < errors[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("favor", {"features": 7}, "features=7"),
        ("taylor", {"project_dim": 0}, "project_dim=0"),
        ("favor", {"feature": 8}, "no option 'feature'.*did you mean 'features'"),
        ("hedge-hog", {}, "did you mean 'hedgehog'"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(UsageError, match=message):
        build_feature_map(name, options, SHAPE, None)


def test_a_map_that_is_no_feature_map_or_lacks_a_method_is_named(monkeypatch):
    from linearize.mixers import feature_maps
    from linearize.mixers.registry import Entry

    class OnlyQueries(feature_maps.FeatureMap):
        def q(self, x):
            return x

    for target, message in ((OnlyQueries, "doesn't define k"), (torch.nn.Linear, "doesn't derive from FeatureMap")):
        monkeypatch.setitem(FEATURE_MAPS, "mine", Entry(target, "none", ""))
        with pytest.raises(UsageError, match=message):
            build_feature_map("mine", {}, SHAPE, None)
