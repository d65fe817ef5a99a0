"""The weight files of a trained model: those of the checkpoint that it was trained from, with new values.

A checkpoint's names, files and dtypes are kept, whatever the model holds its weights in. transformers renames and
merges tensors while loading (experts stored one by one), so names are put through its own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from linearize.conversion import tensor_memory
from linearize.digest import Meter
from linearize.errors import ModelError
from linearize.family import as_loaded, load_config
from linearize.headers import Header, TensorInfo, build_header, read_header
from linearize.plan import base_names, dtype_name, plan_tensors
from linearize.sink import disk_errors
from linearize.source import Source

if TYPE_CHECKING:
    from torch import Tensor

OURS = ".linearize."
LORA = "lora_"
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Shard:
    """A file of base weights.

    Attributes:
        name: in OUT.
        origin: the file of the checkpoint.
        tensors: what the new file holds, in the order of the old one.
        whole: whether the old file holds nothing else.
    """

    name: str
    origin: Path
    tensors: Mapping[str, TensorInfo]
    whole: bool

    @property
    def bytes(self) -> int:
        return sum(info.bytes for info in self.tensors.values())


def base_shards(source: Source) -> list[Shard]:
    """The files of base weights; a file that `save_pretrained` wrote may hold mixers' tensors, too."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, header in source.shards.items():
        base = _base(header)
        if base:
            found[name] = base
    names = base_names(sorted(found))
    return [
        Shard(new, source.checkpoint.paths[old], found[old], len(found[old]) == len(source.shards[old].tensors))
        for old, new in names.items()
    ]


def _base(header: Header) -> dict[str, TensorInfo]:
    ordered = sorted(header.tensors.items(), key=lambda item: item[1].start)
    return {key: info for key, info in ordered if OURS not in key}


