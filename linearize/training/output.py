"""A trained model as a converted checkpoint: what training left alone is linked, what it changed is written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linearize.checkpoint import INDEX, read_json
from linearize.conversion import to_json
from linearize.digest import Meter, Progress, sha256_all
from linearize.errors import ModelError, ResourceError, UsageError
from linearize.family import base_type
from linearize.faults import BadFiles
from linearize.headers import tensor_bytes
from linearize.plan import FILE_SLACK_BYTES, MIXER_SHARD, REMOTE_CODE, SMALL_FILES_BYTES, human, plan_tensors
from linearize.sink import Stage, disk_errors
from linearize.source import Source, from_path
from linearize.target import MANIFEST, Destination, check_target, survey
from linearize.training.shards import (
    LORA,
    PEFT_PREFIX,
    BaseWeights,
    Shard,
    base_shards,
    mixer_tensors,
    plain_state,
    saving,
    shard_file,
    tensor_file,
)

ADAPTER = "adapter"
CARD = "README.md"
UNCHANGED, CHANGED = "unchanged", "changed"


def check(checkpoint: str | Path, out: str | Path, *, base_changed: bool, force: bool = False) -> Source:
    """Everything about `write` that can be refused before a weight is read; returns the checked checkpoint.

    Raises:
        UsageError: OUT isn't empty (and `force` is off), or would harm the checkpoint or something that isn't ours.
        ModelError: the checkpoint isn't converted, or damaged, or holds an adapter that isn't part of its weights.
        ResourceError: OUT's disk is too small.
    """
    source = read_converted(checkpoint)
    destination = survey(out)
    check_target(destination, source.folder, force=force)
    _check_space(source, base_shards(source), destination, base_changed=base_changed, more=0)
    return source


def read_converted(checkpoint: str | Path) -> Source:
    """A converted folder as a source.

    Raises:
        ModelError: it isn't converted, or damaged, or holds an adapter that isn't part of its weights.
    """
    from linearize.modeling.classes import BLOCK, checked_block

    if not os.path.lexists(checkpoint):
        raise ModelError(f"there is no folder {checkpoint}", "Give one that `linearize convert` wrote")
    source = from_path(Path(checkpoint), allow_converted=True)
    if source.gguf or not source.config.get(BLOCK):
        raise ModelError(f"{checkpoint} isn't a converted model", "Convert it first: linearize convert MODEL -o OUT")
    checked_block(source.config.get("model_type"), source.config.get(BLOCK))
    if (source.folder / ADAPTER).is_dir():
        raise ModelError(
            f"{checkpoint} holds an adapter ({ADAPTER}/) that isn't part of its weights",
            "Train with lora.merge: true to get a model without one, or take the folder away to train without it",
        )
    return source


def write(
    model: Any,
    checkpoint: str | Path,
    out: str | Path,
    *,
    record: Mapping[str, Any],
    adapter: Any = None,
    base_changed: bool,
    state: Mapping[str, Any] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a trained model into the folder `out`, which appears whole or not at all.

    config.json is the checkpoint's, with `record` as the key `training` of its `linearize` block; tokenizer, chat
    template, generation config and licence are its own byte for byte; every tensor keeps its name and dtype.

    Args:
        model: the live converted model, unwrapped; its LoRA is merged, absent, or that of `adapter`.
        checkpoint: the converted folder that training began from.
        record: `base_weights` ("unchanged" or "changed"), `teacher`, `stages`: see docs/checkpoint.md.
        adapter: the peft model whose LoRA is kept, in `out/adapter`.
        base_changed: whether weights other than the mixers' have changed. If not, the checkpoint's files are linked.
        state: all tensors of `adapter` (or else `model`), where its own are sharded over processes.
        force: replace an existing `out` atomically.
        progress: called with (what, bytes done, bytes in all).

    Returns:
        out, seconds, files (name -> bytes and sha256), notes, and `training`: the record as it was written.

    Raises:
        UsageError, ModelError, ResourceError: as `check`, and ModelError for a tensor that isn't finite. `out` is as
            it was.
    """
    begun = time.monotonic()
    source = check(checkpoint, out, base_changed=base_changed, force=force)
    if os.path.realpath(record.get("teacher") or "") == os.path.realpath(source.folder):
        record = {**record, "teacher": None}  # it is converted, too
    record = joined(source.config["linearize"].get("training"), record, base_changed=base_changed)
    whole = model.state_dict() if state is None else state
    plain = plain_state(whole, kept=adapter is not None)
    mixers = mixer_tensors(source, plain)
    weights = BaseWeights(source, plain) if base_changed else None
    more = (weights.scratch_bytes if weights else 0) + _adapter_bytes(adapter)
    _check_space(source, base_shards(source), survey(out), base_changed=base_changed, more=more)
    stage = Stage(out, force=force, progress=progress)
    try:
        notes = _base_files(stage, source, model, weights, progress)
        _fill(stage, source, mixers, record, adapter is not None, progress)
        if adapter is not None:
            _write_adapter(stage, adapter, state)
        notes += stage.publish()
    except BaseException:
        stage.abandon()
        raise
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in stage.files.items()}
    return {
        "out": str(stage.out),
        "seconds": round(time.monotonic() - begun, 3),
        "files": files,
        "training": record,
        "notes": notes,
    }


