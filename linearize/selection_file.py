"""What `linearize select` found, as a file: read, checked against a model, and turned into what a recipe keeps.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearize.errors import UsageError
from linearize.keep_softmax import AUTO, FROM_FILE, ranges

if TYPE_CHECKING:
    from linearize.modeling.probe import Probe
    from linearize.recipe import Recipe

VERSION, READS = 2, (1, 2)  # the schema that is written, and those that are read: 1 had no heads
IN_MODEL = "linearize-selection.json"  # beside the weights of a model whose layers `convert` chose itself
MAX_FILE_BYTES = 10_000_000
STAND_IN = (
    "which layers {} keeps is measured when it is converted, with the whole model in memory; "
    "until then as many, evenly spread, stand in for them"
)


def architecture(probed: Probe) -> dict[str, Any]:
    """What a selection has to share with a model that it is used for: the family, the layers with attention, and a
    digest of the shapes of their heads."""
    shapes = [[layer.layer, layer.kind, layer.shape.to_dict()] for layer in probed.layers]
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()
    numbers = [layer.layer for layer in probed.layers]
    return {"model_type": probed.base_model_type, "attention_layers": numbers, "shapes": f"sha256:{digest}"}


def settled(recipe: Recipe, probed: Probe) -> tuple[Recipe, dict[int, str], list[str]]:
    """`recipe` with plain layers and heads in the place of `keep_softmax: "@selection.json"`, why each of these layers
    is kept (see `because`), and what to know of it.

    Other recipes come back as they are, with nothing.

    Raises:
        UsageError: the file isn't there, is no selection, or belongs to another model or other mixers.
    """
    name = selection_of(recipe)
    if name is None:
        return recipe, {}, []
    selection = read_selection(name)
    check_model(selection, architecture(probed), name)
    _check_heads(selection, recipe, probed, name)
    measured, asked = (_mixers(each) for each in (selection["recipe"], recipe.conversion()))
    notes = [f"{name} was measured with other mixers, and what a layer loses depends on its mixer"]
    return with_chosen(recipe, selection), because(selection, Path(name).name), notes if measured != asked else []


def _mixers(conversion: Mapping[str, Any]) -> dict[str, Any]:
    """Of `Recipe.conversion`, what decides which layers get which mixers."""
    return {key: value for key, value in conversion.items() if key not in ("version", "keep_softmax", "seed")}


def selection_of(recipe: Recipe) -> str | None:
    """The file that `recipe` takes its layers from, if it does."""
    spec = recipe.keep_softmax
    return spec.removeprefix(FROM_FILE) if isinstance(spec, str) and spec.startswith(FROM_FILE) else None


def with_chosen(recipe: Recipe, selection: Mapping[str, Any]) -> Recipe:
    """`recipe` that keeps the layers that a selection has chosen, and gives them no mixer any more; and keeps the heads
    that it has chosen, with mixer `heads` over the mixer of their layer.

    Who named layers in `layers` couldn't know of those that are kept; and what config.json holds has to be a recipe
    that is taken again.
    """
    from linearize.recipe_files import layer_numbers
    from linearize.recipe_mixers import Block, in_order

    whole = set(selection["chosen"]["layers"])
    some = heads_in(selection)
    left = {key: [n for n in layer_numbers(key) or () if n not in whole | set(some)] for key in recipe.layers}
    blocks = {ranges(numbers): recipe.layers[key] for key, numbers in left.items() if numbers}
    partly: list[tuple[Block, list[int]]] = []
    for layer, keep in some.items():
        spec = recipe.mixer_spec(layer)
        over = {"over": spec.pop("name"), "over_options": spec}
        block = Block(mixer="heads", mixer_options={"keep": keep, **over})
        same = next((numbers for known, numbers in partly if known == block), None)
        if same is None:
            partly.append((block, same := []))
        same.append(layer)
    blocks |= {ranges(numbers): block for block, numbers in partly}
    kept = tuple(sorted(whole)) or "none"
    return recipe.model_copy(update={"keep_softmax": kept, "layers": in_order(blocks)})


def because(selection: Mapping[str, Any], name: str) -> dict[int, str]:
    """Layer -> why it is kept, or which of its heads are."""
    why = f"chosen by linearize select for score {selection['score']}, budget {selection['budget']} ({name})"
    return dict.fromkeys(selection["chosen"]["layers"], why) | {
        layer: f"key/value head{'s' * (len(keep) > 1)} {', '.join(map(str, keep))} {why}"
        for layer, keep in heads_in(selection).items()
    }


def heads_in(selection: Mapping[str, Any]) -> dict[int, list[int]]:
    """Layer -> the heads that a selection has chosen of it, where it isn't kept whole."""
    return {int(layer): keep for layer, keep in selection["chosen"].get("heads", {}).items()}


