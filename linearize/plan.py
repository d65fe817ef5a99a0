"""What a conversion will do, as a value: layers, new tensors, files, bytes. Nothing is written, no weight is
read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.errors import ResourceError
from linearize.family import as_loaded, check_depth, compare_tensors, load_config, without_how_to_compute
from linearize.faults import all_faults
from linearize.headers import tensor_bytes
from linearize.layer_plan import plan_layers
from linearize.selection_file import STAND_IN, is_auto, settled
from linearize.source import Source

if TYPE_CHECKING:
    from linearize.modeling.probe import Probe
    from linearize.recipe import Recipe
    from linearize.target import Destination

MIXER_SHARD = "model-linearize.safetensors"
REMOTE_CODE = "modeling_linearized.py"
FILE_SLACK_BYTES = 4096  # what a file takes beyond its bytes: the rest of its last block, its directory entry
SMALL_FILES_BYTES = 1_000_000  # config, index, manifest, remote code
# Of chunks of logits in float32, several times over, and of hidden states: of 19M parameters and a vocabulary of 32,000
# converting with auto: took 1.07 GB in all, at 1.47 GB planned.
MEASURING_BYTES = 700_000_000
BASE_MEMORY_BYTES = 700_000_000  # Python, torch, Triton, transformers, scikit-learn where it is installed


@dataclass(frozen=True)
class PlannedFile:
    """One file of OUT: how it comes there ("link", "copy" or "write"), from which file, and its bytes."""

    name: str
    how: str
    bytes: int
    origin: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will do.

    Attributes:
        source: the checked input.
        recipe: what it is converted to; the layers of a selection are listed in it.
        probe: the model's attention layers, as the meta-device run saw them.
        layers: per layer with attention, what it becomes and why: the "layers" of config.json's `linearize`
            block.
        new_tensors: name -> (dtype, shape) of the mixer tensors, in the order of their file.
        files: what OUT will hold, apart from config, index, remote code and manifest.
        bytes_needed: bytes that OUT takes on its disk (linked files take none).
        bytes_free: what that disk has; None if OUT isn't known yet.
        memory_bytes: the most memory that converting takes.
        chosen: layers that were chosen by measurement, to stay softmax whole or in part -> how they were.
    """

    source: Source
    recipe: Recipe
    probe: Probe
    layers: list[dict[str, Any]]
    new_tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    files: tuple[PlannedFile, ...]
    bytes_needed: int
    bytes_free: int | None
    memory_bytes: int
    notes: tuple[str, ...] = field(default=())
    chosen: Mapping[int, str] = field(default_factory=dict)

    @property
    def converted(self) -> list[dict[str, Any]]:
        return [layer for layer in self.layers if layer.get("mixer")]

    @property
    def new_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.new_tensors.values())

    def shard_names(self) -> dict[str, str]:
        """Name of each weight file in the source -> its name in OUT."""
        return base_names(sorted(self.source.shards))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON: what `--dry-run --json` prints."""
        return {
            "model": self.source.name,
            "origin": self.source.origin,
            "base_model_type": self.probe.base_model_type,
            "architecture": self.probe.architecture,
            "recipe": self.recipe.conversion(),
            "num_layers": self.probe.num_layers,
            "layers": self.layers,
            "new_tensors": {
                name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.new_tensors.items()
            },
            "new_parameters": self.new_parameters,
            "files": [{"name": f.name, "how": f.how, "bytes": f.bytes, "from": f.origin} for f in self.files],
            "bytes_needed": self.bytes_needed,
            "bytes_free": self.bytes_free,
            "memory_bytes": self.memory_bytes,
            "notes": list(self.notes),
        }


def base_names(shards: Sequence[str]) -> dict[str, str]:
    """Names of the source's weight files in OUT.

    A lone model.safetensors can't keep its name, which would win over the index. Shards change theirs, too,
    so that saving a model into OUT later can never write into a file that is linked with the source.
    """
    if len(shards) == 1:
        return {shards[0]: "model-base.safetensors"}
    return {name: f"model-base-{i:05d}-of-{len(shards):05d}.safetensors" for i, name in enumerate(shards, 1)}


def make_plan(
    source: Source,
    recipe: Recipe,
    destination: Destination | None = None,
    *,
    chosen: Mapping[int, str] | None = None,
) -> Plan:
    """Plan the conversion of `source` with `recipe` (into `destination`, if it is known).

    Args:
        chosen: how layers that the recipe keeps were chosen (see `Plan`).

    Raises:
        UsageError: keep_softmax or layers names a layer that isn't there, or nothing is left to convert.
        ModelError: the model can't be converted, or its tensors don't fit its config; every problem is named.
    """
    from linearize.modeling.probe import probe

    config = load_config(source.config, source.name)
    if source.tensors:
        check_depth(config, source.tensors, source.name)
    probed = probe(config)
    recipe, why, told = settled(recipe, probed)
    layers = plan_layers(probed, recipe, chosen := chosen or why)
    new_tensors = plan_tensors(layers, recipe.seed)
    faults, notes = compare_tensors(as_loaded(config, source.tensors), source.tensors) if source.tensors else ([], [])
    if faults:
        raise all_faults(source.name, faults, "Download the model again, or correct its config.json")
    if without_how_to_compute(source.config) != source.config:
        notes.append("config.json's choice of an attention or experts implementation is dropped: it may fetch code")
    notes += told
    if is_auto(recipe):
        notes.append(STAND_IN.format(recipe.keep_softmax))
    notes += [f"layer {layer.layer}: {note}" for layer in probed.layers for note in layer.notes]
    files = plan_files(source, new_tensors, destination)
    return Plan(
        source=source,
        recipe=recipe,
        probe=probed,
        layers=layers,
        new_tensors=new_tensors,
        files=files,
        bytes_needed=SMALL_FILES_BYTES + sum(f.bytes + FILE_SLACK_BYTES for f in files if f.how != "link"),
        bytes_free=destination.free_bytes if destination else None,
        memory_bytes=_memory_bytes(source, new_tensors) + (_measuring_bytes(source) if is_auto(recipe) else 0),
        notes=source.notes + tuple(notes),
        chosen=chosen,
    )


def _memory_bytes(source: Source, new_tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    mixers = 2 * max(layer_bytes(new_tensors).values(), default=0)
    # A GGUF model is unpacked to fp32 whatever it is stored in, while the file is mapped and the model filled: fp32
    # plus the stored dtype is more than was ever measured (of 135M parameters: 1.24 GB at 1.58 GB planned in fp32,
    # 0.99 GB at 1.31 GB in bf16).
    return BASE_MEMORY_BYTES + mixers + source.loaded_bytes + 4 * source.loaded_parameters


def _measuring_bytes(source: Source) -> int:
    """What `select` takes besides: the model in float32 (what loads a GGUF file is counted already), and logits."""
    return MEASURING_BYTES + (0 if source.loaded_bytes else 4 * source.num_parameters)


def plan_tensors(layers: Sequence[Mapping[str, Any]], seed: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) of every mixer tensor, layer by layer; mixers are built on the meta device."""
    import torch

    from linearize.mixers import mixer_of

    known: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in layers:
        if not layer.get("mixer"):
            continue
        key = repr((layer["mixer"], layer["shape"]))
        if key not in known:
            with torch.device("meta"):
                mixer = mixer_of(layer, seed)
            known[key] = {
                name: (dtype_name(value.dtype), tuple(value.shape)) for name, value in mixer.state_dict().items()
            }
        for name, info in known[key].items():
            tensors[mixer_tensor(layer, name)] = info
    return tensors


