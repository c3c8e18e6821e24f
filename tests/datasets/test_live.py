"""Side by side with mosaicml-streaming itself: each reads what the other wrote. `make peers` runs it.

The python of an environment that has it is in STREAMING_PYTHON; without one test_mosaicml_files.py must do.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mds_recipes import RECIPES

from penstock.data.writing import text_writers, writers
from penstock.data.writing.merge_index import merge_index

PYTHON = os.environ.get("STREAMING_PYTHON", "")
MAKE = Path(__file__).parents[1] / "data" / "mds" / "make.py"
WRITERS: dict[str, Any] = {**vars(writers), **vars(text_writers)}

pytestmark = pytest.mark.skipif(not PYTHON, reason="STREAMING_PYTHON names no python that has mosaicml-streaming")


def make(*args: str) -> str:
    done = subprocess.run([PYTHON, str(MAKE), *args], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_reads_what_we_write(
    tmp_path: Path, expected: dict[str, list[Any]], read_all: Callable[[Path], list[Any]]
) -> None:
    for name, recipe in RECIPES.items():
        with WRITERS[recipe.writer](tmp_path / name, recipe.columns, **recipe.settings) as writer:
            for sample in recipe.samples():
                writer.write(sample)
    merge_index(tmp_path / "merged")
    read = json.loads(make("read", *(str(tmp_path / name) for name in expected)))
    for name, samples in expected.items():
        assert read[str(tmp_path / name)] == samples
        assert read_all(tmp_path / name) == samples


def test_we_read_what_it_writes_now(tmp_path: Path, read_all: Callable[[Path], list[Any]]) -> None:
    make("write", str(tmp_path))
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert expected.keys() == {*RECIPES, "merged"}
    for name, samples in expected.items():
        assert read_all(tmp_path / name) == samples
