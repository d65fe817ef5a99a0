"""Argument checks: each raises ValueError with one sentence that names the argument and what it was given."""

from __future__ import annotations

from typing import Any

from torch import Tensor, float32, float64, int32, int64, is_grad_enabled
from torch import bool as torch_bool

from .state import DeltaState, LinearState, WindowState


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def shape(name: str, x: Tensor, expected: tuple[int | None, ...], legend: str) -> None:
    """x must have `expected` (None: any size); `legend` spells it with the dims' names."""
    if x.dim() == len(expected) and all(e is None or s == e for s, e in zip(x.shape, expected, strict=True)):
        return  # before the message is made: this runs for every tensor of every token
    sizes = ", ".join("any" if e is None else str(e) for e in expected)
    raise ValueError(f"{name} must be {legend} = ({sizes}), not {tuple(x.shape)}")


def floating(like: Tensor, name_like: str, **tensors: Tensor | None) -> None:
    """All tensors are floating point and on the device of `like`."""
    for name, x in tensors.items():
        if x is None or (x.is_floating_point() and x.device == like.device):
            continue
        require(x.is_floating_point(), f"{name} must be floating point, not {x.dtype} of shape {tuple(x.shape)}")
        require(x.device == like.device, f"{name} is on {x.device}, but {name_like} is on {like.device}")


def same_dtype(name_a: str, a: Tensor, name_b: str, b: Tensor) -> None:
    require(
        a.dtype == b.dtype,
        f"{name_a} {tuple(a.shape)} is {a.dtype}, but {name_b} {tuple(b.shape)} is {b.dtype}",
    )


def heads(q: Tensor, k: Tensor) -> None:
    require(
        k.shape[2] > 0 and q.shape[2] % k.shape[2] == 0,
        f"q {tuple(q.shape)} has {q.shape[2]} heads, no multiple of the {k.shape[2]} of k {tuple(k.shape)}",
    )


def qkv(q: Tensor, k: Tensor, v: Tensor, last: str) -> None:
    """Shapes, dtypes and devices of q (B, T, H, last), k (B, T, Hk, last), v (B, T, Hk, Dv)."""
    shape("q", q, (None, None, None, None), f"(B, T, H, {last})")
    batch, length, _, dim = q.shape
    shape("k", k, (batch, length, None, dim), f"(B, T, Hk, {last})")
    shape("v", v, (batch, length, k.shape[2], None), "(B, T, Hk, Dv)")
    heads(q, k)
    floating(q, "q", q=q, k=k, v=v)
    same_dtype("q", q, "k", k)


def mask(value: Tensor | None, q: Tensor) -> None:
    if value is None:
        return
    shape("mask", value, tuple(q.shape[:2]), "(B, T)")
    require(
        value.dtype == torch_bool,
        f"mask {tuple(value.shape)} must be bool (True = real token), not {value.dtype}",
    )
    require(value.device == q.device, f"mask is on {value.device}, but q is on {q.device}")


def cu_seqlens(value: Tensor | None, q: Tensor) -> int:
    """The number of sequences: B without cu_seqlens. Looks at its values, so a GPU tensor is waited for."""
    if value is None:
        return q.shape[0]
    given = f"cu_seqlens {tuple(value.shape)}"
    require(value.dim() == 1 and value.shape[0] >= 1, f"{given} must be (N + 1,)")
    require(
        value.dtype in (int32, int64),
        f"{given} must be int32 or int64, not {value.dtype}",
    )
    require(
        q.shape[0] == 1,
        f"{given} needs inputs packed into one row (B = 1), but q is {tuple(q.shape)}",
    )
    ends = value.tolist()
    require(ends[0] == 0, f"{given} must start at 0, not {ends[0]}")
    require(ends[-1] == q.shape[1], f"{given} must end at T = {q.shape[1]}, not {ends[-1]}")
    require(
        ends == sorted(ends),
        f"{given} must never decrease, but is {ends}",
    )
    return len(ends) - 1


