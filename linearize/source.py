"""An untrusted model, resolved to checked files: a local folder, a Hub id, or a GGUF file.

Nothing here loads a weight or imports torch: a folder is judged by its config.json, its index and the headers
of its safetensors files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from linearize.checkpoint import Checkpoint, read_checkpoint, read_json
from linearize.errors import ModelError, UsageError
from linearize.faults import BadFiles, all_faults
from linearize.headers import Header, TensorInfo

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
ALREADY = "linearized_"
TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "*.bpe", "*.vocab", "*.codes", "*.tsv")


@dataclass(frozen=True)
class Source:
    """A model that can be read: where it is, what its config says, which tensors it has.

    Attributes:
        name: as the user gave it.
        origin: "folder", "hub" or "gguf".
        folder: the local folder (of a Hub model: its snapshot in the cache; of a GGUF file: the one around
            it).
        config: config.json as it is (of a GGUF file: empty until `linearize.gguf.describe` reads it).
        checkpoint: its files; empty for a GGUF file, which has to be dequantised first.
        gguf: the GGUF file.
        loaded_bytes: bytes of weights that converting has to load (of a GGUF file, once described; else 0).
        loaded_parameters: their number.
        notes: what was noticed and isn't an error.
    """

    name: str
    origin: str
    folder: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    gguf: Path | None = None
    loaded_bytes: int = 0
    loaded_parameters: int = 0
    notes: tuple[str, ...] = ()

    @property
    def shards(self) -> Mapping[str, Header]:
        return self.checkpoint.shards

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.checkpoint.tensors

    @property
    def side_files(self) -> Mapping[str, int]:
        return self.checkpoint.side_files

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        return self.loaded_parameters or sum(tensor.numel for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Bytes stored in each dtype."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
        return sizes


def resolve(model: str | Path, *, revision: str | None = None, allow_converted: bool = False) -> Source:
    """Find a model and check everything about its files that can be checked without reading a weight.

    Args:
        model: a local folder, a Hub id, or a GGUF file (or a folder that holds just one). What exists on disk
            is never taken for a Hub id, and then the network isn't touched.
        revision: branch, tag or commit of a Hub id.
        allow_converted: take a model that is converted already (for `inspect`).

    Raises:
        UsageError: the name can't be a path or a Hub id, or `revision` doesn't apply.
        ModelError: the files are not a model that can be converted; every problem is named.
        NetworkError: the Hub can't be reached or refuses.
    """
    path = local_path(model)
    if path is not None:
        if revision is not None:
            raise UsageError(f"a revision applies to a Hub id, and {path} is a local path", "Leave out --revision")
        return from_path(path, str(model), allow_converted=allow_converted)
    from linearize.hub import download

    folder = download(str(model), revision)
    if (folder / "config.json").exists() and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"'{model}' on the Hub (or the part of it that is cached) has no safetensors weights, "
            "and pickle weights are not taken",
            f"Convert it to safetensors first: AutoModelForCausalLM.from_pretrained('{model}')"
            ".save_pretrained(NEW_FOLDER), and the same for its tokenizer",
        )
    try:
        return _from_folder(folder, str(model), "hub", allow_converted)
    except ModelError as error:  # whoever asked for a Hub id has never seen the folder in the cache
        what, fix = (text.replace(str(folder), f"'{model}'") for text in (error.what, error.fix))
        raise ModelError(what, fix) from error


def local_path(model: str | Path) -> Path | None:
    """The local path that `model` means, or None if it is a Hub id."""
    text = os.fspath(model)
    if not text.strip() or "\0" in text:
        raise UsageError("the model's name is empty", "Give a folder, a Hub id or a GGUF file")
    try:
        home = Path(text).expanduser()
    except RuntimeError:  # ~name of nobody
        home = Path(text)
    for path in (Path(text), home):
        if os.path.lexists(path):
            return path
    if isinstance(model, Path) or not HUB_ID.fullmatch(text) or text.endswith((".gguf", ".safetensors")):
        raise ModelError(f"there is no file or folder {text}", "Check the path; a Hub id looks like owner/name")
    return None


def from_path(path: Path, name: str | None = None, *, allow_converted: bool = False) -> Source:
    """A source from a local folder or GGUF file; never touches the network."""
    name = name or str(path)
    path = Path(os.path.realpath(path))
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return Source(name, "gguf", path.parent, {}, gguf=path)
        hint = "Give the folder that holds it" if path.suffix in (".safetensors", ".bin", ".json") else ""
        raise ModelError(f"{name} is a file, and neither a model folder nor a GGUF file", hint)
    if not path.is_dir():
        raise ModelError(f"{name} is neither a file nor a folder (a broken link?)")
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise ModelError(f"{name} can't be read ({error.strerror})") from None
    ggufs = sorted(entry for entry in names if entry.lower().endswith(".gguf"))
    if ggufs and not any(entry.endswith((".safetensors", ".safetensors.index.json")) for entry in names):
        if len(ggufs) > 1:
            raise ModelError(f"{name} holds {len(ggufs)} GGUF files ({', '.join(ggufs[:4])})", "Give one of the files")
        return Source(name, "gguf", path, {}, gguf=path / ggufs[0])
    return _from_folder(path, name, "folder", allow_converted)


def _from_folder(folder: Path, name: str, origin: str, allow_converted: bool) -> Source:
    config = read_config(folder)
    notes = check_config(config, folder, allow_converted)
    checkpoint = read_checkpoint(folder)
    stray = {key for key in checkpoint.tensors if ".linearize." in key}
    if stray and not config.get("linearize"):
        raise ModelError(
            f"{folder} holds mixer tensors ('{min(stray)}') but its config.json has no linearize block",
            "Restore the config.json that linearize wrote, or convert the original model",
        )
    if not config.get("linearize"):  # of a converted model nothing is converted, so nothing stays behind
        notes += [f"{file} stays behind: {why}" for file, why in checkpoint.left_behind.items()]
        notes += _tokenizer_notes(folder, checkpoint)
    return Source(name, origin, folder, config, checkpoint, notes=tuple(notes))


def _tokenizer_notes(folder: Path, checkpoint: Checkpoint) -> list[str]:
    if not any(fnmatchcase(name, pattern) for name in checkpoint.side_files for pattern in TOKENIZER):
        return ["it has no tokenizer files, so the converted model will have none"]
    if "tokenizer_config.json" not in checkpoint.side_files:
        return []
    try:
        custom = read_json(folder, "tokenizer_config.json").get("auto_map")
    except BadFiles as error:
        return [str(fault) for fault in error.faults]
    return ["its tokenizer asks for custom code (auto_map in tokenizer_config.json), which stays behind"] * bool(custom)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder, or a ModelError that says what the folder is instead of a model."""
    if not os.path.lexists(folder / "config.json"):
        raise _not_a_model(folder)
    try:
        return read_json(folder, "config.json")
    except BadFiles as error:
        raise all_faults(folder, error.faults) from None


