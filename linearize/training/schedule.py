"""The steps of a stage, and the learning rates over them."""

from __future__ import annotations

import math
from typing import Any


def steps_of(settings: Any) -> int:
    """Optimiser steps of a stage: as many as see at least its tokens."""
    return math.ceil(settings.tokens / (settings.batch * settings.length))


def tokens_of(settings: Any) -> int:
    """Tokens that a stage sees; of a calibration, those of its rows."""
    if settings.stage == "calibrate":
        return settings.rows * settings.length
    return steps_of(settings) * settings.batch * settings.length


def factor(schedule: str, step: int, steps: int, *, warmup: float, decay: float, least: float) -> float:
    """What the learning rate is multiplied with at `step` (from 0) of `steps`.

    Args:
        schedule: "cosine", "constant", or "wsd": warm-up, stable, decay (arXiv:2404.06395).
        warmup: share of the steps in which it rises linearly; decay: share at the end in which "wsd" falls linearly.
        least: where "cosine" and "wsd" end.
    """
    rising = _steps(warmup, steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        falling = min(_steps(decay, steps), steps - 1)  # a single step has to train, too
        fallen = step + 1 - (steps - falling)
        return 1.0 - (1.0 - least) * fallen / falling if fallen > 0 else 1.0
    done = (step - rising) / max(1, steps - 1 - rising)
    return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2


def _steps(share: float, steps: int) -> int:
    """A share of the steps, rounded up; 0.07 of 100 is 7, though a hair more in floats."""
    return math.ceil(round(share * steps, 6))
