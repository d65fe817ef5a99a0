"""GGUF models: described from their header, and dequantised by transformers into a clean folder.

Dequantising is the one conversion that loads a model, whole, since GGUF weights have to be unpacked and
renamed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from linearize.errors import ModelError, UsageError
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


def dequantise(source: Source, folder: Path, dtype: str | None = None) -> Source:
    """Load a GGUF model, save it clean (weights, config, tokenizer) into `folder`, and return that as a
    source.

    Raises:
        ModelError: transformers can't read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = _path(source)
    with _model_errors(path):
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype or "float32"),
        )
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError("transformers kept it quantized")
    model.save_pretrained(folder)
    del model
    for shard in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
        shard.chmod((folder / "config.json").stat().st_mode)
    notes = [f"dequantised from {path.name} to {dtype or 'float32'}"]
    try:
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    except Exception as error:
        notes.append(f"the GGUF file's tokenizer can't be read ({error}): copy the tokenizer of the original model")
    clean = from_path(folder, source.name)
    return replace(clean, origin="gguf", gguf=None, notes=(*notes, *clean.notes))


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
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"{self.path} can't be read as a GGUF model ({first})",
                "Use the model's safetensors checkpoint, or a GGUF file that transformers can read",
            ) from error
