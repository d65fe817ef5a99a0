"""The blocks of layers of a model that doesn't fit in memory, and what can be refused of stages that train them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linearize.errors import ModelError, ResourceError, UsageError
from linearize.family import load_config
from linearize.modeling.chain import Chain, Part, chain, load_part
from linearize.modeling.classes import BLOCK
from linearize.modeling.observe import observing
from linearize.plan import human
from linearize.source import Source
from linearize.target import survey
from linearize.training import checks
from linearize.training.head import hidden_states
from linearize.training.loop import Job, steps_of
from linearize.training.output import read_converted
from linearize.training.parallel import fill
from linearize.training.place import TEACHER_TEXT
from linearize.training.redraw import drawn
from linearize.training.separate import TOKENS, check_second
from linearize.training.stored import TOKEN_BYTES, File
from linearize.training.trainable import MIXER

STATES = "states"  # the folder in the work folder


def is_blockwise(stage: Any) -> bool:
    return getattr(stage, "block", None) is not None


def suffices(recipe: Any, text: Path) -> bool:
    """Whether a training can do without ever having the whole model in memory.

    Args:
        text: where the text that the teacher writes is, or will be.
    """
    stages = recipe.train
    writes = recipe.data.source == "teacher" and not text.exists()
    return not writes and any(map(is_blockwise, stages)) and all(_by_blocks(stage) for stage in stages)


def _by_blocks(stage: Any) -> bool:
    return is_blockwise(stage) or stage.stage == "calibrate"


def check(source: Source, work: Path, recipe: Any, device: Any) -> None:
    """Refuse what can be refused of block-wise stages before a weight is read.

    Args:
        source: the converted checkpoint.
        device: what the model will run on.

    Raises:
        UsageError: something else needs the model as a whole, and that is sharded.
        ModelError: the layers of this model can't run block by block.
        ResourceError: the disk of `work` is too small for the hidden states.
    """
    links = None
    for number, stage in enumerate(recipe.train):
        if not is_blockwise(stage):
            continue
        if recipe.shard and not suffices(recipe, work / TEACHER_TEXT):
            raise UsageError(
                f"train.{number}.block: something else (a stage, or data.source: teacher) needs the whole model, and a "
                "sharded one can't be trained by blocks",
                "Set shard to false, or block to null",
            )
        try:
            links = links or _chain(source, _widest(recipe, device))
        except ModelError as error:
            raise ModelError(f"train.{number}.block: {error.what}", f"Leave train.{number}.block out") from error
        parts = blocks(source.config[BLOCK]["layers"], links, stage.block)
        rows = steps_of(stage) * stage.batch
        states = File(Path(), (stage.length, *links.shape), links.dtype).bytes * min(2, len(parts) - 1)
        needed = rows * (states + stage.length * TOKEN_BYTES)
        destination = survey(work)
        own = sum(path.stat().st_size for path in (work / STATES).glob("*")) if (work / STATES).is_dir() else 0
        if needed > destination.free_bytes + own:
            raise ResourceError(
                f"train.{number}.block: the hidden states between blocks take {human(needed)}, and {destination.disk} "
                f"has {human(destination.free_bytes + own)} free",
                f"Free some space, choose an OUT on another disk, or lower train.{number}.tokens",
            )


def _widest(recipe: Any, device: Any) -> torch.dtype:
    """The widest dtype that weights may be held in."""
    everything = any(getattr(stage, "trains", "") == "all" for stage in recipe.train)
    measured = recipe.precision == "auto" and getattr(device, "type", "cpu") == "cpu"
    return torch.float32 if everything or measured or recipe.precision == "float32" else torch.bfloat16


def _chain(source: Source, dtype: torch.dtype) -> Chain:
    attention = [layer["module"] for layer in source.config[BLOCK]["layers"]]
    return chain(load_config(source.config, source.name), attention, dtype)


def blocks(layers: list[dict[str, Any]], links: Chain, size: int) -> list[tuple[int, int]]:
    """Begin and end of the blocks of `size` layers, up to the last layer that has a mixer.

    Args:
        layers: those of config.json's `linearize` block.
    """
    modules = [layer["module"] for layer in layers if layer.get("mixer")]
    end = 1 + max(int(module.removeprefix(f"{links.layers}.").partition(".")[0]) for module in modules)
    return [(begin, min(begin + size, end)) for begin in range(0, end, size)]


def skeleton(checkpoint: str | Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A converted model whose mixers are on `device`, and whose other weights (in `dtype`) are on the meta device.

    Raises:
        ModelError: the checkpoint lacks a mixer's tensor.
    """
    from safetensors import safe_open

    source = read_converted(checkpoint)
    model = checks.skeleton(source).to(dtype)
    wanted = {name for name in model.state_dict() if MIXER in name}
    tensors = {}
    for name in sorted(wanted & source.tensors.keys()):
        with safe_open(source.checkpoint.paths[source.tensors[name].file], framework="pt") as file:
            value = file.get_tensor(name)
            tensors[name] = value.to(device, torch.float32 if value.is_floating_point() else None)
    if missing := sorted(wanted - tensors.keys()):
        raise ModelError(f"{checkpoint} lacks '{missing[0]}'", "Convert the base model again")
    model.load_state_dict(tensors, strict=False, assign=True)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def check_apart(checkpoint: str | Path, model: Any, device: torch.device) -> None:
    """`check_separate` of a model that is there as a `skeleton`: a layer of each kind is loaded, and looked at.

    Raises:
        UsageError: the documents of a row see each other.
    """
    source = read_converted(checkpoint)
    links = _chain(source, model.dtype)
    end = blocks(source.config[BLOCK]["layers"], links, len(links.returns))[0][1]
    types = getattr(model.config, "layer_types", None) or [""] * end
    layers, last = list(model.get_submodule(links.layers)), len(links.returns) - 1
    kinds: dict[Any, int] = {}
    for number in sorted(range(end), key=lambda n: (n in (0, last), n)):
        kinds.setdefault((types[number], *(type(module) for module in layers[number].modules())), number)
    generator = torch.Generator().manual_seed(0)
    # Two documents in each row, of which the first differ.
    ids = torch.randint(model.get_input_embeddings().weight.shape[0], (3, TOKENS), generator=generator).to(device)
    states = torch.randn(3, TOKENS, *links.shape, generator=generator).to(device, links.dtype)
    positions = torch.arange(TOKENS, device=device).repeat(2)[None]
    for number in kinds.values():
        part = load_part(checkpoint, links, number, number + 1, dtype=model.dtype, device=device)
        found = []
        for first in (0, 1):
            row, given = (torch.cat([one[first], one[2]])[None] for one in (ids, states))
            forward = partial(hidden_states, part.model, row, positions)
            with observing(part.model, lambda seen: None):
                out = part.run(forward, given if number else None)
            # What a layer adds may be little beside what it is given. The first and last stand beside embeddings and
            # head, and are taken where there is no other.
            found.append(out if number in (0, last) else out - given)
        check_second(model, *found)
        part.model.to("meta")


