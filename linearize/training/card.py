"""The model card of a trained model: README.md with the header that the Hub reads. It states what is known, and of
scores only what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import linearize
from linearize.console import alike
from linearize.errors import LinearizeError
from linearize.keep_softmax import ranges
from linearize.mixers import grows
from linearize.source import HUB_ID, local_path
from linearize.training.scores import code, inline, scores, short

TAGS = ["linearize", "linear-attention"]
MAX_CARD_BYTES = 1_000_000
LICENCES = ("LICENSE*", "LICENCE*", "license*", "licence*", "COPYING*")
# What the first lines of a licence say -> its name on the Hub. Any other one is linked, not named.
KNOWN_LICENCES = {
    r"Apache License\s+Version 2\.0": "apache-2.0",
    r"MIT License\s": "mit",
    r"GNU GENERAL PUBLIC LICENSE\s+Version 3": "gpl-3.0",
}
SNIPPET = """\
```python
import linearize  # makes the model's class known
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```"""
WITH_ADAPTER = """
Its LoRA is kept apart, and the model is whole only with it:

```python
from peft import PeftModel

model = PeftModel.from_pretrained(model, FOLDER + "/adapter")
```"""


def card(
    config: Mapping[str, Any],
    base_card: str | None = None,
    results: Mapping[str, Any] | None = None,
    *,
    teacher: str | None = None,
    licence: tuple[str, str] | None = None,
    adapter: bool = False,
) -> str:
    """The text of README.md.

    Args:
        config: config.json of the trained model; what it tells is in its `linearize` block.
        base_card: the base model's card, for its licence.
        results: results.json of `linearize eval` (docs/results.md); None if nothing was measured.
        teacher: the model that was converted, where `config` doesn't tell.
        licence: name and text of the licence's file beside the model.
        adapter: whether LoRA is kept in adapter/.
    """
    block = config["linearize"]
    record = block.get("training") or {}
    known = record.get("teacher") or teacher
    teacher = str(known or "A language model")
    hub_id = teacher if known and _on_hub(teacher) else None
    header = {"base_model": hub_id} if hub_id else {}
    header |= _licence(base_card, licence, hub_id)
    header |= {"library_name": "transformers", "tags": TAGS}
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---",
        f"# {inline(short(teacher).split('/')[-1])}, linearized",
        _summary(config, code(short(teacher)) if known else teacher, hub_id, header),
        "## What was converted",
        *_layers(block),
        _yaml(block.get("recipe") or {}),
        "## Training",
        *_training(record),
        "## Scores",
        *scores(results),
        "## Use",
        f"`pip install linearize=={linearize.__version__}`, then, with FOLDER as this model's folder or Hub id:",
        SNIPPET + ("\n" + WITH_ADAPTER if adapter else ""),
        "## Limits",
        *_limits(block, results),
    ]
    return "\n\n".join(parts) + "\n"


def base_card(teacher: str | None) -> str | None:
    """The card of the base model, from its folder or the Hub's cache; None where there is none. No network."""
    try:
        place = local_path(teacher) if teacher else None
    except LinearizeError:
        return None
    if place is None and teacher:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(teacher, "README.md")
        return _read(Path(cached)) if isinstance(cached, str) else None
    return _read(place / "README.md") if place is not None and place.is_dir() else None


def licence_of(folder: Path) -> tuple[str, str] | None:
    """Name and text of the licence's file in a folder, if there is one."""
    for pattern in LICENCES:
        for path in sorted(folder.glob(pattern)):
            text = _read(path)
            if text is not None:
                return path.name, text
    return None


