"""Window attention in Triton: softmax over a sliding window and the sinks, linear attention over older keys.

B batch, T length, H query heads, Hk key/value heads, D key dim, Dv value dim, F feature dim, C queries per block.
Forward takes two passes: the sums before every block (a scan over the blocks), then all blocks at once, each with
the keys of its window, its sums, the keys that join them within the block, and one division. Backward does the same
in reverse; nothing is accumulated by atomics. `backward` computes the sums again rather than keep them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import configs
from .configs import Row, dtype_name
from .launch import arch_of, cdiv, on, precision, rows, strides, tl_dtype
from .window_common import fits, sizes
from .window_far_bwd import window_dphi_k_kernel, window_dphi_q_kernel, window_fold_dv_kernel
from .window_near_bwd import window_dkv_kernel, window_dq_kernel, window_rows_kernel
from .window_out import window_out_kernel
from .window_states import window_states_bwd_kernel, window_states_kernel
from .window_step import step

__all__ = ["backward", "forward", "refuses", "step"]


# Inputs of products: in float32, if their dtypes differ.
MULTIPLIED = ("q", "k", "v", "keys", "values", "phi_q", "phi_k", "ring_k", "ring_v")


def refuses(tensors: dict[str, Tensor]) -> str | None:
    """Head dims that don't fit into one tile, or into the shared memory of the card."""
    mixed = len({x.dtype for name, x in tensors.items() if name in MULTIPLIED}) > 1
    for name in ("q", "v", "values"):
        x = tensors.get(name)
        if x is None:
            continue
        given = f"the last dim of {name} is {x.shape[-1]}"
        if x.shape[-1] > 256:
            return f"{given}, and the kernels take up to 256"
        if not fits(arch_of(x), dtype_name(torch.float32 if mixed else x.dtype), x.shape[-1]):
            return f"{given}, and in float32 the kernels' shared memory on this card is enough for 128"
    return None


class _Plan(NamedTuple):
    """What all kernels of a call need: sizes, dtypes, and the tensors in a form they can read."""

    arch: str
    near: str  # dtypes of the products of the exact and of the far part
    far: str
    block: dict[str, int]  # C, BK, BD, BV
    blocks: int
    n: int  # keys that leave the window
    first: int  # the first query that finds one in the sums
    first_block: int  # the block it is in: those before it all read the initial sums
    slots: int  # blocks from there on
    log_q: Tensor
    log_k: Tensor
    peak: Tensor  # (B, n + 1, Hk): the largest log_k so far
    logs: bool
    options: dict[str, Any]  # constexprs of all kernels
    far_options: dict[str, Any]  # and of those that read the sums

    def row(self, kernel: str, *dims: int, far: bool = True) -> Row:
        return configs.find(kernel, self.arch, self.far if far else self.near, *dims)


