"""The model whose layers are chosen: what `linearize select` can learn of it, and refuse, before a weight is read."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import linearize
from linearize.errors import UsageError
from linearize.keep_softmax import budget_count, ranges
from linearize.select_units import heads_of, units_of

if TYPE_CHECKING:
    from linearize.modeling.probe import Probe
    from linearize.recipe import Recipe
    from linearize.source import Source


@dataclass(frozen=True)
class Subject:
    """A model that can be measured; `layers` are those that have, or will have, a mixer, as the `linearize` block has
    them."""

    place: Path
    probed: Probe
    layers: list[dict[str, Any]]
    mixers: str  # "untrained" or "trained"
    recipe: dict[str, Any]
    settings: Recipe | None  # of a base model

    def count(self, budget: str, kind: str) -> int:
        """How many "layers" or "heads" `budget` keeps.

        Raises:
            UsageError: all of them; or heads can't be kept in this model, or beside its mixers.
        """
        heads = heads_of(self.layers)
        if kind == "layers":
            return budget_count(budget, len(heads))
        if set(heads.values()) == {1}:
            what = "every layer that can be converted has one key/value head, so its heads are its layers"
            raise UsageError(what, "Leave out --heads")
        for layer in self.layers:
            self._check_heads(layer)
        return budget_count(budget, len(units_of(heads, kind)), "key/value heads in convertible layers")

    def notes(self, kind: str) -> list[str]:
        """What to know of kept "layers" or "heads" of this model."""
        numbers = {layer["layer"] for layer in self.layers}
        more = [  # than the softcap, which kept heads have, too
            probed.layer
            for probed in self.probed.layers
            if probed.layer in numbers and len(probed.notes) > (probed.shape.softcap is not None)
        ]
        if kind == "layers" or not more:
            return []
        return [f"heads kept in layers {ranges(more)} lack what their softmax does beside q, k and v: see inspect"]

    def _check_heads(self, layer: dict[str, Any]) -> None:
        from linearize.mixers import grows
        from linearize.mixers.registry import of_checkpoint

        base = self.settings is not None
        with nullcontext() if base else of_checkpoint():
            growing = grows(layer["mixer"])
        if growing:
            raise UsageError(
                f"heads can't be chosen beside mixer '{layer['mixer']['name']}' of layer {layer['layer']}, whose state "
                "grows already",
                "Choose another mixer" if base else "Give the base model, or a conversion without that mixer",
            )
        # Kept heads see all tokens, which a sliding layer's own don't.
        kinds = {probed.layer: probed.kind for probed in self.probed.layers}
        if kinds[layer["layer"]] == "sliding_attention":
            raise UsageError(
                f"heads of layer {layer['layer']} can't be chosen: it has sliding-window attention, and heads that are "
                "kept attend to all tokens",
                "Leave out convert_sliding" if base else "Give the base model",
            )

    def load(self, device: Any, dtype: Any) -> Any:
        from linearize_evals.loading import load_model

        model = load_model(self.place, device=device, dtype=dtype).requires_grad_(False)
        return model if self.settings is None else linearize.linearize_(model, self.settings).eval()


def find_subject(model: str | Path, revision: str | None, settings: Recipe, asked: bool) -> Subject:
    """The subject of a name or path; `asked` is whether `settings`, which a base model is converted by, were given.

    Raises:
        UsageError: a checkpoint that can't be measured so, or settings for one.
        LinearizeError: as `convert`.
    """
    from linearize.family import load_config
    from linearize.gguf import describe
    from linearize.layer_plan import plan_layers
    from linearize.modeling.probe import probe
    from linearize.source import resolve

    source = resolve(model, revision=revision, allow_converted=True)
    source = describe(source) if source.gguf else source
    probed = probe(load_config(source.config, source.name))
    place = source.gguf or source.folder
    if not source.config.get("linearize"):
        layers = plan_layers(probed, settings)
        converted = [layer for layer in layers if layer.get("mixer")]
        return Subject(place, probed, converted, "untrained", settings.conversion(), settings)
    if asked:
        raise UsageError(f"{model} is converted already, so no recipe applies to it", "Leave out its options")
    return _converted(source, place, probed)


def _converted(source: Source, place: Path, probed: Probe) -> Subject:
    from linearize.modeling.classes import checked_block
    from linearize.training.output import ADAPTER, UNCHANGED

    block = checked_block(source.config.get("model_type"), source.config.get("linearize"))
    recipe, record = block.get("recipe") or {}, block.get("training") or {}
    layers = [layer for layer in block["layers"] if layer.get("mixer")]
    if recipe.get("keep_softmax", "none") != "none":
        raise UsageError(
            f"{source.name} keeps layers as softmax already, so their mixers can't be measured",
            "Convert the base model with --keep-softmax none, or give the base model itself",
        )
    if record.get("base_weights", UNCHANGED) != UNCHANGED or (source.folder / ADAPTER).is_dir():
        raise UsageError(
            f"training has changed weights of {source.name} beside its mixers, so that it is no longer its own teacher",
            "Give the checkpoint as it was after attention transfer, or the base model",
        )
    return Subject(place, probed, layers, "trained" if record else "untrained", recipe, None)
