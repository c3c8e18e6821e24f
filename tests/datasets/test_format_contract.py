"""Contract of every format of files that StreamingDataset reads, on small files of the format's own library.

A line in FOLDERS (tests/support/format_folders.py), and a format is checked.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_folders import FOLDERS, Made, plainly
from shard_server import ShardServer

from penstock.data import StreamingDataset
from penstock.data.formats import file_ranges
from penstock.data.formats.arrow.reader import index_arrow
from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.file_ranges import has_ranges, with_spans
from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.index import local_index, read_index, write_index
from penstock.data.formats.readers import open_shard
from penstock.data.formats.records.offset_file import read_offsets
from penstock.data.formats.shards import Shard, ShardReader, columns_of_rows
from penstock.proto.errors import DatasetError, ShardCorruptError, ShardUnavailableError


@pytest.fixture(scope="module", params=FOLDERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    return Made(folder, FOLDERS[request.param](folder))


@pytest.fixture
def own(made: Made, tmp_path: Path) -> Made:
    """A copy that the test may damage."""
    folder = tmp_path / "own"
    folder.mkdir()
    for path in made.folder.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(made.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return Made(folder, made.samples)


@pytest.fixture
def dataset(made: Made) -> Iterator[StreamingDataset]:
    found = StreamingDataset(local=made.folder)
    yield found
    found.close()


def shards_of(made: Made) -> list[tuple[Shard, list[Path]]]:
    shards = read_index(local_index(made.folder).read_bytes(), "it")
    return [(shard, [made.folder / file.raw.name for file in shard.files]) for shard in shards]


def samples_of(reader: ShardReader) -> list[Any]:
    return [plainly(reader[index]) for index in range(len(reader))]


def test_samples_are_the_librarys(made: Made, dataset: StreamingDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and in any other, one by one, together, and by threads that share one reader and no block of it."""
    order = list(range(len(made.samples)))
    assert len(dataset) == len(order)
    assert [plainly(dataset[at]) for at in order] == [plainly(sample) for sample in made.samples]
    random.Random(1).shuffle(order)
    expected = [plainly(made.samples[at]) for at in order]
    assert [plainly(dataset[at]) for at in order] == expected
    assert plainly(dataset.get_many(np.array(order))) == expected
    assert dataset.get_many(np.array([], np.int64)) == []
    monkeypatch.setattr(MEMORY, "limit", 1)
    with ThreadPoolExecutor(4) as threads:
        assert [plainly(sample) for sample in threads.map(dataset.__getitem__, order)] == expected


def test_values_outlive_reader_and_files(own: Made) -> None:
    shard, paths = shards_of(own)[0]
    reader = open_shard(shard, paths)
    for path in paths:
        path.unlink()
    first, second = reader[0], reader[1]
    reader.close()
    reader.close()
    assert [plainly(first), plainly(second)] == [plainly(sample) for sample in own.samples[:2]]
    with pytest.raises(ValueError, match="closed"):
        reader[0]
    assert columns_of_rows(reader, np.arange(2)) is None


def test_forked_and_pickled_readers_agree(made: Made, dataset: StreamingDataset) -> None:
    expected = [plainly(sample) for sample in made.samples]
    assert [plainly(dataset[at]) for at in range(3)] == expected[:3]
    pid = os.fork()
    if not pid:
        os._exit(0 if [plainly(dataset[at]) for at in range(len(dataset))] == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset)):
        assert other.fingerprint == dataset.fingerprint
        assert [plainly(other[at]) for at in range(len(other))] == expected
        other.close()


def in_parts(made: Made) -> list[str]:
    """Index the files of a folder again, with parts as small as can be. Returns the names of the files with parts."""
    shards = []
    for shard, paths in shards_of(made):
        if len(paths) == 2 and FORMATS[shard.format].by_part is not None:
            offsets, _ = read_offsets(paths[1], shard.files[1].raw, shard.files[0].raw.size, shard.samples)
            shard = with_spans(shard, np.array(offsets))
        if shard.format == "arrow":
            shard = index_arrow(paths[0], shard.name)
        shards.append(shard)
    local_index(made.folder).write_bytes(write_index(shards))
    return [shard.name for shard in shards if has_ranges(shard)]


def test_parts_of_remote_files_are_the_same(own: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ranges, "SPAN_BYTES", 1)
    monkeypatch.setattr(file_ranges, "MIN_RANGE_BYTES", 1)
    names = in_parts(own)
    if not names:
        pytest.skip("files of this format are fetched whole")
    with ShardServer(own.folder) as server, closing(StreamingDataset(server.url, tmp_path / "cache")) as dataset:
        assert plainly(dataset[0]) == plainly(own.samples[0])
        asked = [name for name, _ in server.ranges]
        assert [server.requests[name] for name in names] == [asked.count(name) for name in names], "read as a whole"
        assert sum(server.requests[name] for name in names) <= 2, "more than a sample and its header was fetched"
        assert [plainly(dataset[at]) for at in range(len(dataset))] == [plainly(sample) for sample in own.samples]
        with closing(StreamingDataset(local=own.folder)) as local:
            assert dataset.fingerprint == local.fingerprint


def test_other_sizes_are_found_on_opening(own: Made) -> None:
    for shard, paths in shards_of(own):
        for path in paths:
            data = path.read_bytes()
            for other in (data[:-1], data + b"x", b""):
                path.write_bytes(other)
                with pytest.raises(ShardCorruptError, match=path.name):
                    open_shard(shard, paths)
            path.write_bytes(data)


def test_missing_files_are_named(own: Made) -> None:
    for path in shards_of(own)[0][1]:
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(ShardUnavailableError, match=path.name):
            StreamingDataset(local=own.folder)[0]
        path.write_bytes(data)


def test_files_cut_while_open_are_named(own: Made) -> None:
    """A mapped file would kill the process here."""
    for shard, paths in shards_of(own):
        reader = open_shard(shard, paths)
        os.truncate(paths[0], 1)
        with pytest.raises(ShardCorruptError, match=paths[0].name):
            samples_of(reader)
        reader.close()


def error_of(shard: Shard, paths: list[Path]) -> str:
    """Read all of a shard; return the text of the error that this raises, if it does."""
    try:
        reader = open_shard(shard, paths)
        samples_of(reader)
        reader.close()
    except DatasetError as error:  # ShardCorruptError is one
        return str(error)
    return ""


def test_damage_is_an_error_or_other_values(own: Made) -> None:
    """Damage never crashes or hangs the process, and never raises an error without a name."""
    draw = random.Random(4)
    for shard, paths in shards_of(own):
        for path in paths:
            data = path.read_bytes()
            for _ in range(25):
                damaged = bytearray(data)
                for _ in range(draw.choice([1, 1, 4])):
                    damaged[draw.choice([draw.randrange(len(data)), draw.randrange(min(64, len(data)))])] = draw.choice(
                        [0, 1, 127, 128, 255]
                    )
                path.write_bytes(damaged)
                said = error_of(shard, paths)
                assert not said or any(one.name in said for one in paths), said
            path.write_bytes(data)
