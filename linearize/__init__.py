"""linearize: convert pretrained Hugging Face causal LMs to linear attention.

After `import linearize`, `AutoModelForCausalLM.from_pretrained` loads converted checkpoints. Nothing heavy is
imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

from linearize.modeling import registration as _registration

if TYPE_CHECKING:
    from linearize_evals.run import evaluate

    from linearize.conversion import convert
    from linearize.inspection import inspect
    from linearize.live import linearize_, load, load_tokenizer
    from linearize.mixers.registry import register_feature_map, register_mixer
    from linearize.modeling.bypass import ablate, branches, bypass
    from linearize.pipeline import run
    from linearize.recipe import Recipe, load_recipe
    from linearize.selection import select
    from linearize.training.session import train
    from linearize.verification import verify

_PUBLIC = {
    "Recipe": "linearize.recipe",
    "ablate": "linearize.modeling.bypass",
    "branches": "linearize.modeling.bypass",
    "bypass": "linearize.modeling.bypass",
    "convert": "linearize.conversion",
    "evaluate": "linearize_evals.run",
    "inspect": "linearize.inspection",
    "linearize_": "linearize.live",
    "load": "linearize.live",
    "load_tokenizer": "linearize.live",
    "load_recipe": "linearize.recipe",
    "register_feature_map": "linearize.mixers.registry",
    "register_mixer": "linearize.mixers.registry",
    "run": "linearize.pipeline",
    "select": "linearize.selection",
    "train": "linearize.training.session",
    "verify": "linearize.verification",
}

__all__ = [
    "Recipe",
    "__version__",
    "ablate",
    "branches",
    "bypass",
    "convert",
    "evaluate",
    "inspect",
    "linearize_",
    "load",
    "load_recipe",
    "load_tokenizer",
    "register_feature_map",
    "register_mixer",
    "run",
    "select",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
        return value
    raise AttributeError(f"module 'linearize' has no attribute '{name}'")


_registration.install()
