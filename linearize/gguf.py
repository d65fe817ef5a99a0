"""GGUF models: described from their header, and dequantised by transformers into a clean folder.

Dequantising is the one conversion that loads a model, whole, since GGUF weights have to be unpacked and
renamed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from linearize.errors import ModelError, UsageError, first_line
from linearize.source import Source, check_config, from_path

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def describe(source: Source, dtype: str | None = None) -> Source:
    """`source` with the config and size that the GGUF file's header tells.

    Args:
        dtype: what the weights will be stored in: "float32" (the default: exactly what the file holds),
            "bfloat16" or "float16".

    Raises:
        UsageError: the gguf package is missing, or `dtype` is unknown.
        ModelError: the file is damaged, or its architecture is unknown to transformers.
    """
    if dtype not in (None, *DTYPES):
        raise UsageError(f"weights can't be stored as '{dtype}'", f"Choose one of {', '.join(DTYPES)}")
    path = _path(source)
    try:
        import gguf
    except ImportError:
        raise UsageError("reading GGUF files needs the gguf package", "pip install 'linearize[gguf]'") from None
    with _model_errors(path):
        from transformers import AutoConfig

        count = sum(math.prod(int(n) for n in tensor.shape) for tensor in gguf.GGUFReader(path).tensors)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    notes = check_config(config, path)
    size = count * DTYPES[dtype or "float32"]
    return replace(source, config=config, loaded_bytes=size, loaded_parameters=count, notes=tuple(notes))


def load_gguf(source: Source, **kwargs: Any) -> tuple[Any, list[str]]:
    """The dequantised model of a GGUF file, and notes on what the file holds beyond it.

    Args:
        source: of origin "gguf".
        kwargs: of `from_pretrained`, for instance `dtype`.

    Raises:
        ModelError: transformers can't read the file, or it lacks tensors of its architecture.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    path = _path(source)
    with _model_errors(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are in the report, by name
            **kwargs,
        )
        model, report = loaded
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError("transformers kept it quantized")
    return model, _check_report(report, model, path)


def dequantise(source: Source, folder: Path, dtype: str | None = None) -> Source:
    """Load a GGUF model, save it clean (weights, config, tokenizer) into `folder`, and return that as a
    source.

    Raises:
        ModelError: as `load_gguf`.
    """
    import torch
    from transformers import AutoTokenizer

    path = _path(source)
    model, notes = load_gguf(source, dtype=getattr(torch, dtype or "float32"))
    model.save_pretrained(folder)
    del model
    for shard in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
        shard.chmod((folder / "config.json").stat().st_mode)
    notes.insert(0, f"dequantised from {path.name} to {dtype or 'float32'}")
    try:
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    except Exception as error:
        notes.append(f"the GGUF file's tokenizer can't be read ({error}): copy the tokenizer of the original model")
    clean = from_path(folder, source.name)
    return replace(clean, origin="gguf", gguf=None, notes=(*notes, *clean.notes))


def _check_report(report: Mapping[str, Any], model: Any, path: Path) -> list[str]:
    """Refuse a model that loading had to complete with random weights; returns notes on what it ignored."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(report.get("missing_keys") or ()) - tied)
    wrong = sorted(str(key[0]) for key in report.get("mismatched_keys") or ())
    errors = [str(message) for message in report.get("error_msgs") or ()]
    problems = [f"it lacks {_some(missing)}"] if missing else []
    problems += [f"{_some(wrong)} of another shape than its metadata asks for"] if wrong else []
    problems += [first_line(errors[0])] if errors else []
    if problems:
        raise ModelError(
            f"{path} isn't a whole model: {'; '.join(problems)}", "Download it again, or use another GGUF file"
        )
    ignored = sorted(report.get("unexpected_keys") or ())
    return [f"{_some(ignored)} of {path.name}: ignored by the architecture, and left out"] if ignored else []


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name:.120}'" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _path(source: Source) -> Path:
    assert source.gguf is not None
    return source.gguf


class _model_errors:
    """Turns what transformers and gguf raise on a bad file into a `ModelError` of one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            raise ModelError(
                f"{self.path} can't be read as a GGUF model ({first_line(error)})",
                "Use the model's safetensors checkpoint, or a GGUF file that transformers can read",
            ) from error
