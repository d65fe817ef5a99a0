"""Carry out a plan: link the weights, write the mixers, one layer at a time, and publish the folder."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.checkpoint import INDEX
from linearize.digest import Meter, Progress
from linearize.errors import ModelError, ResourceError, UsageError
from linearize.family import without_how_to_compute
from linearize.headers import build_header
from linearize.keep_softmax import AUTO
from linearize.plan import (
    MIXER_SHARD,
    REMOTE_CODE,
    Plan,
    check_resources,
    dtype_name,
    human,
    make_plan,
    mixer_tensor,
)
from linearize.selection_file import IN_MODEL, because, is_auto, read_selection, selection_of, with_chosen
from linearize.sink import Stage, disk_errors
from linearize.source import Source, resolve
from linearize.target import Destination, check_target, survey

if TYPE_CHECKING:
    import torch

    from linearize.recipe import Recipe


@dataclass(frozen=True)
class Result:
    """What `convert` did, or (with `dry_run`) would do.

    Attributes:
        plan: what was decided, and why.
        out: the folder.
        seconds: wall time.
        files: name -> (bytes, sha256) of every file written or linked; empty after a dry run.
        notes: what went otherwise than planned.
    """

    plan: Plan
    out: Path
    seconds: float
    files: Mapping[str, tuple[int, str]]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "seconds": round(self.seconds, 3),
            "files": {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()},
            "plan": self.plan.to_dict(),
            "notes": list(self.notes),
        }


def convert(
    model: str | Path,
    out: str | Path,
    *,
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    revision: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    force: bool = False,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Result:
    """Convert a model to the mixers that `recipe` names, into the folder `out`.

    A file operation: the weights are hard-linked (or copied) as they are, and one small file of mixer tensors is
    added. `out` appears whole or not at all. With keep_softmax `auto:BUDGET`, `select` runs the model first.

    Args:
        model: local folder, Hub id, or GGUF file.
        recipe: a `Recipe`, a YAML file, the name of a shipped recipe, a mapping, or None for the default.
        revision: branch, tag or commit of a Hub id.
        overrides: single recipe keys to change, e.g. `{"window": 128}`.
        dry_run: only plan; nothing is written (a Hub model is still downloaded to its cache).
        force: replace an existing `out` atomically.
        dtype: of a GGUF model's dequantised weights ("float32", "bfloat16", "float16"); other weights stay as
            stored.
        progress: called with (what, bytes done, bytes in all).

    Raises:
        UsageError, ModelError, ResourceError, NetworkError: see their `exit_code`; `out` is as it was.
    """
    from linearize.recipe import load_recipe

    start = time.monotonic()
    settings = load_recipe(recipe, overrides or {})  # first: a typo is found before anything is downloaded
    if (selection_file := selection_of(settings)) is not None:
        read_selection(selection_file)
    destination = survey(out)
    source = resolve(model, revision=revision)
    if dtype is not None and not source.gguf:
        raise UsageError("dtype applies to GGUF models; other weights stay as they are stored", "Leave it out")
    check_target(destination, source.gguf or source.folder, force=force)
    if source.gguf:
        from linearize.gguf import describe

        source = describe(source, dtype)
    plan = make_plan(source, settings, destination)
    check_resources(plan, destination)
    _check_memory(plan)
    if dry_run:
        return Result(plan, destination.path, time.monotonic() - start, {})
    selection = _measured(plan, revision, progress) if is_auto(plan.recipe) else None
    if selection is not None:
        chosen = because(selection, IN_MODEL)
        made = make_plan(source, with_chosen(plan.recipe, selection), destination, chosen=chosen)
        plan = replace(made, memory_bytes=plan.memory_bytes)
    with _terminable():
        plan, files, notes = _carry_out(plan, selection, destination, force=force, dtype=dtype, progress=progress)
    told = selection["notes"] if selection is not None else ()
    return Result(plan, destination.path, time.monotonic() - start, files, (*told, *notes))


def _measured(plan: Plan, revision: str | None, progress: Progress | None) -> dict[str, Any]:
    """The selection for `keep_softmax: auto:BUDGET`, without what isn't the same each time."""
    from linearize.selection import select

    budget = str(plan.recipe.keep_softmax).removeprefix(AUTO)
    selection = select(plan.source.name, budget, recipe=plan.recipe, revision=revision, progress=progress)
    return {key: value for key, value in selection.items() if key != "seconds"}


