"""Tiny configurations of every model type of transformers' AutoModelForCausalLM, and docs/families.md.

python tests/families.py --write docs/families.md
python tests/families.py --check docs/families.md
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when it is run as a script
from tests.family_configs import COMMON, FAMILIES, SLIDING


def tiny_config(model_type: str) -> Any:
    """The config of a model with a handful of layers and 0.1 to 0.6 M parameters."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config_class)}
    aliases = getattr(config_class, "attribute_map", {})
    values = {}
    for name, value in COMMON.items():
        known = name if name in names else aliases.get(name)
        if known in names:
            values[known] = value
    return config_class(**values | FAMILIES[model_type])


def tiny_model(model_type: str, seed: int = 0) -> Any:
    """A model in eval mode with random parameters and buffers, biases and norms too: a dropped one shows."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
        for module in model.modules():
            if getattr(module, "padding_idx", None) is not None and isinstance(module, torch.nn.Embedding):
                module.weight[module.padding_idx] = 0  # as trained, and as some families set it while loading
    return model


OWN, NESTED, ENCODER_DECODER = "in its own code", "nests its decoder", "encoder-decoder"
# Part of the refusal of every model type that isn't converted.
REFUSED: dict[str, str] = {
    name: reason
    for reason, names in (
        (
            OWN,
            "big_bird bloom cpmant falcon falcon_mamba git gpt_neo gpt_neox_japanese mamba mamba2 "
            "megatron-bert mpt openai-gpt reformer rembert roformer rwkv trocr xglm xlm",
        ),
        (
            ENCODER_DECODER,
            "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp "
            "pegasus plbart prophetnet whisper",
        ),
        (
            NESTED,
            "dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified "
            "gemma4_unified_assistant got_ocr2 llama4 mllama moss_transcribe_diarize qwen3_5 qwen3_5_moe "
            "qwen4_exp",
        ),
        ("more than once per forward", "diffllama hrm_text"),
        ("keeps more than keys and values", "axk2 deepseek_v32 glm_moe_dsa hy_v4 qwen4_exp_text"),
        ("doesn't know its layer", "zamba zamba2"),
        ("can't be run without weights", "blt xlnet xlstm xmod"),
    )
    for name in names.split()
}

# Model types whose own cached or left-padded results differ from a plain forward, converted or not.
INEXACT: dict[str, set[str]] = {
    "deepseek_v4": {"padded"},
    "minimax": {"cached", "padded"},
    "nemotron_h": {"padded"},
    "recurrent_gemma": {"padded"},
    "zaya": {"padded"},
}


def row(model_type: str) -> tuple[str, str, str, str]:
    """(model type, status, what its attention is, why it or some layers aren't converted)."""
    from linearize.errors import ModelError
    from linearize.modeling.probe import probe

    if model_type not in FAMILIES:
        return model_type, "not tried", "", ""
    try:
        found = probe(tiny_config(model_type))
    except ModelError as error:
        return model_type, "refused", "", error.what.removeprefix(f"model type '{model_type}' ")
    layers = [layer for layer in found.layers if not layer.refusal]
    sliding = sum(layer.kind == SLIDING for layer in layers)
    refusals = {layer.refusal: [] for layer in found.layers if layer.refusal}
    for layer in found.layers:
        if layer.refusal:
            refusals[layer.refusal].append(str(layer.layer))
    reasons = [f"layer {', '.join(numbers)}: {refusal}" for refusal, numbers in refusals.items()]
    if sliding == len(layers):
        status = "converts with `convert_sliding`"
    elif refusals:
        status = "converts some layers"
    elif sliding or len(layers) < found.num_layers:
        status = "converts its full-attention layers"
    else:
        status = "converts"
    return model_type, status, "; ".join(_mechanism(found, layers)), "; ".join(reasons)


def _mechanism(found: Any, layers: list[Any]) -> list[str]:
    shape = layers[0].shape
    parts = ["grouped keys" if shape.num_key_value_heads < shape.num_heads else "multi-head"]
    if shape.head_dim != shape.v_head_dim:
        parts.append("values have a dim of their own")
    if len({(layer.shape.head_dim, layer.shape.num_heads) for layer in layers}) > 1:
        parts.append("head dims differ between layers")
    if any(layer.kind == SLIDING for layer in found.layers):
        parts.append("sliding or chunked layers")
    if len(found.layers) < found.num_layers:
        parts.append("layers without attention")
    parts += sorted({note for layer in layers for note in layer.notes})
    for what in sorted(INEXACT.get(found.base_model_type, ())):
        parts.append(f"the base model's own {what} results are inexact")
    return parts


def table() -> str:
    """docs/families.md."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows = [row(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    converted = sum(status.startswith("converts") for _, status, _, _ in rows)
    lines = [HEAD.format(version=transformers.__version__, converted=converted, total=len(rows))]
    lines += ["| model type | status | attention | why not |", "|---|---|---|---|"]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", *rest)) + " |" for name, *rest in rows
    ]
    return "\n".join(lines) + "\n"


HEAD = """# Model families

Generated by `python tests/families.py --write docs/families.md`; `--check` compares. transformers
{version}: {converted} of the {total} model types of `AutoModelForCausalLM` convert.

There is no code per family: a probe runs the model once without weights and learns its attention from what
reaches transformers' AttentionInterface. So a model type that isn't listed may well convert, and `linearize
inspect` says whether it does. The rows below are tested with tiny random models: file conversion equals
conversion in memory, a fresh process reloads the same logits bit for bit, cached generation equals a
forward without cache, a left-padded batch equals its single rows, and gradients reach every mixer. Where
the base model itself doesn't hold to one of these, the row says so, and the test of the converted model
leaves it out.

"converts its full-attention layers" means that other layers stay as they are: sliding or chunked attention,
which is of constant size already (`convert_sliding: true` converts it too), and layers without attention.
"converts with `convert_sliding`" means that only sliding layers can be converted.
"""


def main() -> int:
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table of families")
    parser.add_argument("--check", type=Path, metavar="FILE", help="exit 1 if FILE isn't the table of families")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    text = table()
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    if arguments.check and arguments.check.read_text(encoding="utf-8") != text:
        print(
            f"{arguments.check} is out of date: python tests/families.py --write {arguments.check}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
