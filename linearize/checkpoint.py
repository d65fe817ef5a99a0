"""The files of one checkpoint folder: which hold weights, which travel along, which stay behind.

Everything here is a stranger's: an index may name files outside the folder, a shard may be cut off, a link
may lead anywhere. All problems are collected and reported in one error.
"""

from __future__ import annotations

import fnmatch
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linearize.errors import LinearizeError, ModelError
from linearize.faults import BadFiles, Fault, all_faults
from linearize.headers import Header, TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 50_000_000  # the index of 100,000 tensors takes a fifth of it
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

# What loading a model, its tokenizer or its processor may need, and what a licence asks to keep.
TRAVELS = (
    "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.spm", "*.vocab", "*.bpe",
    "tokenizer.model.*", "*.codes", "*.tsv",
    "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*", "license*", "licence*",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
STAYS = {
    "*.bin": "pickle weights", "*.pt": "pickle weights", "*.pth": "pickle weights",
    "*.ckpt": "pickle weights",
    "*.pkl": "a pickle", "*.pickle": "a pickle",
    "*.gguf": "GGUF weights", "*.onnx": "ONNX weights", "*.h5": "TensorFlow weights",
    "*.msgpack": "Flax weights",
    "*.py": "code of the source, which linearize never runs",
    "*.safetensors": "weights that the index doesn't name",
    "README*": "the model card describes the source model, not the converted one",
    "*.index.json": "an index of weights that stay behind",
    "adapter_config.json": "an adapter's config",
    "trainer_state.json": "training state", "linearize-manifest.json": "a manifest of another folder",
}  # fmt: skip
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """The checked files of a folder.

    Attributes:
        shards: file name -> header of each weight file.
        tensors: tensor name -> where it lies.
        paths: real path (links followed, shown to be allowed) of each shard and side file.
        side_files: name -> bytes of the files that travel along.
        left_behind: name -> why it doesn't.
        index_metadata: the `metadata` of the source's index.
        unread: tensors that the index places in a file that is missing or can't be read.
    """

    shards: Mapping[str, Header] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    side_files: Mapping[str, int] = field(default_factory=dict)
    left_behind: Mapping[str, str] = field(default_factory=dict)
    index_metadata: Mapping[str, Any] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()


def is_plain_name(name: Any) -> bool:
    """Whether `name` is the name of a file in a folder, on every platform: no path, no drive, nothing hidden
    in it."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and name not in (".", "..")
        and not re.search(r'[/\\:*?"<>|]', name)
        and name.isprintable()
    )


def find_inside(folder: Path, name: str) -> Path:
    """The real path of a file of `folder`.

    A symbolic link is followed only within the folder, or (in a Hugging Face cache, where every file of a
    snapshot is a link) to the blobs of the same repository.

    Raises:
        BadFiles: it is missing, leads outside, or isn't a file.
    """
    try:
        real = (folder / name).resolve(strict=True)
        info = real.stat()
    except (OSError, RuntimeError):
        raise BadFiles(Fault(name, "", "is missing")) from None
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in allowed):
        raise BadFiles(Fault(name, "", f"is a link that leads outside the folder ({real})"))
    if not stat.S_ISREG(info.st_mode):
        raise BadFiles(Fault(name, "", "isn't a regular file"))
    return real


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Parse a JSON file of the folder that must hold an object; raises `BadFiles`."""
    path = find_inside(folder, name)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadFiles(Fault(name, "", f"is larger than {MAX_JSON_BYTES} bytes"))
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadFiles(Fault(name, "", f"can't be read ({error.strerror})")) from None
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise BadFiles(Fault(name, "", f"isn't valid JSON ({where})")) from None
    if not isinstance(value, dict):
        raise BadFiles(Fault(name, "", "isn't a JSON object"))
    return value


def read_checkpoint(folder: Path) -> Checkpoint:
    """Find and check the weights of a folder; reads the index and the headers, no tensor.

    Raises:
        ModelError: naming every problem.
    """
    checkpoint, faults = collect(folder)
    if faults:
        raise all_faults(folder, faults, "Download the model again, or repair these files")
    return checkpoint


def collect(folder: Path) -> tuple[Checkpoint, list[Fault]]:
    """The checkpoint as far as it can be read, and everything that is wrong with it.

    Raises:
        ModelError: the folder holds no weights that can be read at all.
    """
    names = _list_files(folder)
    faults: list[Fault] = []
    weight_map, index_metadata = _which_weights(folder, names, faults)
    shards: dict[str, Header] = {}
    paths: dict[str, Path] = {}
    for name in sorted(set(weight_map.values()) if weight_map else {SINGLE} if SINGLE in names else ()):
        try:
            paths[name] = find_inside(folder, name)
            shards[name] = read_header(paths[name], name)
        except BadFiles as error:
            faults.extend(error.faults)
        except OSError as error:
            faults.append(Fault(name, "", f"can't be read ({error.strerror})"))
    tensors = _merge(shards, weight_map, faults)
    side_files, left_behind = _sort_others(folder, names, set(shards), paths, faults)
    unread = frozenset(key for key, name in weight_map.items() if name not in shards)
    return Checkpoint(shards, tensors, paths, side_files, left_behind, index_metadata, unread), faults


def _list_files(folder: Path) -> list[str]:
    names = []
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink() and entry.name == "additional_chat_templates":
            names += [f"{entry.name}/{child.name}" for child in entry.iterdir()]
        else:
            names.append(entry.name)
    return sorted(names)


def _which_weights(folder: Path, names: list[str], faults: list[Fault]) -> tuple[dict[str, str], dict[str, Any]]:
    """(tensor -> file) from the index, or an empty map where a lone model.safetensors is the model."""
    strays = [name for name in names if SHARD_NAME.fullmatch(name)]
    if SINGLE in names:
        # transformers looks for this name first, whatever an index says.
        if strays:
            what = f"and {_some(strays)} are both there, so it is unclear which is the model"
            faults.append(Fault(SINGLE, "", what))
        return {}, {}
    if INDEX not in names:
        if not strays:
            raise _no_weights(folder, names)
        faults.append(Fault(INDEX, "", f"is missing, and {_some(strays)} can't be used without it"))
        return {}, {}
    try:
        index = read_json(folder, INDEX)
    except BadFiles as error:
        faults.extend(error.faults)
        return {}, {}
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        faults.append(Fault(INDEX, "", "has no weight_map"))
        return {}, {}
    for name in sorted({str(name) for name in weight_map.values() if not is_plain_name(name)}):
        faults.append(Fault(INDEX, "", f"points to {name!r:.120}, which isn't a file name inside the folder"))
    good = {key: name for key, name in weight_map.items() if is_plain_name(name)}
    faults += [Fault(name, "", f"isn't in {INDEX}") for name in strays if name not in good.values()]
    return good, metadata if isinstance(metadata, dict) else {}


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def _no_weights(folder: Path, names: list[str]) -> LinearizeError:
    pickles = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in PICKLES)]
    others = [name for name in names if name.endswith(".safetensors")]
    if pickles:
        return ModelError(
            f"{folder} holds pickle weights only ({_some(pickles)}), which can run code when opened",
            "Save the model as safetensors first: model = AutoModelForCausalLM.from_pretrained(...); "
            "model.save_pretrained(NEW_FOLDER)",
        )
    if others:
        return ModelError(
            f"{folder} has no {SINGLE} and no {INDEX}, only {_some(others)}",
            f"Rename the file to {SINGLE} if it is the whole model",
        )
    return ModelError(f"{folder} has no weights ({SINGLE} or {INDEX} with its shards)", "Download the whole model")


