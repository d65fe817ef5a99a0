"""What recurrent mixers are put together from: projections of the hidden input, decays, norm and gate of the output.

Parameters are float32 and every function computes in the dtype of the mixer's sums (`accumulate_dtype`), whatever the
model's. All of them start such that they do nothing, or what the paper's start comes down to.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linearize.errors import UsageError
from linearize.mixers.draws import normal
from linearize.mixers.registry import AttentionShape, PartShape

EPS = 1e-6  # of RMS norms, beside the mean square
# Half-lives, in tokens. A head that looks at itself alone still keeps half of a token for the next one; one that looks
# back further than that is taken to keep everything, and its decay can still be told from none in float32.
SHORTEST, LONGEST = 1.0, 65536.0


class LowRank(nn.Module):
    """x (..., inputs) -> (..., *shape), through `rank` dims: 0 at the start, whatever x is.

    The first matrix is drawn so that x with entries of size 1 stays so; the second one is 0. Raises `UsageError` for a
    rank below 1.
    """

    def __init__(self, inputs: int, shape: tuple[int, ...], rank: int, generator: torch.Generator | None) -> None:
        super().__init__()
        if rank < 1:
            raise UsageError(f"a mixer can't have rank={rank}", "Use at least 1")
        self.shape = shape
        self.down = nn.Parameter(normal(rank, inputs, generator) / math.sqrt(inputs))
        self.up = zeros(math.prod(shape), rank)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype)).unflatten(-1, self.shape)


class Full(nn.Module):
    """x (..., inputs) -> (..., *shape): one matrix, which starts as 0."""

    def __init__(self, inputs: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.weight = zeros(math.prod(shape), inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)).unflatten(-1, self.shape)


class FixedDecay(nn.Module):
    """-exp(rate_log), (Hk,), whatever the token."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.rate_log = zeros(shape.num_key_value_heads)
        self.start(start_half_lives(shape))

    def start(self, half_life: Tensor) -> None:
        """Let each head keep half of its state for `half_life` (Hk,) tokens."""
        fill(self.rate_log, rates(half_life).log())

    def forward(self, dtype: torch.dtype) -> Tensor:
        return -self.rate_log.to(dtype).exp()


class SigmoidDecay(nn.Module):
    """log sigmoid(f(x) + bias) / temper, (B, T, Hk, D), f of low rank and 0 at the start."""

    def __init__(self, shape: AttentionShape, temper: float, rank: int, generator: torch.Generator | None) -> None:
        super().__init__()
        dims = (shape.num_key_value_heads, shape.head_dim)
        self.temper = temper
        self.project = LowRank(shape.hidden_size, dims, rank, generator)
        self.bias = zeros(*dims)
        self.start(start_half_lives(shape))

    def start(self, half_life: Tensor) -> None:
        """As in `FixedDecay`, where f(x) is 0, for every key dim alike."""
        fill(self.bias, -(self.temper * rates(half_life)).expm1().log())  # log sigmoid(-log(e^y - 1)) = -y

    def forward(self, x: Tensor) -> Tensor:
        return F.logsigmoid(self.project(x) + self.bias.to(x.dtype)) / self.temper


class SoftplusDecay(nn.Module):
    """-exp(A_log) step with step = softplus(f(x) + bias), f 0 at the start.

    Args:
        step_by_dim: the step is (B, T, Hk, D) and f of low rank; else it is (B, T, Hk) and f one matrix.
        rate_by_dim: A_log is (Hk, D); else it is (Hk,).
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        step_by_dim: bool = False,
        rate_by_dim: bool = False,
        rank: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        heads, dims = (shape.num_key_value_heads,), (shape.num_key_value_heads, shape.head_dim)
        if step_by_dim:
            self.project = LowRank(shape.hidden_size, dims, rank, generator)
        else:
            self.project = Full(shape.hidden_size, heads)
        self.bias = zeros(*(dims if step_by_dim else heads))
        self.A_log = zeros(*(dims if rate_by_dim else heads))
        self.start(start_half_lives(shape))

    def start(self, half_life: Tensor) -> None:
        """As in `SigmoidDecay`: by the step, with exp(A_log) = 1.

        A small step is about exp(f(x) + bias), so that f changes a decay by a factor, however slow it is.
        """
        fill(self.A_log, torch.zeros_like(half_life))
        fill(self.bias, rates(half_life).expm1().log())  # softplus(log(e^y - 1)) = y

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The step, and the log decay: (B, T, Hk, D) if either of its factors is by dim, else (B, T, Hk)."""
        step, rate = F.softplus(self.project(x) + self.bias.to(x.dtype)), self.A_log.to(x.dtype).exp()
        if rate.dim() > self.bias.dim():
            return step, -step[..., None] * rate
        return step, -step * (rate[:, None] if self.bias.dim() > rate.dim() else rate)


