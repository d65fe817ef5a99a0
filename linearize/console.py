"""What commands show people: plans, summaries, progress. Scripts read the same facts with `--json`."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from linearize.keep_softmax import ranges


def printable(text: str, keep: str = "") -> str:
    """`text` with every character that a terminal might obey written out as \\xNN, save those in `keep`.

    Names of files, tensors and layers are a stranger's. A byte of a file name that isn't UTF-8 shows as itself.
    """
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that it could not decode
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: str) -> None:
    """Print one line."""
    click.echo(printable(text))


UNITS = {"select": "layers run"}  # of what is counted otherwise than the rest of a command


@contextlib.contextmanager
def progress(unit: str = "bytes") -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback that draws bars on stderr, or None where stderr is no terminal; it counts bytes or something else."""
    if not sys.stderr.isatty():
        _silence_libraries()
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        *(TextColumn("{task.description:14}", markup=False), BarColumn()),
        *(TextColumn("{task.fields[count]}", markup=False), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            own = UNITS.get(what, unit)
            count = f"{size(done)} of {size(total)}" if own == "bytes" else f"{done:,}/{total:,} {own}"
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what), total=total, count=count)
            bars.update(tasks[what], completed=done, total=total, count=count)

        yield show


def _silence_libraries() -> None:
    """Bars of transformers and huggingface_hub fill log files, since they draw without a terminal, too."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    import huggingface_hub.utils
    from transformers.utils import logging

    huggingface_hub.utils.disable_progress_bars()
    logging.disable_progress_bar()


def print_result(document: Mapping[str, Any], plugins: Sequence[str] = ()) -> None:
    """What `convert` did, or would do; `plugins` are the modules that the next command has to import, too."""
    plan, files, old = document["plan"], document["files"], document["replaces"]
    print_plan(plan)
    if old:
        say(f"replaces {document['out']} ({old['files']} files, {size(old['bytes'])})")
    if not files:
        say("")
        say(f"dry run: nothing was written to {document['out']}")
        return
    for note in document["notes"]:
        say(f"note: {note}")
    written = sum(file["bytes"] for file in files.values())
    say("")
    say(f"wrote {len(files)} files, {size(written)}, in {document['seconds']:.1f} s: {document['out']}")
    imports = [word for module in plugins for word in ("--import", module)]
    say(f"next: {shlex.join(['linearize', 'verify', str(document['out']), *imports])}")


def print_plan(plan: Mapping[str, Any]) -> None:
    """Layers, files and bytes of a plan (`Plan.to_dict()`)."""
    print_layers(plan)
    say(f"new parameters: {plan['new_parameters']:,}")
    linked = "dequantised" if plan["origin"] == "gguf" else "linked (no bytes)"
    how = {"link": linked, "copy": "copied", "write": "written"}
    for kind, text in how.items():
        chosen = [file for file in plan["files"] if file["how"] == kind]
        if chosen:
            names = ", ".join(file["name"] for file in chosen[:4]) + (" ..." if len(chosen) > 4 else "")
            say(f"{text}: {names} ({size(sum(file['bytes'] for file in chosen))})")
    free = "" if plan["bytes_free"] is None else f" of {size(plan['bytes_free'])} free"
    say(f"disk: {size(plan['bytes_needed'])}{free}; memory: at most {size(plan['memory_bytes'])}")
    for note in plan["notes"]:
        say(f"note: {note}")


def print_layers(facts: Mapping[str, Any]) -> None:
    """The model, and what becomes of its layers and why, alike ones together."""
    attention = len(facts["layers"])
    total = facts["num_layers"]
    others = "" if attention == total else f", {attention} with attention"
    say(f"{facts['model']}: {facts['architecture']}, {total} layers{others}")
    for numbers, text, because in alike(facts["layers"]):
        word = "layers" if len(numbers) > 1 else "layer"
        say(f"  {word} {ranges(numbers)}: {text} ({because})")


def alike(layers: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], str, str]]:
    """Layer numbers grouped by what they become and why."""
    groups: dict[tuple[str, str], list[int]] = {}
    for layer in layers:
        becomes = layer.get("becomes", layer["type"])
        text = f"{becomes}, {mixer_text(layer['mixer'])}" if layer.get("mixer") else f"{becomes}, as it is"
        groups.setdefault((text, layer.get("because", "")), []).append(layer["layer"])
    return [(numbers, text, because) for (text, because), numbers in groups.items()]


def mixer_text(mixer: Mapping[str, Any]) -> str:
    """A mixer's spec in a few words: "window 64 + hedgehog, 4 sinks", "windowed 64, 4 sinks, over gla"."""
    known = ("name", "feature_map", "feature_map_options", "window", "sinks", "over", "over_options")
    text = f"{mixer['name']} {mixer['window']}" if "window" in mixer else mixer["name"]
    if "feature_map" in mixer:
        options = ", ".join(f"{key}={value}" for key, value in mixer.get("feature_map_options", {}).items())
        text += f" + {mixer['feature_map']}" + (f"({options})" if options else "")
    if mixer.get("sinks"):
        text += f", {mixer['sinks']} sinks"
    text += "".join(f", {key} {value}" for key, value in mixer.items() if key not in known)
    if "over" in mixer:
        text += f", over {mixer_text({'name': mixer['over'], **mixer.get('over_options', {})})}"
    return text


def print_inspection(report: Mapping[str, Any]) -> None:
    """What `inspect` found."""
    print_layers(report)
    heads = sorted({(row["heads"], row["key_value_heads"], row["head_dim"]) for row in report["layers"]})
    for query, key_value, dim in heads:
        say(f"  {query} query heads, {key_value} key/value heads, head dim {dim}")
    stored = ", ".join(f"{dtype} {size(count)}" for dtype, count in report["dtypes"].items())
    state = "converted" if report["converted"] else "not converted"
    tied = "tied" if report["tied"] else "untied"
    weights = f"weights: {size(report['weight_bytes'])}" + (f" ({stored})" if stored else "")
    say(f"{weights}; {tied} embeddings; {state}")
    say(f"new parameters: {report['new_parameters']:,}")
    disk = report["disk"]
    if "bytes" in disk:
        say(f"disk: {size(disk['bytes'])}")
    else:
        elsewhere = size(disk["bytes_needed_on_another_disk"])
        say(f"to convert: {size(disk['bytes_needed'])} on the model's disk, {elsewhere} on another;")
        say(f"  memory at most {size(report['memory_bytes'])}")
    say("")
    say(f"{'cache of one sequence':24}{'softmax':>12}{'converted':>12}   ({report['cache_dtype']})")
    for row in report["cache"]:
        cells = f"{size(row['before_bytes']):>12}{size(row['after_bytes']):>12}"
        say(f"{row['tokens']:>8,} tokens         {cells}")
    for note in report["notes"]:
        say(f"note: {note}")


def print_verdict(document: Mapping[str, Any]) -> None:
    """Every fault and note, and one line that says no more than what was checked."""
    for fault in document["faults"]:
        tensor = f": tensor '{fault['key']}'" if fault["key"] else ""
        say(f"{fault['file']}{tensor} {fault['what']}")
    for note in document["notes"]:
        say(f"note: {note}")
    count = len(document["faults"])
    sound = "fine, every file and tensor" if document["complete"] else "no fault found, but not all could be checked"
    say(f"{document['out']}: " + (f"{count} fault{'s' if count > 1 else ''}" if count else sound))
    if count:
        say(document["mend"])


def size(count: float) -> str:
    """Bytes for people: "1.50 GB"."""
    from linearize.plan import human

    return human(int(count))
