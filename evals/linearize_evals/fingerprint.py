"""A digest of a model's weights and config, by which scores are kept and found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linearize.errors import ModelError
from linearize.modeling.bypass import is_bypassed
from linearize.modeling.classes import BLOCK
from linearize_evals import rope

WIDTH = 512  # words of 8 bytes in a row
# What a config says of its file and of the code that reads it, not of the model; the class is told by its name.
_WHERE = {"_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map"}


def fingerprint(model: Any) -> str:
    """sha256 over every parameter and buffer, the config (without paths) and the attention implementation.

    Weights enter by name, shape, dtype, and the exact sums of their bit patterns over rows and columns of a
    `WIDTH`-wide table, computed on their device: a change of one weight, or of the order of two, gives another
    digest. Tied weights count once. It guards against mix-ups, not against forgery.

    A converted model whose mixers are bypassed is its base model, and has its fingerprint.

    Raises:
        ModelError: a weight without data (on the meta device, or offloaded).
    """
    rope.reset(model)  # frequencies may be those of what ran last
    digest = hashlib.sha256()
    config, label = _without_paths(model.config.to_dict()), type(model).__name__
    bypassed = is_bypassed(model)
    if bypassed:
        config["model_type"] = config.pop(BLOCK)["base_model_type"]
        label = type(model).__bases__[-1].__name__
    attention = getattr(model.config, "_attn_implementation", None)
    digest.update(json.dumps([label, config, attention], sort_keys=True, default=str).encode())
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if bypassed and f".{BLOCK}." in name:
                continue
            digest.update(f"\n{kind} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(_sums(name, tensor.detach()))
    return digest.hexdigest()


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_paths(item) for key, item in value.items() if key not in _WHERE}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    return value


@torch.inference_mode()
def _sums(name: str, tensor: Tensor) -> bytes:
    """Sums (int64, wrapping) of the bit pattern in words of 8 bytes; what is left of the last row as it is."""
    if tensor.is_meta:
        raise ModelError(f"weight '{name}' has no data (meta device)", "Load the model whole, without offloading")
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // (8 * WIDTH) * 8 * WIDTH
    if flat.storage_offset() % 8:
        flat = flat.clone()
    table = flat[:whole].view(torch.int64).view(-1, WIDTH)
    return b"".join(part.cpu().numpy().tobytes() for part in (table.sum(0), table.sum(1), flat[whole:]))
