"""safetensors headers are a stranger's: every lie is found, and what is built here the safetensors library
reads."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.faults import BadFiles
from linearize.headers import build_header, read_header
from tests.checkpoints import write_safetensors

GOOD = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry()}, 23, "'a' is the first tensor cut off"),
        ({"a": entry()}, 25, "1 bytes after its last tensor"),
        ({"a": entry(offsets=(0, 20))}, 24, "claims shape [2, 3] in F32 but 20 bytes"),
        ({"a": entry(offsets=(24, 0))}, 24, "claims shape"),
        ({"a": entry(offsets=(8, 32))}, 32, "leaves a hole before it"),
        ({"a": entry(), "b": entry(offsets=(12, 36))}, 36, "overlaps the one before"),
        ({"a": entry(dtype="F33")}, 24, "unknown dtype 'F33'"),
        ({"a": entry(shape=(-2, -3))}, 24, "shape that isn't a list of sizes"),
        ({"a": entry(shape=(2.0, 3))}, 24, "shape that isn't a list of sizes"),
        ({"a": entry(shape=(True, 6))}, 24, "shape that isn't a list of sizes"),
        ({"a": entry(shape=(2**62, 2**62))}, 24, "claims shape"),
        ({"a": entry(offsets=(0, 24, 24))}, 24, "data_offsets"),
        ({"a": entry(extra=1)}, 24, "other than dtype, shape and data_offsets"),
        ({"a": 7}, 24, "other than dtype, shape and data_offsets"),
        ({"a\nb": entry()}, 24, "'a?b' has a name that can't be printed"),
        ({"__metadata__": {"format": 1}, "a": entry()}, 24, "__metadata__"),
        (b'{"a": ' + json.dumps(entry()).encode() + b', "a": 1}', 24, "names 'a' twice"),
        (b"[1]", 24, "isn't JSON"),
        (b"{" * 50_000, 24, "damaged header"),
        (b'{"a": NaN}', 24, "damaged header"),
        (b'{"\xff": 1}', 24, "damaged header"),
        ({"x" * 1001: entry()}, 24, "has a name of 1001 characters"),
        ({"a": entry(shape=[1] * 65)}, 24, "has 65 dimensions, more than 64"),
        (b'{"a": ' + b"9" * 10_000 + b"}", 24, ""),
    ],
)
def test_a_header_that_lies_is_refused_by_name(tmp_path, header, data, says):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, header, data)
    with pytest.raises(BadFiles) as caught:
        read_header(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith("x.safetensors")
    assert len(str(caught.value)) < 400


def test_a_hostile_shape_takes_no_quadratic_time(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": entry(shape=[2**62] * 500_000)}, 24)
    start = time.process_time()
    with pytest.raises(BadFiles, match="has 500000 dimensions"):
        read_header(path)
    assert time.process_time() - start < 5  # the product alone would take minutes


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has 0 bytes, too few"),
        (b"\x05\x00\x00", "has 3 bytes, too few"),
        ((10**9).to_bytes(8, "little") + b"{}", "claims a header of 1000000000 bytes"),
        ((49_000_000).to_bytes(8, "little") + b"{}", "truncated: it has 10 bytes"),
        (b"PK\x03\x04 a pickle, really, of some length", "isn't a safetensors file"),
    ],
)
def test_a_file_that_is_something_else(tmp_path, content, says):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadFiles, match=says):
        read_header(path)


def test_every_fault_is_reported_at_once(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": entry(dtype="F33"), "b": entry(shape=(1,)), "c": entry()}, 24)
    with pytest.raises(BadFiles) as caught:
        read_header(path)
    assert [fault.key for fault in caught.value.faults] == ["a", "b"]


def test_agrees_with_the_safetensors_library(tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors = {
        "é": torch.zeros(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 4),
        "ids": torch.zeros(7, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {key: info.shape for key, info in header.tensors.items()} == {k: tuple(v.shape) for k, v in tensors.items()}
    assert {key: info.dtype for key, info in header.tensors.items()} == {
        "é": "BF16", "scalar": "F32", "empty": "F32", "ids": "I64",
    }  # fmt: skip


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8), SHAPES, max_size=5))
def test_what_we_build_the_safetensors_library_reads(tmp_path_factory, shapes):
    import math

    from safetensors import safe_open

    path = tmp_path_factory.mktemp("headers") / "x.safetensors"
    size = sum(4 * math.prod(shape) for shape in shapes.values())
    path.write_bytes(build_header({name: ("F32", shape) for name, shape in shapes.items()}) + bytes(size))
    with safe_open(path, "numpy") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == shapes  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    assert {name: info.shape for name, info in read_header(path).tensors.items()} == shapes
