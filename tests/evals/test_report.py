"""The report: whole, self-contained, safe to open, and there for a run of any shape."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from linearize_evals.compare import compare
from linearize_evals.report import write_report
from linearize_evals.show import print_results

from linearize.errors import ResourceError
from tests.evals.results_example import answer, example_results

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Tags with their attributes, and the text; fails on tags that don't match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"<{tag}> has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def results():
    return example_results()


@pytest.fixture(scope="module")
def written(results, tmp_path_factory):
    return write_report(results, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(written):
    return Page(written[0])


def report_of(results: dict[str, Any], folder: Path, **changes: Any) -> tuple[Page, list[Path]]:
    made = copy.deepcopy(results)
    for path, value in changes.items():
        made[path] = value
    files = write_report(made, folder)
    return Page(files[0]), files


def test_everything_is_written_and_small(written):
    assert written[0].name == "report.html"
    assert written[0].stat().st_size < 1_500_000
    names = {path.name for path in written[1:]}
    for task in ("linearize_niah_single_teacher", "linearize_niah_single_difference", "linearize_mqar_lines_pairs"):
        assert {f"{task}.svg", f"{task}.png"} <= names
    assert {"linearize_mqar_lines_distance.svg", "linearize_ar_text_position.svg", "cache.svg"} <= names
    assert {path.name for path in written[1].parent.iterdir()} == names  # nothing half-written is left
    for path in written:
        if path.suffix == ".svg":
            ElementTree.parse(path)


def test_nothing_is_fetched(page):
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "img"}
        for name, value in attributes.items():
            if not name.startswith("xmlns"):
                assert "//" not in (value or ""), (tag, name)
    assert not re.search(r"url\(\s*['\"]?(?!#)|@import", page.source)


def test_ids_are_unique_and_every_reference_has_its_own(page):
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 50
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)|aria-labelledby="([^"]+)"', page.source)
    assert used
    assert {name for groups in used for name in groups if name} <= set(ids)


def test_the_page_can_be_read_aloud(page):
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("title")) >= 1
    assert {th.get("scope") for th in page.all("th")} == {"col", "row"}
    drawings = page.all("svg")
    assert len(drawings) > 8
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in drawings)
    assert len({svg["aria-label"] for svg in drawings}) == len(drawings)


def test_the_figures_of_the_results_are_on_the_page(page, results):
    for sentence in results["findings"]:
        assert sentence.replace("\u00a0", " ") in page.text.replace("\u00a0", " ")
    kept = results["tasks"]["linearize_mqar_lines"]["retention"]
    assert f"{kept['value']:.3f} [{kept['low']:.3f}, {kept['high']:.3f}]" in page.text
    assert "A 93 %" in page.text
    assert [td.get("class") for td in page.all("td")].count("weak") == 2
    assert page.text.count("teacher too weak") > 10  # in the table and in the cells of the heat map
    assert "window of 64 tokens" in page.text
    for words in (
        "SmolLM2-135M-Instruct",
        "30 x window 64 + favor",
        "5.24.0",
        "377.49 MB",
        "student / teacher",
    ):
        assert words in page.text


def test_names_from_outside_are_text(results, tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    models = copy.deepcopy(results["models"])
    models["student"]["name"] = models["teacher"]["mixers"] = evil
    scores = {evil: {"teacher": {evil: 1.0}, "student": {evil: evil}}}
    more = {"settings": {evil: evil}, "versions": {evil: evil}, "findings": [evil], "lm_eval": scores}
    tasks = {f"{evil}$x_1$": results["tasks"]["linearize_niah_single"]}
    page, files = report_of(results, tmp_path, models=models, tasks=tasks, **more)
    assert page.all("script") == []
    assert evil in page.text
    assert f"{evil}$x_1$: accuracy by distance" in page.text
    assert all(path.parent == tmp_path / "figures" for path in files[1:])
    for path in files:
        if path.suffix == ".svg":
            ElementTree.parse(path)


def test_the_same_results_give_the_same_bytes(results, written, tmp_path):
    again = write_report(copy.deepcopy(results), tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_figures_of_an_earlier_run_go_and_nothing_else_does(results, tmp_path):
    figures, elsewhere = tmp_path / "figures", tmp_path / "elsewhere.svg"
    (figures / "folder.svg").mkdir(parents=True)
    for path in (figures / "old.svg", figures / "old.png", figures / "mine.txt", tmp_path / "mine.svg", elsewhere):
        path.write_text("old")
    (figures / "link.svg").symlink_to(elsewhere)
    _, files = report_of(results, tmp_path)
    left = {path.name for path in figures.iterdir()} - {path.name for path in files}
    assert left == {"mine.txt", "link.svg", "folder.svg"}
    assert elsewhere.read_text() == (tmp_path / "mine.svg").read_text() == "old"


def test_figures_behind_a_link_stay(results, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/old.svg").write_text("old")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/figures").symlink_to(tmp_path / "theirs")
    report_of(results, tmp_path / "run")
    assert (tmp_path / "theirs/old.svg").read_text() == "old"


def test_a_disk_that_refuses_is_an_error_of_ours(results, tmp_path):
    (tmp_path / "figures").write_text("a file where the folder should be")
    with pytest.raises(ResourceError, match="can't be written"):
        write_report(results, tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_layer_that_sees_everything_leaves_no_window_to_mark(results, tmp_path):
    models = copy.deepcopy(results["models"])
    models["student"]["full_attention_layers"] = 2
    page, _ = report_of(results, tmp_path, models=models, findings=[])
    assert "window of 64 tokens" not in page.source


def test_the_terminal_shows_what_there_is_in_80_columns(results, tmp_path, capsys):
    made = copy.deepcopy(results) | {"out": str(tmp_path), "findings": []}
    made["models"] = {side: {**model, "cache_dtype": "float32"} for side, model in made["models"].items()}
    text = made["text"]["linearize_ar_text"]
    text["by_label"]["hit"]["student"]["perplexity"] = None
    text["by_label"]["hit"]["ratio"]["value"] = None
    made["tasks"]["linearize_mqar_lines"]["retention"] |= {"low": None, "high": None}
    print_results(made)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "wrote" not in line)
    (hit,) = (line for line in lines if line.startswith("ar_text, hit tokens"))
    assert hit.split()[-2:] == ["-", "-"]
    (lists,) = (line for line in lines if line.startswith("mqar_lines"))
    assert lists.endswith("(- to -)")
    (weak,) = (line for line in lines if line.startswith("niah_multivalue"))
    assert weak.endswith("teacher too weak")


def test_findings_are_wrapped_for_people_only(results, tmp_path, capsys, monkeypatch):
    made = example_results(teacher=False) | {"out": str(tmp_path), "findings": ["word " * 60]}
    made["models"]["student"]["cache_dtype"] = "float32"
    print_results(made)
    assert "* " + ("word " * 60).strip() in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_results(made)
    words = [line for line in capsys.readouterr().out.splitlines() if "word" in line]
    assert len(words) == 6
    assert all(len(line) <= 60 for line in words)


def test_without_a_teacher_there_are_no_columns_of_it(tmp_path):
    page, files = report_of(example_results(teacher=False), tmp_path)
    assert not any("teacher" in path.name or "difference" in path.name for path in files)
    assert "No teacher was run" in page.text
    tables = page.text.split("Accuracy of recall")[1].split("Other tasks")[0]
    assert "student" in tables
    for word in ("teacher", "retention", "p "):
        assert f" {word}" not in tables


def test_one_task_of_one_cell(results, tmp_path):
    one = [answer(number, correct=number > 0) for number in range(3)]
    models = {"teacher": {"name": "t", "cache": []}, "student": {"name": "s", "window": None, "cache": []}}
    more = {"models": models, "ablations": None, "lm_eval": {}, "findings": []}
    page, files = report_of(results, tmp_path, **compare(one, one), **more)
    assert len(files) == 1
    assert "niah_single" in page.text
    for title in ("Perplexity", "Memory", "Without a branch", "Other tasks"):
        assert title not in page.words


def test_no_answers_at_all(results, tmp_path):
    page, _ = report_of(results, tmp_path, tasks={}, text={}, ablations=None, lm_eval={})
    assert "Recall" not in page.words


def test_pairs_and_lengths_together_are_a_heat_map(results, tmp_path):
    grid = [
        answer(f"{length}/{pairs}", length=length, pairs=pairs, distance=d)
        for length in (64, 128)
        for pairs in (4, 8)
        for d in (10,)
    ]
    _, files = report_of(results, tmp_path, **compare(grid, grid) | {"text": {}})
    assert "linearize_niah_single_difference.svg" in {path.name for path in files}


NAMED = {"tasks", "text", "lm_eval", "linear", "window", "by_label"}  # mappings whose keys are names of the run's own
FREE = {"versions", "settings", "seconds"}


def fields(value: Any, name: str = "") -> set[str]:
    """The names of all fields under a value."""
    if isinstance(value, list):
        return {field for entry in value for field in fields(entry)}
    if not isinstance(value, dict) or name in FREE:
        return set()
    if name in NAMED:
        return {field for entry in value.values() for field in fields(entry)}
    return value.keys() | {field for key, entry in value.items() for field in fields(entry, key)}


def test_the_documentation_lists_every_field(results):
    listed = set(re.findall(r"`([^`]+)`", (ROOT / "docs/results.md").read_text(encoding="utf-8")))
    metrics = {"acc", "acc_norm"}
    assert fields(results) - metrics - listed == set()