def check_config(config: Mapping[str, Any], folder: Path, allow_converted: bool = False) -> list[str]:
    """Refuse, by its config alone, a model that can't be converted; returns notes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{folder}: config.json has no model_type, so its architecture is unknown")
    if (model_type.startswith(ALREADY) or config.get("linearize")) and not allow_converted:
        raise ModelError(
            f"{folder} is converted already (model_type '{model_type}')", "Convert the original model instead"
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{folder} is an encoder-decoder (model_type '{model_type}'); only decoder-only language models "
            "can be converted"
        )
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise ModelError(
            f"{folder} is quantized (quantization_config, method '{method}'), "
            "and linearize keeps weights as they are stored",
            "Convert the unquantized model, then quantize the result",
        )
    if config.get("auto_map") and not model_type.startswith(ALREADY):
        return ["the source's auto_map (custom code) is dropped: transformers' own class of this type is used"]
    return []


def _not_a_model(folder: Path) -> ModelError:
    names = sorted(entry.name for entry in folder.iterdir())
    has = set(names).__contains__
    if not names:
        return ModelError(f"{folder} is empty", "Give the folder that holds config.json and the weights")
    if has("adapter_config.json"):
        return ModelError(
            f"{folder} is a PEFT adapter (adapter_config.json, no config.json), not a whole model",
            "Merge it into its base model first: PeftModel.from_pretrained(base, ADAPTER).merge_and_unload()"
            ".save_pretrained(MERGED)",
        )
    if has("model_index.json"):
        return ModelError(f"{folder} is a diffusers pipeline (model_index.json), not a language model")
    if has("params.json"):
        return ModelError(
            f"{folder} is in its publisher's own format (params.json, no config.json)",
            "Use the checkpoint in transformers' format",
        )
    inner = [name for name in names if (folder / name / "config.json").is_file()]
    fix = f"Did you mean {folder / inner[0]}?" if inner else "Give the folder that holds config.json and the weights"
    return ModelError(f"{folder} has no config.json, so it isn't a model folder", fix)
