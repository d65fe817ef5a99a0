"""A converted folder against its manifest, index, config and architecture; every fault is named."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from linearize.checkpoint import INDEX, Checkpoint, collect, find_inside, is_plain_name, read_json
from linearize.digest import CHUNK_BYTES, Meter, Progress, in_threads
from linearize.errors import LinearizeError, ModelError
from linearize.family import Loaded, as_loaded, compare_tensors, load_config, tied_twice
from linearize.faults import BadFiles, Fault
from linearize.headers import TensorInfo
from linearize.mixers.registry import IMPORT_IT, NotRegistered
from linearize.plan import MIXER_SHARD, REMOTE_CODE, plan_tensors
from linearize.scan import scan_file
from linearize.target import MANIFEST
from linearize.verdict import NOT_CONVERTED, Findings, Verdict

CONFIG = "config.json"


def verify(out: str | Path, *, progress: Progress | None = None) -> list[Fault]:
    """Check a converted folder, and read every byte of it once.

    Returns:
        All faults; none if the folder is whole: the manifest's files are there and unchanged and no other,
        index, headers and config agree, every mixer tensor has its name, shape and dtype, tied weights are
        equal, and no weight is NaN or infinite. A folder that `save_pretrained` wrote has no manifest, and that
        is no fault.

    Raises:
        ModelError: `out` isn't a folder.
    """
    return list(judge(out, progress=progress).faults)


def judge(out: str | Path, *, progress: Progress | None = None) -> Verdict:
    """As `verify`, with notes, with what could not be checked, and with the mend."""
    folder = Path(out)
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}", "Give the folder that `linearize convert` wrote")
    faults: list[Fault] = []
    findings = Findings()
    config: dict[str, Any] = {}
    checkpoint = Checkpoint()
    try:
        config = read_json(folder, CONFIG)
    except BadFiles as error:
        faults += error.faults
    if _never_was_converted(folder, config):
        plain = Fault(CONFIG, "", "has no linearize block, so the folder isn't a converted model")
        return Verdict(str(out), tuple(faults) or (plain,), mend=NOT_CONVERTED)
    try:
        checkpoint, more = collect(folder)
        faults += more
    except LinearizeError as error:
        faults.append(Fault(INDEX, "", f"is missing, or its weights are ({error.what})"))
    faults += _check_index_size(checkpoint)
    faults += _check_config(folder, config, checkpoint, findings) if config else []
    faults += _check_bytes(folder, checkpoint, progress, findings)
    return Verdict(
        str(out),
        tuple(dict.fromkeys(faults)),
        tuple(findings.notes),
        tuple(findings.unchecked),
        findings.mend if faults else "",
    )


def _never_was_converted(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether nothing in the folder speaks of a conversion: then the damage of one is not the news."""
    ours = config.get("linearize") or str(config.get("model_type")).startswith("linearized_")
    return not ours and not any((folder / name).exists() for name in (MANIFEST, MIXER_SHARD, REMOTE_CODE))


def _check_index_size(checkpoint: Checkpoint) -> list[Fault]:
    total = checkpoint.index_metadata.get("total_size")
    actual = sum(tensor.bytes for tensor in checkpoint.tensors.values())
    if total is None or not checkpoint.tensors or checkpoint.unread or total == actual:
        return []
    return [Fault(INDEX, "", f"says total_size {total}, the tensors have {actual} bytes")]


def _check_config(folder: Path, config: Mapping[str, Any], checkpoint: Checkpoint, findings: Findings) -> list[Fault]:
    block = config.get("linearize")
    if not isinstance(block, dict) or not isinstance(block.get("layers"), list):
        return [Fault(CONFIG, "", "has no linearize block with its layers, so the folder isn't a converted model")]
    faults = _check_names(folder, config, block)
    try:
        base = load_config(config, CONFIG)
        faults += _check_layers(base, block)
        base_tensors = {key: info for key, info in checkpoint.tensors.items() if ".linearize." not in key}
        if checkpoint.tensors:
            loaded = as_loaded(base, base_tensors)
            faults += _check_architecture(loaded, base_tensors, checkpoint, findings)
            faults += _check_tied(loaded, checkpoint, base_tensors)
    except LinearizeError as error:
        faults.append(Fault(CONFIG, "", f"can't be used: {error.what}"))
    if checkpoint.tensors:
        faults += _check_mixers(block, checkpoint, findings)
    return faults


