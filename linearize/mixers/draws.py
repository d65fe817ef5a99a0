"""Random draws of mixers: made on the CPU, so that a seed means the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def on_meta() -> bool:
    """Whether modules are being built on the meta device, where draws have no values."""
    return torch.empty(0).device.type == "meta"


def normal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """(rows, columns) float32 draws from N(0, 1)."""
    if on_meta():
        return torch.empty(rows, columns, dtype=torch.float32)
    return _here(_normal(rows, columns, generator))


def orthonormal_columns(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """(rows, columns) columns of length 1, orthogonal to each other."""
    if on_meta():
        return normal(rows, columns, generator)
    return _here(torch.linalg.qr(_normal(rows, columns, generator))[0])


def gaussian_rows(rows: int, dim: int, orthogonal: bool, generator: torch.Generator | None) -> Tensor:
    """(rows, dim) rows distributed as N(0, I) each; orthogonal within each block of `dim` rows if asked."""
    if not orthogonal or on_meta():
        return normal(rows, dim, generator)
    draws, blocks = _normal(rows, dim, generator), []
    for start in range(0, rows, dim):
        q, r = torch.linalg.qr(_normal(dim, dim, generator))
        # The signs of r's diagonal make the orthogonal factor uniform (Haar), which QR alone is not.
        blocks.append((q * r.diagonal().sign()).T[: rows - start])
    return _here(torch.cat(blocks) * draws.norm(dim=1, keepdim=True))


def _normal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """As `normal`, on the CPU: what is made of draws there, a factorisation above all, is the same everywhere."""
    return torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")


def _here(x: Tensor) -> Tensor:
    """x on the device that modules are being built on."""
    return x.to(torch.empty(0).device)
