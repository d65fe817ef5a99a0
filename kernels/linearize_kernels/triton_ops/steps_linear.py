"""One token of linear attention, in place on the state: one program for a state (a key/value head of a row)."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from . import configs
from .configs import Row
from .launch import LEAST_DECAY, Case, arch_of, jit, load32, next_power_of_2, on, register, rows, store, strides
from .linear_cases import LABELS, types

# A program holds a tile of S and, for every query head, a row of outputs.
configs.add("linear_step", [Row({"BF": 32, "BV": 64}, num_warps=4)])


@jit
def linear_step_kernel(
    q, k, v, g, S, z, m, out, heads, stride_q_b, stride_q_h, stride_k_b, stride_k_h, stride_v_b, stride_v_h,
    stride_g_b, stride_g_h, scale, eps,
    MODE: tl.constexpr, NORMALIZE: tl.constexpr, G: tl.constexpr, BG: tl.constexpr,
    F: tl.constexpr, V: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """q (B, H, F), k (B, Hk, F), v (B, Hk, V); g: log_decay or log_k (B, Hk), or log_decay (B, Hk, F) for VECTOR.

    out (B, H, V), G query heads for each key/value head. S, z and m are updated.
    """
    owner = tl.program_id(0).to(tl.int64)
    row, h = owner // heads, owner % heads
    j = tl.arange(0, BG).to(tl.int64)
    q += row * stride_q_b + h * G * stride_q_h
    k += row * stride_k_b + h * stride_k_h
    v += row * stride_v_b + h * stride_v_h
    decay, factor, level = 1.0, 1.0, 0.0
    if MODE > 0:
        g += row * stride_g_b + h * stride_g_h
    if MODE == 1:
        decay = tl.exp(tl.maximum(tl.load(g).to(tl.float32), LEAST_DECAY))
    if MODE == 2:
        old, new = tl.load(m + owner), tl.load(g).to(tl.float32)
        level = tl.maximum(old, new)
        decay, factor = tl.exp(old - level), tl.exp(new - level)
        tl.debug_barrier()  # every thread has read m
        tl.store(m + owner, level)
    den = tl.zeros((BG,), tl.float32)
    for i_f in range((F + BF - 1) // BF):
        f = i_f * BF + tl.arange(0, BF)
        in_f = f < F
        kept = in_f.to(tl.float32) * decay
        if MODE == 3:
            kept = tl.exp(tl.maximum(load32(g + f, in_f), LEAST_DECAY))
        sums = load32(z + owner * F + f, in_f) * kept + load32(k + f, in_f) * factor
        tl.debug_barrier()  # several warps have read these of z, one stores them
        tl.store(z + owner * F + f, sums, mask=in_f)
        den += tl.sum(
            load32(q + j[:, None] * stride_q_h + f[None, :], (j < G)[:, None] & in_f[None, :]) * sums[None, :], 1
        )
    den = tl.maximum(den * scale, eps)
    for i_v in range((V + BV - 1) // BV):
        d = i_v * BV + tl.arange(0, BV)
        in_v = d < V
        value = load32(v + d, in_v)
        num = tl.zeros((BG, BV), tl.float32)
        for i_f in range((F + BF - 1) // BF):
            f = i_f * BF + tl.arange(0, BF)
            in_f = f < F
            kept = in_f.to(tl.float32) * decay
            if MODE == 3:
                kept = tl.exp(tl.maximum(load32(g + f, in_f), LEAST_DECAY))
            mask = in_f[:, None] & in_v[None, :]
            tile = S + owner * F * V + f[:, None] * V + d[None, :]
            held = load32(tile, mask) * kept[:, None] + (load32(k + f, in_f) * factor)[:, None] * value[None, :]
            tl.store(tile, held, mask=mask)  # no barrier: a tile has no fewer numbers than threads, each read by one
            for n in range(G):
                query = load32(q + n * tl.cast(stride_q_h, tl.int64) + f, in_f)
                num += tl.where((j == n)[:, None], tl.sum(query[:, None] * held, 0, keep_dims=True), 0.0)
        num = num * scale
        if NORMALIZE:
            num = num / den[:, None]
        elif MODE == 2:
            num = num * tl.exp(level)
        head = (row * heads + h) * G + j
        store(out + head[:, None] * V + d[None, :], num, (j < G)[:, None] & in_v[None, :])


def step(
    q: Tensor, k: Tensor, v: Tensor, log_k: Tensor | None, log_decay: Tensor | None, S: Tensor, z: Tensor, m: Tensor,
    scale: float, normalize: bool, eps: float,
) -> Tensor:  # fmt: skip
    """out (B, H, V); S (B, Hk, F, V), z (B, Hk, F) and m (B, Hk), contiguous, are updated."""
    mode, g = 0, log_k
    if log_k is not None:
        mode = 2
    elif log_decay is not None:
        mode, g = (1 if log_decay.dim() == 2 else 3), log_decay
    with on(q):
        q, k, v, g = rows(q), rows(k), rows(v), g if mode < 3 else rows(g)
        (batch, queries, features), (heads, v_dim) = q.shape, v.shape[1:]
        out = v.new_empty(batch, queries, v_dim)
        row = configs.find("linear_step", arch_of(q), q.dtype, features, v_dim)
        linear_step_kernel[(batch * heads,)](
            q, k, v, g, S, z, m, out, heads, *strides(q, 2), *strides(k, 2), *strides(v, 2), *strides(g, 2),
            scale, eps, MODE=mode, NORMALIZE=normalize, G=queries // heads,
            BG=next_power_of_2(queries // heads), F=features, V=v_dim, **row.options,
        )  # fmt: skip
    return out


def _cases(arch: str, dtype: str, dim: int) -> list[Case]:
    row = configs.find("linear_step", arch, dtype, dim)
    values = {"NORMALIZE": True, "G": 4, "BG": 4, "F": dim, "V": dim, **row.blocks}
    modes = ((n, {"MODE": n} if n else {"MODE": 0, "g": None}) for n in range(4))
    return [Case(LABELS[n], types(dtype), values | more, row) for n, more in modes]


register("linear_step", linear_step_kernel, _cases)
