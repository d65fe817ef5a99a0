"""Training checkpoints: everything that a training goes on from, written whole or not at all, the newest few kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from linearize.errors import ModelError
from linearize.sink import disk_errors, flush
from linearize.swap import sync_folder
from linearize.training.shards import saving

PARAMETERS, OPTIMIZER, POSITION = "parameters.safetensors", "optimizer.pt", "position.json"
_NAME = re.compile(r"(\d{3})-(\d{9})")


def save(
    folder: Path, parameters: Mapping[str, Tensor], optimizer: Any, position: Mapping[str, Any], keep: int
) -> Path:
    """Write a checkpoint below `folder`, and remove all but the newest `keep`.

    Args:
        parameters: whatever training has changed so far, whole and on the CPU.
        optimizer: its state dict, or None between stages.
        position: JSON-able, with the numbers `stage` and `step` of what comes next.

    Raises:
        ResourceError: the disk refuses; older checkpoints are as they were.
    """
    place = folder / f"{position['stage']:03d}-{position['step']:09d}"
    staged = folder / f".{place.name}.part"
    with disk_errors(place), saving():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        try:
            save_file({name: tensor.contiguous() for name, tensor in parameters.items()}, staged / PARAMETERS)
            if optimizer is not None:
                with open(staged / OPTIMIZER, "wb") as file:  # given a path, torch doesn't say that the disk is full
                    torch.save(optimizer, file)
            (staged / POSITION).write_text(json.dumps(dict(position)), encoding="utf-8")
            for path in staged.iterdir():
                flush(path)
            sync_folder(staged)
            shutil.rmtree(place, ignore_errors=True)  # of an earlier run that was resumed from before it
            os.rename(staged, place)
            sync_folder(folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def checkpoints(folder: Path) -> list[Path]:
    """Those in `folder`, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / POSITION).is_file())


def position(place: Path) -> dict[str, Any]:
    """Where the checkpoint `place` stands.

    Raises:
        ModelError: it can't be read.
    """
    try:
        return json.loads((place / POSITION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{place / POSITION} can't be read ({error})", f"Remove {place} to go on from before"
        ) from None


def read(place: Path, own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The parameters of the checkpoint `place`, and the optimiser's state dict, if it has one.

    Raises:
        ModelError: they can't be read, or aren't exactly those of `own`.
    """
    try:
        stored = load_file(place / PARAMETERS)
        path = place / OPTIMIZER
        optimizer = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    except Exception as error:
        raise ModelError(f"{place} can't be read ({error})", "Remove it to go on from before") from error
    odd = sorted(stored.keys() ^ own.keys())
    odd = odd or sorted(name for name, tensor in stored.items() if tensor.shape != own[name].shape)
    if odd:
        raise ModelError(f"{place} isn't of this training: '{odd[0]}' differs", "Start again in another folder")
    return stored, optimizer


def remove(place: Path) -> None:
    """Delete a checkpoint, and the folder that held it if it was the last."""
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.parent.rmdir()
