"""Recurrences that add to a decaying state and divide by no sum: RetNet, GLA, Mamba-2 and Mamba.

    S_t = a_t S_{t-1} + k_t v_t^T        o_t = s q_t S_t        s: the factor of the model's own softmax

with q and k as the model's attention would get them. They differ in the decay a_t, and in what is done to o_t. A decay
starts from a half-life: that which `start` is given for each head, or RetNet's own spread over the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from linearize_kernels import LinearState, accumulate_dtype, linear_attention, linear_attention_step
from torch import Tensor

from linearize.mixers import parts
from linearize.mixers.linear import State, steps_in_place
from linearize.mixers.registry import AttentionShape


class RetNetMixer(parts.Recurrence):
    """RetNet (Sun et al. 2023, arXiv:2307.08621): one decay per key/value head, whatever the token.

        o_t = gate * out_scale * norm(s q_t S_t)    a = exp(-exp(rate_log))

    norm is an RMS norm over each head's value dims (the paper's group norm without its mean), gate an `OutputGate`.
    The paper fixes the decays; here the rate is a parameter, so that calibration can set it and training move it.
    The paper's rotation of q and k is the model's own position embedding. The state is that of `LinearMixer`.
    """

    def __init__(self, shape: AttentionShape, **options: Any) -> None:
        super().__init__(shape, parts.FixedDecay(shape), **options)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, **call: Any
    ) -> tuple[Tensor, State | None]:
        """Mix q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv) into (B, T, H, Dv); all as in `LinearMixer`."""
        dtype = accumulate_dtype(q)
        x = None if self.gate is None else parts.hidden_input(hidden_states, dtype, call.get("mask"))
        out, state = _recur(q, k, v, self.decay(dtype), self.shape.scaling, **call)
        return self.finish(parts.rms_norm(out), x, v.dtype), state


class GLAMixer(parts.Recurrence):
    """Gated linear attention (Yang et al. 2023, arXiv:2312.06635): a decay for each token and key dim.

        o_t = gate * out_scale * norm(s q_t S_t)    a_t = sigmoid(f(x_t) + bias)^(1/16)

    f is of low rank and 0 at the start, x the hidden input, norm and gate as in `RetNetMixer`. All key dims of a head
    start with one decay: then products q k fade with the distance and keep their proportions.
    """

    def __init__(
        self, shape: AttentionShape, *, rank: int = 16, generator: torch.Generator | None = None, **options: Any
    ) -> None:
        decay = parts.SigmoidDecay(shape, 16, rank, generator)
        super().__init__(shape, decay, rank=rank, generator=generator, **options)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, **call: Any
    ) -> tuple[Tensor, State | None]:
        """As in `RetNetMixer`."""
        x = parts.hidden_input(hidden_states, accumulate_dtype(q), call.get("mask"))
        out, state = _recur(q, k, v, self.decay(x), self.shape.scaling, **call)
        return self.finish(parts.rms_norm(out), x, v.dtype), state


class Mamba2Mixer(parts.Recurrence):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a step size for each token and head scales both decay and input.

        S_t = a_t S_{t-1} + d_t k_t v_t^T    d_t = softplus(w x_t + b)    a_t = exp(-d_t exp(A_log))
        o_t = out_scale * norm(gate * (s q_t S_t + skip v_t))

    C, B, x of the paper are q, k, v. d, w, b and A_log are per key/value head, skip per query head. The start is
    exp(A_log) = 1 and a step of the size that gives the half-life: the writes that are still held then weigh 1
    together, however long it is. w and skip start at 0, since softmax attention has neither. The gate comes before the
    norm as in the paper, is an `OutputGate` instead of silu, and the norm is over each head; the short convolution is
    left out. The state is that of `LinearMixer`.
    """

    def __init__(self, shape: AttentionShape, **options: Any) -> None:
        super().__init__(shape, parts.SoftplusDecay(shape), **options)
        self.skip = parts.zeros(shape.num_heads)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, **call: Any
    ) -> tuple[Tensor, State | None]:
        """As in `RetNetMixer`."""
        x = parts.hidden_input(hidden_states, accumulate_dtype(q), call.get("mask"))
        step, log_decay = self.decay(x)
        out, state = _recur(q, step[..., None] * k, v, log_decay, self.shape.scaling, **call)
        out = out + _skip(v, self.skip, call.get("mask"))
        out = parts.rms_norm(out if self.gate is None else out * self.gate(x))
        return (out * self.out_scale.to(out.dtype)).to(v.dtype), state


class MambaMixer(parts.Recurrence):
    """Mamba (S6, Gu and Dao 2023, arXiv:2312.00752) with a step size per head: a decay for each token and key dim.

        S_t = a_t S_{t-1} + d_t k_t v_t^T    d_t = softplus(w x_t + b)    a_t = exp(-d_t exp(A_log))
        o_t = gate * out_scale * (s q_t S_t + skip v_t)

    C, B, x of the paper are q, k, v, and the key dims its states n. A_log is (Hk, D), d per key/value head. S6 has a
    step for each channel of v, hence a decay of its own for each entry of S, with which no product of matrices computes
    a chunk; here all channels of a head share it. Starts are those of `Mamba2Mixer`, for every key dim alike. There is
    no norm, as in the paper: out_scale alone fits the output to the teacher's size, so it needs calibration.
    """

    def __init__(self, shape: AttentionShape, **options: Any) -> None:
        super().__init__(shape, parts.SoftplusDecay(shape, rate_by_dim=True), **options)
        self.skip = parts.zeros(shape.num_heads)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, **call: Any
    ) -> tuple[Tensor, State | None]:
        """As in `RetNetMixer`."""
        x = parts.hidden_input(hidden_states, accumulate_dtype(q), call.get("mask"))
        step, log_decay = self.decay(x)
        out, state = _recur(q, step[..., None] * k, v, log_decay, self.shape.scaling, **call)
        return self.finish(out + _skip(v, self.skip, call.get("mask")), x, v.dtype), state


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
) -> tuple[Tensor, State | None]:
    """scale q_t S_t in the dtype of the sums, and the state; log_decay as `linear_attention` takes it."""
    dtype = accumulate_dtype(q)
    qkv = (q.to(dtype), k.to(dtype), v.to(dtype))
    options: dict[str, Any] = {"scale": scale, "normalize": False, "log_decay": log_decay, "mask": mask}
    if steps_in_place(state, q):
        return linear_attention_step(*qkv, LinearState(**state), **options), state
    before = None if state is None else LinearState(**state)
    out, after = linear_attention(*qkv, initial_state=before, return_state=True, cu_seqlens=cu_seqlens, **options)
    return out, after._asdict() if return_state else None


def _skip(v: Tensor, skip: Tensor, mask: Tensor | None) -> Tensor:
    """skip_h v_t, (B, T, H, Dv) for v (B, T, Hk, Dv) and skip (H,); 0 at masked tokens."""
    v = parts.without_padding(v, mask)
    by_group = skip.to(accumulate_dtype(v)).view(v.shape[2], -1, 1)
    return (v[:, :, :, None] * by_group).flatten(2, 3)