def plain_state(state: Mapping[str, Tensor], *, kept: bool) -> dict[str, Tensor]:
    """A model's tensors under the names that they have without LoRA, whose own tensors are left out.

    Args:
        kept: whether LoRA is there to be kept as an adapter.

    Raises:
        ValueError: LoRA is attached, and neither merged nor to be kept.
    """
    lora = [name for name in state if f".{LORA}" in name]
    if lora and not kept:
        raise ValueError(f"'{lora[0]}' is neither merged nor kept as an adapter: merge it first")
    own = (name for name in state if f".{LORA}" not in name)
    return {name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."): state[name] for name in own}


def mixer_tensors(source: Source, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mixers' tensors in the order and dtypes of a converted checkpoint.

    Raises:
        ModelError: the model lacks one, or it has another shape, or isn't finite.
    """
    block = source.config["linearize"]
    tensors = {}
    for name, (dtype, shape) in plan_tensors(block["layers"], block.get("recipe", {}).get("seed", 0)).items():
        tensors[name] = _as_stored(name, _found(state, name, tuple(shape)), dtype)
    return tensors


def _found(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    value = state.get(name)
    if value is None:
        raise ModelError(f"the trained model has no tensor '{name}', which its checkpoint has")
    if tuple(value.shape) != shape:
        raise ModelError(f"tensor '{name}' has shape {list(value.shape)}, and its checkpoint has {list(shape)}")
    return value.detach().cpu()


def _as_stored(name: str, value: Tensor, dtype: str, before: Callable[[], Tensor] | None = None) -> Tensor:
    """`value` in `dtype`; where training left it alone, what was stored, which may be more exact.

    Args:
        before: gives the stored tensor, if there was one.
    """
    import torch

    if dtype_name(value.dtype) != dtype:
        stored = before() if before else None
        if stored is not None and torch.equal(stored.to(value.dtype), value):
            return stored
        value = value.to(stored.dtype if stored is not None else torch.float32)
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise ModelError(
            f"tensor '{name}' of the trained model isn't finite in {dtype}",
            "Go back to an earlier training checkpoint, and lower the learning rate",
        )
    return value


def tensor_file(tensors: Mapping[str, Tensor], meter: Meter) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file."""
    yield build_header({name: (dtype_name(value.dtype), tuple(value.shape)) for name, value in tensors.items()})
    for value in tensors.values():
        yield tensor_memory(value)
        meter.add(value.nbytes)


class BaseWeights:
    """Looks up base tensors of a live model by the names that they are stored under."""

    def __init__(self, source: Source, state: Mapping[str, Tensor]) -> None:
        """Match the names; nothing is written yet."""
        self._state = state
        self._names, self._ignored, self._apart = _match(source, state)
        self._files: dict[str, Path] = {}

    @property
    def scratch_bytes(self) -> int:
        """What `take_apart` will write."""
        return sum(self._state[name].nbytes for name in self._apart)

    def take_apart(self, model: Any, scratch: Path) -> None:
        """Let transformers save what is stored in other pieces than it is held in into the empty folder `scratch`.

        Raises:
            ResourceError: the disk refuses.
        """
        if not self._apart:
            return
        from transformers import GenerationConfig

        # The model's own may hold what transformers loads and refuses to save, and none is wanted here.
        with disk_errors(scratch), saving(), mock.patch.object(model, "generation_config", GenerationConfig()):
            model.save_pretrained(scratch, state_dict={name: self._state[name] for name in self._apart})
        files = list(scratch.glob("*.safetensors"))
        self._files = {key: path for path in files for key in read_header(path).tensors}

    def value(self, key: str, info: TensorInfo, read: Callable[[], Tensor]) -> Tensor:
        """The model's value of a stored tensor, in its dtype; `read` gives the stored one.

        Raises:
            ModelError: the model lacks it, or it has another shape, or isn't finite.
        """
        from safetensors import safe_open

        if key in self._ignored:  # loading drops it, so no training has seen it
            return read()
        if key in self._files:
            with safe_open(self._files[key], framework="pt") as file:
                found = {key: file.get_tensor(key)}
        else:
            name = self._names.get(key, key)
            found = {key: self._state[name]} if name in self._state else {}
        return _as_stored(key, _found(found, key, info.shape), info.dtype, read)


def shard_file(shard: Shard, weights: BaseWeights | None, meter: Meter) -> Iterator[bytes | memoryview]:
    """The bytes of a file of base weights, one tensor in memory at a time; without `weights`, as they were."""
    from safetensors import safe_open

    yield build_header({key: (info.dtype, info.shape) for key, info in shard.tensors.items()})
    with safe_open(shard.origin, framework="pt") as stored:
        for key, info in shard.tensors.items():
            read = partial(stored.get_tensor, key)
            yield tensor_memory(weights.value(key, info, read) if weights else read())
            meter.add(info.bytes)


def _match(source: Source, state: Mapping[str, Tensor]) -> tuple[dict[str, str], set[str], set[str]]:
    """Which tensor of the model fills each stored one; stored ones that no model reads; tensors to be taken apart."""
    base = {key: info for key, info in source.tensors.items() if OURS not in key}
    loaded = as_loaded(load_config(source.config, source.name), base)
    if isinstance(loaded, str):  # transformers' tables can't be read here: by its own names, or through saving all
        whole = all(key in state and state[key].shape == info.shape for key, info in base.items())
        return {}, set(), set() if whole else {name for name in state if OURS not in name}
    names, ignored, apart = {}, set(), set()
    for name, keys in loaded.stored.items():
        if name not in loaded.expected:
            ignored.update(keys)
        elif loaded.comparable[name] == "shape":
            names.update(dict.fromkeys(keys, name))
        else:
            apart.add(name)
    return names, ignored, apart


class saving:
    """safetensors has an error of its own for a disk that refuses: turns it into an OSError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from safetensors import SafetensorError

        if isinstance(error, SafetensorError):
            raise OSError(None, str(error)) from error
