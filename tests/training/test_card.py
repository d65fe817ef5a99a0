"""The model card: what it inherits, what it says of the training, and no score that wasn't measured."""

from __future__ import annotations

import json
import re

import pytest
import yaml

import linearize
from linearize.training.card import base_card, card, licence_of
from tests.checkpoints import save
from tests.evals.results_example import example_results

APACHE = "\n                                 Apache License\n                           Version 2.0, January 2004\n"
STAGES = [
    {"stage": "calibrate", "rows": 4, "length": 256},
    {"stage": "transfer", "tokens": 60_000, "lr": 0.01, "loss": "mse"},
    {"stage": "distill", "tokens": 31_000, "lora": {"r": 16, "merge": True}},
]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    save(folder / "m")
    linearize.convert(folder / "m", folder / "c", overrides={"keep_softmax": "1"})
    return json.loads((folder / "c" / "config.json").read_text())


def trained(config, teacher="owner/teacher", **record):
    record = {"base_weights": "changed", "teacher": teacher, "stages": STAGES} | record
    return {**config, "linearize": {**config["linearize"], "training": record}}


def results(**changes):
    found = example_results(**changes)
    found["settings"]["device"] = "cpu"
    return found


def header(text):
    return yaml.safe_load(re.fullmatch(r"---\n(.*?)\n---\n\n# .*", text, re.DOTALL)[1])


@pytest.mark.parametrize(
    ("base", "file", "expected"),
    [
        ("---\nlicense: mit\n---\n", None, {"license": "mit"}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", ("LICENSE", APACHE), {"license": "mit"}),  # what is stated wins
        (None, ("LICENSE.txt", APACHE), {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\n---\n",
            None,
            {
                "license": "other", "license_name": "llama3",
                "license_link": "https://huggingface.co/owner/teacher/blob/main/LICENSE",
            },
        ),
        (
            "---\nlicense: other\nlicense_link: LICENSE\n---\n",
            ("LICENSE", "LLAMA 3 COMMUNITY LICENSE AGREEMENT"),
            {"license": "other", "license_link": "LICENSE"},
        ),
        (
            "no header",
            ("LICENCE", "Do what we say"),
            {"license": "other", "license_name": "inherited-from-the-base-model", "license_link": "LICENCE"},
        ),
        ("---\nlicense: [unclosed\n---\n", None, {}),
        (None, None, {}),
    ],
)  # fmt: skip
def test_the_licence_is_the_base_models(config, base, file, expected):
    text = card(trained(config), base, licence=file)
    assert header(text) == {
        "base_model": "owner/teacher", **expected,
        "library_name": "transformers", "tags": ["linearize", "linear-attention"],
    }  # fmt: skip
    assert ("wasn't found: look it up" in text) == (not expected)


def test_without_results_there_is_no_score(config):
    text = card(trained(config))
    assert "Not measured yet" in text
    assert "Its recall has not been measured." in text
    assert not re.search(r"accuracy|perplexity|retention|\d ?%|0\.\d\d\d", text)


def test_every_score_is_one_of_results_json(config):
    found = results()
    text = card(trained(config), results=found)
    for name, task in found["tasks"].items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {name}".replace("_", r"\_")))
        for side in ("teacher", "student"):
            ends = [f"{task[side][key]:.3f}" for key in ("accuracy", "low", "high")]
            assert f"| {ends[0]} ({ends[1]} to {ends[2]}) |" in row
        kept = "teacher too weak" if task["gate"] != "ok" else f"{task['retention']['value']:.3f}"
        assert f"| {kept}" in row
    ratio = found["text"]["linearize_ar_text"]["ratio"]
    assert f"| {ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) |" in text
    assert r"| arc\_easy | acc | 0.61 ± 0.01 | 0.27 ± 0.009 |" in text
    assert "documents of up to 2,153 tokens" in text
    assert all(finding.split(":")[0].replace("_", r"\_") in text for finding in found["findings"])


def test_without_a_teacher_there_are_no_columns_for_it(config):
    text = card(trained(config), results=results(teacher=False))
    rows = [line for line in text.splitlines() if line.startswith(("| recall", "| perplexity"))]
    assert rows == ["| recall | documents | answers | chance | this model |", "| perplexity | tokens | this model |"]
    assert "No teacher was run beside it." in text


def test_what_was_trained_on_what(config):
    text = card(trained(config, data={"source": "/home/me/secret/corpus.jsonl", "recall_share": 0.3}))
    assert "91,000 tokens in all. Weights of the base model have changed, too." in text
    assert "1. calibrate: no gradient; rows 4; length 256\n2. transfer: 60,000 tokens; lr 0.01; loss mse\n" in text
    assert "3. distill: 31,000 tokens; lora (r 16, merge yes)\n" in text
    assert "source: corpus.jsonl\nrecall_share: 0.3\n" in text
    assert "Only the mixers have changed." in card(trained(config, base_weights="unchanged"))
    assert "## Training\n\nNone." in card(config)


def test_a_local_base_model_is_named_without_its_path(config, tmp_path):
    text = card(trained(config, teacher=str(tmp_path / "my model")))
    assert "base_model" not in header(text)
    assert "# my model, linearized" in text
    assert str(tmp_path) not in text


def test_what_was_converted_and_how_it_is_loaded(config):
    text = card(trained(config))
    assert r"layer 1: full\_attention, as it is (kept by keep\_softmax: 1)" in text
    assert r"layers 0, 2: hybrid\_sliding, window 64 + favor" in text
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert recipe == config["linearize"]["recipe"]
    assert "peft" not in text
    assert 'PeftModel.from_pretrained(model, FOLDER + "/adapter")' in card(trained(config), adapter=True)


def test_a_strangers_words_are_no_markup(config):
    stages = [{"stage": "transfer", "tokens": 1, "note": "a | b\n# [x](y) <script>\x1b[31m"}]
    text = card(trained(config, stages=stages))
    assert r"note a \| b \# \[x\](y) \<script\>" in text
    assert "\x1b" not in text


def test_where_the_base_models_card_and_licence_are_looked_for(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README.md").write_text("of the base")
    (tmp_path / "m" / "LICENSE.md").write_text("licence")
    assert base_card(str(tmp_path / "m")) == "of the base"
    assert base_card(str(tmp_path / "gone")) is base_card(None) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert base_card("owner/not-in-the-cache") is None
    assert licence_of(tmp_path / "m") == ("LICENSE.md", "licence")
    assert licence_of(tmp_path) is None
