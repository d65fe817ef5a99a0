"""`window` with a map that looks at positions, against the sum over every pair of tokens."""

from __future__ import annotations

import math

import torch

from tests.mixers.specs import in_pieces, inputs_of, mixer_of, run, shape_of


def test_a_positional_map_weighs_old_keys_by_their_distance():
    shape = shape_of(2, 1, 8, 8)
    options = {"feature_map": "cosformer", "feature_map_options": {"length": 40}}
    mixer = mixer_of({"name": "window", **options, "window": 4, "sinks": 2}, shape)
    x = inputs_of(shape, 40)
    expected = torch.zeros(2, 40, 2, 8, dtype=torch.float64)
    for t in range(40):
        old = list(range(2, t - 3))
        new = [j for j in range(t + 1) if j not in old]
        cosine = torch.tensor([math.cos(math.pi * (t - j) / 80) for j in old], dtype=torch.float64)
        for h in range(2):
            score = shape.scaling * torch.einsum("bd,bjd->bj", x.q[:, t, h], x.k[:, new, 0])
            exact = mixer.gate[h].exp() * (score - score.amax(1, True)).exp()
            far = torch.einsum("bd,bjd->bj", x.q[:, t, h].relu(), x.k[:, old, 0].relu()) * cosine
            weights, values = torch.cat([exact, far], 1), torch.cat([x.v[:, new, 0], x.v[:, old, 0]], 1)
            expected[:, t, h] = torch.einsum("bj,bjd->bd", weights / weights.sum(1, True), values)
    torch.testing.assert_close(run(mixer, x)[0], expected, atol=1e-10, rtol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(mixer, x, [7, 1, 1, 30, 1]), expected, atol=1e-10, rtol=1e-10)
