"""Bad sources are found before any work, each with one sentence that names it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest

from linearize.errors import NetworkError, UsageError
from linearize.training import local_text, sources
from linearize.training.schema import Data
from linearize.training.sources import check, open_source


def refused(source, *parts, kind=UsageError, how=check, **values):
    with pytest.raises(kind) as caught:
        how(Data(source=str(source), **values))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return caught.value


def write(path, content):
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def test_the_teacher_needs_no_check():
    check(Data(source="teacher"))
    refused("teacher", "nothing was sampled", how=open_source)


LONG = "a" * 5000 + ".txt"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "./folder", "/no/such", "~/no.parquet", "~nobody/x", LONG])
def test_a_missing_file_is_no_data_set(name):
    refused(name, f"there is no text file '{name}' (data.source)", ".jsonl")


def test_a_file_of_another_kind(tmp_path):
    refused(write(tmp_path / "a.csv", "x"), "a.csv' (data.source) isn't text that can be read", ".parquet")
    refused(tmp_path, "holds no text", ".txt")
    write(tmp_path / ".hidden.txt", "x")
    refused(tmp_path, "holds no text")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz"])
def test_an_empty_file(tmp_path, name):
    refused(write(tmp_path / name, "\n \n"), f"{name}' (data.source) holds no text")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_wrong_column(tmp_path, name):
    path = write(tmp_path / name, '{"content": "x", "id": 3, "more": null}\n')
    refused(path, f"{name} has no 'text', but 'content', 'id', 'more'", "Name one of them as data.column")
    refused(path, "Did you mean 'content'?", column="contents")
    refused(path, f"'id' of document 1 of {path} is a int, not text", column="id")
    check(Data(source=str(path), column="content"))
    check(Data(source=str(path), column="more"))


def test_a_bad_line_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n\n{"text": \n["text"]\n')
    check(Data(source=str(path)))  # only the first document is looked at
    found = open_source(Data(source=str(path), shuffle=False))
    with pytest.raises(UsageError, match=r"document 2 of .*a.jsonl isn't JSON"):
        list(found.walk(0))
    with pytest.raises(UsageError, match=r"document 3 of .*a.jsonl isn't a JSON object with a key 'text'"):
        list(found.walk(0, 2))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", b"\xff\xfe x"), ("a.jsonl", b'{"text": "\xff"}\n'), ("b.txt", None), ("c.parquet", b"PAR0")],
)
def test_what_can_t_be_read(tmp_path, name, content):
    path = tmp_path / name
    if content is None:
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress(b"abc" * 1000)[:-9])
    else:
        path.write_bytes(content)
    if name.endswith(".parquet"):
        pytest.importorskip("datasets")
    refused(path, str(path))


def test_text_that_editors_and_crawlers_write(tmp_path):
    """A byte order mark is no text, and no tokenizer takes half a surrogate pair."""
    write(tmp_path / "a.txt", b"\xef\xbb\xbfx")
    write(tmp_path / "b.jsonl", '{"text": "x\\ud800y \\ud83d\\ude00"}\n')
    found = open_source(Data(source=str(tmp_path), shuffle=False))
    assert [each.text for each in found.walk(None)] == ["x", "x?y \U0001f600"]


def test_the_name_of_a_parquet_file_is_no_pattern(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name in ("x[1].parquet", "x*1.parquet", "x_1.parquet"):
        with open(tmp_path / name, "wb") as file:
            datasets.Dataset.from_dict({"text": [name]}).to_parquet(file)
    for name in ("x[1].parquet", "x*1.parquet"):
        check(Data(source=str(tmp_path / name)))
        assert [each.text for each in open_source(Data(source=str(tmp_path / name))).walk(None)] == [name]


def test_one_bad_file_of_a_folder(tmp_path):
    write(tmp_path / "a.jsonl", '{"text": "x"}\n')
    write(tmp_path / "b.jsonl", '{"words": "x"}\n')
    refused(tmp_path, "b.jsonl has no 'text'")


def test_a_parquet_file_of_another_column(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"content": ["x"]}).to_parquet(str(path))
    for how in (check, open_source):
        refused(path, f"{path} has no 'text', but 'content'", how=how)


def test_decompressed_lines_go_to_a_file_when_they_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(local_text, "SPOOL_BYTES", 100)
    texts = [f"{n} äöü " * n for n in range(50)]
    path = write(tmp_path / "a.jsonl.gz", "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts))
    found = open_source(Data(source=str(path), shuffle=False))
    assert [each.text for each in found.walk(None)] == texts


@pytest.mark.parametrize("streaming", [True, False])
def test_a_package_that_is_missing(monkeypatch, streaming):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for how in (check, open_source) if not streaming else (check,):
        refused("owner/name", "'owner/name' can't be read without", "linearize[train]", how=how, streaming=streaming)


@pytest.mark.parametrize("name", ["a:b:c:d", ":en"])
def test_what_can_t_be_a_name(name):
    refused(name, f"'{name}' can't name a data set", "name:config:split")


def test_failures_of_a_data_set(monkeypatch):
    def failing(error):
        def load(*_, **__):
            raise error

        monkeypatch.setattr(sources, "load_dataset", lambda _: load)

    failing(ConnectionError("no route\nto the host"))
    refused("owner/name", "'owner/name' is no file", "(no route)", kind=NetworkError)
    failing(ValueError("BuilderConfig 'xx' not found"))
    refused("owner/name:xx", "BuilderConfig 'xx' not found", "name:config:split")


def test_a_column_that_a_data_set_lacks(monkeypatch):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"content": ["x"]})

    def load(*_, split, streaming):
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(sources, "load_dataset", lambda _: load)
    for how, streaming in ((check, True), (open_source, False)):
        refused("owner/name", "owner/name has no 'text', but 'content'", how=how, streaming=streaming)


@pytest.mark.slow
def test_an_unknown_data_set_offline(tmp_path):
    pytest.importorskip("datasets")
    code = (
        "from linearize.training.schema import Data\nfrom linearize.training.sources import check\n"
        "from linearize.errors import NetworkError\n"
        "try: check(Data(source='nobody/nothing-of-that-name'))\nexcept NetworkError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "'nobody/nothing-of-that-name' is no file, and can't be loaded as a data set" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
