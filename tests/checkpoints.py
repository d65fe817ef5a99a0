"""Tiny checkpoints for tests of files: saved by transformers, or made of headers and holes."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0",\r\n  "added_tokens": [] }',
    "tokenizer_config.json": b'{"chat_template":"{{ messages }}"}  \n\n',
    "chat_template.jinja": "{{ 'é' }}\r\n".encode(),
    "special_tokens_map.json": b"{}",
    "merges.txt": b"#version: 0.2\na b\n",
    "tokenizer.model": bytes(range(256)),
    "LICENSE": b"Apache\r\n",
    "NOTICE.txt": b"notice",
    "additional_chat_templates/tool.jinja": b"{{ tools }}",
}


def config_of(kind: str, **changes: Any) -> Any:
    import transformers as t

    common: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
    decoder = common | {
        "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    }  # fmt: skip
    if kind == "llama":
        return t.LlamaConfig(**(decoder | changes))
    if kind == "mixtral":
        return t.MixtralConfig(**(decoder | {"num_local_experts": 4} | changes))
    if kind == "mistral-sliding":
        return t.MistralConfig(**(decoder | {"sliding_window": 16} | changes))
    if kind == "gemma2":
        return t.Gemma2Config(**(decoder | {"num_hidden_layers": 4, "sliding_window": 8} | changes))
    if kind == "gpt2":
        return t.GPT2Config(**(common | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | changes))
    raise KeyError(kind)


_ROOT = TemporaryDirectory(prefix="linearize-tests-")  # one copy of each tiny model, for the life of the process


@cache
def _saved(kind: str, dtype: str, shards: bool, changes: str) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, **json.loads(changes))).to(getattr(torch, dtype))
    folder = Path(_ROOT.name) / hashlib.sha256(f"{kind} {dtype} {shards} {changes}".encode()).hexdigest()[:12]
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    return folder


def save(folder: Path, kind: str = "llama", *, dtype: str = "bfloat16", shards: bool = False, **changes: Any) -> Path:
    """A tiny random model in `folder`."""
    shutil.copytree(_saved(kind, dtype, shards, json.dumps(changes, sort_keys=True)), folder)
    return folder


def add_side_files(folder: Path) -> None:
    for name, data in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def tree(folder: Path) -> dict[str, str]:
    """Every file (hidden ones, too) -> sha256."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_safetensors(path: Path, header: Any, data: bytes | int = b"") -> None:
    """A safetensors file from a raw header (a dict, or bytes for a damaged one) and data (or a number of
    holes)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if isinstance(data, int):
            file.truncate(8 + len(text) + data)
        else:
            file.write(data)


def sparse(folder: Path, config: Any, shard_bytes: int) -> int:
    """A checkpoint of `config` made of holes, in shards of about `shard_bytes`; returns the bytes that it
    claims."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    folder.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    groups: list[dict[str, Any]] = [{}]
    sizes = [0]
    for name, tensor in state.items():
        size = tensor.numel() * 2
        if sizes[-1] and sizes[-1] + size > shard_bytes:
            groups.append({})
            sizes.append(0)
        offsets = [sizes[-1], sizes[-1] + size]
        groups[-1][name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": offsets}
        sizes[-1] += size
    weight_map = {}
    for i, (group, size) in enumerate(zip(groups, sizes, strict=True), 1):
        name = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        write_safetensors(folder / name, group, size)
        weight_map |= dict.fromkeys(group, name)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes)
