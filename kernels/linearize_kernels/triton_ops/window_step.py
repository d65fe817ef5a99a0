"""One token of window attention. Two launches: the output and S, then what all programs of the first had to read."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from . import configs
from .configs import Row, dtype_name
from .launch import LOWEST_SCORE, arch_of, block, cdiv, dot, jit, load32, on, precision, store, tl_dtype
from .window_common import SINK_TILE, absorb, scores, tile

configs.add("window_step", [Row({"BK": 32, "BF": 32, "BX": 32}, num_stages=1)])
configs.add("window_step_state", [Row({"BF": 256}, num_stages=1)])


@jit
def _leaving(b, h, w, n_sinks, HK, log_k, m, ring_valid, sink_age, begin, LOGS: tl.constexpr, BS: tl.constexpr):
    """How the oldest token is folded: the factor of the sums, its own, and the largest log scale then."""
    slot = tl.arange(0, BS)
    age = tl.load(sink_age + b * n_sinks + slot, mask=slot < n_sinks, other=0)
    sinks = tl.sum(tl.where(age == w, 1, 0), 0)  # of that age: 0 or 1
    counts = (tl.load(ring_valid + b * w + begin) != 0) & (sinks == 0)
    keep = 1.0
    weight = tl.where(counts, 1.0, 0.0)
    largest = tl.load(m + b * HK + h)
    if LOGS:
        log = tl.load(log_k + b * HK + h)
        new = tl.where(counts, tl.maximum(largest, log), largest)
        keep = tl.exp(largest - new)
        weight = tl.exp(tl.where(counts, log - new, float("-inf")))
        largest = new
    return keep, weight, largest


@jit
def window_step_kernel(
    q, k, v, valid, phi_q, phi_k, log_q, log_k, gamma, S, z, m, ring_k, ring_v, ring_valid, sink_k, sink_v, sink_age,
    begin, out,
    H, HK, w, n_sinks, scale, softcap, eps,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr,
    BK: tl.constexpr, BF: tl.constexpr, BX: tl.constexpr, BS: tl.constexpr, LOGS: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """One program per (row, key/value head, tile of Dv), its G query heads as rows. Writes `out` and S alone."""
    pid = tl.program_id(0).to(tl.int64)
    v_tiles: tl.constexpr = (DV + BX - 1) // BX
    d = (pid % v_tiles) * BX + tl.arange(0, BX)
    h = pid // v_tiles % HK
    b = pid // (v_tiles * HK)
    c = tl.arange(0, BD)
    g = tl.arange(0, BG)
    head = h * G + g
    group = g < G
    oldest = tl.load(begin + b)
    now = tl.load(valid + b) != 0
    new_key = load32(k + (b * HK + h) * D + c, c < D)
    new_value = load32(v + (b * HK + h) * DV + d, d < DV)
    query = tile(q + b * H * D, head, D, group, c, D)
    acc = tl.zeros((BG, BX), tl.float32)
    total = tl.zeros((BG,), tl.float32)
    most = tl.full((BG,), LOWEST_SCORE, tl.float32)
    if SINKS:
        # A free slot would take the new token, which is in the window still: the old slots are all that count.
        for s0 in range(0, n_sinks, SINK_TILE):
            sink = s0 + tl.arange(0, SINK_TILE)
            age = tl.load(sink_age + b * n_sinks + sink, mask=sink < n_sinks, other=0)
            key = tile(sink_k + (b * n_sinks * HK + h) * D, sink, HK * D, sink < n_sinks, c, D)
            value = tile(sink_v + (b * n_sinks * HK + h) * DV, sink, HK * DV, sink < n_sinks, d, DV)
            seen = group[:, None] & (age >= w)[None, :]  # one position older than before this token
            s = scores(query, key, seen, scale, softcap, SOFTCAP, PRECISION, NEAR)
            acc, total, most = absorb(acc, total, most, s, value, PRECISION, NEAR)
    for k0 in range(0, w, BK):
        slot = k0 + tl.arange(0, BK)
        taken = slot == oldest  # by the new token
        key = tile(ring_k + (b * w * HK + h) * D, slot, HK * D, slot < w, c, D)
        value = tile(ring_v + (b * w * HK + h) * DV, slot, HK * DV, slot < w, d, DV)
        key = tl.where(taken[:, None], new_key[None, :].to(key.dtype), key)
        value = tl.where(taken[:, None], new_value[None, :].to(value.dtype), value)
        real = tl.load(ring_valid + b * w + slot, mask=slot < w, other=0) != 0
        real = (taken & now) | (real & (slot != oldest))
        s = scores(query, key, group[:, None] & real[None, :], scale, softcap, SOFTCAP, PRECISION, NEAR)
        acc, total, most = absorb(acc, total, most, s, value, PRECISION, NEAR)

    keep, weight, largest = _leaving(b, h, w, n_sinks, HK, log_k, m, ring_valid, sink_age, oldest, LOGS, BS)
    near = load32(gamma + head, group)
    far = tl.full((BG,), 1.0, tl.float32)
    if LOGS:
        log_far = load32(log_q + b * H + head, group) + largest
        highest = tl.maximum(most, log_far)
        near *= tl.exp(most - highest)
        far = tl.exp(log_far - highest)
    acc *= near[:, None]
    total *= near
    old_value = load32(ring_v + ((b * w + oldest) * HK + h) * DV + d, d < DV)
    S += (b * HK + h) * F * DV
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        inside = (f < F)[:, None] & (d < DV)[None, :]
        phi = load32(phi_k + (b * HK + h) * F + f, f < F) * weight
        x = tile(phi_q + b * H * F, head, F, group, f, F).to(tl.float32) * far[:, None]
        total += tl.sum(x * (load32(z + (b * HK + h) * F + f, f < F) * keep + phi)[None, :], 1)
        sums = load32(S + f[:, None] * DV + d[None, :], inside) * keep + phi[:, None] * old_value[None, :]
        tl.store(S + f[:, None] * DV + d[None, :], sums, mask=inside)
        acc = dot(x, sums, acc, PRECISION, tl.float32)
    acc = acc / tl.maximum(total, eps)[:, None]
    store(out + (b * H + head)[:, None] * DV + d[None, :], acc, group[:, None] & (d < DV)[None, :])


@jit
def window_step_state_kernel(
    k, v, valid, phi_k, log_k, z, m, ring_k, ring_v, ring_valid, sink_k, sink_v, sink_age, begin,
    HK, w, n_sinks,
    D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BD: tl.constexpr, BX: tl.constexpr, BF: tl.constexpr,
    BS: tl.constexpr, LOGS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program per row of the batch: z, m, the new token's slots, ages and the ring's start."""
    b = tl.program_id(0).to(tl.int64)
    oldest = tl.load(begin + b)
    now = tl.load(valid + b)
    c = tl.arange(0, BD)
    d = tl.arange(0, BX)
    slot = tl.arange(0, BS)
    age = tl.load(sink_age + b * n_sinks + slot, mask=slot < n_sinks, other=1)
    held = tl.sum(tl.where((age > 0) & (slot < n_sinks), 1, 0), 0)
    takes = (held < n_sinks) & (now != 0)
    for h in range(HK):
        keep, weight, largest = _leaving(b, h, w, n_sinks, HK, log_k, m, ring_valid, sink_age, oldest, LOGS, BS)
        row = b * HK + h
        for f0 in range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            x = load32(z + row * F + f, f < F) * keep + load32(phi_k + row * F + f, f < F) * weight
            tl.store(z + row * F + f, x, mask=f < F)
        key = tl.load(k + row * D + c, mask=c < D, other=0.0)
        value = tl.load(v + row * DV + d, mask=d < DV, other=0.0)
        at = (b * w + oldest) * HK + h
        tl.store(ring_k + at * D + c, key, mask=c < D)
        tl.store(ring_v + at * DV + d, value, mask=d < DV)
        if SINKS:
            at = (b * n_sinks + held) * HK + h
            tl.store(sink_k + at * D + c, key, mask=c < tl.where(takes, D, 0))
            tl.store(sink_v + at * DV + d, value, mask=d < tl.where(takes, DV, 0))
        if LOGS:
            tl.debug_barrier()  # every thread has read m
            tl.store(m + row, largest)
    tl.debug_barrier()  # every thread has read the slots and ages
    tl.store(ring_valid + b * w + oldest, now)
    tl.store(begin + b, (oldest + 1) % w)
    if SINKS:
        age = tl.where(age > 0, age + 1, tl.where((slot == held) & takes, 1, 0))
        tl.store(sink_age + b * n_sinks + slot, age, mask=slot < n_sinks)