def _merge(shards: Mapping[str, Header], weight_map: Mapping[str, str], faults: list[Fault]) -> dict[str, TensorInfo]:
    """All tensors of all shards, shown to be the same ones that the index names."""
    tensors: dict[str, TensorInfo] = {}
    for name, header in shards.items():
        for key, tensor in header.tensors.items():
            if key in tensors:
                faults.append(Fault(name, key, f"is in {tensors[key].file} as well"))
            elif weight_map and weight_map.get(key) != name:
                there = f"places it in {weight_map[key]}" if key in weight_map else "lacks it"
                faults.append(Fault(name, key, f"is here, but {INDEX} {there}"))
            tensors[key] = tensor
    for key, name in weight_map.items():
        if name in shards and key not in shards[name].tensors:
            faults.append(Fault(INDEX, key, f"is placed in {name}, which lacks it"))
    if shards and not tensors:
        faults.append(Fault(min(shards), "", "holds no tensor"))
    return tensors


def _sort_others(
    folder: Path, names: list[str], weights: set[str], paths: dict[str, Path], faults: list[Fault]
) -> tuple[dict[str, int], dict[str, str]]:
    side_files: dict[str, int] = {}
    left_behind: dict[str, str] = {}
    for name in names:
        if name in weights or name in ("config.json", INDEX, SINGLE) or SHARD_NAME.fullmatch(name):
            continue
        why = _why_left(folder, name)
        if why:
            left_behind[name] = why
            continue
        try:
            paths[name] = find_inside(folder, name)
            side_files[name] = paths[name].stat().st_size
        except BadFiles as error:
            faults.extend(error.faults)
    return side_files, left_behind


def _why_left(folder: Path, name: str) -> str:
    if name.startswith("."):
        return "a hidden file"
    if (folder / name).is_dir():  # whatever its name looks like
        return "a folder"
    for pattern, why in STAYS.items():
        if fnmatch.fnmatchcase(name, pattern):
            return why
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in TRAVELS):
        return "not known to be needed"
    return ""