def _read(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _on_hub(teacher: str) -> bool:
    return bool(HUB_ID.fullmatch(teacher)) and "/" in teacher and not Path(teacher).exists()


def _licence(base: str | None, file: tuple[str, str] | None, hub_id: str | None) -> dict[str, Any]:
    """The header's keys on the licence, inherited from the base model; none where it isn't known."""
    stated = {key: value for key, value in _header(base).items() if key in ("license", "license_name", "license_link")}
    if stated.get("license"):
        link = stated.get("license_link")
        if isinstance(link, str) and ":" not in link and not (file and file[0] == link):
            # A link into the base model's repository, where that file stays.
            stated.pop("license_link")
            if hub_id:
                stated["license_link"] = f"https://huggingface.co/{hub_id}/blob/main/{link}"
        return stated
    if file is None:
        return {}
    name, text = file
    for pattern, known in KNOWN_LICENCES.items():
        if re.search(pattern, text[:600]):
            return {"license": known}
    return {"license": "other", "license_name": "inherited-from-the-base-model", "license_link": name}


def _header(text: str | None) -> dict[str, Any]:
    found = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---", text or "", re.DOTALL)
    try:
        header = yaml.safe_load(found[1]) if found else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _summary(config: Mapping[str, Any], shown: str, hub_id: str | None, header: Mapping[str, Any]) -> str:
    layers = config["linearize"]["layers"]
    converted = sum(bool(layer.get("mixer")) for layer in layers)
    shown = f"[{hub_id}](https://huggingface.co/{hub_id})" if hub_id else shown
    text = f"{shown}, with linear attention in {converted} of its {len(layers)} attention layers, made by linearize."
    if header.get("license"):
        return f"{text} The base model's licence holds for this model, too."
    return f"{text} The base model's licence, which holds for this model, too, wasn't found: look it up."


def _layers(block: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for numbers, text, because in alike(block["layers"]):
        word = "layers" if len(numbers) > 1 else "layer"
        rows.append(f"- {word} {ranges(numbers)}: {inline(text)} ({inline(because)})")
    yield "\n".join(rows)
    yield "The recipe of the conversion:"


def _training(record: Mapping[str, Any]) -> Iterator[str]:
    stages = record.get("stages") or ()
    if not stages:
        yield "None."
        return
    changed = record.get("base_weights") != "unchanged"
    what = "Weights of the base model have changed, too." if changed else "Only the mixers have changed."
    tokens = sum(stage.get("tokens") or 0 for stage in stages)
    yield f"{tokens:,} tokens in all. {what}"
    yield "\n".join(f"{number}. {_stage(stage)}" for number, stage in enumerate(stages, 1))
    if record.get("data"):
        yield "The last training's data:"
        yield _yaml(_without_paths(record["data"]))


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: short(value) if key in ("source", "teacher") else value for key, value in values.items()}


def _stage(stage: Mapping[str, Any]) -> str:
    tokens = stage.get("tokens")
    shown = _without_paths(stage)
    rest = {key: value for key, value in shown.items() if key not in ("stage", "tokens") and value is not None}
    text = f"{inline(str(stage.get('stage')))}: " + (f"{tokens:,} tokens" if tokens else "no gradient")
    return "; ".join([text, *(f"{inline(key)} {_value(value)}" for key, value in rest.items())])


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{inline(str(key))} {_value(inner)}" for key, inner in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else inline(str(value))


def _limits(block: Mapping[str, Any], results: Mapping[str, Any] | None) -> Iterator[str]:
    items = ["It loads where linearize is installed, and nowhere else: its model type is linearize's own."]
    mixers = [layer["mixer"] for layer in block["layers"] if layer.get("mixer")]
    windows = sorted({mixer["window"] for mixer in mixers if mixer.get("window")})
    shown = f"tokens older than the window ({', '.join(map(str, windows))} tokens)"
    if not windows:
        shown = "earlier tokens"
    elif not all(mixer.get("window") for mixer in mixers):
        shown = f"earlier tokens (with a window, {shown})"
    where = "converted heads of converted layers" if any(map(grows, mixers)) else "converted layers"
    items.append(f"In {where}, {shown} reach on only through a state of fixed size, which can't hold everything.")
    lengths = _lengths(results)
    items.append(
        f"Recall was measured on documents of {lengths}; nothing is known of longer ones."
        if lengths
        else "Its recall has not been measured."
    )
    items.append("What the base model's card says on its use, biases and risks holds here, too.")
    yield "\n".join(f"- {item}" for item in items)


def _lengths(results: Mapping[str, Any] | None) -> str:
    cells = [cell for task in (results or {"tasks": {}})["tasks"].values() for cell in task["cells"]]
    lengths = sorted({cell["length"] for cell in cells if cell.get("length")})
    if not lengths:
        return ""
    return f"up to {lengths[-1]:,} tokens"


def _yaml(values: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=110)
    return f"```yaml\n{text.replace('```', '')}```"
