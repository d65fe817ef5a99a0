"""What the documentation says is what the code does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from linearize.mixers.registry import FEATURE_MAPS, MIXERS, AttentionShape
from linearize.recipe import Recipe, load_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of the table whose header row starts with `header`, without code marks."""
    lines = text.split(f"\n| {header} |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in row] for row in cells]


def test_the_readme_lists_every_mixer_and_feature_map_with_its_paper():
    assert {row[0]: row[-1] for row in rows(read("README.md"), "mixer")} == {
        name: entry.paper for name, entry in MIXERS.items()
    }
    assert {row[0]: row[-1] for row in rows(read("README.md"), "feature map")} == {
        name: entry.paper for name, entry in FEATURE_MAPS.items()
    }


def test_the_table_of_recipe_keys_is_the_schema():
    table = {row[0]: row[1] for row in rows(read("docs/recipes.md"), "key")}
    assert list(table) == list(Recipe.model_fields)
    default = Recipe().to_dict()
    for key in ("version", "mixer", "keep_softmax", "convert_sliding", "seed"):
        assert table[key] == str(default[key]).replace("False", "false")
    for key in ("feature_map", "window", "sinks"):
        assert f"`{default[key]}" in table[key]


def test_the_table_of_shipped_recipes_is_complete():
    assert {row[0] for row in rows(read("docs/recipes.md"), "name")} == set(shipped_recipes())


def test_the_error_shown_for_a_bad_recipe_is_the_real_one(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("version: 1\nmixer: window\nfeaturemap: hedgehog\nwindow: 0\n")
    with pytest.raises(Exception, match="2 problems") as caught:
        load_recipe(path)
    assert "\n".join(f"    {line}" for line in f"error: {caught.value}".splitlines()) in read("docs/recipes.md")


def test_the_options_of_feature_maps_and_their_defaults_are_listed():
    table = {row[0]: row for row in rows(read("docs/mixers.md"), "map")}
    assert list(table) == list(FEATURE_MAPS)
    for name, entry in FEATURE_MAPS.items():
        assert set(re.findall(r"`(\w+)`", table[name][3])) == set(entry.options)
        for value in entry.options.values():
            assert str(value).lower() in table[name][3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("feature_map", "features"), [("elu1", 24), ("hedgehog", 48), ("favor", 256), ("taylor", 153)])
def test_the_state_takes_the_bytes_that_the_documentation_says(feature_map, features, dtype):
    import torch

    from linearize.mixers import state_bytes

    shape = AttentionShape(8, 2, 24, 40, 64, 0.2)
    heads, dim, v_dim = 2, 24, 40
    linear = 4 * heads * (features * v_dim + features + 1)
    torch_dtype = getattr(torch, dtype)
    spec = {"name": "linear", "feature_map": feature_map}
    assert state_bytes(spec, shape, dtype=torch_dtype) == linear
    element, window, sinks = torch_dtype.itemsize, 16, 3
    exact = element * (window + sinks) * heads * (dim + v_dim) + window + 8 * sinks + 8
    spec = {"name": "window", "feature_map": feature_map, "window": window, "sinks": sinks}
    assert state_bytes(spec, shape, dtype=torch_dtype) == linear + exact


def test_the_checkpoint_example_has_the_keys_of_a_real_one():
    from transformers import LlamaConfig

    from linearize.layer_plan import plan_layers
    from linearize.modeling.classes import linearized_config_dict
    from linearize.modeling.probe import probe

    example = json.loads(re.findall(r"```json\n(.*?)```", read("docs/checkpoint.md"), re.DOTALL)[0])
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        vocab_size=32,
    )
    recipe = load_recipe(None, {"keep_softmax": "0"})
    layers = plan_layers(probe(config), recipe)
    real = linearized_config_dict(config.to_dict(), "llama", layers, recipe.conversion())
    for key in ("model_type", "architectures", "auto_map"):
        assert example[key] == real[key]
    assert list(example["linearize"]) == list(real["linearize"])
    assert example["linearize"]["package_version"] == real["linearize"]["package_version"]
    for shown, true in zip(example["linearize"]["layers"], real["linearize"]["layers"], strict=True):
        assert set(shown) == set(true)
        for key in ("layer", "module", "type", "mixer"):
            assert shown.get(key) == true.get(key)
    described = {row[0] for row in rows(read("docs/checkpoint.md"), "key of a layer")}
    assert described == set(real["linearize"]["layers"][1])


def test_the_exit_codes_are_those_of_the_errors():
    from linearize import errors

    for code, _, exception in rows(read("docs/errors.md"), "exit code"):
        if exception.startswith("linearize.errors."):
            assert getattr(errors, exception.rsplit(".", 1)[1]).exit_code == int(code)


def test_the_options_of_convert_are_documented():
    from linearize.cli import cli

    text = read("docs/quickstart.md")
    for parameter in cli.commands["convert"].params:  # type: ignore[attr-defined]
        for option in parameter.opts:
            if option.startswith("--") and option != "--out":
                assert f"`{option}" in text or f"{option}`" in text


def test_the_options_of_eval_are_documented():
    from linearize.cli import cli

    text = read("docs/evaluation.md") + read("docs/quickstart.md")
    for parameter in cli.commands["eval"].params:  # type: ignore[attr-defined]
        for option in [*parameter.opts, *parameter.secondary_opts]:
            if option.startswith("--") and option not in ("--out", "--ablate", "--no-generate"):
                assert option in text, option


def test_the_table_of_tasks_is_the_catalogue():
    from linearize_evals.catalogue import AXES, FAMILIES
    from linearize_evals.suites import SUITES

    table = {row[0]: row for row in rows(read("docs/evaluation.md"), "task")}
    assert list(table) == list(FAMILIES)
    for name, family in FAMILIES.items():
        assert table[name][2] == ", ".join(AXES[axis] for axis in family.axes)
        assert table[name][3] == family.source.split(" ")[0]
    assert [row[0] for row in rows(read("docs/evaluation.md"), "suite")] == list(SUITES)


def test_the_feature_map_of_extending_md_converts_a_model_in_memory_and_on_disk(tmp_path):
    """In a process of its own: the registry is global."""
    code = re.findall(r"```python\n# my_maps.py\n(.*?)```", read("docs/extending.md"), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    (tmp_path / "my_maps.py").write_text(code)
    (tmp_path / "try_it.py").write_text(
        """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=16, vocab_size=32, head_dim=8)
config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
LlamaForCausalLM(config).save_pretrained("model")
from linearize.cli import main
options = ["--import", "my_maps", "--feature-map", "power", "--window", "4"]
options += ["--set", "feature_map_options.power=3"]
assert main(["convert", "model", "-o", "out", *options]) == 0
ids = torch.arange(1, 31)[None]
model = AutoModelForCausalLM.from_pretrained("out").eval()
assert model.model.layers[0].self_attn.linearize.feature_map.power == 3
with torch.no_grad():
    whole = model(ids).logits
    head = model(ids[:, :20], use_cache=True)
    tail = model(ids[:, 20:], past_key_values=head.past_key_values, use_cache=True).logits
assert torch.isfinite(whole).all()
assert (whole[:, 20:] - tail).abs().max() < 1e-5
"""
    )
    done = subprocess.run(
        [sys.executable, "try_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_python_of_the_readme_and_the_quick_start_runs(tmp_path, monkeypatch):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        vocab_size=32,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", read("README.md"), re.DOTALL)
    names = {"MODEL": "MODEL", "OUT": "OUT", "base_model": LlamaForCausalLM.from_pretrained("MODEL")}
    exec(compile(code, "README.md", "exec"), names)
    assert type(names["model"]).__name__ == "LinearizedLlamaForCausalLM"

    load, in_memory = re.findall(r"```python\n(.*?)```", read("docs/quickstart.md"), re.DOTALL)
    names = {}
    exec(compile(load, "quickstart.md", "exec"), names)
    assert type(names["model"]).__name__ == "LinearizedLlamaForCausalLM"
    exec(compile(in_memory.replace('"OUT"', '"OUT2"'), "quickstart.md", "exec"), names)
    assert (tmp_path / "OUT2" / "modeling_linearized.py").is_file()


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", read(path)):
        if "://" not in target:
            assert (ROOT / path).parent.joinpath(target).exists(), target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(base model folder, converted folder)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import linearize

    root = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(root / "MODEL")
    linearize.convert(root / "MODEL", root / "OUT", overrides={"window": 4, "sinks": 0})
    return root / "MODEL", root / "OUT"


@pytest.mark.parametrize(
    ("trust", "said"),
    [
        (False, ["ValueError", "contains custom code", "`trust_remote_code=True`"]),
        (True, ["ModuleNotFoundError", "linearize"]),
    ],
)
def test_what_a_program_without_linearize_gets(tiny, tmp_path, trust, said):
    code = "import sys; sys.modules['linearize'] = None; from transformers import AutoModelForCausalLM as A; "
    code += f"A.from_pretrained({str(tiny[1])!r}, trust_remote_code={trust or None})"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("\n" + said[0]) :]
    assert all(words in last for words in said)
    assert all(words.strip("`") in read("docs/checkpoint.md") for words in said if words != "ModuleNotFoundError")


def test_padding_takes_up_a_window_s_places_only_in_the_middle(tiny):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny[1]).eval()
    ids, zeros = torch.arange(1, 13)[None], torch.zeros(1, 3, dtype=torch.long)

    @torch.no_grad()
    def last(at):
        parts = [ids[:, :at], zeros, ids[:, at:]]
        mask = [torch.ones_like(parts[0]), zeros, torch.ones_like(parts[2])]
        return model(torch.cat(parts, 1), attention_mask=torch.cat(mask, 1)).logits[:, -1]

    alone = model(ids).logits[:, -1]
    assert (last(0) - alone).abs().max() < 1e-6
    assert (last(10) - alone).abs().max() > 1e-5


def test_the_json_of_verify_has_the_keys_that_are_listed(tiny):
    from linearize.verification import judge

    keys = ", ".join(f'"{key}"' for key in judge(tiny[1]).to_dict())
    listed = read("docs/checkpoint.md").replace(': [{"file", "key", "what"}]', "")
    assert f"`{{{keys}}}`" in listed
