"""Tell transformers about converted model types, without importing transformers to do so.

`import linearize` must stay light, yet `AutoModelForCausalLM.from_pretrained` must know "linearized_llama" after it.
So: if transformers' table of configs is loaded already, it is extended at once; otherwise as soon as it is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

CONFIG_MODULE = "transformers.models.auto.configuration_auto"


class _ConvertedConfigs(dict):
    """transformers' table of user-registered configs, which also makes the converted ones when asked for."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._base(key) is not None

    def __missing__(self, key: str) -> Any:
        base = self._base(key)
        if base is None:
            raise KeyError(key)
        from linearize.modeling.classes import classes_for

        self[key] = classes_for(base)[0]
        return self[key]

    @staticmethod
    def _base(key: object) -> str | None:
        if not isinstance(key, str) or not key.startswith("linearized_"):
            return None
        base = key.removeprefix("linearized_")
        return base if base in sys.modules[CONFIG_MODULE].CONFIG_MAPPING_NAMES else None


def extend(module: ModuleType) -> None:
    """Make the config table of `module` know converted model types."""
    mapping: Any = module.CONFIG_MAPPING
    if not isinstance(mapping._extra_content, _ConvertedConfigs):
        mapping._extra_content = _ConvertedConfigs(mapping._extra_content)


class _Finder(importlib.abc.MetaPathFinder):
    """Runs `extend` right after transformers' config table is imported, then takes itself away."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != CONFIG_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            extend(module)

        spec.loader.exec_module = exec_module  # pyright: ignore[reportAttributeAccessIssue]
        return spec


def install() -> None:
    """Extend transformers' config table now, or when it is imported."""
    module = sys.modules.get(CONFIG_MODULE)
    if module is not None:
        extend(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