def mixer_tensor(layer: Mapping[str, Any], name: str) -> str:
    """Full name of a mixer's tensor."""
    return f"{layer['module']}.linearize.{name}"


def dtype_name(dtype: Any) -> str:
    """safetensors' name of a torch dtype."""
    names = {
        "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
        "uint8": "U8",         "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    }  # fmt: skip
    return names[str(dtype).removeprefix("torch.")]


def layer_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Bytes of the new tensors of each converted attention module."""
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        module = name[: name.index(".linearize.")]
        sizes[module] = sizes.get(module, 0) + (tensor_bytes(dtype, shape) or 0)
    return sizes


def plan_files(
    source: Source, new_tensors: Mapping[str, tuple[str, tuple[int, ...]]], destination: Destination | None
) -> tuple[PlannedFile, ...]:
    """The files of OUT. Weights are linked where OUT is on their file system; small files are always copied,
    since they are meant to be edited, and a linked file would change with its original."""
    files = []
    if source.gguf:
        files.append(PlannedFile("model-base.safetensors", "write", source.loaded_bytes, source.gguf.name))
    for name, new_name in base_names(sorted(source.shards)).items():
        linked = destination is None or _device(source.checkpoint.paths[name]) == destination.device
        files.append(PlannedFile(new_name, "link" if linked else "copy", source.shards[name].file_bytes, name))
    new_bytes = sum(tensor_bytes(dtype, shape) or 0 for dtype, shape in new_tensors.values())
    files.append(PlannedFile(MIXER_SHARD, "write", new_bytes))
    files += [PlannedFile(name, "copy", size, name) for name, size in source.side_files.items()]
    return tuple(files)


def _device(path: Path) -> int:
    return path.stat().st_dev


def check_resources(plan: Plan, destination: Destination) -> None:
    """Refuse a plan that the disk can't hold; raises `ResourceError` with both numbers."""
    if plan.bytes_needed > destination.free_bytes:
        raise ResourceError(
            f"{destination.path} needs {human(plan.bytes_needed)} and {destination.disk} has "
            f"{human(destination.free_bytes)} free",
            "Free some space, or choose an OUT on the model's own disk, where its weights can be linked",
        )


def human(count: int) -> str:
    """Bytes for people: "1.50 GB"."""
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
