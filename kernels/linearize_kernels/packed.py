"""Packed sequences (`cu_seqlens`): gathered into left-padded batches of similar length, then put back.

Rows of one batch differ in length by less than a factor of two, so that padding at most doubles the work and
the number of batches grows with the logarithm of the lengths. Padding stands in front, so that every row's
last token is at the batch's end and the states come out as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .state import LinearState

Op = Callable[..., tuple[Tensor, Any]]


def run_packed(
    op: Op,
    tensors: dict[str, Tensor | None],
    cu_seqlens: Tensor,
    mask: Tensor | None,
    state: LinearState | None,
) -> tuple[Tensor, Any]:
    """op(**tensors, mask=, state=) on every sequence: tensors and output (1, T, ...), N state rows."""
    ends = cu_seqlens.tolist()
    if len(ends) == 1:
        return op(**tensors, mask=mask, state=state)[0], _no_rows(op, tensors)
    groups: dict[int, list[int]] = {}
    for i, (start, stop) in enumerate(pairwise(ends)):
        groups.setdefault((stop - start).bit_length(), []).append(i)
    device = next(x.device for x in tensors.values() if x is not None)
    outs, places, states, rows = [], [], [], []
    for members in groups.values():
        stops = torch.tensor([ends[i + 1] for i in members], device=device)[:, None]
        lengths = torch.tensor([ends[i + 1] - ends[i] for i in members], device=device)[:, None]
        longest = max(ends[i + 1] - ends[i] for i in members)
        column = torch.arange(longest, device=device)
        real = column >= longest - lengths
        index = (stops - longest + column).clamp_min(0)
        batch = {name: None if x is None else x[0][index] for name, x in tensors.items()}
        row_ids = torch.tensor(members, device=device)
        row_state = None if state is None else type(state)(*(x.index_select(0, row_ids) for x in state))
        out, new_state = op(
            **batch,
            mask=real if mask is None else real & mask[0][index],
            state=row_state,
        )
        outs.append(out[real])
        places.append(index[real])
        states.append(new_state)
        rows.append(row_ids)
    out = torch.cat(outs).index_select(0, torch.cat(places).argsort())
    order = torch.cat(rows).argsort()
    merged = (torch.cat(parts).index_select(0, order) for parts in zip(*states, strict=True))
    return out[None], type(states[0])(*merged)


def _no_rows(op: Op, tensors: dict[str, Tensor | None]) -> Any:
    """The state of zero sequences."""
    empty = {name: None if x is None else x[:, :0] for name, x in tensors.items()}
    state = op(**empty, mask=None, state=None)[1]
    return type(state)(*(x[:0] for x in state))
