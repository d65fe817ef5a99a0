"""Config and model classes of converted models, made at run time from the base family's own.

A converted Llama is `LinearizedLlamaForCausalLM`, a `LlamaForCausalLM` with mixers attached, with model type
"linearized_llama". The model type is changed on purpose: a checkpoint that kept the base's would load without
linearize as the base model, silently wrong; so it fails loudly instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import linearize
from linearize.errors import ModelError, UsageError
from linearize.mixers.registry import of_checkpoint

PREFIX = "linearized_"
BLOCK = "linearize"  # the key in config.json, and the name of each mixer submodule
BLOCK_VERSION = 1
REMOTE_MODULE = "modeling_linearized"


def is_linearized(model_type: object) -> bool:
    return isinstance(model_type, str) and model_type.startswith(PREFIX)


class _NoCopiedCode:
    """Saving never copies this package's source into the folder; `remote_code` is all that a checkpoint needs."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: transformers would mark the class so that saving copies its module."""


class LinearizedConfigMixin(_NoCopiedCode):
    """What a converted model's config adds to the base family's: the `linearize` block."""

    model_type: str
    base_model_type: str
    linearize: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()  # pyright: ignore[reportAttributeAccessIssue]
        output["auto_map"] = auto_map(self.base_model_type)
        output.pop("base_model_type", None)
        return output


