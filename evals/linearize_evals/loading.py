"""Models ready to be scored, and the checks that make two of them comparable."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import linearize
from linearize.errors import ModelError, UsageError, first_line
from linearize.training.output import ADAPTER, UNCHANGED
from linearize_evals.settings import SELF

DTYPES = ("float32", "bfloat16", "float16")
# Text whose tokens tell tokenizers apart that have the same vocabulary: spaces, digits, case, other scripts.
PROBE = "The code  is 1234567:\n\t'Été' naïve ÆØÅ 東京 don't -- x=3.14;"


def check_tokenizers(teacher: Any, student: Any) -> None:
    """Refuse two models that would be given different tokens for the same text.

    Raises:
        UsageError: if the vocabularies or the tokens of a sample differ.
    """
    why = ""
    if teacher.get_vocab() != student.get_vocab():
        why = f"their vocabularies differ ({len(teacher)} and {len(student)} tokens)"
    elif teacher(PROBE).input_ids != student(PROBE).input_ids:
        why = "they split the same text into different tokens"
    if why:
        raise UsageError(
            f"teacher and student have different tokenizers: {why}", "Compare a student with the model it was made from"
        )


def choose_device(device: str | None) -> Any:
    """The device to run on: what was asked for, this process's GPU, or the CPU.

    Raises:
        UsageError: if torch doesn't know or have it.
    """
    import torch

    from linearize_evals import processes

    if device is None:
        return processes.start().device
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except Exception as error:
        reason = first_line(error)
        raise UsageError(f"--device {device} can't be used here: {reason}", "Choose cpu, cuda or cuda:N") from None
    return chosen


def check_dtype(dtype: str | None) -> None:
    """Raise `UsageError` for a dtype that models can't run in here."""
    if dtype not in (None, *DTYPES):
        raise UsageError(f"models can't run in '{dtype}' here", f"Choose one of {', '.join(DTYPES)}")


def choose_dtype(dtype: str | None, device: Any) -> tuple[Any, str]:
    """A torch dtype (or "auto", the checkpoint's own) and why it was chosen.

    On a CPU the faster of float32 and bfloat16 is measured, since only some CPUs multiply bfloat16 matrices quickly.

    Raises:
        UsageError: for an unknown dtype.
    """
    import torch

    check_dtype(dtype)
    if dtype is not None:
        return getattr(torch, dtype), "asked for"
    if device.type != "cpu":
        return "auto", "the checkpoint's own"
    ratio = _matmul_seconds(torch.float32) / _matmul_seconds(torch.bfloat16)
    best, other = (torch.bfloat16, "float32") if ratio > 1 else (torch.float32, "bfloat16")
    return best, f"this CPU multiplies matrices {max(ratio, 1 / ratio):.1f} x as fast in it as in {other}"


def _matmul_seconds(dtype: Any) -> float:
    """The shortest of three measurements, the first of which warms up."""
    import torch

    x = torch.randn(768, 768).to(dtype)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(5):
            torch.mm(x, x)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def load_model(name: str | Path, *, device: Any, dtype: Any) -> Any:
    """A model in evaluation mode on `device`.

    Raises:
        LinearizeError: as `linearize.load`.
    """
    from linearize.modeling.classes import BLOCK
    from linearize.source import local_path

    model = linearize.load(name, dtype=dtype, device_map={"": device})  # past the host's memory
    place = local_path(name)
    if hasattr(model.config, BLOCK) and place is not None and (place / ADAPTER).is_dir():  # else a stranger's folder
        model = _with_adapter(model, place / ADAPTER)
    return model.eval()


def _with_adapter(model: Any, folder: Path) -> Any:
    """The model with LoRA that `linearize train` kept apart: without it, another model would be judged.

    Raises:
        UsageError: peft isn't installed.
        ModelError: peft can't read it.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise UsageError(f"{folder} needs the peft package", "pip install 'linearize[train]'") from None
    try:
        return PeftModel.from_pretrained(model, folder).merge_and_unload()
    except Exception as error:
        raise ModelError(f"{folder} can't be read as an adapter ({first_line(error)})", "Copy it again") from error


def count_parameters(model: Any) -> int:
    """The parameters that take part: none of the mixers' where they are bypassed."""
    from linearize.modeling.bypass import is_bypassed

    bypassed = is_bypassed(model)
    return sum(p.numel() for name, p in model.named_parameters() if not (bypassed and ".linearize." in name))


def has_position_table(model: Any, positions: int) -> bool:
    """Whether positions are looked up in a learned table of that many rows, which has none for later ones.

    OPT and its kin have two rows more.
    """
    from torch import nn

    words = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words)
    return any(table.num_embeddings - positions in (0, 2) for table in tables)


def choose_teacher(student: str | Path, teacher: str | Path | None) -> str:
    """The teacher's name; without one the student itself, where its weights beside the mixers are the teacher's.

    That is known of a folder that is as `convert` or `train` wrote it, if training left them alone.

    Raises:
        UsageError: the student has been changed, by training or since, or is no such folder.
        ModelError: there is no such file or folder.
    """
    from linearize.source import local_path
    from linearize.target import MANIFEST
    from linearize.verification import judge

    if teacher is not None:
        return str(teacher)
    place = local_path(student)
    known = ""
    why = "is no folder here" if place is None else "isn't a folder that `linearize convert` or `train` wrote"
    if place is not None and (place / MANIFEST).is_file():
        why, known = _trained(place)
        faults = () if why else judge(place).faults
        if not why and not faults:
            return SELF
        if faults:
            why = f"isn't as linearize wrote it any more ({faults[0].file} {faults[0].what})"
    named = f"--teacher {shlex.quote(known)}, which it was made from" if known else "--teacher MODEL"
    raise UsageError(
        f"{student} {why}, so its teacher has to be named", f"Give {named}, or --teacher none to judge it alone"
    )


def _trained(folder: Path) -> tuple[str, str]:
    """Why a converted folder can't be its own teacher (empty: nothing speaks against it), and its teacher's name.

    What a damaged config.json says is for `judge` to complain of.
    """
    from linearize.checkpoint import read_json
    from linearize.faults import BadFiles

    try:
        block = read_json(folder, "config.json").get("linearize")
    except BadFiles:
        return "", ""
    record = block.get("training") if isinstance(block, dict) else None
    if not isinstance(record, dict):
        return "", ""
    why = "has weights that training has changed" if record.get("base_weights") != UNCHANGED else ""
    if (folder / ADAPTER).is_dir():
        why = f"has an adapter ({ADAPTER}/)"
    return why, str(record.get("teacher") or "")
