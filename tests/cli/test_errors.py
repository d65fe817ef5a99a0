"""Every kind of failure has its exit code, a message on stderr, and with --json a document on stdout."""

from __future__ import annotations

import importlib
import shlex
import signal
import subprocess
import sys

import pytest

from linearize.errors import ModelError, NetworkError, ResourceError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mixer", "hedge-hog"], "did you mean 'hedgehog'"),
        (["--feature-map", "hedgehgo"], "did you mean 'hedgehog'"),
        (["--recipe", "hybrid25"], "did you mean 'hybrid-25'"),
        (["--recipe", "no/such.yaml"], "there is no recipe file"),
        (["--mixer", "linear", "--window", "64"], "use mixer: window"),
        (["--window", "0"], "at least 1"),
        (["--window", "many"], "not a valid integer"),
        (["--sinks", "-1"], "at least 0"),
        (["--keep-softmax", "auto"], "auto:25% or @selection.json"),
        (["--keep-softmax", "every:x"], "every:4, 25%, auto:25%"),
        (["--keep-softmax", "@no/such.json"], "no/such.json can't be read: No such file"),
        (["--set", "windw=3"], "did you mean 'window'"),
        (["--set", "window"], "KEY=VALUE"),
        (["--window", "3", "--set", "window=4"], "given twice"),
        (["--feature-map", "hedgehog", "--set", "feature_map_options.features=3"], "has no option 'features'"),
        (["--import", "no_such_module"], "--import no_such_module failed"),
        (["--nonsense"], "No such option"),
        (["--mixer", "lineer"], "error: --mixer: unknown mixer 'lineer'"),
        (["--set", "window=0"], "error: --set window: must be at least 1, not 0"),
        (["--set", "windw=3"], "error: --set windw: unknown key 'windw'"),
        (["--recipe", "~no-such-user/r.yaml"], "a user who doesn't exist"),
        (["-o", "~no-such-user/out"], "a user who doesn't exist"),
    ],
)
def test_usage_errors_exit_2_before_the_model_is_looked_at(run, tmp_path, options, said):
    ran = run("convert", tmp_path / "no such model", "-o", tmp_path / "out", *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["conver"], ["convert"], ["convert", "model"], ["recipes", "rm"]])
def test_bad_grammar_exits_2(run, arguments):
    ran = run(*arguments)
    assert ran.code == 2
    assert "error: " in ran.err
    assert "--help" in ran.err


def test_a_missing_model_exits_3(run, tmp_path):
    for command in (["convert", "-o", tmp_path / "out"], ["inspect"], ["verify"]):
        ran = run(command[0], tmp_path / "none", *command[1:])
        assert ran.code == 3
        assert str(tmp_path / "none") in ran.err


def test_keep_softmax_out_of_range_exits_2(run, model, tmp_path):
    ran = run("convert", model, "-o", tmp_path / "out", "--keep-softmax", "0,99")
    assert ran.code == 2
    assert "99" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (
            ModelError("model.safetensors is cut off", "Download it again"),
            3,
            "error: model.safetensors is cut off.",
        ),
        (ResourceError("the disk is full"), 4, "error: the disk is full."),
        (NetworkError("'a/b' is gated"), 5, "error: 'a/b' is gated."),
        (MemoryError(), 4, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"), 4, "out of memory"),
        (OSError(28, "No space left on device", "/x"), 4, "/x: No space left on device"),
        (KeyError("x"), 1, "this is a bug of linearize (KeyError: 'x')"),
        (PermissionError(13, "Permission denied", "/x"), 1, "this is a bug of linearize"),
    ],
)
def test_errors_have_their_exit_codes(run, monkeypatch, tmp_path, raised, code, said):
    module = importlib.import_module("linearize.verification")

    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr(module, "judge", fail)
    ran = run("verify", tmp_path)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
    assert "Traceback" not in ran.err

    ran = run("verify", tmp_path, "--json")
    assert ran.json["error"]["exit_code"] == code
    assert ran.json["error"]["what"]

    assert "Traceback" in run("verify", tmp_path, "--debug").err
    monkeypatch.setenv("LINEARIZE_DEBUG", "1")
    assert "Traceback" in run("verify", tmp_path).err


def test_an_error_as_json_keeps_what_and_mend_apart(run, tmp_path):
    ran = run("convert", tmp_path / "none", "-o", tmp_path / "out", "--json")
    assert set(ran.json) == {"error"}
    assert ran.json["error"]["mend"].startswith("Check the path")


def test_a_hub_model_while_offline_exits_5(run, monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    ran = run("convert", "owner/never-downloaded", "-o", tmp_path / "out")
    assert ran.code == 5
    assert "offline" in ran.err


def hears_interrupts():
    # Background jobs of a shell ignore Ctrl-C, and so do their children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_exits_130_with_the_command_to_repeat(tmp_path, number):
    # A plug-in that never finishes stands for any long step.
    (tmp_path / "waits.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")
    command = ["convert", "my model", "-o", "out", "--import", "waits"]
    process = subprocess.Popen(
        [sys.executable, "-m", "linearize.cli", *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == f"interrupted; to run it again: {shlex.join(['linearize', *command])}\n"


def test_a_closed_pipe_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "linearize.cli", "recipes", "cat", "default"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 141
