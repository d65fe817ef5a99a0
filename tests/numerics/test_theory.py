"""What is often said wrongly of linear attention, and what is right: docs/theory.md points at these tests."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from linearize.mixers import AttentionShape, build_mixer
from linearize.mixers.feature_maps import Favor
from linearize.mixers.key_normalised import key_normalised_attention

DIM, PAIRS = 16, 12
SHAPE = AttentionShape(2, 2, 8, 8, 16, 8**-0.5)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def pairs(square_plus, square_minus, seed=0):
    """q, k (PAIRS, DIM) with |q+k|^2 and |q-k|^2 as given, in directions at right angles."""
    directions = torch.linalg.qr(torch.randn(PAIRS, DIM, 2, generator=generator(seed), dtype=torch.float64))[0]
    plus, minus = math.sqrt(square_plus) * directions[..., 0], math.sqrt(square_minus) * directions[..., 1]
    return (plus + minus) / 2, (plus - minus) / 2


def rows(count, seed, orthogonal=False):
    """`count` rows as the map 'favor' draws them."""
    shape = AttentionShape(1, 1, DIM, DIM, DIM, 1.0)
    options = {"features": count, "hyperbolic": False, "orthogonal": orthogonal}
    return Favor(shape, generator=generator(seed), **options).omega.double()


def positive(x, w):
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(w))


def trigonometric(x, w):
    angle = x @ w.T
    return torch.cat([angle.sin(), angle.cos()], -1) * (x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(w))


def relative_variance(features, q, k, count, draws=1500, orthogonal=False):
    """(PAIRS,) mean square of estimate / e^{q.k} - 1."""
    exact = (q * k).sum(-1).exp()
    drawn = (rows(count, seed, orthogonal) for seed in range(draws))
    estimates = torch.stack([(features(q, w) * features(k, w)).sum(-1) for w in drawn])
    return (estimates / exact - 1).square().mean(0)


@pytest.mark.parametrize("square", [0.2, 1.0, 1.5])
def test_the_error_of_positive_features_grows_as_the_exponential_of_the_norm(square):
    """(e^{|q+k|^2} - 1) / m, whatever q.k is (Choromanski et al. 2020, lemma 2)."""
    for minus in (0.2, 3.0):
        found = relative_variance(positive, *pairs(square, minus), count=16).mean().item()
        assert found == pytest.approx(math.expm1(square) / 16, rel=0.25)


def test_positive_features_win_where_the_kernel_is_small_and_trigonometric_ones_where_it_is_large():
    """q.k is -0.45 and 0.45, at equal norms; as many features of both kinds (8 rows give 16 of sines and cosines)."""
    for plus, minus, winner in ((0.1, 1.9, positive), (1.9, 0.1, trigonometric)):
        q, k = pairs(plus, minus)
        errors = {f: relative_variance(f, q, k, n).mean() for f, n in ((positive, 16), (trigonometric, 8))}
        assert min(errors, key=lambda f: errors[f]) is winner
        assert max(errors.values()) > 4 * min(errors.values())


def test_orthogonal_rows_lower_the_variance():
    q, k = pairs(1.0, 1.0)
    independent, orthogonal = (relative_variance(positive, q, k, DIM, orthogonal=kind).mean() for kind in (False, True))
    assert orthogonal < 0.97 * independent


def test_clipped_sines_and_cosines_estimate_another_kernel():
    """max(0, sin) beside max(0, cos) isn't FAVOR+: its bias differs from pair to pair, so that it doesn't cancel."""
    w = rows(60_000, 0)

    def clipped(x):
        return torch.cat([(x @ w.T).sin(), (x @ w.T).cos()], -1).clamp(min=0) / math.sqrt(len(w))

    off, right = [], []
    for plus, minus in ((2.0, 0.1), (0.1, 2.0)):
        q, k = pairs(plus, minus)
        exact = (q * k).sum(-1).exp()
        off.append(((clipped(q) * clipped(k)).sum(-1) / exact).mean())
        right.append(((positive(q, w) * positive(k, w)).sum(-1) / exact).mean())
    assert max(off) / min(off) > 2
    assert max(right) / min(right) < 1.05


def test_without_the_factor_of_its_norm_a_longer_key_counts_for_less():
    """sin and cos alone estimate e^{-|q-k|^2 / 2}. e^{-|q|^2 / 2} cancels in the ratio, e^{-|k|^2 / 2} doesn't."""
    w = rows(60_000, 1)
    q, k = pairs(1.0, 1.0)

    def ratio(k, gaussian):
        estimate = (trigonometric(q, w) * trigonometric(k, w)).sum(-1)
        estimate = estimate * (-(q.square() + k.square()).sum(-1) / 2).exp() if gaussian else estimate
        return estimate / (q * k).sum(-1).exp()

    short, long = k, 2 * k
    expected = ((short.square() - long.square()).sum(-1) / 2).exp()
    torch.testing.assert_close(ratio(long, True) / ratio(short, True), expected, rtol=0.05, atol=0)
    torch.testing.assert_close(ratio(long, False), torch.ones(PAIRS, dtype=torch.float64), rtol=0.05, atol=0)