def step(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, phi_q: Tensor, phi_k: Tensor, log_q: Tensor | None,
    log_k: Tensor | None, gamma: Tensor, S: Tensor, z: Tensor, m: Tensor, ring_k: Tensor, ring_v: Tensor,
    ring_valid: Tensor, sink_k: Tensor, sink_v: Tensor, sink_age: Tensor, start: Tensor, scale: float, softcap: float,
    eps: float,
) -> Tensor:  # fmt: skip
    """The output (B, H, Dv) of one token; the state, S to start, is updated in place (all of it contiguous)."""
    B, H, D = q.shape
    Hk, Dv, F, w, sinks = k.shape[1], v.shape[2], phi_q.shape[2], ring_k.shape[1], sink_k.shape[1]
    logs = log_q is not None and log_k is not None
    out = v.new_empty(B, H, Dv)
    inputs = (q, k.to(ring_k.dtype), v.to(ring_v.dtype), phi_q, phi_k)
    q, k, v, phi_q, phi_k = (x.contiguous() for x in inputs)
    far_q = m if log_q is None else log_q.float().contiguous()
    far_k = m if log_k is None else log_k.float().contiguous()
    arch = arch_of(q)
    near = dtype_name(q.dtype if q.dtype == ring_k.dtype == ring_v.dtype else torch.float32)
    row = configs.find("window_step", arch, near, D, Dv)
    flags, ring_flags = valid.contiguous().view(torch.uint8), ring_valid.view(torch.uint8)
    shape = {"D": D, "DV": Dv, "F": F, "BD": block(D, 256), "BS": block(sinks, 1 << 20), "LOGS": logs}
    shape["SINKS"] = sinks > 0
    with on(q):
        window_step_kernel[(B * Hk * cdiv(Dv, row.blocks["BX"]),)](
            q, k, v, flags, phi_q, phi_k, far_q, far_k, gamma, S, z, m, ring_k, ring_v, ring_flags, sink_k, sink_v,
            sink_age, start, out, H, Hk, w, sinks, scale, softcap, eps, G=H // Hk, BG=block(H // Hk),
            SOFTCAP=softcap > 0, PRECISION=precision(arch), NEAR=tl_dtype(near), **shape, **row.options,
        )  # fmt: skip
        row = configs.find("window_step_state", arch, near, D, Dv)
        window_step_state_kernel[(B,)](
            k, v, flags, phi_k, far_k, z, m, ring_k, ring_v, ring_flags, sink_k, sink_v, sink_age, start, Hk, w,
            sinks, BX=block(Dv, 256), **shape, **row.options,
        )  # fmt: skip
    return out