class Blocks:
    """The blocks of a job's model, which is there as a whole or (as a `skeleton`) but for its mixers."""

    def __init__(self, job: Job, checkpoint: str | Path, size: int) -> None:
        self.job, self.checkpoint = job, checkpoint
        source = read_converted(checkpoint)
        self.links = _chain(source, job.model.dtype)
        self.bounds = blocks(source.config[BLOCK]["layers"], self.links, size)
        self.loads = any(parameter.is_meta for parameter in job.model.parameters())

    @contextmanager
    def part(self, number: int) -> Iterator[Part]:
        """Have block `number` in memory; what its mixers have learnt goes to the job's model."""
        bounds = self.bounds[number]
        if not self.loads:
            part = Part(self.job.model, self.links, *bounds)
            try:
                yield part
            finally:
                part.bring_back()
            return
        model, device = self.job.model, self.job.accelerator.device
        part = load_part(self.checkpoint, self.links, *bounds, dtype=model.dtype, device=device)
        own = _learnt(part.model)
        fill(own, {name: tensor for name, tensor in _learnt(model).items() if name in own})
        yield part
        self.keep(part)
        part.model.to("meta")  # now, and not when the cycles of a model happen to be collected

    def keep(self, part: Part) -> None:
        """Give the job's model what the mixers of a part have learnt."""
        if self.loads:
            fill(_learnt(self.job.model), _learnt(part.model))


def _learnt(model: Any) -> dict[str, Tensor]:
    """What training changes of the mixers."""
    return {**mixers(model), **drawn(model)}


def mixers(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if MIXER in name}
