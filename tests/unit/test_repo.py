"""The layout of the repository and of what is built from it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", ["kernels", "evals", "recipes"])
def test_source_roots_are_no_packages(folder):
    # transformers looks for Hugging Face's package `kernels`, and a folder with an __init__.py passes for it.
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_importing_linearize_loads_nothing_heavy():
    heavy = "{'torch', 'transformers', 'numpy', 'pydantic', 'rich', 'triton', 'safetensors'}"
    assert python(f"import sys, linearize; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_no_public_function_has_the_name_of_a_module():
    # Importing a submodule sets it as an attribute of its package, where it would hide a function of that name.
    import linearize

    assert {name for name in linearize.__all__ if (ROOT / "linearize" / f"{name}.py").exists()} == set()
    assert all(callable(getattr(linearize, name)) for name in linearize.__all__ if name != "__version__")


@pytest.mark.slow
def test_transformers_imports_beside_our_kernels_folder():
    code = "import linearize, transformers, linearize_kernels; from transformers import AutoModelForCausalLM"
    python(code, cwd=ROOT, PYTHONPATH=str(ROOT))


@pytest.mark.slow
def test_the_wheel_holds_the_four_packages_and_the_recipes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "No module named" in done.stderr:
        pytest.fail(f"the test environment lacks the build tools: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for source in (ROOT / "recipes").rglob("*.yaml"):
        assert source.relative_to(ROOT / "recipes").as_posix() in names
    for source in (ROOT / "evals").rglob("*"):  # task files, the bundled text, the report's template
        if source.is_file() and "__pycache__" not in source.parts:
            assert source.relative_to(ROOT / "evals").as_posix() in names
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"linearize", "linearize_kernels", "linearize_evals", "linearize_recipes"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
