"""Stage 0: what a few forwards can set without a gradient, and what they tell about a conversion."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from linearize_evals.settings import write_json
from torch import Tensor

from linearize.errors import ModelError
from linearize.mixers.parts import starts
from linearize.modeling.observe import Observation, observing
from linearize.training import parallel, place, summary
from linearize.training.head import hidden_states
from linearize.training.memory import peak_memory
from linearize.training.packing import batch
from linearize.training.trainable import MIXER

QUERIES = 64  # at a time, of the distances that attention looks over
LEAST = 0.1  # of an output's size: a head that points elsewhere still starts with something to train
# Of the mean distance. A few far tokens, above all the first one, draw it out, so that much of what a head looks at
# can lie far nearer.
SHARES = (1.0, 1 / 4, 1 / 16)
Batch = tuple[Tensor, Tensor | None]  # (B, T) input_ids, and position_ids if there are any


def calibrate(
    model: Any,
    batches: list[Batch],
    forward: Callable[[Any, Tensor, Tensor | None], Any] = hidden_states,
) -> list[dict[str, Any]]:
    """Set what mixers leave to set, by what softmax attention does on a few batches:

    - `mixer.start(distance)` is called first, with how many tokens back each head looks on average, (H,), or, without a
      grid, with the one of SHARES of it that leaves the heads of a key/value head the least error;
    - `mixer.grid`, a few values for a parameter of each head, (H,), or of each key/value head, (Hk,): that of the least
      squared error of what these heads give;
    - `mixer.scale`, the name of a parameter (H,) or (H, Dv) that multiplies the output: it is multiplied by the factor
      that brings a head's output nearest to softmax attention's, <student, teacher> / <student, student>, and at least
      by a tenth of what makes the two equally large. The grid is then chosen by the error that is left.

    A mixer may have any of them, or none. A method `calibrated` names another one to set in its place, and the heads
    that this one has.

    Args:
        model: a converted model, changed in place.
        batches: (B, T) input_ids and position_ids or None.
        forward: runs the decoder of `model` on a batch. It goes through the batches once, and once more if a mixer has
            `start`.

    Returns:
        For each converted layer: `error_before` and `error_after`, squared and relative to the teacher's square;
        `distance`, how many tokens back its softmax attention looks on average, for each head that is calibrated;
        `share`, what part of it `start` got, for each key/value head, where that was a choice; and `scale`, the factor
        for each head, of mixers that have one.
    """
    found: dict[int, _Layer] = {}

    def first(given: Observation) -> None:
        given = _part(given)
        found.setdefault(given.layer, _Layer(given.module.linearize)).see(given)

    def second(given: Observation) -> None:
        found[given.layer].see_started(_part(given))

    def go(observer: Callable[[Observation], None]) -> None:
        with torch.no_grad(), observing(model, observer):
            for input_ids, position_ids in batches:
                forward(model, input_ids, position_ids)

    go(first)
    started = [layer.start() for layer in found.values()]
    if any(started):
        go(second)
    return [{"layer": number, **layer.choose()} for number, layer in sorted(found.items())]


def _part(given: Observation) -> Observation:
    """What the mixer sees that is calibrated: the layer's own, or the one that it has calibrated in its place."""
    mixer = given.module.linearize
    if not hasattr(mixer, "calibrated"):
        return given
    inner, (q, k, v, teacher) = mixer.calibrated(given.q, given.k, given.v, given.teacher)
    module = SimpleNamespace(linearize=inner, layer_idx=given.layer)
    return replace(given, module=module, q=q, k=k, v=v, teacher=teacher)


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


class _Fit(NamedTuple):
    """Of some choice of parameters, for each head (H,): sums over all tokens and dims, in float64."""

    error: Tensor  # |student - teacher|^2
    inner: Tensor  # student * teacher
    square: Tensor  # |student|^2

    @classmethod
    def of(cls, given: Observation) -> _Fit:
        student, teacher = given.student().double(), given.teacher.double()
        terms = ((student - teacher).square(), student * teacher, student.square())
        return cls(*(x.sum((0, 1, 3)) for x in terms))

    def factor(self, teacher: Tensor) -> Tensor:
        """What the student is best multiplied by, `teacher` (H,) being |teacher|^2; 1 where one of them is 0."""
        size, cosine = (teacher / self.square).sqrt(), self.inner / (teacher * self.square).sqrt()
        return torch.where((self.square > 0) & (teacher > 0), size * cosine.clamp_min(LEAST), 1.0)

    def error_at(self, factor: Tensor) -> Tensor:
        """The error of the student times a factor; without a difference of large sums where the factor is 1."""
        more = 1 - factor
        return self.error + 2 * more * (self.inner - self.square) + more.square() * self.square


