"""Datasets that several test modules read: those that mosaicml-streaming wrote, and small ones of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_values import plain
from shard_server import ShardServer
from shardsets import numbers

from penstock.data.formats.compressed_files import unpack
from penstock.data.formats.index import INDEX, read_index
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import Shard
from penstock.data.remote import folders
from penstock.data.streaming_dataset import StreamingDataset

MDS = Path(__file__).parents[1] / "data" / "mds"


@pytest.fixture(scope="session")
def expected() -> dict[str, list[Any]]:
    """Folder below tests/data/mds -> its samples as mosaicml-streaming's own reader gave them, in plain form."""
    answer: dict[str, list[Any]] = json.loads((MDS / "expected.json").read_text())
    return answer


@pytest.fixture
def raw_paths(tmp_path: Path) -> Callable[[Path, Shard], list[Path]]:
    """The raw files of a shard in a folder; those that are packed are unpacked elsewhere."""

    def paths(folder: Path, shard: Shard) -> list[Path]:
        answer = []
        for file in shard.files:
            path = folder / file.raw.name
            if file.packed is not None:
                data = (folder / file.packed.name).read_bytes()
                assert len(data) == file.packed.size
                path = tmp_path / "unpacked" / file.raw.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(unpack(data, shard.compression, limit=file.raw.size))
            answer.append(path)
        return answer

    return paths


@pytest.fixture
def read_all(raw_paths: Callable[[Path, Shard], list[Path]]) -> Callable[[Path], list[Any]]:
    """All samples of the dataset in a folder, in plain form."""

    def read(folder: Path) -> list[Any]:
        samples = []
        for shard in read_index((folder / INDEX).read_bytes(), str(folder)):
            reader = open_shard(shard, raw_paths(folder, shard), allow_unsafe_types=True)
            try:
                assert len(reader) == shard.samples
                samples += [plain(reader[i]) for i in range(len(reader))]
            finally:
                reader.close()
        return samples

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
    monkeypatch.setattr(folders, "FIRST_PAUSE_S", 0.01)
    (tmp_path / "served").mkdir()
    with ShardServer(tmp_path / "served") as server:
        yield server
