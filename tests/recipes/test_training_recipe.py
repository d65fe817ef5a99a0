"""The sections of a recipe that train and judge: checked like its other keys, and documented as they are."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from linearize.errors import UsageError
from linearize.recipe import Recipe, load_recipe, shipped_recipes
from linearize.training import schema

ROOT = Path(__file__).resolve().parents[2]
TRAINING = {name: path for name, path in shipped_recipes().items() if load_recipe(name).train}
STAGES = "train:\n  - stage: calibrate\n  - stage: transfer\n  - stage: distill\n"


def problem(ref, overrides=None) -> str:
    with pytest.raises(UsageError) as caught:
        load_recipe(ref, overrides or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_all_problems_of_all_sections_are_reported_at_once_each_with_its_line(write):
    text = problem(
        write("""window: 0
data:
  recall_share: 1.5
  colum: x
train:
  - stage: calibrate
    block: 2
  - stage: transfer
    losss: mse
    loss: mes
    temperature: 2
  - stage: distil
  - stage: distill
    lora:
      r: 0
      alfa: 3
  - lr: 3
every: {log: 0}
trackers: [wandbb]
eval:
  batch_size: 0
""")
    )
    said = [line.strip() for line in text.splitlines()[1:]]
    for line, expected in zip(
        said,
        [
            "window (line 1): must be at least 1, not 0",
            "data.recall_share (line 3): must be at most 1, not 1.5",
            "unknown key 'data.colum' (line 4); recipes allow only documented keys; did you mean 'column'?",
            "train.0.block (line 7): stage calibrate has no block; transfer has it",
            "unknown key 'train.1.losss' (line 9); recipes allow only documented keys; did you mean 'loss'?",
            "train.1.loss (line 10): must be 'mse', 'normalized_l2' or 'cosine', not 'mes'; did you mean 'mse'?",
            "train.1.temperature (line 11): stage transfer has no temperature; distill has it",
            "train.2.stage (line 12): unknown stage 'distil'; known: calibrate, transfer, distill, finetune; "
            "did you mean 'distill'?",
            "train.3.lora.r (line 15): must be at least 1, not 0",
            "unknown key 'train.3.lora.alfa' (line 16); recipes allow only documented keys; did you mean 'alpha'?",
            "train.4 (line 17): needs a stage, which is one of calibrate, transfer, distill, finetune",
            "every.log (line 18): must be at least 1, not 0",
            f"trackers (line 19): unknown tracker 'wandbb'; known: {', '.join(schema.TRACKERS)}; did you mean 'wandb'?",
            "eval.batch_size (line 21): must be auto or a whole number of at least 1, not 0",
        ],
        strict=True,
    ):
        assert line.rstrip(".") == expected


@pytest.mark.parametrize(
    ("stage", "values", "said"),
    [
        ("calibrate", "rows: 0", "train.0.rows (line 1): must be at least 1, not 0"),
        ("transfer", "tokens: 1.5", "must be an integer, not 1.5"),
        ("transfer", "lr: 0", "must be more than 0, not 0"),
        ("transfer", "lr: .inf", "must be a finite number"),
        ("transfer", "lr: true", "must be a number, not True"),
        ("transfer", "lr: fast", "must be a number, not 'fast'"),
        ("transfer", "warmup: -0.1", "must be at least 0"),
        ("transfer", "schedule: linear", "must be 'cosine', 'wsd' or 'constant', not 'linear'"),
        ("transfer", "schedule: wsd, warmup: 0.9", "decay (line 1): is 0.2, which with warmup 0.9 is more"),
        ("transfer", "batch: 4, micro_batch: 3", "micro_batch (line 1): must divide batch, 4, and 3 doesn't"),
        ("transfer", "betas: [0.9]", "two numbers"),
        ("transfer", "betas: [0.9, 1]", "two numbers"),
        ("transfer", "clip: 0", "more than 0"),
        ("transfer", "block: 0", "at least 1"),
        ("distill", "trains: all", "teacher (line 1): can't be self where the stage trains all"),
        ("distill", "trains: mixers, lora: {r: 4}", "lora (line 1): isn't there where the stage trains mixers"),
        ("distill", "trains: mixers, mixer_lr: 1", "write lr instead"),
        ("distill", "lora: {targets: []}", "must be auto or a list"),
        ("distill", "lora: {targets: q_proj}", "must be auto or a list"),
        ("distill", "lora: {targets: [q, q]}", "'q' is listed twice"),
        ("distill", "lora: {dropout: 1}", "must be less than 1"),
        ("distill", "lora: 4", "must be a mapping"),
        ("distill", "temperature: 0", "more than 0"),
        ("distill", "ce: 2", "at most 1"),
        ("finetune", "ce: 0.5", "stage finetune has no ce; distill has it"),
        ("finetune", "loss: mse", "stage finetune has no loss; transfer has it"),
    ],
)
def test_bad_stages(write, stage, values, said):
    assert said in problem(write(f"train: [{{stage: {stage}, {values}}}]\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: teacher\n", "data (line 1): must be a mapping, not 'teacher'"),
        ("data: {source: ''}\n", "data.source (line 1): must be a name"),
        ("data: {held_out: -1}\n", "at least 0"),
        ("data: {source: a, source: b}\n", "key 'data.source' (line 1) is given already on line 1"),
        ("train: {stage: transfer}\n", "train (line 1): must be a list"),
        ("train: [transfer]\n", "train.0 (line 1): must be a mapping, not 'transfer'"),
        ("train: &a [*a]\n", "train.0 (line 1): must be a mapping"),
        ("keep: 0\n", "at least 1"),
        ("precision: bf16\n", "did you mean 'bfloat16'?"),
        ("trackers: wandb\n", "must be a list of names"),
        ("trackers: [wandb, wandb]\n", "listed twice"),
        ("eval: {suit: quick}\n", "unknown key 'eval.suit'"),
        ("eval: {depths: [2]}\n", "numbers from 0 to 1"),
        ("eval: {lengths: [x]}\n", "whole numbers of at least 1, not 'x'"),
        ("model: 3\n", "model (line 1): must be a name"),
        (
            STAGES + "    trains: all\n    teacher: m\n  - stage: distill\n",
            "stage 3 has teacher self, but stage 2 trains",
        ),
    ],
)
def test_bad_sections(write, text, said):
    assert said in problem(write(text))


def test_numbers_that_yaml_takes_for_text_are_numbers(write):
    stage = load_recipe(write("train: [{stage: transfer, lr: 1e-3, betas: [9e-1, 0.99], clip: null}]\n")).train[0]
    assert isinstance(stage, schema.Transfer)
    assert (stage.lr, stage.betas, stage.clip) == (1e-3, (0.9, 0.99), None)


def test_overrides_reach_into_sections(write):
    file = write(STAGES)
    changes = {"train.1.lr": "3e-3", "train.1.clip": "null", "train.2.lora.r": "4", "data.source": "x: [1].txt"}
    recipe = load_recipe(file, {**changes, "model": "~", "eval.samples": "3", "trackers": "[wandb]"})
    transfer, distill = recipe.train[1:]
    assert isinstance(transfer, schema.Transfer)
    assert isinstance(distill, schema.Distill)
    assert (transfer.lr, transfer.clip, distill.lora.r) == (3e-3, None, 4)
    assert (recipe.data.source, recipe.model, recipe.trackers) == ("x: [1].txt", "~", ("wandb",))
    assert recipe.eval == schema.Evaluation(samples=3)
    assert load_recipe(file).train[1:] != recipe.train[1:]  # nothing was changed in place

    assert "train.1.lr (an override): must be more than 0" in problem(file, {"train.1.lr": "0"})
    for key in ("train.3.lr", "train.transfer.lr", "train.-1.lr"):
        said = problem(file, {key: "1"})
        assert said.startswith(f"{key}: a stage is named by its number, from 0")
        assert "train.0 (calibrate), train.1 (transfer), train.2 (distill)" in said
    assert "data.source needs a value" in problem(file, {"data.source": ""})
    assert "train.1.lr (an override): must be a number, not None" in problem(file, {"train.1.lr": "null"})
    assert load_recipe(file, {"train.1.clip": None, "eval": None, "window": None}).train[1].clip is None
    assert "no such entry" in problem(None, {"train.0.lr": "1"})


def test_what_config_json_holds_is_the_conversion_alone(write):
    recipe = load_recipe(write(STAGES + "model: m\ndata: {source: x}\neval: {}\nkeep: 3\nwindow: 32\n"))
    plain = load_recipe({"window": 32})
    assert recipe.conversion() == plain.conversion()
    assert load_recipe(recipe.conversion()) == plain
    assert recipe.to_dict().items() > recipe.conversion().items()
    assert set(recipe.to_dict()) == set(Recipe.model_fields) - {"layers", "mixer_options"}


numbers = st.integers(-2, 3) | st.floats(allow_nan=True) | st.sampled_from(["1e-3", "inf", "auto", "all", "self", "x"])
values = (
    numbers | st.none() | st.booleans() | st.lists(numbers, max_size=2) | st.dictionaries(st.text(max_size=3), numbers)
)
fields = sorted({field for model in schema.STAGES.values() for field in model.model_fields} - {"stage"})
stages = st.builds(
    lambda stage, others: {"stage": stage, **others},
    st.sampled_from([*schema.STAGES, "x", 3, None]),
    st.dictionaries(st.sampled_from([*fields, "x"]) | st.integers(), values, max_size=3),
)
sections = st.fixed_dictionaries(
    {},
    optional={
        "train": st.lists(stages | values, max_size=3),
        "data": st.dictionaries(st.sampled_from([*schema.Data.model_fields, "x"]), values, max_size=3) | values,
        "eval": st.dictionaries(st.sampled_from([*schema.Evaluation.model_fields, "x"]), values, max_size=3) | values,
    },
)


@settings(max_examples=300, deadline=None)
@given(sections)
def test_any_section_is_a_recipe_or_a_usage_error(data):
    try:
        recipe = load_recipe(yaml.safe_load(yaml.safe_dump(data)))
    except UsageError:
        return
    assert load_recipe(recipe.to_dict()) == recipe


def test_the_section_eval_takes_what_evaluate_takes_with_its_defaults():
    from linearize_evals.run import evaluate

    parameters = inspect.signature(evaluate).parameters
    left_out = {"student", "out", "device", "resume", "progress", "note"}
    assert schema.Evaluation().model_dump() == {
        name: parameter.default for name, parameter in parameters.items() if name not in left_out
    }


def rows(header: str) -> list[list[str]]:
    lines = (ROOT / "docs/recipes.md").read_text().split(f"\n| {header} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def shown(value) -> str:
    return str(list(value)) if isinstance(value, tuple) else yaml.safe_dump(value).splitlines()[0]


@pytest.mark.parametrize(("section", "model"), [("data", schema.Data), ("every", schema.Every)])
def test_the_tables_of_sections_are_the_schema(section, model):
    assert [row[:2] for row in rows(f"key of `{section}`")] == [
        [f"`{name}`", f"`{shown(field.default)}`"] for name, field in model.model_fields.items()
    ]


def test_the_tables_of_stages_are_the_schema():
    common = {row[0]: row[1] for row in rows("key of a stage")}
    own = {row[0]: row for row in rows("key of one stage")}
    for stage, model in schema.STAGES.items():
        if stage == "calibrate":
            continue
        for name, field in model.model_fields.items():
            if f"`{name}`" in common:
                assert f"`{shown(field.default)}`" in common.pop(f"`{name}`") or stage != "transfer"
            elif name != "stage" and name in own:
                assert stage in own[f"`{name}`"][2]
        mine = {row[0].strip("`") for row in own.values() if stage in row[2].split(", ")}
        assert mine == set(model.model_fields) - set(schema.Steps.model_fields)
        for name in mine - {"lora"}:
            assert own[f"`{name}`"][1] == f"`{shown(model.model_fields[name].default)}`"
    for name, field in schema.Lora.model_fields.items():
        assert f"`{name}: {shown(field.default)}`" in own["`lora`"][1]
    assert not common


def test_recipes_that_train_ship_for_these_models():
    assert set(TRAINING) == {
        *(f"smollm2-135m/{kind}" for kind in ("hedgehog-window", "performer-window", "hybrid-25")),
        *(f"{model}/hedgehog-window" for model in ("llama3-8b", "qwen3-8b", "mistral-7b", "llama3-70b")),
    }
    assert {8, 18, 23} < set(load_recipe("smollm2-135m/hybrid-25").keep_softmax)
    assert len(load_recipe("smollm2-135m/hybrid-25").keep_softmax) == 8


@pytest.mark.parametrize("name", TRAINING)
def test_headers_say_what_a_recipe_takes_and_their_sums_are_right(name):
    text = TRAINING[name].read_text(encoding="utf-8")
    header = " ".join(line.lstrip("# ") for line in text.split("\nversion:")[0].splitlines())
    assert re.search(r"Hardware: .* Tokens: .* Memory: +reckoned, not measured", header)
    recipe = load_recipe(name)
    assert recipe.model
    trained = [stage for stage in recipe.train if isinstance(stage, schema.Steps)]
    for stage in trained:
        written = f"{stage.tokens // 1000}k" if stage.tokens < 1e6 else f"{stage.tokens // 1_000_000}M"
        assert f"{written} of {stage.stage.replace('distill', 'distillation')}" in header
        assert stage.length == 1024
    weights, count, unit = re.findall(r"([\d.]+) GB of weights \((?:8 layers of )?([\d.]+)([MB]) in bfloat16", header)[
        0
    ]
    parameters = float(count) * {"M": 1e6, "B": 1e9}[unit] * (8 if "layers of" in header else 1)
    assert float(weights) == pytest.approx(2 * parameters / 1e9, rel=0.02)
    total, what = re.findall(r"([\d.]+) GB for what is trained \((.*?), 16 bytes each", header)[0]
    millions = sum(float(number) for number in re.findall(r"([\d.]+)M", what))
    assert float(total) == pytest.approx(16 * millions / 1e3, abs=0.006)


@pytest.mark.parametrize("name", TRAINING)
def test_headers_count_the_mixers_that_are_trained(name):
    heads, key_value_heads, dim, layers = {
        "smollm2-135m": (9, 3, 64, 30),
        "llama3-8b": (32, 8, 128, 32),
        "mistral-7b": (32, 8, 128, 32),
        "qwen3-8b": (32, 8, 128, 36),
        "llama3-70b": (64, 8, 128, 8),  # of a block
    }[name.split("/")[0]]
    recipe = load_recipe(name)
    if isinstance(recipe.keep_softmax, tuple):
        layers -= len(recipe.keep_softmax)
    learned = (heads + key_value_heads) * dim**2 if recipe.feature_map == "hedgehog" else 0
    count = layers * (learned + heads)
    written = f"{count / 1e6:.1f}M" if learned else f"{count} gates"
    assert written in TRAINING[name].read_text(encoding="utf-8").replace("\n#           ", " ")
