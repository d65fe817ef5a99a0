"""Stage 0: what a few forwards can set without a gradient, and what they tell about a conversion."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from linearize_evals.settings import write_json
from torch import Tensor

from linearize.errors import ModelError
from linearize.modeling.observe import Observation, observing
from linearize.training import parallel, place, summary
from linearize.training.head import hidden_states
from linearize.training.memory import peak_memory
from linearize.training.packing import batch
from linearize.training.trainable import MIXER

QUERIES = 64  # at a time, of the distances that attention looks over
Batch = tuple[Tensor, Tensor | None]  # (B, T) input_ids, and position_ids if there are any


def calibrate(
    model: Any,
    batches: list[Batch],
    forward: Callable[[Any, Tensor, Tensor | None], Any] = hidden_states,
) -> list[dict[str, Any]]:
    """Choose what mixers leave to choose (`grid`, a few values for a parameter of each head), by the squared error of
    their heads' outputs against softmax attention.

    Args:
        model: a converted model, changed in place.
        batches: (B, T) input_ids and position_ids or None.
        forward: runs the decoder of `model` on a batch.

    Returns:
        For each converted layer: `error_before` and `error_after`, squared and relative to the teacher's square; and
        `distance`, how many tokens back its softmax attention looks on average, for each head.
    """
    found: dict[int, _Layer] = {}

    def observer(given: Observation) -> None:
        found.setdefault(given.layer, _Layer(given.module.linearize)).see(given)

    with torch.no_grad(), observing(model, observer):
        for input_ids, position_ids in batches:
            forward(model, input_ids, position_ids)
    return [{"layer": number, **layer.choose()} for number, layer in sorted(found.items())]


def calibrate_stage(job: Any, number: int, stage: Any, find: Callable[[list[Batch]], list[dict[str, Any]]]) -> Any:
    """Carry out stage `number` of a training (see `loop.Job`); returns its part of the summary.

    Args:
        find: calibrates the job's model, as `calibrate` does.

    Raises:
        ModelError: a mixer's output isn't finite, naming its layer.
    """
    started = time.perf_counter()
    stream, device = job.stream(stage.length), job.accelerator.device
    if job.data is not None:
        stream.load_state(job.data)
    rows = [batch([row]) for row in stream.take(stage.rows)]
    inputs = [{key: value.to(device) for key, value in row.items()} for row in rows]
    job.model.eval()
    try:
        found = find([(one["input_ids"], one.get("position_ids")) for one in inputs])
    except FloatingPointError as error:
        raise ModelError(f"stage {number} (calibrate): {error}", "Convert the model again") from error
    mixers = {name: parameter for name, parameter in job.model.named_parameters() if MIXER in name}
    parallel.agree(mixers.values())
    job.data = stream.state()
    job.changed |= set(mixers)
    if job.main:
        write_json(job.work / place.CALIBRATION, found)
    job.save(number + 1, 0, job.data)
    seconds = round(time.perf_counter() - started, 1)
    return summary.calibration(stage, found) | {"seconds": seconds, "peak_memory_bytes": peak_memory(device)}


class _Layer:
    """Errors of one layer's heads, summed over batches: as it is, and for each value of each parameter."""

    def __init__(self, mixer: Any) -> None:
        self.mixer = mixer
        self.grid = dict(getattr(mixer, "grid", {}))
        self.errors: dict[tuple[str, float], Tensor] = {}
        self.before: Any = 0.0
        self.square: Any = 0.0
        self.distance: Any = 0.0
        self.tokens = 0

    @torch.no_grad()
    def see(self, given: Observation) -> None:
        self.square = self.square + given.teacher.double().square().sum((0, 1, 3))
        self.before = self.before + _error(given)
        self.distance = self.distance + attention_distance(given)
        self.tokens += given.q.shape[0] * given.q.shape[1]
        for name, values in self.grid.items():
            parameter = getattr(self.mixer, name)
            own = parameter.clone()
            for value in values:
                parameter.fill_(value)
                error = self.errors.get((name, value), 0.0)
                self.errors[name, value] = error + _error(given)
            parameter.copy_(own)

    @torch.no_grad()
    def choose(self) -> dict[str, Any]:
        after = self.before
        for name, values in self.grid.items():
            table = torch.stack([self.errors[name, value] for value in values])
            least, index = table.min(0)
            better = least < after
            chosen = torch.tensor(values, device=table.device)[index].to(getattr(self.mixer, name).dtype)
            parameter = getattr(self.mixer, name)
            parameter.copy_(torch.where(better, chosen, parameter))
            after = torch.where(better, least, after)
        total = self.square.sum().clamp_min(1e-30)
        return {
            "error_before": float(self.before.sum() / total),
            "error_after": float(after.sum() / total),
            "distance": [round(value, 1) for value in (self.distance / self.tokens).tolist()],
        }


def _error(given: Observation) -> Tensor:
    """(H,) squared error of each head."""
    return (given.student().double() - given.teacher.double()).square().sum((0, 1, 3))


def attention_distance(given: Observation) -> Tensor:
    """(H,) how many tokens back softmax attention looks, summed over the B T tokens."""
    q, k = given.q.float().transpose(1, 2), given.k.float().transpose(1, 2)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    batch, _, length, _ = q.shape
    time = torch.arange(length, device=q.device)
    document = torch.zeros(batch * length, dtype=torch.long)
    if given.cu_seqlens is not None:
        document[given.cu_seqlens[1:-1].long()] = 1
    document = document.cumsum(0).view(batch, 1, length, 1).to(q.device)
    total: Any = 0.0
    for begin in range(0, length, QUERIES):  # T x T would be a layer's largest tensor by far
        part = slice(begin, begin + QUERIES)
        back = time[part, None] - time
        hidden = (back < 0) | (document[:, :, part] != document.transpose(-1, -2))
        weights = (q[:, :, part] @ k.transpose(-1, -2) * given.scaling).masked_fill(hidden, -torch.inf).softmax(-1)
        total = total + (weights * back).sum((0, 2, 3)).double()
    return total
