"""Which parameters a stage trains, and LoRA on the frozen ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from linearize.errors import UsageError, did_you_mean
from linearize.modeling.bypass import bypass
from linearize.modeling.classes import BLOCK
from linearize.training.schema import Lora

MIXER = f".{BLOCK}."


def plain_name(name: str) -> str:
    """What a parameter is called without LoRA around its module."""
    return name.replace(".base_layer.", ".")


def lora_modules(model: Any) -> tuple[list[str], list[str]]:
    """Names of the modules that can get LoRA, and of the attention modules that have a mixer.

    The head can't, where it stands beside the decoder: the teacher's is the student's.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)) and "." in name]
    converted = [layer["module"] for layer in model.config.linearize["layers"] if layer.get("mixer")]
    return [name for name in linear if MIXER not in f"{name}."], converted


def lora_targets(lora: Lora, linear: Sequence[str], converted: Iterable[str]) -> list[str]:
    """The modules that get LoRA; the last two arguments are what `lora_modules` gives.

    Raises:
        UsageError: a target matches no module.
    """
    last = sorted({name.rsplit(".", 1)[-1] for name in linear})
    if lora.targets == "auto":
        found = [name for name in linear if name.startswith(tuple(f"{name}." for name in converted))]
        if not found:
            raise UsageError("lora.targets: no converted layer has projections", f"Choose some of {', '.join(last)}")
        return found
    found = []
    for target in lora.targets:
        matched = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matched:
            raise UsageError(
                f"lora.targets: '{target}' matches no module of the model",
                did_you_mean(target, last) or f"Choose auto, or some of {', '.join(last)}",
            )
        found += matched
    return list(dict.fromkeys(found))


def add_lora(model: Any, lora: Lora, seed: int) -> Any:
    """Put LoRA in float32 on `model`, in place, and return peft's wrapper of it."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=lora_targets(lora, *lora_modules(model)),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft finds out about transposed weights itself, and says so for each module
        torch.manual_seed(seed)
        return get_peft_model(model, settings)


def choose(model: Any, trains: str) -> dict[str, nn.Parameter]:
    """Let exactly the parameters of `trains` (lora, mixers or all) require gradients; returns them by name."""
    chosen = {}
    for name, parameter in model.named_parameters():
        wanted = trains == "all" or MIXER in name or (trains == "lora" and ".lora_" in name)
        parameter.requires_grad_(wanted and parameter.is_floating_point())
        if parameter.requires_grad:
            chosen[name] = parameter
    return chosen


def groups(parameters: Mapping[str, nn.Parameter], lr: float, mixer_lr: float | None) -> list[dict[str, Any]]:
    """Parameter groups of an optimiser: the mixers, LoRA, and all others, which may be sharded while those are not."""
    mixers = [parameter for name, parameter in parameters.items() if MIXER in name]
    low_rank = [parameter for name, parameter in parameters.items() if ".lora_" in name]
    others = [parameter for name, parameter in parameters.items() if MIXER not in name and ".lora_" not in name]
    made: Sequence[tuple[list[Any], float]] = ((mixers, mixer_lr or lr), (low_rank, lr), (others, lr))
    return [{"params": params, "lr": rate, "base_lr": rate} for params, rate in made if params]


@contextmanager
def as_teacher(model: Any, adapter: Any):
    """Within the block, `model` is what it was before training: softmax attention, no LoRA, no dropout, no gradient."""
    training = model.training
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(bypass(model))
        if adapter is not None:
            stack.enter_context(_without_lora(adapter))
        model.eval()
        try:
            yield model
        finally:
            model.train(training)


@contextmanager
def _without_lora(adapter: Any):
    """peft lets LoRA require gradients afterwards, whether or not it did before."""
    before = [(p, p.requires_grad) for name, p in adapter.named_parameters() if ".lora_" in name]
    try:
        with adapter.disable_adapter():
            yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
