"""Datasets that several test modules read: those that mosaicml-streaming wrote, and small ones of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from plain_values import plain
from shard_server import ShardServer
from shardsets import numbers

from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.index import INDEX, read_index
from penstock.data.remote import transfer
from penstock.data.remote.folders import RemoteFolder
from penstock.data.streaming_dataset import StreamingDataset

MDS = Path(__file__).parents[1] / "data" / "mds"


@pytest.fixture(scope="session")
def expected() -> dict[str, list[Any]]:
    """Folder below tests/data/mds -> its samples as mosaicml-streaming's own reader gave them, in plain form."""
    answer: dict[str, list[Any]] = json.loads((MDS / "expected.json").read_text())
    return answer


@pytest.fixture
def read_all(tmp_path: Path) -> Callable[[Path], list[Any]]:
    """All samples of the dataset in a folder, in plain form."""

    def read(folder: Path) -> list[Any]:
        if not read_index((folder / INDEX).read_bytes(), str(folder)):
            return []
        unpacked = tmp_path / "unpacked" / folder.name
        with closing(StreamingDataset(str(folder), unpacked, allow_unsafe_types=True)) as dataset:
            return [plain(dataset[at]) for at in range(len(dataset))]

    return read


@pytest.fixture(scope="session")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred numbers in ten shards."""
    return numbers(tmp_path_factory.mktemp("hundred"), 100)


@pytest.fixture
def dataset(hundred: Path) -> Iterator[StreamingDataset]:
    found = StreamingDataset(local=hundred)
    yield found
    found.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    """A web server for the folder `served`; who asks it again does so soon."""
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.01)
    (tmp_path / "served").mkdir()
    with ShardServer(tmp_path / "served") as server:
        yield server


@pytest.fixture
def bucket() -> Iterator[str]:
    """Address of an empty folder in memory, which fsspec takes for a place far away."""
    yield f"memory://{os.urandom(4).hex()}/train"
    MemoryFileSystem.store.clear()


@pytest.fixture
def make(server: ShardServer, tmp_path: Path) -> Iterator[Callable[..., ShardCache]]:
    """Caches of the server, all in the folder `cache`."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            closing(ShardCache(RemoteFolder(server.url, tries=2), tmp_path / "cache", **settings))
        )
