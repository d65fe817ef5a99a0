"""The stage: whole or not at all, whatever the file system does."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from linearize import sink
from linearize.errors import ResourceError, UsageError
from linearize.sink import Stage
from linearize.target import check_target, replaced, survey
from tests.checkpoints import tree


def fill(stage: Stage, origin: Path, content: bytes = b"new") -> None:
    stage.link(origin, "linked")
    stage.copy(origin, "copied")
    stage.write("written", [content[:1], content[1:]])
    stage.write("folder/inside", content)
    stage.write("config.json", b"{}")


@pytest.fixture
def origin(tmp_path):
    path = tmp_path / "origin"
    path.write_bytes(b"weights" * 1000)
    return path


@pytest.fixture
def old(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"old": 1}')
    (out / "weights").write_text("old")
    return out


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_publish_writes_a_manifest_of_everything(tmp_path, origin):
    stage = Stage(tmp_path / "a" / "b" / "out")
    fill(stage, origin)
    assert not (tmp_path / "a" / "b" / "out").exists()
    assert stage.publish() == []
    out = tmp_path / "a" / "b" / "out"
    manifest = json.loads((out / "linearize-manifest.json").read_text())
    on_disk = tree(out)
    del on_disk["linearize-manifest.json"]
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == on_disk
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        name: (out / name).stat().st_size for name in on_disk
    }
    assert os.path.samefile(out / "linked", origin)
    assert not os.path.samefile(out / "copied", origin)
    assert not hidden(out.parent)


def test_an_empty_folder_is_filled_and_a_full_one_needs_force(tmp_path, origin, old):
    (tmp_path / "empty").mkdir()
    stage = Stage(tmp_path / "empty")
    fill(stage, origin)
    stage.publish()
    assert (tmp_path / "empty" / "linked").exists()
    before = tree(old)
    with pytest.raises(UsageError, match="isn't empty"):
        Stage(old)
    assert tree(old) == before
    assert not hidden(tmp_path)


@pytest.mark.parametrize("exchange", [True, False])
def test_force_replaces(tmp_path, origin, old, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(sink, "exchange", lambda a, b: False)
    stage = Stage(old, force=True)
    fill(stage, origin)
    assert (old / "weights").exists()
    stage.publish()
    assert not (old / "weights").exists()
    assert (old / "written").read_text() == "new"
    assert not hidden(tmp_path)


def test_an_out_that_is_filled_meanwhile(tmp_path, origin):
    stage = Stage(tmp_path / "out")
    fill(stage, origin)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("x")
    with pytest.raises(UsageError, match="filled by someone else"):
        stage.publish()
    stage.abandon()
    assert tree(tmp_path / "out").keys() == {"theirs"}
    assert not hidden(tmp_path)


def test_abandon_leaves_nothing(tmp_path, origin):
    stage = Stage(tmp_path / "a" / "out")
    fill(stage, origin)
    (stage.scratch() / "x").write_text("x")
    stage.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["origin"]
    assert origin.read_bytes() == b"weights" * 1000


def test_a_link_to_out_is_followed(tmp_path, origin, old):
    (tmp_path / "link").symlink_to(old)
    stage = Stage(tmp_path / "link", force=True)
    fill(stage, origin)
    stage.publish()
    assert (tmp_path / "link").is_symlink()
    assert (old / "written").exists()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_what_can_not_be_linked_is_copied(tmp_path, origin, monkeypatch, code):
    def link(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    stage = Stage(tmp_path / "out")
    assert stage.link(origin, "linked") is False
    stage.publish()
    assert (tmp_path / "out" / "linked").read_bytes() == origin.read_bytes()
    assert not os.path.samefile(tmp_path / "out" / "linked", origin)


CODES = {
    errno.ENOSPC: "another disk",
    errno.EIO: "The disk fails",
    errno.EROFS: "read-only",
    errno.EDQUOT: "quota",
}
CALLS = [(os, "link"), (os, "mkdir"), (os, "fsync"), (os, "rename"), (sink, "_write_all"), (sink, "exchange")]


@pytest.mark.parametrize("error", [*CODES, KeyboardInterrupt])
@pytest.mark.parametrize(("module", "name"), CALLS)
def test_a_failure_at_any_call_leaves_the_old_folder(tmp_path, origin, old, monkeypatch, module, name, error):
    """Make the k-th call fail for every k there is; the old folder stays (or, past the swap, the new one is
    whole)."""
    real = getattr(module, name)
    before = tree(old)
    failures = 0
    for k in range(100):
        raised = None
        calls = [0]

        def failing(*args, calls=calls, k=k, **kwargs):
            calls[0] += 1
            if calls[0] - 1 == k:
                raise error if error is KeyboardInterrupt else OSError(error, os.strerror(error))
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            if name == "rename":  # one rename is all that it takes otherwise
                patch.setattr(sink, "exchange", lambda a, b: False)
            stage = None
            try:
                stage = Stage(old, force=True)
                fill(stage, origin)
                stage.publish()
            except (ResourceError, KeyboardInterrupt) as caught:
                failures += 1
                raised = caught
                if stage:
                    stage.abandon()
            else:
                break  # there are fewer than k calls
        if error is not KeyboardInterrupt:
            assert isinstance(raised, ResourceError)
            assert CODES[error] in str(raised) or "is complete" in str(raised)
        assert not hidden(tmp_path)
        if tree(old) != before:
            # The swap was done, and only then something failed: the new folder has to be whole.
            assert "flushed to the disk" in str(raised) or error is KeyboardInterrupt
            assert {"linked", "copied", "written", "linearize-manifest.json"} <= tree(old).keys()
            shutil.rmtree(old)
            old.mkdir()
            (old / "config.json").write_text('{"old": 1}')
            (old / "weights").write_text("old")
    assert failures >= 1


def test_two_writers_the_second_fails_at_once(tmp_path, origin, old):
    first = Stage(old, force=True)
    before = tree(old)
    with pytest.raises(ResourceError, match=f"being written by process {os.getpid()}") as caught:
        Stage(old, force=True)
    assert caught.value.exit_code == 4
    assert first.folder.exists()
    script = "import sys; from linearize.sink import Stage; Stage(sys.argv[1], force=True)"
    other = subprocess.run([sys.executable, "-c", script, str(old)], capture_output=True, text=True, check=False)
    assert f"process {os.getpid()}" in other.stderr
    assert tree(old) == before
    fill(first, origin)
    first.publish()
    Stage(old, force=True).abandon()
    assert not hidden(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_two_writers_on_a_disk_without_locks(tmp_path, origin, old, monkeypatch, code):
    import fcntl

    def flock(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    first = Stage(old, force=True)
    with pytest.raises(ResourceError, match="being written by another process"):
        Stage(old, force=True)
    fill(first, origin)
    first.publish()
    assert (old / "written").exists()
    assert not hidden(tmp_path)


@pytest.mark.parametrize("kind", ["hard link", "symbolic link", "pipe", "folder"])
def test_nothing_is_written_into_what_stands_in_the_lock_s_place(tmp_path, old, kind):
    before = tree(old)
    path, precious = tmp_path / ".out.linearize-lock", tmp_path / "precious"
    precious.write_text("mine")
    make = {
        "hard link": lambda: os.link(precious, path),
        "symbolic link": lambda: path.symlink_to(precious),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[kind]()
    with pytest.raises(ResourceError, match="linearize-lock isn't a lock file"):
        Stage(old, force=True)
    assert precious.read_text() == "mine"
    assert os.path.lexists(path)
    assert tree(old) == before


def test_a_second_interrupt_while_cleaning_up_lets_go_of_the_lock(tmp_path, origin, old, monkeypatch):
    stage = Stage(old, force=True)
    fill(stage, origin)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage.abandon()
    again = Stage(old, force=True)  # would be refused if the lock were still held
    assert not stage.folder.exists()
    again.abandon()
    assert not hidden(tmp_path)


def test_leftovers_of_dead_writers_are_removed_and_nothing_else(tmp_path, old):
    dead = [".out.linearize-123-0123abcd", ".out.linearize-old-123-0123abcd"]
    others = [".out.linearize-notes", ".out2.linearize-123-0123abcd", ".out.linearize-123-0123abcd.bak"]
    for name in [*dead, *others]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    (tmp_path / ".out.linearize-1-ffffffff").symlink_to(old)
    Stage(old, force=True).abandon()
    assert sorted(hidden(tmp_path)) == sorted([*others, ".out.linearize-1-ffffffff"])
    assert (old / "weights").exists()


def test_an_old_folder_set_aside_by_a_dead_writer_comes_back(tmp_path, old):
    before = tree(old)
    old.rename(tmp_path / ".out.linearize-old-123-0123abcd")
    (tmp_path / ".out.linearize-123-0123abcd").mkdir()
    with pytest.raises(UsageError, match="isn't empty"):
        Stage(old)
    assert tree(old) == before
    assert not hidden(tmp_path)


def test_a_long_name(tmp_path, origin):
    out = tmp_path / ("é" * 120)
    stage = Stage(out)
    fill(stage, origin)
    stage.publish()
    assert (out / "written").exists()
    with pytest.raises(UsageError, match="too long"):
        Stage(tmp_path / ("x" * 300))


def test_large_files_are_hashed_in_pieces(tmp_path):
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate((8 << 20) + 3)
        file.seek(8 << 20)
        file.write(b"end")
    seen = []
    stage = Stage(tmp_path / "out", progress=lambda what, done, total: seen.append((what, done, total)))
    stage.link(path, "big")
    stage.copy(path, "copy")
    stage.publish()
    size = path.stat().st_size
    assert stage.files["big"] == stage.files["copy"] == (size, hashlib.sha256(path.read_bytes()).hexdigest())
    assert (tmp_path / "out" / "copy").read_bytes() == path.read_bytes()
    assert seen == [(what, done, size) for what in ("copy copy", "hash") for done in (8 << 20, size)]


def force(out: Path) -> None:
    check_target(survey(out), out.parent / "model", force=True)


def converted_config(out: Path) -> None:
    (out / "config.json").write_text('{"model_type": "linearized_llama"}')


def test_force_spares_folders_that_are_no_conversion(tmp_path, old):
    for config in ('{"model_type": "llama"}', "{", "[]", ""):
        (old / "config.json").write_text(config)
        with pytest.raises(UsageError, match="isn't a converted model"):
            force(old)
    (old / "linearize-manifest.json").write_text('{"files": {"weights": {}, "config.json": {}}}')
    with pytest.raises(UsageError, match="isn't a converted model"):  # a manifest of something else
        force(old)


def test_force_spares_what_others_put_into_a_conversion(tmp_path, origin):
    stage = Stage(tmp_path / "out")
    fill(stage, origin)
    stage.publish()
    out = tmp_path / "out"
    force(out)
    (out / "model-00001-of-00002.safetensors").write_text("saved over it")
    force(out)
    assert replaced(out) == (7, sum(path.stat().st_size for path in out.rglob("*") if path.is_file()))
    (out / "checkpoint-500" / "deep").mkdir(parents=True)
    (out / "folder" / "mine").write_text("beside a listed file")
    (out / "notes.txt").write_text("")
    (out / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"checkpoint-500/, folder/, link/, notes\.txt") as caught:
        force(out)
    assert "--force would delete" in str(caught.value)


def test_force_without_a_manifest_replaces_only_what_a_save_writes(tmp_path):
    out = tmp_path / "out"
    (out / "additional_chat_templates").mkdir(parents=True)
    converted_config(out)
    for name in ("model.safetensors", "tokenizer.json", "modeling_linearized.py", "additional_chat_templates/a.jinja"):
        (out / name).write_text("")
    force(out)
    (out / "results.json").write_text("")
    with pytest.raises(UsageError, match=r"didn't write: results\.json"):
        force(out)
