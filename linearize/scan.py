"""Hash a file and look for NaN and infinity in its tensors, in one pass over its bytes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from linearize.digest import CHUNK_BYTES, Meter
from linearize.headers import Header

# dtype -> (unsigned integer of its width, all bits but the sign, bits of infinity). With the sign cleared, a
# float is infinite if its bits equal those of infinity, and NaN if they are larger.
_FLOATS = {
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "C64": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "F8_E5M2": ("u1", 0x7F, 0x7C),
    "F8_E4M3": ("u1", 0x7F, None),  # has no infinity; NaN is all ones
}


def count_bad(data: memoryview, dtype: str) -> tuple[int, int]:
    """(NaN, infinite) among the elements of `data`; (0, 0) for integers."""
    if dtype not in _FLOATS:
        return 0, 0
    width, magnitude, infinity = _FLOATS[dtype]
    kind = np.dtype(width)
    bits = np.frombuffer(data[: len(data) - len(data) % kind.itemsize], dtype=kind) & magnitude
    if infinity is None:
        return int(np.count_nonzero(bits == magnitude)), 0
    if not bits.size or bits.max() < infinity:
        return 0, 0
    infinite = int(np.count_nonzero(bits == infinity))
    return int(np.count_nonzero(bits > infinity)), infinite


def scan_file(
    path: Path, header: Header | None, meter: Meter | None = None, stop: threading.Event | None = None
) -> tuple[str, dict[str, tuple[int, int]]]:
    """(sha256 of the file, tensor -> (NaN, infinite) if there are any); without a header only the first."""
    digest = hashlib.sha256()
    bad: dict[str, tuple[int, int]] = {}

    def take(piece: memoryview) -> None:
        digest.update(piece)
        if meter:
            meter.add(len(piece))
        if stop and stop.is_set():
            raise InterruptedError

    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        tensors = sorted(header.tensors.items(), key=lambda item: item[1].start) if header else []
        for piece in _pieces(file, header.data_start if header else 0, buffer):  # type: ignore[arg-type]
            take(piece)
        for key, tensor in tensors:
            for piece in _pieces(file, tensor.bytes, buffer):  # type: ignore[arg-type]
                take(piece)
                nan, infinite = count_bad(piece, tensor.dtype)
                if nan or infinite:
                    before = bad.get(key, (0, 0))
                    bad[key] = (before[0] + nan, before[1] + infinite)
        for piece in _pieces(file, None, buffer):  # type: ignore[arg-type]
            take(piece)
    return digest.hexdigest(), bad


def _pieces(file: BinaryIO, count: int | None, buffer: memoryview) -> Iterator[memoryview]:
    """The next `count` bytes (None: all that follow), in full buffers, so that no element is cut in two."""
    left = count if count is not None else 1 << 63
    while left > 0:
        filled = 0
        want = min(left, len(buffer))
        while filled < want:
            got = file.readinto(buffer[filled:want])  # type: ignore[attr-defined]
            if not got:
                break
            filled += got
        if not filled:
            return
        left -= filled
        yield buffer[:filled]
