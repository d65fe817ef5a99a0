"""safetensors headers: read without trust, written for a stream.

A safetensors file is 8 bytes (little-endian length of the header), a JSON header, then the tensors one after
another. The header comes from a stranger, so every number in it is checked against the file before anything
uses it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from linearize.faults import BadFiles, Fault

# Real headers take some 150 bytes a tensor; parsed, they take many times that in memory.
MAX_HEADER_BYTES = 50_000_000
MAX_NAME_LENGTH = 1000
MAX_RANK = 64  # torch's own bound; without one, the product of a hostile shape takes quadratic time

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `start` and `end` are byte offsets in the file (not in the data part)."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The checked header of one file."""

    file: str
    file_bytes: int
    data_start: int
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor; None if they don't come to whole bytes (sub-byte dtypes)."""
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    return bits // 8 if bits % 8 == 0 else None


def read_header(path: Path, name: str | None = None) -> Header:
    """Read and check the header of a safetensors file; reads no tensor.

    Raises:
        BadFiles: with every fault found.
        OSError: if the file can't be read.
    """
    name = name or path.name
    with open(path, "rb") as file:
        return parse_header(file, os.fstat(file.fileno()).st_size, name)


def parse_header(file: BinaryIO, file_bytes: int, name: str) -> Header:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise _bad(name, f"has {file_bytes} bytes, too few for a safetensors file")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _bad(name, f"isn't a safetensors file (it claims a header of {header_bytes} bytes)")
    if header_bytes > file_bytes - 8:
        raise _bad(name, f"is truncated: it has {file_bytes} bytes, its header alone takes {header_bytes + 8}")
    raw = _parse_json(file.read(header_bytes), name)
    metadata = raw.pop("__metadata__", {})
    if not _is_text_map(metadata):
        raise _bad(name, "has a header whose __metadata__ isn't a map of strings")
    data_start = 8 + header_bytes
    tensors, faults = _check_entries(raw, name, data_start)
    faults = faults or _check_layout(tensors, name, data_start, file_bytes)
    if faults:
        raise BadFiles(*faults)
    return Header(name, file_bytes, data_start, tensors, metadata)


def _bad(name: str, what: str) -> BadFiles:
    return BadFiles(Fault(name, "", what))


def _parse_json(data: bytes, name: str) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise _bad(name, "isn't a safetensors file (its header isn't JSON)")
    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _Repeated as error:
        raise _bad(name, f"names '{_printable(str(error)):.120}' twice in its header") from None
    except (ValueError, RecursionError):
        raise _bad(name, "has a damaged header (not valid JSON)") from None
    if not isinstance(header, dict):
        raise _bad(name, "has a header that isn't a JSON object")
    return header


class _Repeated(Exception):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Repeated(key)
            seen.add(key)
    return result


def _no_constant(value: str) -> Any:
    raise ValueError(value)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(x, str) for pair in value.items() for x in pair)


def _check_entries(raw: dict[str, Any], name: str, data_start: int) -> tuple[dict[str, TensorInfo], list[Fault]]:
    tensors: dict[str, TensorInfo] = {}
    faults: list[Fault] = []
    for key, entry in raw.items():
        fault = _entry_fault(key, entry)
        if fault:
            faults.append(Fault(name, _printable(key)[:MAX_NAME_LENGTH] or "(no name)", fault))
            continue
        start, end = entry["data_offsets"]
        tensors[key] = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), data_start + start, data_start + end)
    return tensors, faults


def _entry_fault(key: str, entry: Any) -> str:
    if len(key) > MAX_NAME_LENGTH:
        return f"has a name of {len(key)} characters"
    if not key or key != _printable(key):
        return "has a name that can't be printed"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "has a header entry other than dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"has the unknown dtype {dtype!r:.40}"
    if isinstance(shape, list) and len(shape) > MAX_RANK:
        return f"has {len(shape)} dimensions, more than {MAX_RANK}"
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        return "has a shape that isn't a list of sizes"
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(n) for n in offsets)):
        return "has data_offsets that aren't two sizes"
    start, end = offsets
    if tensor_bytes(dtype, shape) != end - start:
        return f"claims shape {shape!s:.80} in {dtype} but {end - start} bytes"
    return ""


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63  # bool is an int, too, and not a size


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _check_layout(tensors: Mapping[str, TensorInfo], name: str, data_start: int, file_bytes: int) -> list[Fault]:
    """The tensors must fill the data part: no hole, no overlap, nothing past the end, nothing left over."""
    position = data_start
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != position:
            what = "overlaps the one before" if tensor.start < position else "leaves a hole before it"
            return [Fault(name, key, f"{what} (byte {tensor.start}, expected {position})")]
        position = tensor.end
    if position > file_bytes:
        cut = next(key for key, t in sorted(tensors.items(), key=lambda item: item[1].end) if t.end > file_bytes)
        what = f"is truncated: it has {file_bytes} of {position} bytes, '{cut:.120}' is the first tensor cut off"
        return [Fault(name, "", what)]
    if position < file_bytes:
        return [Fault(name, "", f"has {file_bytes - position} bytes after its last tensor")]
    return []


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file that will hold `tensors` (name -> dtype, shape) in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = tensor_bytes(dtype, shape)
        assert size is not None
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return len(text).to_bytes(8, "little") + text
