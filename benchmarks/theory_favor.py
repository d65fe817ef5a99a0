"""How FAVOR+ errs on q and k of a real model: by the number of features, the kind of features, and the norms.

    python benchmarks/theory_favor.py [--tokens 192] [--draws 8]

SmolLM2-135M-Instruct on demo_text.txt. In the notation of the paper (arXiv:2009.14794, with q and k scaled by
D^-1/4), an estimate of e^{q.k} from m positive features has a relative variance of (e^{|q+k|^2} - 1) / m, and one from
trigonometric features of about e^{|q-k|^2} (1 - e^{-|q-k|^2})^2 / m. "Tempered" heads are the model's own, with
q and k multiplied by one number each so that the median of |q+k|^2 over pairs is what is said: directions are real,
the softmax is a softer one. "Centred" keys have their mean subtracted, which no softmax notices.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from linearize.mixers import AttentionShape
from linearize.mixers.feature_maps import Favor
from theory_tools import Heads, capture, figure, lines, logarithmic, slope, versions

LAYERS = (0, 8, 18, 29)
FEATURES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
KINDS = ("positive, i.i.d.", "positive, orthogonal", "positive, orthogonal, ±", "trigonometric")
AT = 256  # features where errors are compared by norm and by kernel


def features(kind: str, x: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(T, H, F) features of x (T, H, D) and their log scale (T, H). F is `count` for every kind."""
    dim, heads = x.shape[-1], x.shape[1]
    shape = AttentionShape(heads, heads, dim, dim, heads * dim, scaling=1.0)
    trigonometric = kind == "trigonometric"
    favor = Favor(
        shape,
        features=count // 2 if trigonometric else count,
        orthogonal="i.i.d." not in kind,
        hyperbolic="±" in kind,
        generator=torch.Generator().manual_seed(seed),
    )
    if not trigonometric:
        phi, log_scale = favor.q(x[None])
        return phi[0], log_scale[0]
    angle = x @ favor.omega.double().T
    return torch.cat([angle.sin(), angle.cos()], -1) / math.sqrt(count / 2), x.square().sum(-1) / 2


def estimates(kind: str, heads: Heads, count: int, seed: int) -> Tensor:
    """(H, T, T) estimates of e^{q.k} over its exact value: 1 is right. Meaningful for causal pairs only."""
    (q, log_q), (k, log_k) = (features(kind, x, count, seed) for x in heads[:2])
    products = torch.einsum("thf,shf->hts", q, k)
    exponent = log_q.T[:, :, None] + log_k.T[:, None] - torch.einsum("thd,shd->hts", *heads[:2])
    return products * exponent.clamp(max=600).exp()  # e^600 is far out already; beyond e^709 float64 ends


def causal(heads: Heads) -> Tensor:
    length = len(heads.q)
    return torch.ones(length, length, dtype=torch.bool).tril()


def squares(heads: Heads, sign: int = 1) -> Tensor:
    """(H, T, T) |q + sign k|^2."""
    q, k = (x.square().sum(-1).T for x in heads[:2])
    return q[:, :, None] + k[:, None] + 2 * sign * torch.einsum("thd,shd->hts", *heads[:2])


def tempered(heads: Heads, target: float | None) -> Heads:
    """q and k of each head times one number, for a median |q+k|^2 of `target`; None leaves them as they are."""
    if target is None:
        return heads
    median = squares(heads)[:, causal(heads)].median(-1).values
    factor = (target / median).sqrt()[None, :, None]
    return heads._replace(q=heads.q * factor, k=heads.k * factor)


def centred(heads: Heads) -> Heads:
    return heads._replace(k=heads.k - heads.k.mean(0))


def output_error(heads: Heads, kind: str, count: int, seed: int) -> Tensor:
    """(H,) |estimate - softmax| / |softmax| of the attention output, over all queries."""
    mask = causal(heads)
    exact = torch.einsum("thd,shd->hts", *heads[:2]).masked_fill(~mask, -torch.inf).softmax(-1)
    weights = exact * estimates(kind, heads, count, seed).masked_fill(~mask, 0)
    total = weights.sum(-1, keepdim=True)
    # Where every weight has underflowed the operator gives 0; a trigonometric sum can be 0 or below.
    weights = torch.where(total.abs() > 1e-300, weights / total, 0.0)
    wanted, found = (torch.einsum("hts,shd->htd", one, heads.v) for one in (exact, weights))
    return (found - wanted).square().sum((1, 2)).sqrt() / wanted.square().sum((1, 2)).sqrt()


def kernel_error(heads: Heads, kind: str, count: int, seed: int) -> Tensor:
    """(H,) the median over causal pairs of |estimate / exact - 1|."""
    return (estimates(kind, heads, count, seed)[:, causal(heads)] - 1).abs().median(-1).values


def over_features(measure: Callable[..., Tensor], layers: list[Heads], kind: str, draws: int) -> np.ndarray:
    """(3, len(FEATURES)) quartiles over heads; of each head the median over draws."""
    rows = []
    for count in FEATURES:
        heads = []
        for number, one in enumerate(layers):  # layers draw apart, as in a model
            errors = [measure(one, kind, count, seed * len(layers) + number) for seed in range(draws)]
            heads.append(torch.stack(errors).median(0).values)
        rows.append(np.percentile(torch.cat(heads), [25, 50, 75]))
    return np.array(rows).T


