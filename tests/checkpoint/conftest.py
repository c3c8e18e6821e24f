"""A checkpointer whose writer process all tests of a module share, for tests that are not about processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client.checkpoint import AsyncCheckpointer


@pytest.fixture(scope="module")
def module_checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncCheckpointer]:
    with AsyncCheckpointer(tmp_path_factory.mktemp("module") / "saved", fsync=False) as checkpointer:
        yield checkpointer


@pytest.fixture
def checkpointer(module_checkpointer: AsyncCheckpointer) -> Iterator[AsyncCheckpointer]:
    """A checkpointer with an empty folder."""
    yield module_checkpointer
    module_checkpointer.wait()
    shutil.rmtree(Path(module_checkpointer.folder), ignore_errors=True)
