"""What a softmax layer can become: mixers and feature maps, by name.

The registries are plain dicts and hold no tensor code, so that a recipe can be checked (and a typo found) without
importing torch. An entry's `target` is a class, or the `"module:Class"` string of one that is imported when used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from linearize.errors import ModelError, UsageError, did_you_mean


@dataclass(frozen=True)
class AttentionShape:
    """What a mixer needs to know of the attention module that it replaces.

    `head_dim` is the dim of q and k as the attention function receives them, `v_head_dim` that of v, and `scaling`
    the factor that the model's own softmax puts on `q @ k` (not always `head_dim ** -0.5`). `softcap` is the bound
    that it puts on logits, if it does. `max_length` is how many positions the model's config gives it, if it says so.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    hidden_size: int
    scaling: float
    softcap: float | None = None
    max_length: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def part(self, heads: Sequence[int]) -> PartShape:
        """That of some key/value heads alone, with the query heads that read them."""
        group, whole = self.num_heads // self.num_key_value_heads, self.num_key_value_heads
        fewer = {"num_heads": group * len(heads), "num_key_value_heads": len(heads)}
        return PartShape(**{**self.to_dict(), **fewer}, whole=whole, heads=tuple(heads))

    def agrees(self, shape: Any) -> bool:
        """Whether `shape`, as a checkpoint holds it, is this one. `max_length` doesn't count: it may be missing, or of
        a time when the config said another one."""
        return isinstance(shape, dict) and self.to_dict() == {**shape, "max_length": self.max_length}