class OutputGate(nn.Module):
    """2 sigmoid(f(x)) for each head and value dim, (B, T, H, Dv), f of low rank: 1 at the start.

    Published gates are silu or sigmoid of a learned projection. They have no value at which they do nothing for every
    x, so that this one, which has, stands for both.
    """

    def __init__(self, shape: AttentionShape, rank: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.project = LowRank(shape.hidden_size, (shape.num_heads, shape.v_head_dim), rank, generator)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.project(x).sigmoid()


class Recurrence(nn.Module):
    """What the mixers of `gated` and `delta` have in common: a decay, a gate and a scale of the output.

    The decay starts from RetNet's half-lives, or from what `start` is given. `out_scale` (H, Dv) starts as 1, for
    calibration to fit.

    Args:
        decay: a module with a method `start(half_life)`; None where time lets nothing fade.
        output_gate: whether the output has an `OutputGate`, of this rank.
    """

    scale = "out_scale"

    def __init__(
        self,
        shape: AttentionShape,
        decay: nn.Module | None,
        *,
        output_gate: bool = True,
        rank: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.decay: Any = decay
        self.gate = OutputGate(shape, rank, generator) if output_gate else None
        self.out_scale = ones(shape.num_heads, shape.v_head_dim)

    @property
    def starts(self) -> bool:
        return self.decay is not None

    def start(self, distance: Tensor) -> None:
        """Let each head's half-life be its `distance` (H,), in tokens; see `half_lives`."""
        if self.starts:
            self.decay.start(half_lives(distance, self.shape.num_key_value_heads))

    def finish(self, out: Tensor, x: Tensor | None, dtype: torch.dtype) -> Tensor:
        """out (B, T, H, Dv) times out_scale and the gate, which reads the hidden input x, in `dtype`."""
        out = out * self.out_scale.to(out.dtype)
        return (out if self.gate is None else out * self.gate(x)).to(dtype)


def starts(mixer: nn.Module) -> bool:
    """Whether a mixer's method `start` sets anything, where it has one."""
    return hasattr(mixer, "start") and bool(getattr(mixer, "starts", True))


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32))


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=torch.float32))


def hidden_input(hidden_states: Tensor | None, dtype: torch.dtype, mask: Tensor | None) -> Tensor:
    """(B, T, hidden) in `dtype`, 0 where the mask (B, T) is False; raises ValueError if there is none.

    Anything may stand in padding. A NaN there would reach the gradients of all gates, though their outputs are masked.
    """
    if hidden_states is None:
        raise ValueError("this mixer's gates read the hidden input of the attention module: pass hidden_states")
    return without_padding(hidden_states, mask).to(dtype)


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, T, ...) with zeros where the mask (B, T) is False."""
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), 0)


def rms_norm(x: Tensor) -> Tensor:
    """x (..., Dv) over its root mean square."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def start_half_lives(shape: AttentionShape) -> Tensor:
    """(Hk,) half-lives in tokens until a calibration has measured better ones: from 22 to 2839.

    RetNet's decays (Sun et al. 2023, arXiv:2307.08621), 1 - 2^(-5-h) for heads h = 0 ... 7, h spread evenly over as
    many heads as the layer has.
    """
    part = isinstance(shape, PartShape)
    heads = shape.whole if part else shape.num_key_value_heads
    h = torch.linspace(0, 7, heads) if heads > 1 else torch.full((1,), 3.5)
    h = h[list(shape.heads)] if part else h
    return math.log(2) / -torch.log1p(-(2.0 ** (-5 - h)))


def half_lives(distance: Tensor, kv_heads: int) -> Tensor:
    """(Hk,) half-lives from distances of the query heads (H,): their mean in each group, within what decays can be."""
    return distance.view(kv_heads, -1).mean(1).clamp(SHORTEST, LONGEST)


def rates(half_life: Tensor) -> Tensor:
    """How much each token takes off the logarithm of what is kept, > 0, for half-lives in tokens."""
    return math.log(2) / half_life


@torch.no_grad()
def fill(parameter: nn.Parameter, value: Tensor) -> None:
    """Give parameter (Hk, ...) the values (Hk,), or its own shape."""
    value = value.view(*value.shape, *[1] * (parameter.dim() - value.dim()))
    parameter.copy_(value.to(parameter.device, parameter.dtype).expand_as(parameter))