def decay(log_decay: Tensor | None, q: Tensor, k: Tensor) -> None:
    """log_decay (Hk,), (B, T, Hk) or (B, T, Hk, F); that it is <= 0 is the caller's to see to."""
    if log_decay is None:
        return
    fitting = (tuple(k.shape[2:3]), tuple(k.shape[:3]), tuple(k.shape))
    require(
        tuple(log_decay.shape) in fitting,
        f"log_decay must be (Hk,), (B, T, Hk) or (B, T, Hk, F) = {', '.join(map(str, fitting))}, "
        f"not {tuple(log_decay.shape)}",
    )
    floating(q, "q", log_decay=log_decay)


def linear_state(state: LinearState | None, rows: int, k: Tensor, v: Tensor, features: int) -> None:
    """S, z and m of either state, for k (B, T, Hk, .) and v (B, T, Hk, Dv)."""
    if state is None:
        return
    sizes = (rows, k.shape[2], features, v.shape[3])
    shape("initial_state.S", state.S, sizes, "(N, Hk, F, Dv)")
    shape("initial_state.z", state.z, sizes[:3], "(N, Hk, F)")
    shape("initial_state.m", state.m, sizes[:2], "(N, Hk)")
    floating(
        k,
        "k",
        **{f"initial_state.{n}": x for n, x in zip("Szm", state[:3], strict=True)},
    )


def window_state(
    state: WindowState | None,
    k: Tensor,
    v: Tensor,
    features: int,
    window: int,
    sinks: int,
) -> None:
    if state is None:
        return
    linear_state(LinearState(*state[:3]), k.shape[0], k, v, features)
    for name, size, count in (("", "w", window), ("sink_", "n", sinks)):
        for last, like in (("k", k), ("v", v)):
            x = getattr(state, name + last)
            dims = (k.shape[0], count, k.shape[2], like.shape[3])
            shape(
                f"initial_state.{name}{last}",
                x,
                dims,
                f"(B, {size}, Hk, {'D' if last == 'k' else 'Dv'})",
            )
            floating(k, "k", **{f"initial_state.{name}{last}": x})
    shape("initial_state.valid", state.valid, (k.shape[0], window), "(B, w)")
    shape("initial_state.sink_age", state.sink_age, (k.shape[0], sinks), "(B, n)")
    shape("initial_state.start", state.start, (k.shape[0],), "(B,)")
    for name in ("valid", "sink_age", "start"):
        x = getattr(state, name)
        require(x.device == k.device, f"initial_state.{name} is on {x.device}, but k is on {k.device}")
    for name in ("sink_age", "start"):
        x = getattr(state, name)
        require(x.dtype == int64, f"initial_state.{name} must be int64, not {x.dtype}")
    require(
        state.valid.dtype == torch_bool,
        f"initial_state.valid must be bool, not {state.valid.dtype}",
    )


def one_token(q: Tensor, state: Any) -> None:
    """q is one token, and the state's sums can be updated in place."""
    require(q.dim() == 4 and q.shape[1] == 1, f"q must be one token, (B, 1, H, .), not {tuple(q.shape)}")
    for name, x in zip(type(state)._fields, state, strict=True):
        require(x.is_contiguous(), f"state.{name} {tuple(x.shape)} must be contiguous: it is updated in place")
        wanted = name not in ("S", "z", "m") or x.dtype in (float32, float64)
        require(wanted, f"state.{name} must be float32 or float64, not {x.dtype}: it is updated in place")


def no_gradient(*tensors: Tensor | None) -> None:
    require(
        not (is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)),
        "a step updates its state in place and has no gradient: run it under torch.no_grad(), or call the op itself "
        "with one token",
    )