def joined(before: Mapping[str, Any] | None, record: Mapping[str, Any], *, base_changed: bool) -> dict[str, Any]:
    """The record of a model that may have been trained before: weights that have changed once stay changed."""
    before = before or {}
    changed = base_changed or before.get("base_weights", UNCHANGED) != UNCHANGED
    return {
        **record,
        "base_weights": CHANGED if changed else UNCHANGED,
        "teacher": before.get("teacher") or _named(record.get("teacher")),
        "stages": [*before.get("stages", ()), *record.get("stages", ())],
    }


def _named(teacher: str | None) -> str | None:
    """A model's name that, read in another folder, isn't taken for a Hub id: `models/base` there is somebody else's."""
    if teacher is None or teacher.startswith((".", "~")) or not os.path.lexists(teacher):
        return teacher
    return os.path.join(".", teacher)


def _base_files(
    stage: Stage, source: Source, model: Any, weights: BaseWeights | None, progress: Progress | None
) -> list[str]:
    """Put the base model's weights into the stage, linked where they are as they were; returns notes."""
    notes = []
    if weights:
        weights.take_apart(model, stage.scratch())
    shards = base_shards(source)
    meter = Meter("weights", sum(shard.bytes for shard in shards), progress)
    for shard in shards:
        if weights or not shard.whole:
            stage.write(shard.name, shard_file(shard, weights, meter))
        elif not stage.link(shard.origin, shard.name):
            notes.append(f"{shard.origin.name} was copied, since it can't be linked from {shard.origin.parent}")
    return notes


def _fill(
    stage: Stage,
    source: Source,
    mixers: Mapping[str, Any],
    record: Mapping[str, Any],
    adapter: bool,
    progress: Progress | None,
) -> None:
    """Put everything but the base model's weights into the stage."""
    from linearize.modeling.classes import remote_code
    from linearize.training.card import base_card, card, licence_of

    size = sum(value.nbytes for value in mixers.values())
    stage.write(MIXER_SHARD, tensor_file(mixers, Meter("mixers", size, progress)))
    for name in source.side_files:
        stage.copy(source.checkpoint.paths[name], name)
    config = {**source.config, "linearize": {**source.config["linearize"], "training": record}}
    stage.write("config.json", to_json(config))
    stage.write(INDEX, to_json(_index(source, base_shards(source), mixers)))
    stage.write(REMOTE_CODE, remote_code(base_type(source.config)).encode())
    text = card(config, base_card(record["teacher"]), licence=licence_of(source.folder), adapter=adapter)
    stage.write(CARD, text.encode())


def _adapter_bytes(adapter: Any) -> int:
    if adapter is None:
        return 0
    return sum(value.nbytes for name, value in adapter.named_parameters() if f".{LORA}" in name)