def laws(layers: list[Heads], draws: int) -> None:
    """Error by m, of the kernel and of the output; prints the slopes."""
    soft = [tempered(one, 1.0) for one in layers]
    kinds = {kind: over_features(kernel_error, soft, kind, draws) for kind in KINDS}
    norms: dict[str, np.ndarray] = {}
    for target in (1.0, 4.0, 16.0):
        norms[f"|q+k|² = {target:g}"] = over_features(
            output_error, [tempered(one, target) for one in layers], KINDS[2], draws
        )
    norms["as it is, keys centred"] = over_features(output_error, [centred(one) for one in layers], KINDS[2], draws)
    norms["as it is"] = over_features(output_error, layers, KINDS[2], draws)
    with figure("favor-features", 2) as (_, (left, right)):
        label = "features m"
        lines(left, FEATURES, kinds, title="kernel, median |q+k|² = 1", xlabel=label, ylabel="relative error")
        lines(right, FEATURES, norms, 4, title="attention output (orthogonal, ±)", xlabel=label)
        for axes in (left, right):
            logarithmic(axes, FEATURES)
        left.plot(FEATURES, [2 * m**-0.5 for m in FEATURES], color="#999999", linewidth=0.8, label="slope -1/2")
    print(f"{'error by m':34}" + "".join(f"{m:>8}" for m in FEATURES) + "   slope")
    for name, table in (kinds | norms).items():
        fitted = slope(FEATURES[3:], table[1][3:])  # from where a block of D rows is full, with ±, too
        print(f"{name:34}" + "".join(f"{value:8.3f}" for value in table[1]) + f"{fitted:8.2f}")


def by_norm(layers: list[Heads], draws: int) -> None:
    """Root mean square of the relative error at m = 256: by |q+k|^2, and by q.k where |q|^2 + |k|^2 is about 4."""
    kinds = (KINDS[0], KINDS[2], KINDS[3])
    edges, small = np.geomspace(0.25, 64, 9), np.linspace(-1.6, 1.6, 9)
    norms, kernels = ({kind: np.zeros((2, len(bins) - 1)) for kind in kinds} for bins in (edges, small))
    targets = (0.5, 2.0, 8.0, None)
    for target in targets:
        for heads in (tempered(one, target) for one in layers):
            mask = causal(heads)
            size = squares(heads)[:, mask].numpy()
            dot = torch.einsum("thd,shd->hts", *heads[:2])[:, mask].numpy()
            sums = size - 2 * dot
            for kind in kinds:
                for seed in range(draws):
                    wrong = (estimates(kind, heads, AT, seed)[:, mask] - 1).square().numpy()
                    add(norms[kind], size, edges, wrong)
                    near = (sums > 3) & (sums < 5)
                    add(kernels[kind], dot[near], small, wrong[near])
    middles = np.sqrt(edges[:-1] * edges[1:])
    found = {kind: np.sqrt(sum_ / np.maximum(count, 1)) for kind, (count, sum_) in norms.items() if kind != KINDS[3]}
    between = (small[:-1] + small[1:]) / 2
    signs = {
        kind: np.where(count >= 1000, np.sqrt(sum_ / np.maximum(count, 1)), np.nan)
        for kind, (count, sum_) in kernels.items()
    }
    with figure("favor-norms", 2) as (_, (left, right)):
        lines(left, middles, found, title=f"m = {AT}: by |q+k|²", xlabel="|q+k|²", ylabel="relative error (RMS)")
        theory = np.sqrt(np.expm1(np.geomspace(0.25, 30, 60)) / AT)
        left.plot(np.geomspace(0.25, 30, 60), theory, color="#999999", linewidth=0.8, label="√((e^|q+k|² - 1) / m)")
        logarithmic(left, [0.25, 1, 4, 16, 64])
        left.set_ylim(4e-3, 1e4)
        lines(
            right, between, signs, title=f"m = {AT}: by q·k, |q|² + |k|² from 3 to 5", xlabel="q·k = log of the kernel"
        )
        logarithmic(right, x=False)
    for title, places, rows in (("|q+k|^2", middles, found), ("q.k", between, signs)):
        print(f"\n{'RMS error at m = 256, by ' + title:34}" + "".join(f"{x:9.2f}" for x in places))
        for kind, values in rows.items():
            print(f"{kind:34}" + "".join(f"{value:9.3g}" for value in values))
    print(f"{'(e^x - 1) / m, its root, first':34}" + "".join(f"{math.sqrt(math.expm1(x) / AT):9.3g}" for x in middles))


def add(sums: np.ndarray, places: np.ndarray, edges: np.ndarray, values: np.ndarray) -> None:
    """Add the count and the sum of `values` that lie in each bin of `places` to `sums` (2, bins)."""
    for row, weights in zip(sums, (None, values), strict=True):
        row += np.histogram(places, edges, weights=weights)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--draws", type=int, default=8)
    arguments = parser.parse_args()
    print(versions())
    layers = list(capture(LAYERS, arguments.tokens).values())
    for name, change in (("as they are", lambda one: one), ("keys centred", centred)):
        median = torch.cat([squares(change(one))[:, causal(one)].median(-1).values for one in layers])
        low, middle, high = np.percentile(median, [0, 50, 100])
        print(f"median |q+k|^2 of heads of layers {LAYERS}, {name}: {middle:.0f} ({low:.0f} to {high:.0f})")
    with torch.no_grad():
        laws(layers, arguments.draws)
        by_norm(layers, arguments.draws)


if __name__ == "__main__":
    main()