def linear_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_k: Tensor | None,
    log_decay: Tensor | None,
    initial_state: LinearState | None,
    cu: Tensor | None,
    valid: Tensor | None,
) -> None:
    """All arguments of linear_attention."""
    qkv(q, k, v, "F")
    if log_k is not None:
        shape("log_k", log_k, tuple(k.shape[:3]), "(B, T, Hk)")
    floating(q, "q", log_k=log_k)
    decay(log_decay, q, k)
    require(
        log_k is None or log_decay is None,
        "log_k and log_decay can't be combined: sums are held relative to the largest log_k, or decay",
    )
    mask(valid, q)
    linear_state(initial_state, cu_seqlens(cu, q), k, v, k.shape[3])


def delta_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: DeltaState | None,
    cu: Tensor | None,
    valid: Tensor | None,
) -> None:
    """All arguments of delta_rule."""
    qkv(q, k, v, "F")
    shape("beta", beta, tuple(k.shape[:3]), "(B, T, Hk)")
    floating(q, "q", beta=beta)
    decay(log_decay, q, k)
    mask(valid, q)
    rows = cu_seqlens(cu, q)
    if initial_state is not None:
        sizes = (rows, k.shape[2], k.shape[3], v.shape[3])
        shape("initial_state.S", initial_state.S, sizes, "(N, Hk, F, Dv)")
        floating(k, "k", **{"initial_state.S": initial_state.S})


def window_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    window: int,
    sinks: int,
    gamma: Tensor | None,
    log_q: Tensor | None,
    log_k: Tensor | None,
    softcap: float | None,
    initial_state: WindowState | None,
    cu: Tensor | None,
    valid: Tensor | None,
) -> None:
    """All arguments of window_attention."""
    require(
        isinstance(window, int) and window >= 1,
        f"window must be an integer of at least 1, not {window!r}",
    )
    require(
        isinstance(sinks, int) and sinks >= 0,
        f"sinks must be an integer of at least 0, not {sinks!r}",
    )
    require(softcap is None or softcap > 0, f"softcap must be positive, not {softcap}")
    qkv(q, k, v, "D")
    batch, length, num_heads, _ = q.shape
    shape("phi_q", phi_q, (batch, length, num_heads, None), "(B, T, H, F)")
    shape("phi_k", phi_k, (batch, None, k.shape[2], phi_q.shape[3]), "(B, T', Hk, F)")
    floating(q, "q", phi_q=phi_q, phi_k=phi_k, gamma=gamma, log_q=log_q, log_k=log_k)
    same_dtype("phi_q", phi_q, "phi_k", phi_k)
    if gamma is not None:
        shape("gamma", gamma, (num_heads,), "(H,)")
    require(
        (log_q is None) == (log_k is None),
        f"log_{'q' if log_k is None else 'k'} is given alone: maps give log scales of queries and keys, or none",
    )
    if log_q is not None:
        shape("log_q", log_q, (batch, length, num_heads), "(B, T, H)")
    if log_k is not None:
        shape("log_k", log_k, tuple(phi_k.shape[:3]), "(B, T', Hk), as long as phi_k")
    mask(valid, q)
    cu_seqlens(cu, q)
    if cu is not None:
        require(
            initial_state is None,
            f"cu_seqlens {tuple(cu.shape)} with initial_state is ambiguous: the one row of phi_k "
            f"{tuple(phi_k.shape)} can't hold the features of every sequence's ring; continue the sequences "
            "as rows of a batch",
        )
        shape(
            "phi_k",
            phi_k,
            (1, length, k.shape[2], phi_q.shape[3]),
            "(1, T, Hk, F) with cu_seqlens",
        )
    needed = length if initial_state is not None else max(length - window, 0)
    require(
        phi_k.shape[1] >= (needed if cu is None else length),
        f"phi_k {tuple(phi_k.shape)} must hold at least {needed} keys in dim 1: those of the state's ring, "
        "if there is one, and of k, that leave the window during the call",
    )
    window_state(initial_state, k, v, phi_q.shape[3], window, sinks)
