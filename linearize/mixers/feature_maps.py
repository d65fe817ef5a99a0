"""Feature maps: phi with phi(q) . phi(k) in the place of exp(scaling * q . k).

Shapes: B batch, T length, H query heads, Hk key/value heads, D head dim, F feature dim.

A feature map is a module with two methods, `q(x)` for queries (B, T, H, D) and `k(x)` for keys (B, T, Hk, D). Each
returns the features (B, T, heads, F), or a pair of them and their log scale (B, T, heads): the true features are then
`exp(log_scale) * features`, which lets maps with a huge range stay finite. Inputs arrive in float32 or float64 after
the model's own RoPE and norms. A map that returns a log scale says by it that its features estimate the softmax
kernel itself, so that a window hybrid can put both parts on one scale.

A `positional` map also needs to know where tokens stand: its methods are `q(x, positions)` and `k(x, positions)`, with
positions (B, T) or (1, T) int64. Only their differences within a sequence count, so a mixer may count from anywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from linearize_kernels import favor_features, hedgehog_features
from torch import Tensor, nn
from torch.nn import functional as F

from linearize.errors import UsageError
from linearize.mixers.draws import gaussian_rows, orthonormal_columns
from linearize.mixers.registry import AttentionShape


class Features(NamedTuple):
    """Features (B, T, heads, F) and, where the map has one, their log scale (B, T, heads)."""

    phi: Tensor
    log_scale: Tensor | None


class FeatureMap(nn.Module, ABC):
    """Base of the maps that ship here: keeps the shape, gives draws that depend on the seed alone.

    `feature_dim` (F) must be set by the subclass. `absolute` says that `q` and `k` return log scales, `positional` that
    they take positions. `max_length` is how many tokens a sequence may have, None without a limit.

    A map of random draws that may be drawn again has a method `redraw(generator)`, which fills the module's buffers.
    """

    feature_dim: int
    absolute = False
    positional = False
    max_length: int | None = None

    def __init__(self, shape: AttentionShape, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.feature_dim = shape.head_dim

    def forward(self, x: Tensor, side: str, positions: Tensor | None = None) -> Features:
        """Features of queries (side "q") or keys ("k") that stand at `positions`. Mixers call the map through this, so
        that hooks on the module run: offloading brings weights with them."""
        method: Any = self.q if side == "q" else self.k
        output = method(x, positions) if self.positional else method(x)
        return Features(output, None) if isinstance(output, Tensor) else Features(*output)

    @abstractmethod
    def q(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Features of queries x (B, T, H, D)."""

    @abstractmethod
    def k(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Features of keys x (B, T, Hk, D)."""


class Elu1(FeatureMap):
    """elu(x) + 1 (Katharopoulos et al. 2020, arXiv:2006.16236)."""

    def q(self, x: Tensor) -> Tensor:
        return F.elu(x).add_(1)

    k = q


class Relu(FeatureMap):
    """relu(x). The denominator can be 0, where the operator floors it."""

    def q(self, x: Tensor) -> Tensor:
        return F.relu(x)

    k = q


class Hedgehog(FeatureMap):
    """softmax(xW) beside softmax(-xW), W learned per head, the identity at the start (Zhang et al. 2024,
    arXiv:2402.04347). F = 2 D."""

    def __init__(self, shape: AttentionShape, *, generator: torch.Generator | None = None) -> None:
        super().__init__(shape)
        self.feature_dim = 2 * shape.head_dim
        self.q_weight = _identity(shape.num_heads, shape.head_dim)
        self.k_weight = _identity(shape.num_key_value_heads, shape.head_dim)

    @staticmethod
    def _map(x: Tensor, weight: Tensor) -> Tensor:
        return hedgehog_features(x, weight)

    def q(self, x: Tensor) -> Tensor:
        return self._map(x, self.q_weight)

    def k(self, x: Tensor) -> Tensor:
        return self._map(x, self.k_weight)


class T2R(FeatureMap):
    """relu(xW + b), learned per head; W starts as the identity and b as 0 (Kasai et al. 2021, arXiv:2103.13076).
    F = D. The denominator can be 0, where the operator floors it."""

    def __init__(self, shape: AttentionShape, *, generator: torch.Generator | None = None) -> None:
        super().__init__(shape)
        self.q_weight = _identity(shape.num_heads, shape.head_dim)
        self.q_bias = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim, dtype=torch.float32))
        self.k_weight = _identity(shape.num_key_value_heads, shape.head_dim)
        self.k_bias = nn.Parameter(torch.zeros(shape.num_key_value_heads, shape.head_dim, dtype=torch.float32))

    def q(self, x: Tensor) -> Tensor:
        return F.relu(_per_head(x, self.q_weight) + self.q_bias.to(x.dtype))

    def k(self, x: Tensor) -> Tensor:
        return F.relu(_per_head(x, self.k_weight) + self.k_bias.to(x.dtype))


class Cosformer(FeatureMap):
    """relu(x) beside itself, times cos(pi t / 2M) and sin(pi t / 2M) at position t (Qin et al. 2022, arXiv:2202.08791):

        phi(q_t) . phi(k_j) = relu(q_t) . relu(k_j) cos(pi (t - j) / 2M)

    F = 2 D. The weight replaces the position embedding that the paper's models don't have. RoPE, which the model
    applies before the mixer, stays, and so q and k arrive rotated.

    M is `length`, or the model's max_position_embeddings if that is 0. Beyond M tokens the cosine of the oldest keys is
    negative, so mixers refuse longer sequences. The denominator can be 0, where the operator floors it.

    Raises:
        UsageError: `length` is negative, or 0 and the model doesn't say how long it may be.
    """

    positional = True

    def __init__(self, shape: AttentionShape, *, length: int = 0, generator: torch.Generator | None = None) -> None:
        super().__init__(shape)
        if length < 0 or not (length or shape.max_length):
            reason = "isn't a number of tokens" if length < 0 else "needs a model whose config has a length"
            raise UsageError(
                f"feature map 'cosformer': length {length} {reason}",
                "Set feature_map_options.length to the most tokens that a sequence will have",
            )
        self.max_length = length or shape.max_length
        self.feature_dim = 2 * shape.head_dim

    def q(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        assert self.max_length is not None
        assert positions is not None
        # The angles have a period of 4M positions, within which float32 tells neighbours apart.
        angle = (positions % (4 * self.max_length)).to(x.dtype) * (math.pi / (2 * self.max_length))
        x, angle = F.relu(x), angle[..., None, None]
        return torch.cat([x * angle.cos(), x * angle.sin()], dim=-1)

    k = q


class Favor(FeatureMap):
    """FAVOR+ (Choromanski et al. 2020, arXiv:2009.14794): positive random features of the softmax kernel.

    With x scaled by sqrt(scaling) and rows w of omega drawn from N(0, I), the features exp(w.x - |x|^2/2) / sqrt(F)
    satisfy E[phi(q) . phi(k)] = exp(scaling * q.k). `hyperbolic` uses w and -w, which lowers the variance; `orthogonal`
    draws the rows orthogonal in blocks of D, with the norms of Gaussian rows (chi of D degrees), so that the
    estimate stays unbiased. omega is a persistent buffer: it is part of the checkpoint.
    """

    absolute = True
    omega: Tensor

    def __init__(
        self,
        shape: AttentionShape,
        *,
        features: int = 256,
        orthogonal: bool = True,
        hyperbolic: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(shape)
        if features < 1 or (hyperbolic and features % 2):
            raise UsageError(f"feature map 'favor' can't have features={features}", "Use an even number of at least 2")
        self.feature_dim = features
        self.hyperbolic, self.orthogonal = hyperbolic, orthogonal
        rows = features // 2 if hyperbolic else features
        self.register_buffer("omega", gaussian_rows(rows, shape.head_dim, orthogonal, generator))

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None) -> None:
        """Draw omega anew, in place."""
        rows, dim = self.omega.shape
        self.omega.copy_(gaussian_rows(rows, dim, self.orthogonal, generator))

    def q(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return favor_features(x, self.omega, scale=abs(self.shape.scaling), hyperbolic=self.hyperbolic)

    k = q


class Taylor(FeatureMap):
    """Second-order Taylor series of exp (Based, Arora et al. 2024, arXiv:2402.18668): 1 + s + s^2/2 with
    s = scaling * q.k, after q and k are projected to `project_dim` dims by weights learned per head.

    The projection starts as one random orthonormal map for q and k, scaled so that E[q'.k'] = q.k. The symmetric
    second-order part keeps each pair of dims once (off-diagonal entries times sqrt 2), so F = 1 + p + p(p+1)/2.
    1 + s + s^2/2 = ((s + 1)^2 + 1) / 2 is never below 1/2: the denominator is positive.
    """

    absolute = True
    pairs: Tensor

    def __init__(
        self, shape: AttentionShape, *, project_dim: int = 16, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(shape)
        if project_dim < 1:
            raise UsageError(f"feature map 'taylor' can't have project_dim={project_dim}", "Use at least 1")
        p = min(project_dim, shape.head_dim)
        self.project_dim = p
        self.feature_dim = 1 + p + p * (p + 1) // 2
        projection = orthonormal_columns(shape.head_dim, p, generator) * math.sqrt(shape.head_dim / p)
        self.q_weight = nn.Parameter(projection.repeat(shape.num_heads, 1, 1))
        self.k_weight = nn.Parameter(projection.repeat(shape.num_key_value_heads, 1, 1))

    def _map(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = _per_head(x * math.sqrt(abs(self.shape.scaling)), weight)
        i, j = torch.triu_indices(self.project_dim, self.project_dim, device=x.device)
        # x_i^2 / sqrt 2 on the diagonal, x_i x_j off it: their products sum to s^2 / 2.
        factor = torch.where(i == j, math.sqrt(0.5), 1.0).to(x.dtype)
        second = x[..., i] * x[..., j] * factor
        phi = torch.cat([torch.ones_like(x[..., :1]), x, second], dim=-1)
        return phi, torch.zeros_like(x[..., 0])

    def q(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._map(x, self.q_weight)

    def k(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._map(x, self.k_weight)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x (B, T, H, D) times weight (H, D, F), head by head."""
    return torch.einsum("bthd,hdf->bthf", x, weight.to(x.dtype))


def _identity(num_heads: int, dim: int) -> nn.Parameter:
    return nn.Parameter(torch.eye(dim, dtype=torch.float32).repeat(num_heads, 1, 1))
