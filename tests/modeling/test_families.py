"""Every model type of AutoModelForCausalLM: converted, saved, reloaded and run, or refused with a reason."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import linearize
from linearize.errors import ModelError
from linearize.mixers.registry import FEATURE_MAPS
from linearize.modeling.probe import probe
from tests import families
from tests.families import FAMILIES, INEXACT, REFUSED, tiny_config, tiny_model

KNOWN = sorted(set(FAMILIES) & set(CONFIG_MAPPING_NAMES))  # an older transformers has fewer
CONVERTED = [name for name in KNOWN if name not in REFUSED]
WINDOW = {"mixer": "window", "feature_map": "hedgehog", "window": 4}
# Relative to the largest logit: fp32 sums in another order. Gemma 4, whose logits of attention aren't scaled down,
# reaches 1.5e-5.
TOLERANCE = 3e-5
NEW_TOKENS = 14  # more than three windows
LENGTHS = (3, 11, 20)  # shorter and longer than the window
# Keys of config.json that a conversion, a load or a save writes.
OURS = {"model_type", "architectures", "auto_map", "linearize", "transformers_version", "_name_or_path"}


@pytest.fixture(autouse=True)
def _exact():
    """Sums in one order, here and in the fresh process; memory that nobody filled is NaN."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory) -> Path:
    """A folder that all test processes share."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    (root / "families").mkdir(exist_ok=True)
    return root / "families"


def recipe_for(config, mixer: dict) -> dict:
    """Every layer that can be converted but the last; sliding ones only in families with hardly any other."""
    layers = [layer for layer in probe(config).layers if not layer.refusal]
    full = [layer for layer in layers if layer.kind == "full_attention"]
    sliding = len(full) < 2
    pool = layers if sliding else full
    keep = [pool[-1].layer] if len(pool) > 1 else "none"
    return {**mixer, "keep_softmax": keep, "convert_sliding": sliding}


def prompt(length: int = 20) -> torch.Tensor:
    return torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def forward(model, ids, **kwargs):
    """Logits of a forward without cache, at the positions that generate() gives to an unpadded row."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("position_ids", torch.arange(ids.shape[1])[None].expand(ids.shape))
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def generate(model, ids, **kwargs):
    """(new tokens (B, N), their logits (B, N, V)) of greedy decoding that doesn't stop."""
    out = model.generate(
        ids,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def error(actual, expected) -> float:
    """Largest difference, relative to the largest logit or 1."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


def made(workshop: Path, name: str) -> Path:
    """The family's base checkpoint, its file conversion, and the logits of base and in-memory conversion."""
    folder = workshop / name
    with FileLock(workshop / f"{name}.lock"):
        if not (folder / "logits.safetensors").exists():
            tiny_model(name).save_pretrained(folder / "base")
            model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
            recipe = recipe_for(model.config, WINDOW)
            linearize.convert(folder / "base", folder / "out", recipe=recipe, force=True)
            base = forward(model, prompt())
            live = forward(linearize.linearize_(model, recipe), prompt())
            save_file({"base": base, "live": live}, folder / "logits.safetensors")
    return folder


def check_cached_equals_uncached(model, name: str) -> None:
    ids = prompt(11)
    tokens, logits = generate(model, ids)
    whole = forward(model, torch.cat([ids, tokens], 1)[:, :-1])[:, ids.shape[1] - 1 :]
    if "cached" in INEXACT.get(name, ()):
        assert logits.isfinite().all()
        return
    assert error(logits, whole) <= TOLERANCE
    end = model.generation_config.eos_token_id
    if end is not None:
        whole[..., end] = -torch.inf  # generate() may not stop here
    assert torch.equal(whole.argmax(-1), tokens)


def check_padded_equals_single(model, name: str) -> None:
    batch, mask = torch.zeros(2, len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        batch[row, -length:], mask[row, -length:] = prompt(length)[0], 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    prefill = forward(model, batch, attention_mask=mask, **({"position_ids": positions} if takes_positions else {}))
    tokens, logits = generate(model, batch, attention_mask=mask)
    if "padded" in INEXACT.get(name, ()):
        assert logits.isfinite().all()
        return
    for row, length in enumerate(LENGTHS):
        alone_tokens, alone = generate(model, prompt(length))
        assert error(prefill[row, -length:], forward(model, prompt(length))[0]) <= TOLERANCE
        assert error(logits[row], alone[0]) <= TOLERANCE
        assert torch.equal(tokens[row], alone_tokens[0])


def check_gradients(model) -> int:
    """The count of parameters that were checked."""
    model(input_ids=prompt(), use_cache=False).logits.square().mean().backward()
    mixers = {name: p for name, p in model.named_parameters() if ".linearize." in name and p.requires_grad}
    for name, parameter in mixers.items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    return len(mixers)


def check_config_survives(folder: Path, model) -> None:
    base, out = (json.loads((folder / part / "config.json").read_text()) for part in ("base", "out"))
    assert {k: v for k, v in out.items() if k not in OURS} == {k: v for k, v in base.items() if k not in OURS}
    original = AutoModelForCausalLM.from_pretrained(folder / "base").config.to_dict()
    loaded = model.config.to_dict()
    assert {k: loaded[k] for k in original if k not in OURS} == {k: v for k, v in original.items() if k not in OURS}
    generation = folder / "base" / "generation_config.json"
    if generation.exists():
        assert (folder / "out" / "generation_config.json").read_bytes() == generation.read_bytes()


@pytest.mark.parametrize("name", CONVERTED)
def test_converted_family(name, workshop):
    folder = made(workshop, name)
    expected = load_file(folder / "logits.safetensors")
    model = linearize.load(folder / "out").eval()
    assert torch.equal(forward(model, prompt()), expected["live"])
    assert error(expected["live"], expected["base"]) > 1e-2
    check_config_survives(folder, model)
    check_cached_equals_uncached(model, name)
    check_padded_equals_single(model, name)
    assert check_gradients(model) > 0


# Not every family has a length in its config, which cosformer needs.
MAPS = [name for name in FEATURE_MAPS if name != "cosformer"]


@pytest.mark.parametrize(("name", "feature_map"), [(name, MAPS[i % len(MAPS)]) for i, name in enumerate(CONVERTED)])
def test_family_with_linear_attention_alone(name, feature_map):
    """No layer that can be converted stays softmax, so that no layer makes a T x T mask."""
    model = tiny_model(name)
    recipe = recipe_for(model.config, {"mixer": "linear", "feature_map": feature_map}) | {"keep_softmax": "none"}
    linearize.linearize_(model, recipe)
    check_cached_equals_uncached(model, name)
    check_padded_equals_single(model, name)
    check_gradients(model)


RELOAD = """
import inspect, json, sys
from pathlib import Path
import torch
import linearize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)
root, ids = Path(sys.argv[1]), torch.tensor(json.loads(sys.argv[2]))
errors = {}
for name in sys.argv[3:]:
    try:
        model = AutoModelForCausalLM.from_pretrained(root / name / "out").eval()
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        options = {"position_ids": torch.arange(ids.shape[1])[None]} if takes_positions else {}
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **options).logits
        errors[name] = float((logits - load_file(root / name / "logits.safetensors")["live"]).abs().max())
    except Exception as error:
        errors[name] = f"{type(error).__name__}: {error}"
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_a_fresh_process_reloads_every_family_bit_for_bit(workshop, tmp_path):
    for name in CONVERTED:
        made(workshop, name)
    ids = json.dumps(prompt().tolist())
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(workshop), ids, *CONVERTED],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors == dict.fromkeys(CONVERTED, 0.0)


@pytest.mark.parametrize("name", [name for name in KNOWN if name in REFUSED])
def test_refused_family(name):
    with pytest.raises(ModelError, match=REFUSED[name]):
        probe(tiny_config(name))


def test_docs_list_what_the_probe_says():
    text = (Path(families.__file__).parents[1] / "docs" / "families.md").read_text(encoding="utf-8")
    if transformers.__version__ not in text:
        pytest.skip(f"docs/families.md is about another transformers than {transformers.__version__}")
    assert text == families.table()