class LinearizedModelMixin(_NoCopiedCode):
    """What a converted model adds to the base family's: mixers, their cache slots, and checks on loading."""

    # Mixers are small, and their features and gates feed sums over the whole context.
    _keep_in_fp32_modules_strict = (BLOCK,)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        from linearize.modeling.attach import attach

        with of_checkpoint():
            attach(self, checked_block(config.model_type, getattr(config, BLOCK, None)))  # pyright: ignore

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers' own, but a tensor that is missing or belongs to no mixer raises instead of being
        initialised or dropped.

        Raises:
            ModelError: naming the tensors.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # pyright: ignore
        missing = sorted(info["missing_keys"])
        unexpected = sorted(key for key in info["unexpected_keys"] if f".{BLOCK}." in key)
        shapes = sorted(key for key in map(_key_of, info.get("mismatched_keys", ())) if f".{BLOCK}." in key)
        faults = [f"missing {_some(missing)}"] if missing else []
        faults += [f"unexpected {_some(unexpected)}"] if unexpected else []
        faults += [f"of another shape {_some(shapes)}"] if shapes else []
        if faults:
            raise ModelError(
                f"the checkpoint doesn't fit its config: {'; '.join(faults)}",
                "Run `linearize verify` on the folder, and convert or copy it again",
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, plus the two-line file that lets `trust_remote_code=True` find linearize."""
        if kwargs.get("is_main_process", True):  # first, since saving may upload the folder
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            path = Path(save_directory) / f"{REMOTE_MODULE}.py"
            path.write_text(remote_code(self.config.base_model_type), encoding="utf-8")  # pyright: ignore
        return super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: the initialisation is the base family's own. For custom code, transformers leaves out modules that
        only fill their children's non-persistent buffers, which then hold whatever memory held (Falcon-H1)."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from linearize.modeling.cache import adopt, has_slot
        from linearize.modeling.compat import cache_of

        result = super()._prepare_cache_for_generation(  # pyright: ignore
            generation_config, model_kwargs, *args, **kwargs
        )
        cache = cache_of(model_kwargs)
        switch: Any = self._linearize_switch  # pyright: ignore[reportAttributeAccessIssue]
        if cache is not None and not switch.bypassed:
            # Now rather than at the first forward: recording for assisted decoding is switched on in between.
            mode = args[0] if args else kwargs.get("generation_mode")
            assisted = getattr(mode, "value", "") == "assisted_generation"
            for layer in self.config.linearize["layers"]:  # pyright: ignore[reportAttributeAccessIssue]
                # With early exit as the assistant, the cache has fewer layers than the model.
                if layer.get("mixer") and layer["layer"] not in switch.kept and has_slot(cache, layer["layer"]):
                    slot = adopt(cache, layer["layer"])
                    if assisted or getattr(generation_config, "is_assistant", False):
                        slot.activate_past_recording()
        return result

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> Any:
        from linearize.modeling.context import remembering

        if "gradient_checkpointing_func" in kwargs:
            kwargs["gradient_checkpointing_func"] = remembering(kwargs["gradient_checkpointing_func"])
        return super()._set_gradient_checkpointing(*args, **kwargs)  # pyright: ignore


def _key_of(entry: Any) -> str:
    return entry if isinstance(entry, str) else entry[0]


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def checked_block(model_type: Any, block: Any) -> dict[str, Any]:
    """A config's `linearize` block; raises `ModelError` if it is absent or of a version that isn't known here."""
    layers = block.get("layers") if isinstance(block, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) and "layer" in layer for layer in layers):
        raise ModelError(f"config.json has model_type '{model_type}' but no '{BLOCK}' block with its layers")
    if block.get("version") != BLOCK_VERSION:
        raise ModelError(
            f"config.json's '{BLOCK}' block has version {block.get('version')}, and this linearize "
            f"({linearize.__version__}) reads version {BLOCK_VERSION}",
            "Install the linearize version that wrote the checkpoint, or convert the base model again",
        )
    return block


def classes_for(base_model_type: str) -> tuple[type, type]:
    """(config class, model class) of converted `base_model_type` models, registered with transformers' auto classes.

    Raises:
        UsageError: if transformers has no causal language model of that type.
    """
    config_class = config_class_for(base_model_type)
    return config_class, model_class_for(config_class)


def config_class_for(base_model_type: str) -> type:
    """The config class, made on first use and kept in this module, so that it can be pickled."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if base_model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(f"transformers has no causal language model of type '{base_model_type}'")
    base = CONFIG_MAPPING[base_model_type]
    return _make(
        base,
        class_names(base_model_type)[0],
        (LinearizedConfigMixin, base),
        {"model_type": PREFIX + base_model_type, "base_model_type": base_model_type, BLOCK: None},
    )


def model_class_for(config_class: type) -> type:
    """The model class of a converted config class, made and registered on first use."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from linearize.modeling.compat import alias_tokenizer, alias_weight_conversions

    base_config: Any = config_class.__bases__[-1]
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    name = class_names(config_class.base_model_type)[1]  # pyright: ignore[reportAttributeAccessIssue]
    model_class = _make(base, name, (LinearizedModelMixin, base), {"config_class": config_class})
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    alias_weight_conversions(
        [(base_config.model_type, PREFIX + base_config.model_type), (base.__name__, model_class.__name__)]
    )
    alias_tokenizer(base_config.model_type, PREFIX + base_config.model_type, base_config, config_class)
    return model_class


def _make(base: type, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    made = vars(sys.modules[__name__])
    if name not in made:
        made[name] = type(name, bases, {**attributes, "__module__": __name__, "__doc__": base.__doc__})
    return made[name]


def __getattr__(name: str) -> Any:
    """Classes by name, for unpickling in a process that hasn't made them yet."""
    if name.startswith("Linearized"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        for base in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            if name in class_names(base):
                return classes_for(base)[class_names(base).index(name)]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def class_names(base_model_type: str) -> tuple[str, str]:
    """Names of the (config, model) classes of `base_model_type`, without importing its modules.

    Several model types share one model class (Exaone is a LlamaForCausalLM), but a model class has one config class:
    the name of such a class tells the config too.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_name = CONFIG_MAPPING_NAMES[base_model_type]
    model_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base_model_type]
    family = config_name.removesuffix("Config").removesuffix("Text")
    own = model_name.startswith(family)
    return f"Linearized{config_name}", f"Linearized{model_name}" if own else f"Linearized{family}{model_name}"


def auto_map(base_model_type: str) -> dict[str, str]:
    """The config's `auto_map`, which `trust_remote_code=True` follows to `modeling_linearized.py`."""
    config_name, model_name = class_names(base_model_type)
    return {
        "AutoConfig": f"{REMOTE_MODULE}.{config_name}",
        "AutoModelForCausalLM": f"{REMOTE_MODULE}.{model_name}",
    }


def remote_code(base_model_type: str) -> str:
    """Content of `modeling_linearized.py`: it names the package, so that transformers can say that it is missing."""
    config_name, model_name = class_names(base_model_type)
    return (
        "# Loads the classes of this checkpoint from the linearize package: pip install linearize\n"
        "from linearize.modeling.classes import classes_for\n\n"
        f'{config_name}, {model_name} = classes_for("{base_model_type}")\n'
    )


def linearized_config_dict(
    raw: dict[str, Any], base_model_type: str, layers: list[dict[str, Any]], recipe: dict[str, Any]
) -> dict[str, Any]:
    """config.json of the converted model: the base's values untouched, but for the model type, the class names and
    the `linearize` block."""
    return {
        **raw,
        "architectures": [class_names(base_model_type)[1]],
        "model_type": PREFIX + base_model_type,
        "auto_map": auto_map(base_model_type),
        BLOCK: block_for(base_model_type, layers, recipe),
    }


def block_for(base_model_type: str, layers: list[dict[str, Any]], recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": BLOCK_VERSION,
        "package_version": linearize.__version__,
        "base_model_type": base_model_type,
        "recipe": recipe,
        "layers": layers,
    }