def _index(source: Source, shards: list[Shard], mixers: Mapping[str, Any]) -> dict[str, Any]:
    """model.safetensors.index.json of the trained model."""
    weight_map = {key: shard.name for shard in shards for key in shard.tensors}
    weight_map |= dict.fromkeys(mixers, MIXER_SHARD)
    total = sum(shard.bytes for shard in shards) + sum(value.nbytes for value in mixers.values())
    metadata = {**source.checkpoint.index_metadata, "total_size": total}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def _write_adapter(stage: Stage, adapter: Any, state: Mapping[str, Any] | None) -> None:
    """The LoRA of a peft model, as peft saves it; its config names the folder that it belongs to."""
    folder = stage.scratch()
    targets = adapter.peft_config[adapter.active_adapter].target_modules or ()
    if state is not None:  # peft takes the names of its own model
        state = {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): value for name, value in state.items()}
    with disk_errors(folder), saving():
        # "auto" would ask the Hub whether the vocabulary has grown.
        embeddings = any(name in str(targets) for name in ("embed", "lm_head"))
        adapter.save_pretrained(
            folder, selected_adapters=[adapter.active_adapter], save_embedding_layers=embeddings, state_dict=state
        )
    found = next(folder.rglob("adapter_config.json"))
    config = json.loads(found.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = str(stage.out)
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()  # a set's order is another one in each process
    stage.write(f"{ADAPTER}/adapter_config.json", to_json(config))
    stage.copy(found.parent / "adapter_model.safetensors", f"{ADAPTER}/adapter_model.safetensors")


def _check_space(
    source: Source, shards: list[Shard], destination: Destination, *, base_changed: bool, more: int
) -> None:
    mixers = plan_tensors(source.config["linearize"]["layers"], 0)
    needed = SMALL_FILES_BYTES + more + sum(tensor_bytes(dtype, shape) or 0 for dtype, shape in mixers.values())
    for shard in shards:
        linked = shard.whole and not base_changed and shard.origin.stat().st_dev == destination.device
        needed += 0 if linked else shard.bytes + FILE_SLACK_BYTES
    needed += sum(size + FILE_SLACK_BYTES for size in source.side_files.values())
    if needed > destination.free_bytes:
        raise ResourceError(
            f"{destination.path} needs {human(needed)} and {destination.disk} has {human(destination.free_bytes)} free",
            "Free some space, or choose an OUT on another disk",
        )


def replace_card(folder: str | Path, text: str, *, progress: Progress | None = None) -> list[str]:
    """Give a folder that linearize wrote another card. It is swapped for one of the same files and that card, so that
    card and manifest agree at every moment.

    Returns:
        Notes on what couldn't be cleaned up.

    Raises:
        ModelError: a file is missing, or isn't what the manifest says: a new manifest would declare it sound.
        UsageError: it holds files that the manifest doesn't list, which would be lost.
        ResourceError: the disk refuses.
    """
    place = survey(folder).path
    try:
        listed = {name: entry["sha256"] for name, entry in read_json(place, MANIFEST)["files"].items()}
    except (BadFiles, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{place} isn't as linearize wrote it ({error})", "Make it again") from None
    names = set(listed) - {CARD, MANIFEST}
    found = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_symlink() or not path.is_dir()}
    if missing := sorted(names - found):
        raise ModelError(f"{place} lacks {missing[0]}, which its manifest lists", "Make it again")
    if strangers := sorted(found - names - {CARD, MANIFEST}):
        raise UsageError(f"{place} holds {strangers[0]}, which linearize didn't write", "Move it somewhere else")
    digests = sha256_all({name: place / name for name in sorted(names)}, "check", progress)
    if changed := [name for name, digest in digests.items() if digest != listed[name]]:
        raise ModelError(f"{place / changed[0]} isn't as linearize wrote it any more", "Make it again")
    stage = Stage(place, force=True, progress=progress)
    try:
        for name in sorted(names):
            stage.link(place / name, name)
        stage.write(CARD, text.encode())
        return stage.publish()
    except BaseException:
        stage.abandon()
        raise
