"""Where tokens stand, for feature maps and mixers to which it matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linearize.errors import TooLong
from linearize.mixers.feature_maps import FeatureMap


def sequence_starts(cu_seqlens: Tensor, length: int, device: torch.device) -> Tensor:
    """(T,) int64: where the sequence of each of `length` packed tokens begins, of bounds (N + 1,)."""
    bounds = cu_seqlens.long()
    number = torch.bucketize(torch.arange(length, device=bounds.device), bounds[1:], right=True)
    return bounds[:-1][number].to(device)


def slots(
    feature_map: FeatureMap, x: Tensor, state: dict[str, Tensor] | None, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What a positional map needs: the places of the tokens of x (B, T, ...), and what the state keeps of them.

    Every token of a call counts, padding too: only distances between tokens matter, and padding before a sequence
    changes none of them.

    Returns:
        Positions (B, T) or (1, T) int64, and {"seen": (B,) int64}, the tokens that have passed after this call. None
        and {} for maps that aren't positional.

    Raises:
        TooLong: sequences get longer than the map can take. In calls that continue a state this is found out on the
            CPU alone: a GPU would have to be waited for at every token.
    """
    if not feature_map.positional:
        return None, {}
    length = x.shape[1]
    if not x.is_meta:  # where nothing but sizes is asked for
        _check_length(feature_map, length, state, cu_seqlens)
    places = torch.arange(length, device=x.device)
    if cu_seqlens is not None:
        places = places - sequence_starts(cu_seqlens, length, x.device)
        return places[None], {"seen": cu_seqlens.diff().long().to(x.device)}
    if state is None:
        return places[None], {"seen": places.new_full((x.shape[0],), length)}
    return state["seen"][:, None] + places, {"seen": state["seen"] + length}


def _check_length(
    feature_map: FeatureMap, length: int, state: dict[str, Tensor] | None, cu_seqlens: Tensor | None
) -> None:
    limit = feature_map.max_length
    if limit is None:
        return
    longest: Any = length
    asks = not torch.compiler.is_compiling()
    if cu_seqlens is not None:
        longest = int(cu_seqlens.diff().max()) if asks and cu_seqlens.device.type == "cpu" else 0
    elif state is not None and asks and state["seen"].device.type == "cpu":
        longest = length + max(state["seen"].tolist(), default=0)
    if longest > limit:
        raise TooLong(
            f"a sequence of {longest} tokens is too long for this feature map, which takes {limit}",
            "Give it shorter ones, or convert again with a larger feature_map_options.length",
        )
