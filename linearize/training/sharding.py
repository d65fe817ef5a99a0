"""FSDP2: the model's weights, their gradients and optimiser states are spread over the processes, block by block.

Mixers and LoRA stay whole in every process (see `parallel.sum_gradients`): they are small, come and go while the rest
stays sharded, and mixers take gradients inside the forward in stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from linearize.errors import ModelError, UsageError
from linearize.training.head import decoder
from linearize.training.objectives import Runner
from linearize.training.parallel import spread_as
from linearize.training.trainable import MIXER


def check() -> None:
    """Refuse a torch whose FSDP2 can't leave parameters alone.

    Raises:
        UsageError: naming its version.
    """
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in signature(fully_shard).parameters:
        raise UsageError(f"shard: true needs a newer torch than {torch.__version__}", "pip install -U torch")


def load(read: Callable[[str], Any], accelerator: Any) -> Runner:
    """A frozen model, spread over the processes. Only the first ever holds all of it, in the host's memory.

    Args:
        read: gives the model on a device: "cpu", or "meta" in all processes but the first.

    Returns:
        What runs the model: whatever uses its weights has to run in its forward.

    Raises:
        ModelError: the processes have read different models, or the model's decoder can't be found.
        LinearizeError: as `read`.
    """
    from linearize_evals import processes
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = accelerator.device
    model = processes.everywhere(lambda: read("cpu" if accelerator.is_main_process else "meta"))
    runner = Runner(model.requires_grad_(False))
    named = chain(model.named_parameters(), model.named_buffers())
    tensors = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    if any(processes.together(lambda: tensors != processes.same(tensors))):
        raise ModelError("the processes have read different models", "Give all of them the same files and packages")
    blocks = processes.everywhere(lambda: _blocks(model))
    inside = {module for block in blocks for module in block.modules()}
    mesh = init_device_mesh(device.type, (accelerator.num_processes,))
    for part in (*blocks, runner):
        _receive([module for module in part.modules() if part is not runner or module not in inside], device)
        mixers = {parameter for name, parameter in part.named_parameters() if MIXER in name}
        # Always, or the root's weights would stay gathered after a look, and be taken for the sharded ones.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=mixers)
    return runner


def _blocks(model: Any) -> list[nn.Module]:
    """The decoder's blocks: the longest of its lists of modules that lie in no other list."""
    return list(max(_lists(decoder(model)), key=len, default=()))


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _lists(child)


def _receive(modules: list[nn.Module], device: torch.device) -> None:
    """Put what the first process holds in the parameters and buffers of `modules` on every process's device."""
    known: dict[Tensor, Tensor] = {}  # tied weights stay tied
    for module in modules:
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if tensor not in known:
                    value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                    value = value.contiguous()
                    distributed.broadcast(value, 0)
                    known[tensor] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
                slots[name] = known[tensor]  # pyright: ignore[reportArgumentType]
        left = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        if left:
            what = f"{type(module).__name__} keeps a tensor ({left[0]}) that is neither parameter nor buffer"
            raise ModelError(what, "Train it with shard: false")


@torch.no_grad()
def merge(adapter: Any) -> Any:
    """Add peft's LoRA to the weights, which may be spread over the processes, and return the model without it."""
    from peft.tuners.lora import LoraLayer

    for module in adapter.modules():
        if isinstance(module, LoraLayer):
            weight: Any = module.get_base_layer().weight
            for name in module.active_adapters:
                change = module.get_delta_weight(name)  # pyright: ignore[reportAttributeAccessIssue]
                weight.data += spread_as(weight, change)
    return adapter.unload()
