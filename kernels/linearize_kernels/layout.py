"""The shapes of what backends are given, checked on real tensors right before they read memory.

The public ops check their arguments in words of their own, but not in a compiled graph. Letters: B batch, T length,
H query heads, K key/value heads, F features, D key dim, V value dim, N states, L keys (a ring's, then the call's),
w window, s sinks; `.` is any size. A den that isn't there is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .checks import require

_SUMS = {"S": "NKFV", "z": "NKF", "m": "NK", "dS": "NKFV", "dz": "NKF"}
_QKV = {"q": "BTHF", "k": "BTKF", "v": "BTKV", "d_out": "BTHV", "out": "BTHV", "log_decay": "BTK"}
_TOKEN = {"q": "BHF", "k": "BKF", "v": "BKV", "log_decay": "BK"}
_SINKS = {"sink_k": "BsKD", "sink_v": "BsKV"}
_STATE = {"S": "BKFV", "z": "BKF", "m": "BK"}

LAYOUTS: dict[tuple[str, bool], dict[str, str]] = {  # (op, whether it is a step) -> name -> dims
    ("linear_attention", False): _QKV | _SUMS | {"log_k": "BTK", "den": "BTH"},
    ("linear_attention", True): _TOKEN | _STATE | {"log_k": "BK"},
    ("delta_rule", False): _QKV | _SUMS | {"beta": "BTK"},
    ("delta_rule", True): _TOKEN | _STATE | {"beta": "BK"},
    ("hedgehog_features", False): {"x": "BTHF", "weight": "HFV", "d_phi": "BTH.", "phi": "BTH."},
    ("favor_features", False): {"x": "BTHF", "omega": ".F", "d_phi": "BTHV", "phi": "BTHV", "d_log": "BTH"},
    ("window_attention", False): _SINKS | _STATE | {
        "q": "BTHD", "keys": "BLKD", "values": "BLKV", "valid": "BL", "phi_q": "BTHF", "phi_k": "B.KF", "log_q": "BTH",
        "log_k": "B.K", "sink_position": "Bs", "gamma": "H", "d_out": "BTHV", "dS": "BKFV", "dz": "BKF", "out": "BTHV",
        "den": "BTH", "top": "BTH",
    },
    ("window_attention", True): _SINKS | _STATE | {
        "q": "BHD", "k": "BKD", "v": "BKV", "valid": "B", "phi_q": "BHF", "phi_k": "BKF", "log_q": "BH", "log_k": "BK",
        "gamma": "H", "ring_k": "BwKD", "ring_v": "BwKV", "ring_valid": "Bw", "sink_age": "Bs", "start": "B",
    },
}  # fmt: skip


def check(op: str, step: bool, named: Mapping[str, Any]) -> None:
    """Raise ValueError where the tensors of a call don't fit together."""
    layout = LAYOUTS[op, step]
    sizes: dict[str, int] = {}
    for name, x in named.items():
        if not isinstance(x, Tensor) or name not in layout or (name == "den" and not x.numel()):
            continue
        dims = layout[name]
        if name == "log_decay" and x.dim() == len(dims) + 1:
            dims += "F"
        fits = x.dim() == len(dims) and all(
            letter == "." or sizes.setdefault(letter, size) == size for letter, size in zip(dims, x.shape, strict=True)
        )
        if not fits:  # not `require`: its message would be made for every tensor of every call
            legend = ", ".join(f"{letter}={sizes.get(letter, 'any')}" for letter in dims)
            raise ValueError(f"{op}: {name} must be ({legend}), not {tuple(x.shape)}")
    heads, kv_heads = sizes["H"], sizes.get("K", 1)
    require(kv_heads > 0 and heads % kv_heads == 0, f"{op}: {heads} heads are no multiple of {kv_heads}")
    cu = named.get("cu_seqlens")
    if cu is None:
        require(sizes.get("N", sizes["B"]) == sizes["B"], f"{op}: {sizes.get('N')} states for {sizes['B']} rows")
        return
    require(tuple(cu.shape) == (sizes["N"] + 1,), f"{op}: cu_seqlens {tuple(cu.shape)} for {sizes['N']} states")
    if cu.device.type == "cpu":
        ends = cu.tolist()
        rising = ends[0] == 0 and ends[-1] == sizes["T"] and ends == sorted(ends)
        require(rising, f"{op}: cu_seqlens must rise from 0 to T = {sizes['T']}, not {ends}")
