"""Packed sequences (`cu_seqlens`): gathered into left-padded batches of similar length, then put back.

Rows of one batch differ in length by less than a factor of two, so that padding at most doubles the work and
the number of batches grows with the logarithm of the lengths. Padding stands in front, so that every row's
last token is at the batch's end and the states come out as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Op = Callable[..., tuple[Tensor, Any]]


class Group(NamedTuple):
    """Sequences `rows` (n,) of similar length: their tokens' places `index` (n, longest), where `real`."""

    rows: Tensor
    index: Tensor
    real: Tensor


def groups(cu_seqlens: Tensor, device: torch.device, least: int = 0) -> list[Group]:
    """All sequences, at least one, each group `least` tokens long or more; a GPU's cu_seqlens is waited for."""
    ends = cu_seqlens.tolist()
    members: dict[int, list[int]] = {}
    for i, (start, stop) in enumerate(pairwise(ends)):
        members.setdefault((stop - start).bit_length(), []).append(i)
    found = []
    for rows in members.values():
        stops = torch.tensor([ends[i + 1] for i in rows], device=device)[:, None]
        lengths = torch.tensor([ends[i + 1] - ends[i] for i in rows], device=device)[:, None]
        longest = max(least, *(ends[i + 1] - ends[i] for i in rows))
        column = torch.arange(longest, device=device)
        index = (stops - longest + column).clamp_min(0)
        found.append(Group(torch.tensor(rows, device=device), index, column >= longest - lengths))
    return found


def run_packed(
    op: Op,
    tensors: dict[str, Tensor | None],
    cu_seqlens: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Any]:
    """op(**tensors, mask=, state=None) on every sequence: tensors and output (1, T, ...), N state rows."""
    device = next(x.device for x in tensors.values() if x is not None)
    if cu_seqlens.shape[0] == 1:
        return op(**tensors, mask=mask, state=None)[0], _no_rows(op, tensors)
    outs, places, states, rows = [], [], [], []
    for group in groups(cu_seqlens, device):
        batch = {name: None if x is None else x[0][group.index] for name, x in tensors.items()}
        out, new_state = op(
            **batch,
            mask=group.real if mask is None else group.real & mask[0][group.index],
            state=None,
        )
        outs.append(out[group.real])
        places.append(group.index[group.real])
        states.append(new_state)
        rows.append(group.rows)
    out = torch.cat(outs).index_select(0, torch.cat(places).argsort())
    order = torch.cat(rows).argsort()
    merged = (torch.cat(parts).index_select(0, order) for parts in zip(*states, strict=True))
    return out[None], type(states[0])(*merged)


def on_sequences(
    op: Callable[..., tuple[Sequence[Tensor | None], Sequence[Tensor]]],
    tokens: Sequence[Tensor | None],
    states: Sequence[Tensor],
    cu_seqlens: Tensor,
    fill: dict[int, float],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """op(*tokens, *states) -> (token tensors, state tensors) on every sequence, without gradients.

    Tensors of tokens are (1, T, ...) here and (n, longest, ...) for `op`, with 0 at padding, or fill[place in tokens];
    those of states are (N, ...) here and (n, ...) for `op`.
    """
    length = next(x.shape[1] for x in tokens if x is not None)
    results: list[Tensor | None] = []
    ends: list[Tensor] = []
    # One token of padding stands for an empty sequence, and leaves its states as they are.
    for group in groups(cu_seqlens, states[0].device, least=1):
        batch = [None if x is None else _gather(x, group, fill.get(i, 0.0)) for i, x in enumerate(tokens)]
        outs, after = op(*batch, *(x.index_select(0, group.rows) for x in states))
        if not ends:
            results = [None if x is None else x.new_empty(1, length, *x.shape[2:]) for x in outs]
            ends = [x.new_empty(cu_seqlens.shape[0] - 1, *x.shape[1:]) for x in after]
        places = group.index[group.real]
        for x, y in zip(results, outs, strict=True):
            if x is not None and y is not None:
                x[0, places] = y[group.real]
        for x, y in zip(ends, after, strict=True):
            x[group.rows] = y
    return results, ends


def _gather(x: Tensor, group: Group, fill: float) -> Tensor:
    y = x[0][group.index]
    return y.masked_fill_(~group.real.view(*group.real.shape, *(1,) * (y.dim() - 2)), fill)


def _no_rows(op: Op, tensors: dict[str, Tensor | None]) -> Any:
    """The state of zero sequences."""
    empty = {name: None if x is None else x[:, :0] for name, x in tensors.items()}
    state = op(**empty, mask=None, state=None)[1]
    return type(state)(*(x[:0] for x in state))
