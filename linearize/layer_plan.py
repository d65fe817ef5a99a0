"""What becomes of each layer that has attention, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linearize.errors import UsageError
from linearize.keep_softmax import kept_layers, ranges
from linearize.recipe_mixers import check_named
from linearize.selection_file import is_auto

if TYPE_CHECKING:
    from linearize.modeling.probe import Probe, ProbedLayer
    from linearize.recipe import Recipe


def plan_layers(probed: Probe, recipe: Recipe, chosen: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """What becomes of each layer that has attention, with the reason: the `linearize` block's "layers".

    Args:
        chosen: layers that were chosen by measurement -> what is to be said of them.

    Raises:
        UsageError: keep_softmax or layers names a layer that isn't there, layers one that stays as it is, or no layer
            is left to convert.
    """
    from linearize.mixers import grows, layer_type

    chosen = chosen or {}
    stays = {layer.module: why_stays(layer, recipe) for layer in probed.layers}
    convertible = [layer.layer for layer in probed.layers if not stays[layer.module]]
    kept = kept_layers(recipe.keep_softmax, convertible, [layer.layer for layer in probed.layers])
    if not set(convertible) - kept:
        raise _nothing_left(set(stays.values()) - {""}, convertible)
    keeps = {layer: chosen.get(layer, f"kept by keep_softmax: {_as_text(recipe.keep_softmax)}") for layer in kept}
    # What stands in for layers that are to be measured says nothing about those that `layers` may name.
    asked = set() if is_auto(recipe) else kept
    check_named(
        recipe.layers, {x.layer: stays[x.module] or (keeps[x.layer] if x.layer in asked else "") for x in probed.layers}
    )
    layers = []
    for layer in probed.layers:
        entry: dict[str, Any] = {"layer": layer.layer, "module": layer.module, "type": layer.kind}
        if stays[layer.module]:
            entry["because"] = stays[layer.module]
        elif layer.layer in kept:
            entry["because"] = keeps[layer.layer]
        else:
            spec, named = recipe.mixer_spec(layer.layer), recipe.named(layer.layer)
            if layer.kind == "sliding_attention" and grows(spec):
                raise UsageError(
                    f"layer {layer.layer} has sliding-window attention, and heads that mixer '{spec['name']}' keeps "
                    "would attend to all tokens",
                    "Leave out convert_sliding, or give it another mixer",
                )
            entry |= {"type": layer_type(spec), "mixer": spec, "shape": layer.shape.to_dict()}
            why = chosen.get(layer.layer) or (f"named by layers: {named}" if named else "keep_softmax doesn't keep it")
            entry["because"] = f"{layer.kind.replace('_', ' ')}, and {why}"
        layers.append(entry)
    return layers


def why_stays(layer: ProbedLayer, recipe: Recipe) -> str:
    """Why a layer can't be converted, or not by this recipe; "" where it can."""
    if layer.refusal:
        return layer.refusal
    if layer.kind == "sliding_attention" and not recipe.convert_sliding:
        return "sliding-window attention is of constant size already (convert_sliding would convert it)"
    return ""


def _nothing_left(reasons: set[str], convertible: Sequence[int]) -> UsageError:
    if convertible:
        return UsageError(
            f"keep_softmax keeps all {len(convertible)} convertible layers ({ranges(convertible)}), "
            "so nothing is left to convert",
            "Keep fewer layers",
        )
    return UsageError(
        f"no layer can be converted: {'; '.join(sorted(reasons))}",
        "Set convert_sliding: true, if it is for sliding-window layers",
    )


def _as_text(spec: Any) -> str:
    return spec if isinstance(spec, str) else ",".join(map(str, spec))