@pytest.mark.parametrize("norm", ["1", "1 / sqrt(m)", "gaussian"])
def test_orthonormal_rows_give_the_wrong_width(norm):
    """The log of the estimate is to grow as q.k does. With rows of length 1 it grows D times as slowly, with rows of
    length 1 / sqrt(m) hardly at all: every key then has the same weight."""
    w = torch.cat([rows(DIM, seed, orthogonal=True) for seed in range(4000)])
    if norm != "gaussian":
        w = torch.nn.functional.normalize(w, dim=1) / (1 if norm == "1" else math.sqrt(64))

    def log_kernel(plus, minus):  # of e^{w.q} e^{w.k}: the factors e^{-|x|^2 / 2} are right for rows of any length
        q, k = pairs(plus, minus)
        return ((q @ w.T).exp() * (k @ w.T).exp()).mean(-1).log().mean()

    slope = (log_kernel(1.5, 0.5) - log_kernel(0.5, 1.5)) / 0.5  # q.k rises from -0.25 to 0.25 at equal norms
    expected = {"1": 1 / DIM, "1 / sqrt(m)": 1 / DIM / 64, "gaussian": 1.0}[norm]
    assert slope == pytest.approx(expected, rel=0.1)


def test_random_features_are_drawn_and_never_trained():
    mixer = build_mixer(
        {"name": "linear", "feature_map": "favor"}, AttentionShape(2, 2, 8, 8, 16, 1.0), layer=0, seed=0
    )
    assert list(mixer.parameters()) == []
    assert "feature_map.omega" in mixer.state_dict()


def test_one_plus_the_product_is_no_kernel_for_attention():
    """1 + q.k, the first order of exp, can be negative; elu + 1 is no series of it, and its weights hardly tell keys
    apart that softmax does."""
    q, k = pairs(0.5, 8.5)
    products = (q * k).sum(-1)
    assert (1 + products < 0).all()
    shape = AttentionShape(1, 1, DIM, DIM, DIM, 1.0)
    elu = build_mixer({"name": "linear", "feature_map": "elu1"}, shape, layer=0, seed=0).feature_map
    found = (elu.q(q) * elu.k(k)).sum(-1) / (elu.q(q) * elu.k(q)).sum(-1)
    assert (found > 10 * (products - q.square().sum(-1)).exp()).all()


def tokens(length=10, seed=3):
    q, k, v = torch.randn(3, 1, length, 2, 8, generator=generator(seed), dtype=torch.float64)
    return q, k, v


def linear(q, k, v, **state):
    return build_mixer({"name": "linear", "feature_map": "elu1"}, SHAPE, layer=0, seed=0)(q, k, v, **state)


def test_causal_linear_attention_is_not_blind_to_order():
    """Reversed tokens give reversed outputs only if every token sees every other. Causal sums depend on the order, also
    without decay or positions; the last token alone sees a set, and only in one layer."""
    q, k, v = tokens()
    back = torch.arange(9, -1, -1)
    causal, turned = linear(q, k, v)[0], linear(q[:, back], k[:, back], v[:, back])[0]
    assert (turned - causal[:, back]).abs().amax((0, 2, 3)).min() > 0.01

    phi = build_mixer({"name": "linear", "feature_map": "elu1"}, SHAPE, layer=0, seed=0).feature_map.q

    def both_ways(q, k, v):
        weights = torch.einsum("bthf,bshf->bhts", phi(q), phi(k))
        return torch.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdim=True), v)

    torch.testing.assert_close(both_ways(q[:, back], k[:, back], v[:, back]), both_ways(q, k, v)[:, back])

    mixed = torch.cat([torch.randperm(9, generator=generator(4)), torch.tensor([9])])
    q_, k_, v_ = (x[:, mixed] for x in (q, k, v))
    once, again = linear(q, k, v)[0], linear(q_, k_, v_)[0]
    torch.testing.assert_close(once[:, -1], again[:, -1])
    second = [linear(x, x, x)[0][:, -1] for x in (once, again)]
    assert (second[0] - second[1]).abs().max() > 0.01


def test_the_normaliser_is_a_state_too():
    """z_t = phi(q_t) . sum of phi(k_j) depends on the query, and is linear in the length all the same: what is kept is
    the sum of features, of one size at every length."""
    q, k, v = tokens(200)
    sizes = {}
    for length in (10, 200):
        _, state = linear(q[:, :length], k[:, :length], v[:, :length], return_state=True)
        sizes[length] = {name: x.shape for name, x in state.items()}
    assert sizes[10] == sizes[200]
    assert sizes[200]["z"] == (1, 2, 8)
    phi_q, phi_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    weights = torch.einsum("bthf,bshf->bhts", phi_q, phi_k).tril()
    expected = torch.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(linear(q, k, v)[0], expected)


def test_normalising_keys_over_later_queries_shows_the_future():
    """z_j = sum over i >= j of phi(q_i) . phi(k_j): a changed last token changes the first output. Over i <= j, it
    doesn't."""
    q, k, v = tokens()
    changed = q.clone()
    changed[:, -1] += 3

    def published(q):
        weights = torch.einsum("bthf,bshf->bhts", q.exp(), k.exp()).tril()
        return torch.einsum("bhts,bshd->bthd", weights / weights.sum(-2, keepdim=True), v)

    def ours(q):
        return key_normalised_attention(q.exp(), k.exp(), v, causal=True)

    assert (published(changed) - published(q))[:, 0].abs().max() > 0.001
    assert torch.equal(ours(changed)[:, :-1], ours(q)[:, :-1])


def test_the_tests_that_the_page_points_at_exist():
    root = Path(__file__).resolve().parents[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs/theory.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    for path, name in named:
        assert f"\ndef {name}(" in (root / path).read_text(encoding="utf-8"), name
