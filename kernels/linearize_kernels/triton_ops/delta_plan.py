"""The sizes of a call of the delta rule's kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import configs, launch
from .chunks import CHUNK, Chunks
from .launch import block


class Plan(NamedTuple):
    """The sizes of a call and where its chunks lie."""

    B: int
    T: int
    H: int
    Hk: int
    F: int
    Dv: int
    N: int
    chunks: int
    table: Tensor | None  # of packed sequences, as these three are in `Chunks`
    firsts: Tensor | None
    cu: Tensor | None
    decay: int  # 0 none, 1 scalar, 2 by feature
    arch: str
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor, cu: Tensor | None) -> Plan:
        B, T, H, F = q.shape
        decay = 0 if log_decay is None else log_decay.dim() - 2
        lie = Chunks.of(q, cu)
        # One dtype for all products, the wider of the inputs'.
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        sizes = (B, T, H, k.shape[2], F, v.shape[3], S.shape[0], lie.count)
        return Plan(*sizes, lie.table, lie.first, lie.cu, decay, launch.arch_of(q), dtype, q.device)

    def constants(self, kernel: str, **blocks: int) -> dict[str, Any]:
        """The constexprs and options of a launch: `blocks` are the dims that the table's sizes are for."""
        row = configs.find(kernel, self.arch, self.dtype, self.F, self.Dv)
        found: dict[str, Any] = {"num_warps": row.num_warps, "num_stages": row.num_stages}
        for name, dim in blocks.items():
            found[name] = block(dim, row.blocks.get(name, 1 << 30))
        return found

    @property
    def products(self) -> dict[str, Any]:
        return {"PRECISION": launch.precision(self.arch), "DTYPE": launch.tl_dtype(self.dtype)}

    @property
    def shape(self) -> dict[str, Any]:
        return {"F": self.F, "Dv": self.Dv, "C": CHUNK, "DECAY": self.decay, "VARLEN": self.packed}

    @property
    def packed(self) -> bool:
        return self.cu is not None

    def empty(self, *shape: int, wide: bool = True) -> Tensor:
        """A buffer, float32 unless its values are only ever read as terms of products of bf16."""
        narrow = not wide and self.dtype == torch.bfloat16 and not launch.INTERPRETED
        return torch.empty(shape, dtype=torch.bfloat16 if narrow else torch.float32, device=self.device)
