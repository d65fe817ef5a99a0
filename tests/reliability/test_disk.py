"""Disks that are full, read-only or shared with another writer: a clear message, and the old folder as it
was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from linearize import sink
from linearize.conversion import convert
from linearize.errors import ResourceError
from linearize.verification import verify
from tests.checkpoints import save, tree


@contextmanager
def tmpfs(folder, size):
    """A real small disk; skips, saying so, where mounting isn't allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = done.stderr.strip()
        mounted = done.returncode == 0
    except FileNotFoundError:
        mounted, reason = False, "no mount command"
    if not mounted:
        pytest.skip(f"mounting a tmpfs isn't allowed here ({reason}); the same with a simulated disk runs above")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """About 12 MB of weights."""
    return save(tmp_path_factory.mktemp("disk") / "m", vocab_size=62_000, num_hidden_layers=1)


def test_a_disk_of_8_mb_is_refused_at_plan(model, tmp_path):
    with tmpfs(tmp_path / "disk", "8m") as disk:
        with pytest.raises(ResourceError, match=r"needs 1\d\.\d\d MB and the disk of .*/disk has 8\.\d\d MB free"):
            convert(model, disk / "out")
        assert list(disk.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way(model, tmp_path, monkeypatch):
    """The plan is told that there is room, and the disk then says ENOSPC for real; an old OUT is on it
    already."""
    small = save(tmp_path / "small")
    with tmpfs(tmp_path / "disk", "8m") as disk:
        convert(small, disk / "out")
        before = tree(disk)
        real = os.statvfs

        def roomy(path):
            values = list(real(path))
            values[4] = 1 << 40  # f_bavail
            return os.statvfs_result(values)

        monkeypatch.setattr(os, "statvfs", roomy)
        with pytest.raises(
            ResourceError, match=r"model-base\.safetensors: No space left .* OUT is as it was"
        ) as caught:
            convert(model, disk / "out", force=True)
        assert caught.value.exit_code == 4
        assert tree(disk) == before
        assert verify(disk / "out") == []


def test_weights_on_another_disk_are_copied(tmp_path):
    model = save(tmp_path / "m")
    with tmpfs(tmp_path / "disk", "8m") as disk:
        result = convert(model, disk / "out")
        assert {file.how for file in result.plan.files if "base" in file.name} == {"copy"}
        assert (disk / "out" / "model-base.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        assert verify(disk / "out") == []


def test_a_read_only_disk(tmp_path):
    model = save(tmp_path / "m")
    with tmpfs(tmp_path / "disk", "8m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ResourceError, match="Read-only file system"):
            convert(model, disk / "out")


def test_no_space_at_the_kth_write(tmp_path, monkeypatch):
    import errno

    model = save(tmp_path / "m", num_hidden_layers=1)
    convert(model, tmp_path / "out")
    before = tree(tmp_path)
    real = sink._write_all
    for k in range(100):
        count = [0]

        def write(file, piece, k=k, count=count):
            count[0] += 1
            if count[0] > k:
                real(file, memoryview(piece)[: len(piece) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(file, piece)

        monkeypatch.setattr(sink, "_write_all", write)
        try:
            convert(model, tmp_path / "out", overrides={"window": 8}, force=True)
        except ResourceError as error:
            message = str(error)
        else:
            break  # there are no more than k writes
        assert "No space left" in message
        assert tree(tmp_path) == before
    assert k >= 6  # mixers, generation_config, config, index, code and manifest at least
    assert verify(tmp_path / "out") == []


SLOW_WRITER = """
import sys, time
from linearize import sink
real = sink._write_all
def slow(file, piece):
    print("writing", flush=True)
    time.sleep(0.3)
    real(file, piece)
sink._write_all = slow
import linearize
linearize.convert(sys.argv[1], sys.argv[2], overrides={"window": 8}, force=True)
"""


@contextmanager
def slow_writer(model, out):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SLOW_WRITER, str(model), str(out)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # Background jobs of a shell ignore Ctrl-C, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == "writing\n"
        yield child
        child.kill()


def test_of_two_writers_the_second_fails_at_once_and_the_first_is_not_harmed(tmp_path):
    model = save(tmp_path / "m", num_hidden_layers=1)
    convert(model, tmp_path / "out")
    with slow_writer(model, tmp_path / "out") as child:
        start = time.monotonic()
        with pytest.raises(ResourceError, match=f"is being written by process {child.pid}"):
            convert(model, tmp_path / "out", force=True)
        assert time.monotonic() - start < 5
        assert child.wait(timeout=120) == 0
    assert verify(tmp_path / "out") == []
    assert '"window": 8' in (tmp_path / "out" / "config.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"m", "out"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_the_stage_and_leaves_out_as_it_was(tmp_path, number):
    model = save(tmp_path / "m", num_hidden_layers=1)
    convert(model, tmp_path / "out")
    before = tree(tmp_path)
    with slow_writer(model, tmp_path / "out") as child:
        child.send_signal(number)
        assert child.wait(timeout=60) != 0
        assert child.stderr
        assert "KeyboardInterrupt" in child.stderr.read()
    assert tree(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"m", "out"}


def test_the_callers_signal_handlers_come_back(tmp_path):
    model = save(tmp_path / "m", num_hidden_layers=1)
    old = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        convert(model, tmp_path / "out")
        assert [signal.getsignal(number) for number in old] == [signal.SIG_DFL, signal.SIG_DFL]
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