def _check_architecture(
    loaded: Loaded | str, tensors: Mapping[str, TensorInfo], checkpoint: Checkpoint, findings: Findings
) -> list[Fault]:
    """The base model's tensors against its architecture; what can't be compared is said, not passed over."""
    faults, notes = compare_tensors(loaded, tensors)
    if isinstance(loaded, str):
        findings.unchecked += notes
    else:
        findings.notes += notes
    missing_is_known = bool(checkpoint.unread)  # then its file is a fault already
    return [fault for fault in faults if fault.file != CONFIG or not missing_is_known]


def _check_names(folder: Path, config: Mapping[str, Any], block: Mapping[str, Any]) -> list[Fault]:
    """Model type, class names and the file of remote code must all follow from the base model type."""
    from linearize.modeling.classes import BLOCK_VERSION, PREFIX, auto_map, class_names

    base = str(block.get("base_model_type"))
    if block.get("version") != BLOCK_VERSION:
        what = f"has a linearize block of version {block.get('version')}, this release reads {BLOCK_VERSION}"
        return [Fault(CONFIG, "", what)]
    try:
        wanted = {
            "model_type": f"{PREFIX}{base}",
            "architectures": [class_names(base)[1]],
            "auto_map": auto_map(base),
        }
    except KeyError:
        return [Fault(CONFIG, "", f"names the base model type '{base}', which transformers doesn't know")]
    faults = [
        Fault(CONFIG, "", f"has {key} {config.get(key)!r}, not {value!r}")
        for key, value in wanted.items()
        if config.get(key) != value
    ]
    if not (folder / REMOTE_CODE).is_file():
        faults.append(Fault(REMOTE_CODE, "", "is missing, and auto_map needs it"))
    return faults


def _check_layers(base: Any, block: Mapping[str, Any]) -> list[Fault]:
    """The block's layers must be those that the base model has."""
    from linearize.modeling.probe import probe

    probed = {layer.module: layer for layer in probe(base).layers}
    faults, seen = [], set()
    for entry in block["layers"]:
        module = entry.get("module") if isinstance(entry, dict) else None
        layer = probed.get(module)  # type: ignore[arg-type]
        if layer is None or entry.get("layer") != layer.layer or module in seen:
            faults.append(Fault(CONFIG, "", f"lists layer {module!r:.100}, which the base model hasn't (twice)"))
            continue
        seen.add(module)
        if entry.get("mixer") and not layer.shape.agrees(entry.get("shape")):
            faults.append(Fault(CONFIG, "", f"gives layer '{module}' another attention shape than its base model has"))
    faults += [
        Fault(CONFIG, "", f"leaves out layer '{module}' of its base model") for module in probed if module not in seen
    ]
    return faults


def _check_mixers(block: Mapping[str, Any], checkpoint: Checkpoint, findings: Findings) -> list[Fault]:
    tensors = checkpoint.tensors
    try:
        expected = plan_tensors(block["layers"], 0)
    except NotRegistered as error:
        findings.mend = IMPORT_IT
        return [Fault(CONFIG, "", f"needs a part that isn't registered: {error.what}")]
    except (LinearizeError, KeyError, TypeError, ValueError, AttributeError) as error:
        return [Fault(CONFIG, "", f"describes mixers that can't be built ({error})")]
    faults = [
        Fault(INDEX, key, "belongs to a mixer, and is stored nowhere")
        for key in expected
        if key not in tensors and key not in checkpoint.unread
    ]
    for key, tensor in tensors.items():
        if ".linearize." not in key:
            continue
        if key not in expected:
            faults.append(Fault(tensor.file, key, "belongs to no mixer of config.json"))
        elif (tensor.dtype, tensor.shape) != expected[key]:
            dtype, shape = expected[key]
            what = f"is {tensor.dtype} {list(tensor.shape)}, its mixer needs {dtype} {list(shape)}"
            faults.append(Fault(tensor.file, key, what))
    return faults