def _plan(
    q: Tensor, keys: Tensor, values: Tensor, phi_q: Tensor, phi_k: Tensor, log_q: Tensor | None,
    log_k: Tensor | None, m: Tensor, window: int,
) -> _Plan:  # fmt: skip
    T, D, Dv = q.shape[1], q.shape[3], values.shape[3]
    arch = arch_of(q)
    near = dtype_name(q.dtype if q.dtype == keys.dtype == values.dtype else torch.float32)
    far = dtype_name(phi_q.dtype if phi_q.dtype == phi_k.dtype == values.dtype else torch.float32)
    block = sizes(arch, near, far, D, Dv)
    first = window - (keys.shape[1] - T)
    n = max(T - first, 0)
    blocks = cdiv(T, block["C"])
    first_block = min(first // block["C"], blocks - 1)
    logs = log_q is not None
    options = {"C": block["C"], "PRECISION": precision(arch)}
    far_options = {"F": phi_q.shape[3], "DV": Dv, "LOGS": logs, "FAR": tl_dtype(far), **options}
    nothing = q.new_empty(0, dtype=torch.float32)
    if log_q is None or log_k is None:
        log_q, log_k, peak = nothing, nothing, nothing
    else:
        log_q, log_k = log_q.float().contiguous(), log_k[:, :n].float().contiguous()
        peak = torch.cat([m[:, None], log_k], 1).cummax(1).values.contiguous()
    return _Plan(
        arch, near, far, block, blocks, n, first, first_block, blocks - first_block, log_q, log_k, peak, logs, options,
        far_options,
    )  # fmt: skip


class _Inputs(NamedTuple):
    """Forward's tensors as the kernels read them: last dims contiguous, and all of the small ones."""

    q: Tensor
    keys: Tensor
    values: Tensor
    phi_q: Tensor
    phi_k: Tensor
    valid: Tensor
    sink_k: Tensor
    sink_v: Tensor
    sink_position: Tensor
    gamma: Tensor
    S: Tensor
    z: Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, Hk, T, and how many keys stand before the call's first"""
        T = self.q.shape[1]
        return self.q.shape[2], self.keys.shape[2], T, self.keys.shape[1] - T


def _inputs(*tensors: Tensor) -> _Inputs:
    x = _Inputs(*(rows(x) for x in tensors[:5]), *(x.contiguous() for x in tensors[5:]))
    return x._replace(valid=x.valid.view(torch.uint8))


def _states(plan: _Plan, x: _Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums before each block from `first_block` on (B * Hk, slots, F, Dv) and (., F), and at the end."""
    B, Hk, F, Dv = x.S.shape
    states = x.S.new_empty(B * Hk, plan.slots, F, Dv, dtype=torch.bfloat16 if plan.far == "bf16" else torch.float32)
    sums = x.S.new_empty(B * Hk, plan.slots, F)
    S, z = torch.empty_like(x.S), torch.empty_like(x.z)
    row = plan.row("window_states", F, Dv)
    tiles = cdiv(F, row.blocks["BF"]) * cdiv(Dv, row.blocks["BX"])
    window_states_kernel[(B * Hk * tiles,)](
        x.phi_k, x.values, plan.log_k, plan.peak, x.S, x.z, states, sums, S, z, *strides(x.phi_k, 3),
        *strides(x.values, 3), Hk, x.q.shape[1], plan.n, plan.first, plan.first_block, plan.blocks, plan.slots,
        **plan.far_options, **row.options,
    )  # fmt: skip
    return states, sums, S, z


def forward(
    q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, phi_q: Tensor, phi_k: Tensor, log_q: Tensor | None,
    log_k: Tensor | None, sink_k: Tensor, sink_v: Tensor, sink_position: Tensor, gamma: Tensor, S: Tensor, z: Tensor,
    m: Tensor, window: int, scale: float, softcap: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, den, top, S, z, m). Query t reads key i where valid[i], if i is one of the last `window` indices up to
    L - T + t, and every sink whose position lies before those."""
    plan = _plan(q, keys, values, phi_q, phi_k, log_q, log_k, m, window)
    x = _inputs(q, keys, values, phi_q, phi_k, valid, sink_k, sink_v, sink_position, gamma, S, z)
    B, T, H, D = q.shape
    Dv, sinks = values.shape[3], sink_k.shape[1]
    out = values.new_empty(B, T, H, Dv)
    den, top = S.new_empty(B, T, H), S.new_empty(B, T, H)
    with on(q):
        states, sums, S_end, z_end = _states(plan, x)
        row = plan.row("window_out", D, Dv)
        window_out_kernel[(B * plan.blocks * H * cdiv(Dv, row.blocks["BX"]),)](
            x.q, x.keys, x.values, x.valid, x.phi_q, x.phi_k, plan.log_q, plan.log_k, plan.peak, x.sink_k, x.sink_v,
            x.sink_position, x.gamma, states, sums, out, den, top, *strides(x.q, 3), *strides(x.keys, 3),
            *strides(x.values, 3), *strides(x.phi_q, 3), *strides(x.phi_k, 3), *x.sizes, window, plan.n, plan.first,
            plan.first_block, plan.slots, sinks, scale, softcap, eps, D=D, BK=plan.block["BK"], BD=plan.block["BD"],
            SOFTCAP=softcap > 0, SINKS=sinks > 0, NEAR=tl_dtype(plan.near), **plan.far_options, **row.options,
        )  # fmt: skip
    return out, den, top, S_end, z_end, plan.peak[:, -1].contiguous() if plan.logs else m


def backward(
    d_out: Tensor, dS: Tensor, dz: Tensor, q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, phi_q: Tensor,
    phi_k: Tensor, log_q: Tensor | None, log_k: Tensor | None, sink_k: Tensor, sink_v: Tensor, sink_position: Tensor,
    gamma: Tensor, S: Tensor, z: Tensor, m: Tensor, out: Tensor, den: Tensor, top: Tensor, window: int, scale: float,
    softcap: float, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, keys, values, phi_q, phi_k, log_q, log_k, sink_k, sink_v, gamma, S and z."""
    plan = _plan(q, keys, values, phi_q, phi_k, log_q, log_k, m, window)
    x = _inputs(q, keys, values, phi_q, phi_k, valid, sink_k, sink_v, sink_position, gamma, S, z)
    d_out, out, den, top = (y.contiguous() for y in (d_out, out, den, top))
    inverse, slope, held = (torch.empty_like(den) for _ in range(3))
    with on(q):
        row = configs.find("window_rows", plan.arch, plan.near)
        window_rows_kernel[(cdiv(den.numel(), row.blocks["ROWS"]),)](
            d_out, out, den, inverse, slope, held, den.numel(), eps, DV=out.shape[3], BV=plan.block["BV"],
            **row.options,
        )  # fmt: skip
        per_row = _Rows(d_out, inverse, slope, top)
        d_phi_q, d_phi_k, far, d_log_k, fold_dv, dS0, dz0 = _far_gradients(plan, x, per_row, dS, dz)
        near = _near_gradients(plan, x, per_row, held - far, fold_dv, window, scale, softcap)
    dq, dk, dv, d_sink_k, d_sink_v, d_gamma = near
    d_log_q = None if log_q is None else far.to(log_q.dtype)
    d_log_k = None if log_k is None else _padded(d_log_k.to(log_k.dtype), log_k)
    return dq, dk, dv, d_phi_q, d_phi_k, d_log_q, d_log_k, d_sink_k, d_sink_v, d_gamma, dS0, dz0


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """x (B, n, Hk), with zeros after it."""
    return torch.cat([x, x.new_zeros(x.shape[0], like.shape[1] - x.shape[1], x.shape[2])], 1)


class _Rows(NamedTuple):
    """Of every query: d_out, 1 / denominator, the denominator's gradient, the scale both parts were held at."""

    d_out: Tensor
    inverse: Tensor
    slope: Tensor
    top: Tensor


def _far_gradients(
    plan: _Plan, x: _Inputs, per_row: _Rows, dS: Tensor, dz: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of phi_q and phi_k, both by log_q (B, T, H) and by the first n log_k, of the first n values through
    the sums, and of the first sums."""
    B, Hk, F, Dv = x.S.shape
    T, H = x.q.shape[1:3]
    d_out, inverse, _, top = per_row
    place = (H, Hk, T, plan.n, plan.first, plan.first_block)
    both = (*strides(x.phi_q, 3), *strides(x.phi_k, 3))
    logs = (plan.log_q, plan.log_k, plan.peak)
    states, sums, _, _ = _states(plan, x)
    row = plan.row("window_dphi_q", Dv)
    tiles = cdiv(F, row.blocks["BF"])
    d_phi_q = torch.empty_like(x.phi_q, memory_format=torch.contiguous_format)
    far = inverse.new_empty(B, T, H, tiles)
    window_dphi_q_kernel[(B * plan.blocks * H * tiles,)](
        x.phi_q, x.phi_k, x.values, *logs, states, sums, *per_row, d_phi_q, far, *both, *strides(x.values, 3), *place,
        plan.slots, BV=plan.block["BV"], **plan.far_options, **row.options,
    )  # fmt: skip

    row = plan.row("window_states_bwd", F, Dv)
    tiles = cdiv(F, row.blocks["BF"]) * cdiv(Dv, row.blocks["BX"])
    d_states, d_sums = states, sums  # written over: no longer needed
    dS0, dz0 = torch.empty_like(x.S), torch.empty_like(x.z)
    window_states_bwd_kernel[(B * Hk * tiles,)](
        x.phi_q, plan.log_q, *per_row, plan.peak, dS.contiguous(), dz.contiguous(), d_states, d_sums, dS0, dz0,
        *strides(x.phi_q, 3), *place, plan.blocks, plan.slots, **plan.far_options, **row.options,
    )  # fmt: skip

    row = plan.row("window_dphi_k", Dv)
    tiles = cdiv(F, row.blocks["BF"])
    d_phi_k = torch.empty_like(x.phi_k, memory_format=torch.contiguous_format)
    d_phi_k[:, plan.n :] = 0
    d_log_k = inverse.new_empty(B, plan.n, Hk, tiles)
    fold_dv = inverse.new_empty(B, plan.n, Hk, Dv)
    if plan.n:
        window_dphi_k_kernel[(B * plan.slots * Hk * tiles,)](
            x.phi_q, x.phi_k, x.values, *logs, d_states, d_sums, *per_row, d_phi_k, d_log_k, *both,
            *strides(x.values, 3), d_phi_k.stride(0), *place, plan.slots, BV=plan.block["BV"], **plan.far_options,
            **row.options,
        )  # fmt: skip
        row = plan.row("window_fold_dv", Dv)
        window_fold_dv_kernel[(B * plan.slots * Hk * cdiv(Dv, row.blocks["BX"]),)](
            x.phi_q, x.phi_k, *logs, d_states, d_out, inverse, top, fold_dv, *both, *place, plan.slots,
            **plan.far_options, **row.options,
        )  # fmt: skip
    return d_phi_q, d_phi_k, far.sum(-1), d_log_k.sum(-1), fold_dv, dS0, dz0


def _near_gradients(
    plan: _Plan, x: _Inputs, per_row: _Rows, gain: Tensor, fold_dv: Tensor, window: int, scale: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, keys, values, sink_k, sink_v and gamma. gain (B, T, H): what the exact part as a whole is worth,
    gamma sum(p dp)."""
    B, _, H, D = x.q.shape
    L, Hk, Dv, sinks = x.keys.shape[1], x.keys.shape[2], x.values.shape[3], x.sink_k.shape[1]
    options = {
        "D": D, "DV": Dv, "RELATIVE": not plan.logs, "SOFTCAP": softcap > 0, "NEAR": tl_dtype(plan.near), **plan.block,
        "PRECISION": plan.options["PRECISION"],
    }  # fmt: skip
    place = (*strides(x.q, 3), *strides(x.keys, 3), *strides(x.values, 3), *x.sizes, window)
    row = plan.row("window_dq", D, Dv, far=False)
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    tie = torch.empty_like(gain)
    d_sink_k, d_sink_v = (gain.new_empty(B, plan.blocks, H, sinks, dim) for dim in (D, Dv))
    d_gamma = gain.new_empty(B, plan.blocks, H)
    window_dq_kernel[(B * plan.blocks * H,)](
        x.q, x.keys, x.values, x.valid, x.sink_k, x.sink_v, x.sink_position, x.gamma, *per_row, gain, dq, tie,
        d_sink_k, d_sink_v, d_gamma, *place, sinks, scale, softcap, SINKS=sinks > 0, **options, **row.options,
    )  # fmt: skip
    row = plan.row("window_dkv", D, Dv, far=False)
    dk = torch.empty_like(x.keys, memory_format=torch.contiguous_format)
    dv = torch.empty_like(x.values, memory_format=torch.contiguous_format)
    window_dkv_kernel[(B * cdiv(L, plan.block["BK"]) * Hk,)](
        x.q, x.keys, x.values, x.valid, x.gamma, *per_row, tie, fold_dv, dk, dv, *place, plan.n, scale, softcap,
        **options, **row.options,
    )  # fmt: skip
    d_sinks = [
        y.unflatten(2, (Hk, H // Hk)).sum((1, 3)).transpose(1, 2).to(like.dtype)
        for y, like in ((d_sink_k, x.sink_k), (d_sink_v, x.sink_v))
    ]
    return dq, dk, dv, d_sinks[0], d_sinks[1], d_gamma.sum((0, 1)).to(x.gamma.dtype)
