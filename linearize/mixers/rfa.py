"""Random feature attention (Peng et al. 2021, arXiv:2103.02143)."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from linearize_kernels import accumulate_dtype
from torch import Tensor, nn
from torch.nn import functional as F

from linearize.errors import UsageError
from linearize.mixers import parts
from linearize.mixers.draws import gaussian_rows
from linearize.mixers.linear import State, linear_state, linear_sums, steps_in_place
from linearize.mixers.positions import sequence_starts
from linearize.mixers.registry import AttentionShape

# The gate's half-life at the start, in tokens, until a calibration has measured a better one.
HALF_LIFE = 1024.0


class RFAMixer(nn.Module):
    """Softmax attention over directions, exp(tau q.k) of q and k of length 1, by trigonometric random features.

        phi(x) = [sin(Wx), cos(Wx)] / sqrt(m)    x of length sqrt(tau), rows of W (m, D) from N(0, I)
        E[phi(q) . phi(k)] = exp(-|q - k|^2 / 2) = exp(tau q.k / (|q| |k|)) exp(-tau)

    The constant cancels in o_t = phi(q_t) S_t / phi(q_t) z_t. tau = exp(log_tau) is one of a key/value head, (Hk,),
    since both sides have to have it.

    An estimate of a positive kernel that is made of sines and cosines can be 0 or negative, and so can the denominator
    be. It is held at `guard` times the number of keys or above: features have length 1, so that this is a floor under
    the mean of the kernel, whatever the length of the sequence.

    With `gate`, S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T and z_t likewise, g_t = sigmoid(w x_t + b) of the hidden
    input x, for each key/value head (the paper's RFA-GATE). The number of keys is then the weight that they have left.

    The state is S (B, Hk, F, Dv + 1), whose last column sums phi(k), the z and m of `LinearMixer`, and count (B, Hk):
    the number of keys, or the sum of -log g with a gate. All of it is float32.
    """

    layer_type = "linear_attention"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"log_tau": (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)}
    omega: Tensor

    def __init__(
        self,
        shape: AttentionShape,
        *,
        features: int = 256,
        orthogonal: bool = True,
        gate: bool = False,
        guard: float = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if features < 2 or features % 2:
            raise UsageError(f"mixer 'rfa' can't have features={features}", "Use an even number of at least 2")
        if not 0 < guard <= 1:
            raise UsageError(f"mixer 'rfa' can't have guard={guard}", "Use a number above 0, and at most 1")
        self.shape, self.orthogonal, self.guard = shape, orthogonal, guard
        self.log_tau = parts.zeros(shape.num_key_value_heads)
        self.register_buffer("omega", gaussian_rows(features // 2, shape.head_dim, orthogonal, generator))
        self.gate = parts.Full(shape.hidden_size, (shape.num_key_value_heads,)) if gate else None
        self.starts = gate
        if gate:
            self.gate_bias = parts.zeros(shape.num_key_value_heads)
            self.start(torch.full((shape.num_heads,), HALF_LIFE))

    def start(self, distance: Tensor) -> None:
        """Let each gate's half-life be the `distance` (H,) of its heads, in tokens, where the hidden input says
        nothing; see `parts.half_lives`."""
        if self.starts:
            rates = parts.rates(parts.half_lives(distance, self.shape.num_key_value_heads))
            parts.fill(self.gate_bias, -rates.expm1().log())  # log sigmoid(-log(e^y - 1)) = -y

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None) -> None:
        """Draw omega anew, in place."""
        rows, dim = self.omega.shape
        self.omega.copy_(gaussian_rows(rows, dim, self.orthogonal, generator))

    def features(self, x: Tensor, log_tau: Tensor) -> Tensor:
        """phi (B, T, H, F) of x (B, T, H, D), log_tau (H,)."""
        x = F.normalize(x, dim=-1) * (log_tau / 2).exp()[:, None]
        angle = x @ self.omega.to(x.dtype).T
        return torch.cat([angle.sin(), angle.cos()], dim=-1) / math.sqrt(self.omega.shape[0])

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        hidden_states: Tensor | None = None,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: State | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, State | None]:
        """Mix q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv) into (B, T, H, Dv), causally; as `LinearMixer`. A gate
        needs hidden_states (B, T, hidden)."""
        dtype, group = accumulate_dtype(q), q.shape[2] // k.shape[2]
        log_tau = self.log_tau.to(dtype)
        phi_q = self.features(q.to(dtype), log_tau.repeat_interleave(group))
        phi_k = self.features(k.to(dtype), log_tau)
        log_gate, steps = None, torch.ones_like(phi_k[..., 0])
        if self.gate is not None:
            pre = self.gate(parts.hidden_input(hidden_states, dtype, mask)) + self.gate_bias.to(dtype)
            log_gate = F.logsigmoid(pre)
            phi_k, steps = phi_k * torch.sigmoid(-pre)[..., None], -log_gate
        steps = steps if mask is None else steps.masked_fill(~mask[..., None], 0)
        total, count = _running(steps, None if state is None else state["count"], cu_seqlens)
        keys = total if self.gate is None else -(-total).expm1()  # 1 - g_1 ... g_t is the weight of all keys
        sums, after = linear_sums(
            phi_q,
            phi_k,
            torch.cat([v.to(dtype), torch.ones_like(v[..., :1], dtype=dtype)], dim=-1),
            None if state is None else linear_state(state),
            in_place=steps_in_place(state, q),
            log_decay=log_gate,
            mask=mask,
            cu_seqlens=cu_seqlens,
        )
        # The second floor is for padding before the first key, where all is 0.
        floor = (self.guard * keys).clamp_min(1e-30).repeat_interleave(group, 2)[..., None]
        out = (sums[..., :-1] / torch.maximum(sums[..., -1:], floor)).to(v.dtype)
        return out, {**after._asdict(), "count": count} if return_state else None


def _running(steps: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of steps (B, T, Hk) up to each token of a sequence, on top of `before` (B, Hk), and at its end."""
    if cu_seqlens is None:
        first = steps.new_zeros(steps.shape[0], 1, steps.shape[2]) if before is None else before[:, None]
        total = torch.cat([first, steps], 1).cumsum(1)
        return total[:, 1:], total[:, -1]
    total = F.pad(steps[0].cumsum(0), (0, 0, 1, 0))
    bounds = cu_seqlens.to(total.device)
    starts = sequence_starts(cu_seqlens, steps.shape[1], total.device)
    return (total[1:] - total[starts])[None], total[bounds[1:]] - total[bounds[:-1]]