def _check_tied(loaded: Loaded | str, checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> list[Fault]:
    faults = []
    for key, other in tied_twice(loaded):
        a, b = tensors[key], tensors[other]
        if a.bytes != b.bytes or not _equal_bytes(checkpoint.paths[a.file], a, checkpoint.paths[b.file], b):
            faults.append(Fault(a.file, key, f"differs from '{other}', to which config.json ties it"))
    return faults


def _equal_bytes(path_a: Path, a: TensorInfo, path_b: Path, b: TensorInfo) -> bool:
    with open(path_a, "rb") as file_a, open(path_b, "rb") as file_b:
        file_a.seek(a.start)
        file_b.seek(b.start)
        left = a.bytes
        while left:
            count = min(left, CHUNK_BYTES)
            if file_a.read(count) != file_b.read(count):
                return False
            left -= count
    return True


def _check_bytes(folder: Path, checkpoint: Checkpoint, progress: Progress | None, findings: Findings) -> list[Fault]:
    """Every file against the manifest, and every weight for NaN and infinity, in one pass."""
    faults: list[Fault] = []
    if os.path.lexists(folder / MANIFEST):
        listed = _read_manifest(folder, faults)
    else:
        listed = {}
        findings.unchecked.append("hashes not checked: there is no manifest")
    paths: dict[str, Path] = {}
    for name in sorted(listed.keys() | checkpoint.shards.keys()):
        try:
            paths[name] = find_inside(folder, name)
        except BadFiles as error:
            faults += error.faults
    meter = Meter("verify", sum(path.stat().st_size for path in paths.values()), progress)
    jobs: dict[str, Callable[[threading.Event], object]] = {
        name: _job(path, checkpoint.shards.get(name), meter) for name, path in paths.items()
    }
    for name, result in (in_threads(jobs) if jobs else {}).items():
        if isinstance(result, Fault):
            faults.append(result)
            continue
        digest, bad = result  # type: ignore[misc]
        if name in listed:
            changed = _changed(name, paths[name].stat().st_size, digest, listed[name])
            if name.lower().endswith(".md"):  # a card is there to be edited
                findings.notes += [f"{name} {fault.what}" for fault in changed]
            else:
                faults += changed
        for key, (nan, infinite) in bad.items():
            counts = [f"{nan} NaN"] * bool(nan) + [f"{infinite} infinite"] * bool(infinite)
            faults.append(Fault(name, key, f"holds {' and '.join(counts)} values"))
    if listed:
        faults += _extra(folder, listed, findings)
    return faults


def _job(path: Path, header: Any, meter: Meter) -> Callable[[threading.Event], object]:
    def run(stop: threading.Event) -> object:
        try:
            return scan_file(path, header, meter, stop)
        except InterruptedError:
            raise
        except OSError as error:
            return Fault(path.name, "", f"can't be read ({error.strerror})")

    return run


def _read_manifest(folder: Path, faults: list[Fault]) -> dict[str, Mapping[str, Any]]:
    try:
        files = read_json(folder, MANIFEST).get("files")
    except BadFiles as error:
        faults += error.faults
        return {}
    if not isinstance(files, dict):
        faults.append(Fault(MANIFEST, "", "has no list of files"))
        return {}
    good = {}
    for name, entry in files.items():
        if not all(is_plain_name(part) for part in name.split("/")) or not isinstance(entry, dict):
            faults.append(Fault(MANIFEST, "", f"lists {json.dumps(name)[:120]}, which can't be a file of the folder"))
        else:
            good[name] = entry
    return good


def _changed(name: str, size: int, digest: str, entry: Mapping[str, Any]) -> list[Fault]:
    if size != entry.get("bytes"):
        return [Fault(name, "", f"has {size} bytes, the manifest says {entry.get('bytes')}")]
    if digest != entry.get("sha256"):
        return [Fault(name, "", "has changed: its sha256 differs from the manifest's")]
    return []


def _extra(folder: Path, listed: Mapping[str, Any], findings: Findings) -> list[Fault]:
    """Files that nothing accounts for. Hidden ones (.gitattributes, .cache) and texts are the user's own business."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    visible = {name for name in found if not any(part.startswith(".") for part in name.split("/"))}
    extra = sorted(visible - listed.keys() - {MANIFEST})
    texts = [name for name in extra if name.lower().endswith(".md")]
    findings.notes += [f"{name} was added: it isn't in the manifest" for name in texts]
    return [Fault(name, "", "isn't in the manifest") for name in extra if name not in texts]