def _check_heads(selection: Mapping[str, Any], recipe: Recipe, probed: Probe, name: str) -> None:
    """Refuse heads that a layer doesn't have, or that can't be kept beside the mixer that `recipe` gives it."""
    from linearize.layer_plan import why_stays
    from linearize.mixers import grows

    layers = {layer.layer: layer for layer in probed.layers}
    for number, keep in heads_in(selection).items():
        count = layers[number].shape.num_key_value_heads
        if len(set(keep)) < len(keep) or len(keep) >= count or max(keep) >= count:
            raise UsageError(
                f"{name} chooses heads {keep} of layer {number}, which has {count} key/value heads",
                "List some of them, each once, or the layer in chosen.layers",
            )
        why = why_stays(layers[number], recipe)
        mixer = recipe.mixer_spec(number)
        if why or grows(mixer):
            why = f"which stays as it is: {why}" if why else f"whose mixer '{mixer['name']}' keeps heads already"
            raise UsageError(f"{name} chooses heads of layer {number}, {why}", "Give the recipe that was measured")


def is_auto(recipe: Recipe) -> bool:
    """Whether the layers that `recipe` keeps have to be measured first."""
    return isinstance(recipe.keep_softmax, str) and recipe.keep_softmax.startswith(AUTO)


def read_selection(name: str | Path) -> dict[str, Any]:
    """The selection in a file that `linearize select` wrote; keys that `convert` needs are checked.

    Raises:
        UsageError: it can't be read, or isn't one.
    """
    mend = "Make it with `linearize select MODEL -o selection.json`"
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"the selection {name} is in the home folder of a user who doesn't exist", mend) from None
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is too large to be a selection", mend)
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the selection {path} can't be read: {error.strerror}", mend) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} isn't JSON, so it is no selection", mend) from None
    if isinstance(found, dict) and "chosen" in found and found.get("version") not in READS:
        version = found.get("version")
        reads = " and ".join(map(str, READS))
        raise UsageError(f"{path} is a selection of version {version!r}, and this linearize reads {reads}", mend)
    if not _is_selection(found):
        raise UsageError(f"{path} isn't a selection that `linearize select` wrote", mend)
    return found


def _is_selection(found: Any) -> bool:
    try:
        model, chosen = found["architecture"], found["chosen"]
        texts = [found["score"], found["budget"], model["model_type"], model["shapes"]]
        lists = [chosen["layers"], model["attention_layers"], *chosen.get("heads", {}).values()]
        layers, recipe = heads_in(found), found["recipe"]
        names = [str(layer) for layer in layers]
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    kinds = [(texts, str), (lists, list), ([recipe], dict)]
    if not all(isinstance(value, kind) for values, kind in kinds for value in values) or not all(lists[1:]):
        return False
    if not (lists[0] or layers) or set(layers) & set(lists[0]) or names != list(chosen.get("heads", {})):
        return False
    return all(type(number) is int and number >= 0 for one in (*lists, layers) for number in one)


def check_model(selection: Mapping[str, Any], model: Mapping[str, Any], name: str) -> None:
    """Refuse a selection that was made for another model; `model` is its `architecture`.

    Raises:
        UsageError: naming what differs.
    """
    made_for, mend = selection["architecture"], "Run `linearize select` on this model"
    chosen = {*selection["chosen"]["layers"], *heads_in(selection)}
    absent = sorted(chosen - set(model["attention_layers"]))
    why = ""
    if made_for["model_type"] != model["model_type"]:
        why = f"a model of type '{made_for['model_type']}', and this one is of type '{model['model_type']}'"
    elif made_for["attention_layers"] != model["attention_layers"]:
        theirs, mine = (
            f"{len(one['attention_layers'])} layers with attention ({ranges(one['attention_layers'])})"
            for one in (made_for, model)
        )
        why = f"a model of {theirs}, and this one has {mine}"
    elif made_for["shapes"] != model["shapes"]:
        why = "a model whose attention heads have other shapes than this one's"
    elif absent:
        raise UsageError(f"{name} chooses layers {ranges(absent)}, which the model doesn't have", mend)
    if why:
        raise UsageError(f"{name} was made for {why}", mend)
