"""What will run on this machine, what won't, and why. Nothing here fails: a broken part is reported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from linearize_evals.options import NEEDED

from linearize.console import say
from linearize.mixers.registry import FEATURE_MAPS, MIXERS, Entry

PACKAGES = (
    "linearize", "torch", "transformers", "triton", "accelerate", "peft", "datasets", "huggingface_hub", "safetensors",
    "tokenizers", "gguf", "lm_eval", "matplotlib", "scipy", "numpy", "pydantic", "click", "rich",
)  # fmt: skip


def examine() -> dict[str, Any]:
    """Everything that `linearize doctor` tells, JSON-able."""
    versions = {name: _version(name) for name in PACKAGES}
    devices, device_problem = _devices()
    kernels = _kernels()
    hub = _hub()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "devices": devices,
        "kernels": kernels,
        "checks": _checks(versions, devices, device_problem, kernels, hub),
        "mixers": _entries(MIXERS),
        "feature_maps": _entries(FEATURE_MAPS),
        "disk": [_disk(Path.cwd()), _disk(Path(hub["cache"]))],
        "hub": hub,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[list[dict[str, Any]], str]:
    """The devices that torch sees, and why it sees no accelerator (or can't be imported)."""
    try:
        import torch
    except Exception as error:
        return [], f"torch can't be imported: {error}"
    cpu = {
        "device": "cpu",
        "name": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    try:
        count = torch.cuda.device_count()
        cards = [torch.cuda.get_device_properties(index) for index in range(count)]
    except Exception as error:
        return [cpu], f"torch can't use the GPU: {error}"
    devices = [cpu]
    for index, card in enumerate(cards):
        capability = f"{card.major}.{card.minor}"
        name = {"device": f"cuda:{index}", "name": card.name, "capability": capability}
        devices.append({**name, "memory_bytes": card.total_memory})
    if cards:
        return devices, ""
    if not torch.backends.cuda.is_built():
        return devices, f"torch {torch.__version__} is built without CUDA"
    return devices, "torch finds no CUDA device (is the driver loaded?)"


def _kernels() -> list[dict[str, Any]]:
    """The backends of linearize_kernels: name, whether it runs here, and why (not)."""
    try:
        from linearize_kernels import dispatch

        found = dispatch.available()
    except Exception as error:
        return [{"backend": "all", "runs": False, "because": f"{type(error).__name__}: {error}"}]
    return [{"backend": name, "runs": usable, "because": because} for name, usable, because in found]


def _checks(
    versions: dict[str, str | None],
    devices: list[dict[str, Any]],
    device_problem: str,
    kernels: list[dict[str, Any]],
    hub: dict[str, Any],
) -> list[dict[str, Any]]:
    """What will run and what won't; without an `essential` one nothing runs."""
    checks: list[dict[str, Any]] = []

    def add(what: str, ok: bool, because: str, fix: str = "", essential: bool = False) -> None:
        checks.append({"what": what, "ok": ok, "because": because, "fix": "" if ok else fix, "essential": essential})

    add(
        "Python",
        sys.version_info >= (3, 10),
        platform.python_version(),
        "use Python 3.10 or newer",
        essential=True,
    )
    broken = device_problem if not devices else ""
    add("torch", not broken, broken or f"{versions['torch']}", "pip install torch", essential=True)
    version = versions["transformers"]
    right = version is not None and version.split(".")[0] == "5"
    add("transformers", right, version or "not installed", "pip install 'transformers>=5,<6'", essential=True)
    running = [row["backend"] for row in kernels if row["runs"]]
    reason = f"backends: {', '.join(running)}" if running else kernels[0]["because"] if kernels else "no backend"
    add("mixers", bool(running), reason, "install linearize again", essential=True)
    add(
        "GPU",
        len(devices) > 1,
        device_problem or devices[-1]["name"],
        "runs on the CPU, slowly for large models",
    )
    add(
        "GGUF models",
        versions["gguf"] is not None,
        versions["gguf"] or "gguf isn't installed",
        "pip install gguf",
    )
    missing = [name for name in NEEDED if _version(name) is None]
    add(
        "evaluation",
        not missing,
        f"{', '.join(missing)} not installed" if missing else f"lm_eval {versions['lm_eval']}",
        "pip install 'linearize[eval]'",
    )
    missing += [name for name in ("peft", "datasets") if _version(name) is None]
    add(
        "training",
        not missing,
        f"{', '.join(missing)} not installed" if missing else f"peft {versions['peft']}",
        "pip install 'linearize[train]'",
    )
    offline = "HF_HUB_OFFLINE is set: only what the cache holds" if hub["offline"] else "online, not tried"
    add("models from the Hub", not hub["offline"], offline, "unset HF_HUB_OFFLINE")
    return checks


def _entries(registry: dict[str, Entry]) -> list[dict[str, Any]]:
    return [
        {"name": name, "paper": entry.paper, "summary": entry.summary, "options": dict(entry.options)}
        for name, entry in registry.items()
    ]


def _disk(path: Path) -> dict[str, Any]:
    """Free bytes on the disk that holds `path`, or will hold it."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        free = shutil.disk_usage(existing).free
    except OSError:
        free = None
    return {"path": str(path), "free_bytes": free}


def _hub() -> dict[str, Any]:
    try:
        from huggingface_hub import constants, get_token

        cache, offline, token = (
            constants.HF_HUB_CACHE,
            bool(constants.HF_HUB_OFFLINE),
            get_token() is not None,
        )
    except Exception:
        cache, offline, token = "~/.cache/huggingface/hub", False, False
    return {"cache": str(Path(cache).expanduser()), "offline": offline, "logged_in": token}


def print_report(report: dict[str, Any]) -> None:
    """The report of `examine` as text."""
    for check in report["checks"]:
        mark = "ok  " if check["ok"] else "FAIL" if check["essential"] else "no  "
        fix = f"  ({check['fix']})" if check["fix"] else ""
        say(f"{mark} {check['what']:20} {check['because']}{fix}")
    say("")
    say("versions  " + ", ".join(f"{name} {version or '-'}" for name, version in report["versions"].items()))
    for device in report["devices"]:
        rest = ", ".join(f"{key} {value}" for key, value in device.items() if key != "device")
        say(f"device    {device['device']}: {rest}")
    for kernel in report["kernels"]:
        state = "runs" if kernel["runs"] else "does not run"
        say(f"backend   {kernel['backend']}: {state}" + (f", {kernel['because']}" if kernel["because"] else ""))
    for disk in report["disk"]:
        free = "unknown" if disk["free_bytes"] is None else f"{disk['free_bytes'] / 1e9:.1f} GB"
        say(f"disk      {disk['path']}: {free} free")
    hub = report["hub"]
    say(f"hub       offline {hub['offline']}, logged in {hub['logged_in']}")
    width = max(len(row["name"]) for kind in ("mixers", "feature_maps") for row in report[kind])
    for title, rows in (("mixers", report["mixers"]), ("feature maps", report["feature_maps"])):
        say("")
        say(title)
        for row in rows:
            say(f"  {row['name']:{width}} {row['paper']:18} {row['summary']}")
