"""One process or several: what the launcher asks for, and data-parallel training through torch's DDP.

Stage 1 takes its gradients inside the forward, one layer at a time, where no wrapper sees them, and sharding (see
`sharding`) leaves mixers and LoRA whole in every process. The gradients of both are summed here, once a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from linearize.errors import UsageError

# What else `accelerate launch` can ask for. It would be found out late, or not at all.
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "accelerate's parallelism config",
}


def launched(recipe: Any) -> Any:
    """The recipe with what `accelerate launch` asks for; to be called before accelerate looks at it.

    FSDP there is `shard: true` here. Accelerate itself isn't to know of it: it would wrap the model once more, and let
    transformers leave weights out that it means to send around later.

    Raises:
        UsageError: the launcher asks for something that can't be had.
    """
    for name, called in _REFUSED.items():
        if _flag(name):
            raise UsageError(
                f"{called} can't train a conversion", "Use FSDP2: `shard: true` in the recipe, or accelerate's FSDP"
            )
    if not _flag("ACCELERATE_USE_FSDP"):
        return recipe
    del os.environ["ACCELERATE_USE_FSDP"]
    return recipe.model_copy(update={"shard": True})


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def wrap(runner: nn.Module, accelerator: Any, *, by_hand: bool) -> nn.Module:
    """What runs `runner` in this process.

    Args:
        by_hand: whether gradients are exchanged otherwise: by FSDP2, or `sum_gradients`.
    """
    if accelerator.num_processes == 1 or by_hand:
        return runner
    # Nothing changes buffers, so that there is nothing to send at each forward.
    runner._ddp_params_and_buffers_to_ignore = [name for name, _ in runner.named_buffers()]  # pyright: ignore
    devices = [accelerator.device] if accelerator.device.type != "cpu" else None
    return DistributedDataParallel(runner, device_ids=devices, gradient_as_bucket_view=True)


@contextmanager
def accumulating(module: nn.Module, last: bool) -> Iterator[None]:
    """Within the block, processes exchange gradients only if it is a step's `last` micro-batch.

    FSDP2 does at each: what it would have to keep until then is as large as the model.
    """
    with module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext():
        yield


def apart(parameters: Iterable[Tensor], module: nn.Module) -> list[Tensor]:
    """Those of the parameters whose gradients neither DDP nor FSDP2 exchanges."""
    if isinstance(module, DistributedDataParallel):
        return []
    return [parameter for parameter in parameters if not isinstance(parameter, DTensor)]


def sum_gradients(parameters: Iterable[Tensor], accelerator: Any, *, mean: bool = False) -> None:
    """Sum, or average, the gradients of parameters that are whole in every process."""
    parameters = list(parameters)
    if accelerator.num_processes == 1 or not parameters:
        return
    for parameter in parameters:
        if parameter.grad is None:  # it may be there in other processes
            parameter.grad = torch.zeros_like(parameter)
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    if mean:
        flat /= accelerator.num_processes
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def clip(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale gradients, spread over the processes or not, down to a norm of at most `limit`; returns what it was."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = []
    for spread in (False, True):
        own = [gradient for gradient in gradients if isinstance(gradient, DTensor) == spread]
        if own:
            norm: Any = nn.utils.get_total_norm(own)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if limit is not None:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
    return norm


def of_all(found: list[Any]) -> list[Any]:
    """What was found in any process, in their order."""
    from linearize_evals import processes

    return [one for own in processes.together(lambda: found) for one in own]


def agree(parameters: Iterable[Tensor]) -> None:
    """Give all processes the first one's values of parameters that are whole in each."""
    if distributed.is_initialized():
        for parameter in parameters:
            distributed.broadcast(parameter.data, 0)


def gather(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors on the CPU, of those that may be spread over the processes; every process has to ask.

    Args:
        keep: False: this process only takes part, and gets none.
    """
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = value.cpu()
    return found


def fill(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give parameters, sharded or not, whole values of the same names."""
    with torch.no_grad():
        for name, value in values.items():
            own = parameters[name]
            value = value.to(own.device, own.dtype)
            own.copy_(spread_as(own, value))


def spread_as(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` spread over the processes as `parameter` is, or as it is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value
