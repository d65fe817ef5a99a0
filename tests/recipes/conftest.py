from __future__ import annotations

import pytest


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "r.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