def _carry_out(
    plan: Plan,
    selection: Mapping[str, Any] | None,
    destination: Destination,
    *,
    force: bool,
    dtype: str | None,
    progress: Progress | None,
) -> tuple[Plan, dict[str, tuple[int, str]], list[str]]:
    stage = Stage(destination.path, force=force, progress=progress)
    try:
        clean = _dequantised(plan, destination, stage.scratch(), dtype) if plan.source.gguf else plan
        notes = _fill(stage, clean, progress)
        if selection is not None:
            stage.write(IN_MODEL, to_json(selection))
        notes += stage.publish()
    except BaseException:
        stage.abandon()
        raise
    # The scratch folder of a GGUF model is no part of what was planned; what was noticed on the way is.
    return replace(plan, notes=clean.notes), stage.files, notes


def _dequantised(plan: Plan, destination: Destination, scratch: Path, dtype: str | None) -> Plan:
    """The plan for the folder that a GGUF file was dequantised into."""
    from linearize.gguf import dequantise

    with disk_errors(scratch):
        source = dequantise(plan.source, scratch, dtype)
    return make_plan(source, plan.recipe, destination, chosen=plan.chosen)


def _fill(stage: Stage, plan: Plan, progress: Progress | None) -> list[str]:
    """Put every file of the plan into the stage; returns notes."""
    from linearize.modeling.classes import linearized_config_dict, remote_code

    source, names = plan.source, plan.shard_names()
    notes = []
    for name, new_name in names.items():
        path = source.checkpoint.paths[name]
        with disk_errors(path):
            size = path.stat().st_size
        if size != source.shards[name].file_bytes:
            raise ModelError(f"{path} has changed since it was checked", "Convert again when it is complete")
        if not stage.link(path, new_name):
            notes.append(f"{name} was copied, since it can't be linked from {path.parent}")
    stage.write(MIXER_SHARD, mixer_file(plan, progress))
    for name in source.side_files:
        stage.copy(source.checkpoint.paths[name], name)
    base_type = plan.probe.base_model_type
    raw = without_how_to_compute(source.config)
    config = linearized_config_dict(raw, base_type, plan.layers, plan.recipe.conversion())
    stage.write("config.json", to_json(config))
    stage.write(INDEX, to_json(merged_index(source, names, plan)))
    stage.write(REMOTE_CODE, remote_code(base_type).encode())
    return notes


def mixer_file(plan: Plan, progress: Progress | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of the safetensors file of mixer tensors; one layer's mixer is in memory at a time."""
    import torch

    from linearize.mixers import mixer_of

    yield build_header(plan.new_tensors)
    expected = iter(plan.new_tensors.items())
    meter = Meter("mixers", sum(f.bytes for f in plan.files if f.name == MIXER_SHARD), progress)
    for layer in plan.converted:
        with torch.device("cpu"), torch.no_grad():
            mixer = mixer_of(layer, plan.recipe.seed)
        for name, tensor in mixer.state_dict().items():
            planned = next(expected)
            actual = (mixer_tensor(layer, name), (dtype_name(tensor.dtype), tuple(tensor.shape)))
            if planned != actual:
                raise RuntimeError(f"mixer '{layer['mixer']['name']}' made {actual}, the plan has {planned}")
            yield tensor_memory(tensor)
            meter.add(tensor.nbytes)
        del mixer


def tensor_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor (little-endian, as safetensors wants them); no copy where it is contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def merged_index(source: Source, names: Mapping[str, str], plan: Plan) -> dict[str, Any]:
    """model.safetensors.index.json of the converted model."""
    weight_map = {key: names[tensor.file] for key, tensor in source.tensors.items()}
    weight_map |= dict.fromkeys(plan.new_tensors, MIXER_SHARD)
    new_bytes = sum(f.bytes for f in plan.files if f.name == MIXER_SHARD)
    metadata = dict(source.checkpoint.index_metadata)
    metadata["total_size"] = source.weight_bytes + new_bytes
    if "total_parameters" in metadata:
        metadata["total_parameters"] = source.num_parameters + plan.new_parameters
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def _check_memory(plan: Plan) -> None:
    """A GGUF model is loaded whole: better to say so now than to be killed half-way."""
    if not plan.source.loaded_bytes:
        return
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return  # not Linux
    if plan.memory_bytes > free:
        raise ResourceError(
            f"dequantising {plan.source.name} takes {human(plan.memory_bytes)} of memory, and {human(free)} is free",
            "Use the model's safetensors checkpoint, which is never loaded, or a machine with more memory",
        )


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the conversion as Ctrl-C does, so that the stage is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    wanted = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # A handler that the calling program has set is its own business.
    old = {number: signal.signal(number, stop) for number in wanted if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
