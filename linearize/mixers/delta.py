"""Recurrences that replace what a state holds for a key: DeltaNet, Gated DeltaNet and Kimi Delta Attention.

    S'_t = a_t S_{t-1}    S_t = S'_t + beta_t k_t (v_t - k_t S'_t)^T    o_t = out_scale * norm(q_t S_t)

q and k are those that the model's attention would get, scaled to length 1 in each head: then a write with beta = 1
erases exactly what was there. The papers' silu and short convolutions on q, k and v are left out, so that directions
stay the teacher's. norm is an RMS norm over each head's value dims, which takes the length of q out of the output.
"""

from __future__ import annotations

from typing import Any

import torch
from linearize_kernels import DeltaState, accumulate_dtype, delta_rule, delta_rule_step
from torch import Tensor, nn
from torch.nn import functional as F

from linearize.mixers import parts
from linearize.mixers.linear import State, steps_in_place
from linearize.mixers.registry import AttentionShape


class DeltaNetMixer(parts.Recurrence):
    """DeltaNet (Schlag et al. 2021, arXiv:2102.11174; Yang et al. 2024, arXiv:2406.06484): a_t = 1.

        beta_t = sigmoid(w x_t + b)

    x is the hidden input, w and b per key/value head and 0 at the start: half of what is held for a key is replaced.
    `output_gate` multiplies the output by an `OutputGate`, which the papers don't have. The state is S (B, Hk, D, Dv),
    float32.
    """

    def __init__(
        self, shape: AttentionShape, decay: nn.Module | None = None, *, output_gate: bool = False, **options: Any
    ) -> None:
        super().__init__(shape, decay, output_gate=output_gate, **options)
        self.beta = _Beta(shape)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, **call: Any
    ) -> tuple[Tensor, State | None]:
        """Mix q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv) into (B, T, H, Dv); all as in `LinearMixer`."""
        x = parts.hidden_input(hidden_states, accumulate_dtype(q), call.get("mask"))
        log_decay = None if self.decay is None else self.decay(x)[1]
        out, state = _recur(q, k, v, self.beta(x), log_decay, **call)
        return self.finish(parts.rms_norm(out), x, v.dtype), state


class GatedDeltaNetMixer(DeltaNetMixer):
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a decay for each token and key/value head.

        a_t = exp(-exp(A_log) softplus(w x_t + b))

    and otherwise `DeltaNetMixer`, with the gate that the paper has. A_log and w start at 0, b such that the decay has
    the half-life that `start` is given, or RetNet's spread over the heads (`parts.start_half_lives`).
    """

    by_dim = False

    def __init__(
        self,
        shape: AttentionShape,
        *,
        output_gate: bool = True,
        rank: int = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        decay = parts.SoftplusDecay(shape, step_by_dim=self.by_dim, rank=rank, generator=generator)
        super().__init__(shape, decay, output_gate=output_gate, rank=rank, generator=generator)


class KDAMixer(GatedDeltaNetMixer):
    """Kimi Delta Attention (Kimi Linear, arXiv:2510.26692): a decay for each token and key dim.

        a_t = exp(-exp(A_log) softplus(f(x_t) + b))

    f is of low rank and 0 at the start, A_log per key/value head, b per key dim; otherwise as `GatedDeltaNetMixer`. All
    key dims of a head start with one decay, so that products q k keep their proportions at any distance.
    """

    by_dim = True


class _Beta(nn.Module):
    """sigmoid(w x + b), (B, T, Hk): 1/2 at the start."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.project = parts.Full(shape.hidden_size, (shape.num_key_value_heads,))
        self.bias = parts.zeros(shape.num_key_value_heads)

    def forward(self, x: Tensor) -> Tensor:
        return (self.project(x) + self.bias.to(x.dtype)).sigmoid()


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    *,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
) -> tuple[Tensor, State | None]:
    """q_t S_t for q and k scaled to length 1, in the dtype of the sums, and the state."""
    dtype = accumulate_dtype(q)
    inputs = (_unit(q.to(dtype)), _unit(k.to(dtype)), v.to(dtype), beta)
    options: dict[str, Any] = {"scale": 1.0, "log_decay": log_decay, "mask": mask}
    if steps_in_place(state, q):
        return delta_rule_step(*inputs, DeltaState(**state), **options), state
    before = None if state is None else DeltaState(**state)
    out, after = delta_rule(*inputs, initial_state=before, return_state=True, cu_seqlens=cu_seqlens, **options)
    return out, after._asdict() if return_state else None


def _unit(x: Tensor) -> Tensor:
    """x (..., D) over its length; a vector of zeros stays one."""
    return F.normalize(x, dim=-1, eps=1e-6)