class _Layer:
    """Fits of one layer's heads, summed over batches: as it is (None), and for each value of each parameter."""

    def __init__(self, mixer: Any) -> None:
        self.mixer = mixer
        self.grid = dict(getattr(mixer, "grid", {}))
        self.scale = getattr(mixer, "scale", None)
        self.starts = starts(mixer)
        self.fits: dict[tuple[str, float] | None, _Fit] = {}
        self.before: Any = 0.0
        self.square: Any = 0.0
        self.distance: Any = 0.0
        self.tokens = 0
        self.kv_heads = 0
        self.shares = SHARES if self.starts and not self.grid else (1.0,)

    @torch.no_grad()
    def see(self, given: Observation) -> None:
        self.square = self.square + given.teacher.double().square().sum((0, 1, 3))
        self.distance = self.distance + attention_distance(given)
        self.tokens += given.q.shape[0] * given.q.shape[1]
        self.kv_heads = given.k.shape[2]
        fit = _Fit.of(given)
        self.before = self.before + fit.error
        if not self.starts:
            self._take(None, fit)
            self._try(given)

    @torch.no_grad()
    def start(self) -> bool:
        """Let the mixer set what it sets by distances, if anything."""
        if self.starts:
            self._start(1.0)
        return self.starts

    def _start(self, share: Any) -> None:
        self.mixer.start((self.distance / self.tokens) * share)

    @torch.no_grad()
    def see_started(self, given: Observation) -> None:
        if not self.starts:
            return
        for share in self.shares[1:]:
            self._start(share)
            self._take(("start", share), _Fit.of(given))
        if self.shares[1:]:
            self._start(1.0)
        self._take(None, _Fit.of(given))
        self._try(given)

    def _try(self, given: Observation) -> None:
        for name, values in self.grid.items():
            parameter = getattr(self.mixer, name)
            own = parameter.clone()
            for value in values:
                parameter.fill_(value)
                self._take((name, value), _Fit.of(given))
            parameter.copy_(own)

    def _take(self, key: tuple[str, float] | None, fit: _Fit) -> None:
        known = self.fits.get(key)
        self.fits[key] = fit if known is None else _Fit(*(a + b for a, b in zip(known, fit, strict=True)))

    def _best(self, key: tuple[str, float] | None) -> tuple[Tensor, Tensor]:
        """Factor and error of a fit."""
        fit = self.fits[key]
        factor = fit.factor(self.square) if self.scale else torch.ones_like(fit.error)
        return factor, fit.error_at(factor)

    @torch.no_grad()
    def choose(self) -> dict[str, Any]:
        factor, after = self._best(None)
        share = None
        if self.shares[1:]:
            keys = (None, *(("start", one) for one in self.shares[1:]))
            factors, errors = (torch.stack(x) for x in zip(*(self._best(key) for key in keys), strict=True))
            index = errors.unflatten(1, (self.kv_heads, -1)).sum(2).argmin(0)
            share = torch.tensor(self.shares, device=errors.device)[index]
            index = index.repeat_interleave(len(after) // self.kv_heads)[None]
            factor, after = factors.gather(0, index)[0], errors.gather(0, index)[0]
            self._start(share.repeat_interleave(len(after) // self.kv_heads).to(self.distance))
        for name, values in self.grid.items():
            factors, errors = (torch.stack(x) for x in zip(*(self._best((name, one)) for one in values), strict=True))
            parameter = getattr(self.mixer, name)
            group = len(after) // len(parameter)  # heads that share a value
            least, index = errors.unflatten(1, (-1, group)).sum(2).min(0)
            better = least < after.view(-1, group).sum(1)
            chosen = torch.tensor(values, device=errors.device)[index].to(parameter.dtype)
            parameter.copy_(torch.where(better, chosen, parameter))
            better, index = better.repeat_interleave(group), index.repeat_interleave(group)[None]
            factor = torch.where(better, factors.gather(0, index)[0], factor)
            after = torch.where(better, errors.gather(0, index)[0], after)
        total = self.square.sum().clamp_min(1e-30)
        report = {
            "error_before": float(self.before.sum() / total),
            "error_after": float(after.sum() / total),
            "distance": [round(value, 1) for value in (self.distance / self.tokens).tolist()],
        }
        if share is not None:
            report["share"] = share.tolist()
        if self.scale:
            parameter = getattr(self.mixer, self.scale)
            parameter.mul_(factor.to(parameter.dtype).view(-1, *[1] * (parameter.dim() - 1)))
            report["scale"] = [float(f"{value:.4g}") for value in factor.tolist()]
        return report


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