@dataclass(frozen=True)
class PartShape(AttentionShape):
    """Some key/value `heads` of a layer that has `whole` of them.

    What starts otherwise in each head of a layer starts in its part as in these heads.
    """

    whole: int = 0
    heads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One name of a registry.

    Attributes:
        target: the class, or where to import it from.
        paper: where the mechanism is published.
        summary: one line for `linearize doctor` and the docs.
        options: the options it takes, with their defaults; nothing else is accepted.
    """

    target: str | type
    paper: str
    summary: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> type:
        if isinstance(self.target, str):
            module, _, name = self.target.partition(":")
            return getattr(importlib.import_module(module), name)
        return self.target


_MAPS = "linearize.mixers.feature_maps"

FEATURE_MAPS: dict[str, Entry] = {
    "elu1": Entry(f"{_MAPS}:Elu1", "arXiv:2006.16236", "elu(x) + 1"),
    "relu": Entry(f"{_MAPS}:Relu", "arXiv:2103.13076", "relu(x), nothing to learn"),
    "hedgehog": Entry(f"{_MAPS}:Hedgehog", "arXiv:2402.04347", "softmax(xW) and softmax(-xW), W learned per head"),
    "t2r": Entry(f"{_MAPS}:T2R", "arXiv:2103.13076", "relu(xW + b), learned per head"),
    "cosformer": Entry(
        f"{_MAPS}:Cosformer",
        "arXiv:2202.08791",
        "relu(x), weighted by the cosine of the distance; for sequences of up to `length` tokens",
        {"length": 0},
    ),
    "favor": Entry(
        f"{_MAPS}:Favor",
        "arXiv:2009.14794",
        "FAVOR+: positive orthogonal random features of the softmax kernel",
        {"features": 256, "orthogonal": True, "hyperbolic": True},
    ),
    "taylor": Entry(
        f"{_MAPS}:Taylor",
        "arXiv:2402.18668",
        "second-order Taylor series of exp, q and k projected to a few dims first",
        {"project_dim": 16},
    ),
}

MIXERS: dict[str, Entry] = {
    "linear": Entry(
        "linearize.mixers.linear:LinearMixer",
        "arXiv:2006.16236",
        "normalised linear attention; the state is one matrix per head",
        {"feature_map": "favor", "feature_map_options": {}},
    ),
    "window": Entry(
        "linearize.mixers.window:WindowMixer",
        "arXiv:2410.10254",
        "exact softmax over the last `window` tokens (and optional sinks), linear attention over older ones, "
        "one denominator",
        {"feature_map": "favor", "feature_map_options": {}, "window": 64, "sinks": 4},
    ),
    "length_switch": Entry(
        "linearize.mixers.switch:LengthSwitchMixer",
        "arXiv:2006.16236",
        "exact softmax for the first `length` tokens of a sequence, linear attention for the others",
        {"feature_map": "favor", "feature_map_options": {}, "length": 2048},
    ),
    "windowed": Entry(
        "linearize.mixers.windowed:WindowedMixer",
        "arXiv:2411.13676",
        "exact softmax over the last `window` tokens (and optional sinks) beside another mixer, weighed by a gate",
        {"over": "gated_deltanet", "over_options": {}, "window": 64, "sinks": 4},
    ),
    "heads": Entry(
        "linearize.mixers.heads:HeadsMixer",
        "arXiv:2411.13676",
        "the key/value heads `keep` stay softmax, the others get another mixer; the state grows with the kept heads",
        {"keep": [0], "over": "window", "over_options": {}},
    ),
    "retnet": Entry(
        "linearize.mixers.gated:RetNetMixer",
        "arXiv:2307.08621",
        "a sum that fades at one rate per head; RMS norm and output gate",
        {"output_gate": True, "rank": 16},
    ),
    "gla": Entry(
        "linearize.mixers.gated:GLAMixer",
        "arXiv:2312.06635",
        "gated linear attention: a decay for each token and key dim; RMS norm and output gate",
        {"output_gate": True, "rank": 16},
    ),
    "mamba2": Entry(
        "linearize.mixers.gated:Mamba2Mixer",
        "arXiv:2405.21060",
        "a step size for each token and head, which scales decay and input; gated RMS norm",
        {"output_gate": True, "rank": 16},
    ),
    "mamba": Entry(
        "linearize.mixers.gated:MambaMixer",
        "arXiv:2312.00752",
        "as mamba2, with a rate for each key dim and no norm (S6 with a step size per head)",
        {"output_gate": True, "rank": 16},
    ),
    "deltanet": Entry(
        "linearize.mixers.delta:DeltaNetMixer",
        "arXiv:2406.06484",
        "the delta rule: what is held for a key is replaced, not added to; RMS norm",
        {"output_gate": False, "rank": 16},
    ),
    "gated_deltanet": Entry(
        "linearize.mixers.delta:GatedDeltaNetMixer",
        "arXiv:2412.06464",
        "the delta rule with a decay for each token and head; RMS norm and output gate",
        {"output_gate": True, "rank": 16},
    ),
    "kda": Entry(
        "linearize.mixers.delta:KDAMixer",
        "arXiv:2510.26692",
        "the delta rule with a decay for each token and key dim; RMS norm and output gate",
        {"output_gate": True, "rank": 16},
    ),
    "rfa": Entry(
        "linearize.mixers.rfa:RFAMixer",
        "arXiv:2103.02143",
        "random feature attention: sines and cosines of q and k of length 1, a temperature, and a gate if asked",
        {"features": 256, "orthogonal": True, "gate": False, "guard": 0.01},
    ),
    "key_normalised": Entry(
        "linearize.mixers.key_normalised:KeyNormalisedMixer",
        "arXiv:2006.16236",
        "linear attention with each key's value divided by what the queries so far gave that key",
        {"feature_map": "hedgehog", "feature_map_options": {}, "causal": True},
    ),
    "linear_bias": Entry(
        "linearize.mixers.relative:LinearBiasMixer",
        "arXiv:2006.16236",
        "linear attention and learned weights for the last `reach` distances, one denominator",
        {"feature_map": "hedgehog", "feature_map_options": {}, "reach": 16},
    ),
}


class NotRegistered(UsageError):
    """No mixer or feature map of this name is registered in this process."""


LEAST = {"window": 1, "sinks": 0}  # of options that several mixers have
IMPORT_IT = "Import the module that registers it (command line: --import)"


@contextmanager
def of_checkpoint() -> Iterator[None]:
    """Within the block, what is wrong with a mixer is said of the config.json that describes it, and not of a recipe.

    Raises:
        ModelError: in the place of a `UsageError`.
    """
    try:
        yield
    except NotRegistered as error:  # its names were right once, so that a module must be missing
        raise ModelError(f"config.json needs a part that isn't registered: {error.what}", IMPORT_IT) from None
    except UsageError as error:
        what = f"config.json describes a mixer that can't be built: {error.what}"
        raise ModelError(what, "Convert the base model again") from None


def lookup(registry: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """The entry called `name`; raises `NotRegistered`, which lists the names and guesses what was meant."""
    if name in registry:
        return registry[name]
    hint = did_you_mean(name, registry)
    if not hint:
        for other_kind, other in (("mixer", MIXERS), ("feature_map", FEATURE_MAPS)):
            guess = did_you_mean(name, other)
            hint = hint or (guess and f"{guess[:-1]} (a {other_kind})?")
    known = ", ".join(sorted(registry))
    raise NotRegistered(f"unknown {kind} '{name}'; known: {known}" + (f"; {hint}" if hint else ""))


def check_options(kind: str, name: str, entry: Entry, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` over the entry's defaults.

    Raises:
        UsageError: an option that the entry doesn't take, or a value that isn't of its default's kind.
    """
    for key, value in options.items():
        if key not in entry.options:
            known = ", ".join(sorted(entry.options)) or "none"
            hint = did_you_mean(key, entry.options)
            raise UsageError(
                f"{kind} '{name}' has no option '{key}'; it takes: {known}" + (f"; {hint}" if hint else "")
            )
        wrong = wrong_value(key, value, entry.options[key])
        if wrong:
            raise UsageError(f"{kind} '{name}', option {key}: {wrong}")
    return {**entry.options, **options}


def wrong_value(key: str, value: Any, default: Any) -> str:
    """What is wrong with the value of an option, or ""."""
    number = isinstance(default, float) and not isinstance(value, bool) and isinstance(value, (int, float))
    if default is not None and not number and type(value) is not type(default):
        return f"must be like its default {default!r}, not {value!r}"
    least = LEAST.get(key)
    return (
        f"must be at least {least}, not {value}" if type(value) is int and least is not None and value < least else ""
    )


def register_feature_map(name: str, target: type, *, paper: str, summary: str = "", options: Mapping[str, Any] = {}):
    """Add a feature map of your own; raises `UsageError` if the name is taken by another class."""
    return _register(FEATURE_MAPS, "feature map", name, Entry(target, paper, summary, dict(options)))


def register_mixer(name: str, target: type, *, paper: str, summary: str = "", options: Mapping[str, Any] = {}):
    """Add a mixer of your own; raises `UsageError` if the name is taken by another class."""
    return _register(MIXERS, "mixer", name, Entry(target, paper, summary, dict(options)))


def _register(registry: dict[str, Entry], kind: str, name: str, entry: Entry) -> type:
    if name in registry and registry[name].target is not entry.target:
        raise UsageError(f"a {kind} called '{name}' is registered already", "Choose another name")
    registry[name] = entry
    return entry.load()
