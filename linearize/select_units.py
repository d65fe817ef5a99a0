"""What a selection chooses among: layers, or key/value heads with the query heads that read them.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from linearize.keep_softmax import ranges

Unit = int | tuple[int, int]  # a layer; or a layer and one of its key/value heads
UNITS = ("layers", "heads")


def units_of(heads: Mapping[int, int], kind: str) -> list[Unit]:
    """The units of layers that have so many key/value `heads`, in order; ValueError for a `kind` that UNITS lacks."""
    if kind not in UNITS:
        raise ValueError(f"units are {' or '.join(UNITS)}, not {kind!r}")
    if kind == "layers":
        return list(heads)
    return [(layer, head) for layer, count in heads.items() for head in range(count)]


def layer_of(unit: Unit) -> int:
    return unit if isinstance(unit, int) else unit[0]


def parted(units: Collection[Unit], heads: Mapping[int, int]) -> tuple[list[int], dict[int, list[int]]]:
    """The layers that `units` cover whole, and for other layers the heads that they name."""
    whole, some = {unit for unit in units if isinstance(unit, int)}, {}
    for unit in sorted(unit for unit in units if not isinstance(unit, int)):
        some.setdefault(unit[0], []).append(unit[1])
    whole |= {layer for layer, named in some.items() if len(named) == heads[layer]}
    return sorted(whole), {layer: named for layer, named in some.items() if layer not in whole}


def as_json(units: Collection[Unit], heads: Mapping[int, int], kind: str) -> dict[str, Any]:
    """`parted`, as selection.json holds it: "layers", and "heads" where heads are chosen."""
    whole, some = parted(units, heads)
    return {"layers": whole} | (
        {"heads": {str(layer): named for layer, named in some.items()}} if kind == "heads" else {}
    )


def as_row(unit: Unit) -> dict[str, int]:
    """A unit as the keys of a row of selection.json."""
    return {"layer": unit} if isinstance(unit, int) else {"layer": unit[0], "head": unit[1]}


def label(row: Mapping[str, Any]) -> str:
    """The unit of a row, as people read it: "18", or "18.2" for head 2."""
    return f"{row['layer']}.{row['head']}" if "head" in row else str(row["layer"])


def in_words(kept: Mapping[str, Any]) -> str:
    """The layers and heads of `as_json`: "0-2, 5", or "5, heads 7.0, 7.2"; "" for none."""
    heads = [f"{layer}.{head}" for layer, named in kept.get("heads", {}).items() for head in named]
    return ", ".join(
        [*([ranges(kept["layers"])] if kept["layers"] else []), *([f"heads {', '.join(heads)}"] if heads else [])]
    )


def heads_of(entries: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Layer -> its number of key/value heads, of those `entries` of a block's "layers" that have a mixer."""
    return {entry["layer"]: entry["shape"]["num_key_value_heads"] for entry in entries if entry.get("mixer")}
