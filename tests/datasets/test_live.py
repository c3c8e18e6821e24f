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

from penstock.data.writing.merge_index import merge_index
from penstock.data.writing.writers import MDSWriter

PYTHON = os.environ.get("STREAMING_PYTHON", "")
MAKE = Path(__file__).parents[1] / "data" / "mds" / "make.py"

pytestmark = pytest.mark.skipif(not PYTHON, reason="STREAMING_PYTHON names no python that has mosaicml-streaming")


def make(*args: str) -> str:
    done = subprocess.run([PYTHON, str(MAKE), *args], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_reads_what_we_write(
    tmp_path: Path, expected: dict[str, list[Any]], read_all: Callable[[Path], list[Any]]
) -> None:
    ours = {name: recipe for name, recipe in RECIPES.items() if recipe.writer == "MDSWriter"}
    for name, recipe in ours.items():
        with MDSWriter(tmp_path / name, recipe.columns, **recipe.settings) as writer:
            for sample in recipe.samples():
                writer.write(sample)
    merge_index(tmp_path / "merged")
    read = json.loads(make("read", *(str(tmp_path / name) for name in (*ours, "merged"))))
    for name in (*ours, "merged"):
        samples = expected[name]
        assert read[str(tmp_path / name)] == samples
        assert read_all(tmp_path / name) == samples


def test_we_read_what_it_writes_now(tmp_path: Path, read_all: Callable[[Path], list[Any]]) -> None:
    make("write", str(tmp_path))
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert expected.keys() == {*RECIPES, "merged"}
    for name, samples in expected.items():
        assert read_all(tmp_path / name) == samples
