"""What each command does and prints, on a tiny model."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

import pytest


def snapshot(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def converted(run, model, tmp_path):
    out = tmp_path / "out é"
    ran = run("convert", model, "-o", out, "--keep-softmax", "0,2", "--window", "8")
    assert ran.code == 0, ran.err
    return out


def test_convert_says_what_it_did_and_what_comes_next(run, model, tmp_path):
    before = snapshot(model)
    ran = run("convert", model, "-o", tmp_path / "out", "--keep-softmax", "0,2", "--window", "8")
    assert ran.code == 0
    assert "layers 0, 2: full_attention, as it is (kept by keep_softmax: 0,2)" in ran.out
    assert "layers 1, 3: hybrid_sliding, window 8 + favor" in ran.out
    assert f"next: linearize verify {tmp_path / 'out'}" in ran.out
    assert snapshot(model) == before
    assert (tmp_path / "out" / "LICENSE").read_text() == "as it was\n"


def test_the_flags_reach_the_checkpoint(converted):
    block = json.loads((converted / "config.json").read_text(encoding="utf-8"))["linearize"]
    assert block["recipe"]["window"] == 8
    assert block["recipe"]["keep_softmax"] == [0, 2]
    assert ["mixer" in layer for layer in block["layers"]] == [False, True, False, True]


def test_convert_as_json(run, model, tmp_path):
    ran = run("convert", model, "-o", tmp_path / "out", "--mixer", "linear", "--set", "seed=3", "--json")
    assert ran.code == 0, ran.err
    assert set(ran.json) == {"out", "seconds", "files", "plan", "notes", "replaces"}
    assert ran.json["plan"]["recipe"]["seed"] == 3
    listed = {name: info["sha256"] for name, info in ran.json["files"].items()}
    on_disk = snapshot(tmp_path / "out")
    assert listed.items() <= on_disk.items()
    assert set(on_disk) - set(listed) <= {"linearize-manifest.json"}


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_dry_run_writes_nothing(run, model, tmp_path, as_json):
    before = snapshot(model)
    ran = run("convert", model, "-o", tmp_path / "out", "--dry-run", *as_json)
    assert ran.code == 0
    if as_json:
        assert ran.json["files"] == {}
        assert len(ran.json["plan"]["layers"]) == 4
        assert ran.json["plan"]["new_parameters"] > 0
    else:
        assert "dry run: nothing was written" in ran.out
    assert list(tmp_path.iterdir()) == []
    assert snapshot(model) == before


def test_an_existing_folder_needs_force(run, model, converted):
    before = snapshot(converted)
    ran = run("convert", model, "-o", converted)
    assert ran.code == 2
    assert "--force" in ran.err
    assert snapshot(converted) == before
    assert run("convert", model, "-o", converted, "--force", "--recipe", "performer").code == 0
    assert snapshot(converted) != before


def test_a_forced_dry_run_says_what_it_would_replace(run, model, converted):
    (converted / "tokenizer.json").write_bytes(b"x" * 1000)
    files = [path.stat().st_size for path in converted.iterdir()]
    ran = run("convert", model, "-o", converted, "--force", "--dry-run")
    assert f"replaces {converted} ({len(files)} files, " in ran.out
    report = run("convert", model, "-o", converted, "--force", "--dry-run", "--json").json
    assert report["replaces"] == {"files": len(files), "bytes": sum(files)}
    (converted / "notes.txt").write_text("mine")
    ran = run("convert", model, "-o", converted, "--force")
    assert ran.code == 2
    assert "notes.txt" in ran.err
    assert (converted / "notes.txt").exists()


def test_verify_does_not_claim_more_than_it_checked(run, model, converted):
    (converted / "linearize-manifest.json").unlink()
    ran = run("verify", converted)
    assert ran.code == 0
    assert "note: hashes not checked: there is no manifest" in ran.out
    assert "fine" not in ran.out
    ran = run("verify", model)
    assert ran.code == 3
    assert "isn't a converted model" in ran.out
    assert "--force" not in ran.out


def test_a_part_of_ones_own_is_imported_by_the_command_that_comes_next(run, model, tmp_path, monkeypatch):
    (tmp_path / "own_maps.py").write_text(
        "import linearize\nfrom linearize.mixers.feature_maps import Elu1\n"
        "class Own(Elu1): pass\nlinearize.register_feature_map('own', Own, paper='none')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out"
    ran = run("convert", model, "-o", out, "--import", "own_maps", "--feature-map", "own")
    assert f"next: linearize verify {out} --import own_maps\n" in ran.out
    maps = importlib.import_module("linearize.mixers.registry").FEATURE_MAPS
    entry = maps.pop("own")  # as in a new process
    try:
        ran = run("verify", out)
        assert (ran.code, "command line: --import" in ran.out) == (3, True)
        ran = run("inspect", out)
        assert (ran.code, "command line: --import" in ran.err) == (3, True)
        sys.modules.pop("own_maps")
        assert run("verify", out, "--import", "own_maps").code == 0
    finally:
        maps.pop("own", entry)
        sys.modules.pop("own_maps", None)


def test_names_of_strangers_do_not_reach_the_terminal_as_they_are(run, converted):
    evil = "\x1b]0;owned\x07\u202e\n.bin"
    (converted / evil).write_text("x")
    ran = run("verify", converted)
    assert r"\x1b]0;owned\x07\u202e\x0a.bin isn't in the manifest" in ran.out
    assert run("verify", converted, "--json").json["faults"][0]["file"] == evil
    ran = run("inspect", f"no\x1b[2J/{evil}")
    assert ran.code == 3
    assert "\x1b" not in ran.err
    assert r"\x1b[2J" in ran.err


def test_a_path_that_is_not_utf8(run, model, tmp_path):
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    ran = run("convert", model, "-o", out)
    assert ran.code == 0, ran.err
    assert r"/\xff" in ran.out
    ran = run("verify", out, "--json")
    assert ran.out.isascii()
    assert ran.json["out"] == out


def test_options_of_a_recipe_do_not_apply_to_what_is_converted(run, converted):
    ran = run("inspect", converted, "--window", "4")
    assert ran.code == 2
    assert "is converted already" in ran.err
    assert "note:" not in run("inspect", converted).out


def test_verify_is_silent_about_a_sound_folder_and_names_a_fault(run, converted):
    ran = run("verify", converted)
    assert ran.code == 0
    assert "fine" in ran.out
    assert run("verify", converted, "--json").json == {
        "out": str(converted),
        "ok": True,
        "faults": [],
        "notes": [],
        "complete": True,
        "mend": "",
    }

    (converted / "model-linearize.safetensors").unlink()
    with open(converted / "generation_config.json", "a") as file:
        file.write(" ")
    ran = run("verify", converted)
    assert ran.code == 3
    assert "model-linearize.safetensors" in ran.out
    assert "generation_config.json" in ran.out
    assert ran.out.endswith("Copy the folder again from where it was whole, or convert the original model again\n")
    ran = run("verify", converted, "--json")
    assert (ran.code, ran.json["ok"]) == (3, False)
    assert {"file", "key", "what"} == set(ran.json["faults"][0])


def test_inspect_before_and_after(run, model, converted):
    report = run("inspect", model, "--keep-softmax", "0", "--json").json
    assert report["converted"] is False
    assert [bool(row["mixer"]) for row in report["layers"]] == [False, True, True, True]
    last = report["cache"][-1]
    assert last["tokens"] == 131072
    assert last["after_bytes"] < 0.3 * last["before_bytes"]

    report = run("inspect", converted, "--json").json
    assert report["converted"] is True
    assert [bool(row["mixer"]) for row in report["layers"]] == [False, True, False, True]

    ran = run("inspect", converted)
    assert "layers 1, 3: hybrid_sliding, window 8 + favor" in ran.out
    assert "131,072 tokens" in ran.out


def test_doctor_reports_without_failing(run, monkeypatch):
    report = run("doctor", "--json").json
    assert report["versions"]["torch"]
    assert {row["name"] for row in report["mixers"]} >= {"linear", "window"}
    assert all(row["paper"].startswith("arXiv:") for row in report["feature_maps"] if row["name"] == "favor")
    assert {check["what"]: check["ok"] for check in report["checks"]}["mixers"] is True

    def broken():
        raise OSError("libcuda is missing")

    monkeypatch.setattr("torch.cuda.device_count", broken)
    ran = run("doctor")
    assert ran.code == 0
    assert "torch can't use the GPU: libcuda is missing" in ran.out
    assert "triton" in ran.out
    assert "\\x0a" not in ran.out


def test_recipes_commands(run, tmp_path):
    names = [row["name"] for row in run("recipes", "ls", "--json").json]
    assert {"default", "hybrid-25", "performer"} <= set(names)
    assert all(name in run("recipes", "ls").out for name in names)
    for row in run("recipes", "ls", "--json").json:
        assert row["summary"].endswith(".")
        assert ". " not in row["summary"]
    assert run("recipes", "cat", "hybrid-25").out.startswith("# A quarter")
    assert run("recipes", "cat", "hybrid-25", "--json").json["keep_softmax"] == "25%"
    assert run("recipes", "validate", *names).code == 0
    (tmp_path / "bad.yaml").write_text("windw: 3\n")
    ran = run("recipes", "validate", "default", tmp_path / "bad.yaml")
    assert ran.code == 2
    assert "default: fine" in ran.out
    assert "unknown key 'windw' (line 1)" in ran.out
    assert [row["ok"] for row in run("recipes", "validate", "default", tmp_path / "bad.yaml", "--json").json] == [
        True,
        False,
    ]


def test_json_is_the_only_thing_on_stdout_even_if_a_library_prints(run, model, monkeypatch):
    module = importlib.import_module("linearize.inspection")

    def chatty(*args, **kwargs):
        print("noise")
        return {"model": "x"}

    monkeypatch.setattr(module, "inspect", chatty)
    ran = run("inspect", model, "--json")
    assert ran.json == {"model": "x"}
    assert "noise" in ran.err
