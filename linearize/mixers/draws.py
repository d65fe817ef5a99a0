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
    device = torch.empty(0).device
    return torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu").to(device)


def orthonormal_columns(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """(rows, columns) columns of length 1, orthogonal to each other."""
    draws = normal(rows, columns, generator)
    return draws if on_meta() else torch.linalg.qr(draws)[0]


def gaussian_rows(rows: int, dim: int, orthogonal: bool, generator: torch.Generator | None) -> Tensor:
    """(rows, dim) rows distributed as N(0, I) each; orthogonal within each block of `dim` rows if asked."""
    draws = normal(rows, dim, generator)
    if not orthogonal or on_meta():
        return draws
    blocks = []
    for start in range(0, rows, dim):
        q, r = torch.linalg.qr(normal(dim, dim, generator))
        # The signs of r's diagonal make the orthogonal factor uniform (Haar), which QR alone is not.
        blocks.append((q * r.diagonal().sign()).T[: rows - start])
    return torch.cat(blocks) * draws.norm(dim=1, keepdim=True)
