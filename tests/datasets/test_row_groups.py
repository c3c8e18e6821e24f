"""Parquet by row group: an order that decodes each group once, columns, one memory for all readers, bulk reading."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from shard_server import Fault, ShardServer
from shardsets import numbers

from penstock.data import MDSWriter, Stream, StreamingDataset, StreamingLoader, index_parquet
from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats import file_ranges
from penstock.data.formats.decoded_blocks import MEMORY, BlockMemory
from penstock.data.formats.index import read_index, write_index
from penstock.data.formats.parquet.reader import ParquetReader
from penstock.data.loading import streaming_loader
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    ShardCorruptError,
    ShardUnavailableError,
    StateMismatchError,
)

Kept = dict[str, Any]


def write_groups(path: Path, groups: list[int], first: int = 0, **settings: Any) -> Path:
    """Write a file with row groups of these sizes; row i has the number first + i, and a text of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema([("number", pyarrow.int64()), ("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema, **settings) as writer:
        for rows in groups:
            own = range(first, first + rows)
            table = pyarrow.table({"number": list(own), "text": [f"row {number}" for number in own]}, schema)
            writer.write_table(table, row_group_size=max(1, rows))
            first += rows
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 1,000 rows in 24 row groups, one of which is empty."""
    write_groups(tmp_path / "rows" / "a.parquet", [50] * 10)
    write_groups(tmp_path / "rows" / "b.parquet", [40, 0, 60, 25, 25, 50], first=500)
    write_groups(tmp_path / "rows" / "c.parquet", [30] * 10, first=700)
    index_parquet(tmp_path / "rows")
    return tmp_path / "rows"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Number of times that each row group was decoded, by (file, number)."""
    count: Counter[tuple[str, int]] = Counter()
    actual = ParquetReader._decode

    def counted(self: ParquetReader, number: int) -> Any:
        count[self.name, number] += 1
        return actual(self, number)

    monkeypatch.setattr(ParquetReader, "_decode", counted)
    return count


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockMemory]:
    gc.collect()
    MEMORY.reset()
    monkeypatch.setattr(MEMORY, "limit", MEMORY.limit)
    yield MEMORY
    MEMORY.reset()


def rows(loader: StreamingLoader) -> list[int]:
    return [number for batch in loader for number in batch["number"].tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_row_group_is_decoded_once(
    folder: Path, decoded: Counter[Any], memory: BlockMemory, shuffle: bool
) -> None:
    """The memory holds a few of the 24 row groups."""
    dataset = StreamingDataset(folder)
    memory.limit = int(400 * dataset.sample_bytes)
    block = int(120 * dataset.sample_bytes)
    loader = StreamingLoader(dataset, batch_size=10, shuffle=shuffle, seed=1, shuffle_memory=block)
    found = rows(loader)
    assert sorted(found) == list(range(1000))
    assert len(decoded) >= 23
    assert max(decoded.values()) == 1
    if shuffle:
        groups = [len({number // 50 for number in found[at : at + 100]}) for at in range(0, 1000, 100)]
        assert max(groups) <= 8  # row groups near each other
        assert np.mean(np.abs(np.diff(found))) > 20  # but shuffled


def test_share_of_a_stream_takes_whole_groups(folder: Path, tmp_path: Path) -> None:
    mds = numbers(tmp_path / "mds", 100)
    streams = [Stream(folder, choose=400, columns=["number"]), Stream(mds, choose=100)]
    dataset = StreamingDataset(streams=streams)
    loader = StreamingLoader(dataset, batch_size=10, shuffle=True, seed=1)
    seen: Counter[int] = Counter()
    for _ in range(5):
        found = rows(loader)
        assert len(found) == 500
        seen.update(found)
    assert set(seen) == set(range(1000))
    assert {seen[number] for number in range(100, 1000)} == {2}  # 2,000 of 1,000 rows
    assert {seen[number] for number in range(100)} == {7}


def test_order_depends_on_the_row_groups(folder: Path) -> None:
    before = StreamingDataset(folder)
    settings: Kept = {"batch_size": 10, "shuffle": True, "seed": 1}
    with pytest.raises(StateMismatchError, match="shuffle_memory"):
        StreamingLoader(before, **settings, shuffle_memory=9000).load_state_dict(
            StreamingLoader(before, **settings, shuffle_memory=3000).state_dict()
        )
    state = StreamingLoader(before, batch_size=10, shuffle=True, seed=1).state_after(3)
    write_groups(folder / "a.parquet", [100] * 5)
    index_parquet(folder)
    after = StreamingDataset(folder)
    assert after.fingerprint != before.fingerprint
    with pytest.raises(StateMismatchError, match="data"):
        StreamingLoader(after, batch_size=10, shuffle=True, seed=1).load_state_dict(state)


# ---- columns


def test_only_wanted_columns_are_read(folder: Path, memory: BlockMemory) -> None:
    dataset = StreamingDataset(folder, columns=["number"])
    assert dataset[7] == {"number": 7}
    assert dataset.get_many(np.array([999, 0])) == [{"number": 999}, {"number": 0}]
    assert 80 * 8 <= memory.nbytes < 80 * 9  # the numbers of two row groups, and no text
    both = StreamingDataset(folder, columns=["text", "number"])
    assert list(both[1].items()) == [("text", "row 1"), ("number", 1)]
    assert both.fingerprint == dataset.fingerprint


def test_columns_of_a_mds_dataset_are_chosen(tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "mds", {"a": "int", "b": "str"}) as writer:
        writer.write({"a": 1, "b": "x"})
    dataset = StreamingDataset(tmp_path / "mds", columns=["b"])
    assert dataset[0] == {"b": "x"}
    assert dataset.get_many(np.array([0])) == [{"b": "x"}]


def test_wrong_columns_are_refused_at_once(folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"columns must be some of number, text, got numbr"):
        StreamingDataset(folder, columns=["numbr"])


# ---- memory


def test_readers_share_one_memory(folder: Path, decoded: Counter[Any], memory: BlockMemory) -> None:
    one = StreamingDataset(folder)
    one[0]
    group = memory.nbytes
    memory.limit = int(2.5 * group)
    one[500], one[50]
    assert memory.nbytes <= memory.limit
    one[1], one[501]  # the first group was dropped, the last two files' stay
    assert decoded[str(folder / "a.parquet"), 0] == 2
    assert memory.nbytes <= memory.limit
    other = StreamingDataset(folder)
    other[0], other[900], other[950]
    assert memory.nbytes <= memory.limit


def test_memory_ends_with_its_reader(folder: Path, memory: BlockMemory) -> None:
    dataset = StreamingDataset(folder)
    kept = dataset[0], dataset[999]
    assert memory.nbytes > 0
    dataset.close()
    del dataset
    gc.collect()
    memory.make_room(0)
    assert memory.nbytes == 0
    assert kept[1]["number"] == 999


def test_what_is_counted_is_what_is_allocated(tmp_path: Path, memory: BlockMemory) -> None:
    """pyarrow's file objects kept the compressed bytes of the row group that they had read last."""
    noise = np.random.default_rng(1).integers(0, 1 << 60, 10_000)
    for number in range(16):
        pyarrow.parquet.write_table(pyarrow.table({"x": noise}), tmp_path / f"{number}.parquet")
    index_parquet(tmp_path)
    dataset = StreamingDataset(tmp_path)
    memory.limit = 200_000
    before = pyarrow.total_allocated_bytes()
    for at in range(0, len(dataset), len(noise)):
        assert dataset[at]["x"] == noise[0]
    assert pyarrow.total_allocated_bytes() - before < 2 * memory.limit


def test_too_large_a_shuffle_is_warned_of(folder: Path, memory: BlockMemory) -> None:
    memory.limit = 1000
    dataset = StreamingDataset(folder)
    with pytest.warns(UserWarning, match="many times. Give StreamingDataset"):
        StreamingLoader(dataset, batch_size=10, shuffle=True, shuffle_memory=None)
    StreamingLoader(dataset, batch_size=10, shuffle=True, shuffle_memory=900)
    StreamingLoader(dataset, batch_size=10)


def test_row_groups_are_decoded_ahead(folder: Path, decoded: Counter[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_loader, "DECODED_AHEAD", 200)
    loader = StreamingLoader(StreamingDataset(folder), batch_size=10)
    next(iter(loader))
    deadline = time.monotonic() + 30
    while len(decoded) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(decoded) >= 3


def test_damage_found_ahead_is_raised_in_its_turn(folder: Path) -> None:
    damaged = bytearray((folder / "a.parquet").read_bytes())
    group = pyarrow.parquet.read_metadata(folder / "a.parquet").row_group(3)
    begin = group.column(0).dictionary_page_offset
    damaged[begin : begin + 60] = b"\xff" * 60
    (folder / "a.parquet").write_bytes(damaged)
    batches = iter(StreamingLoader(StreamingDataset(folder), batch_size=50))
    for _ in range(3):
        next(batches)
    with pytest.raises(ShardCorruptError, match=r"a\.parquet: sample 150, row group 3"):
        next(batches)


# ---- values


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pyarrow.list_(pyarrow.int32()), [[1, 2], [], None, [2**31 - 1]]),
        (pyarrow.large_list(pyarrow.uint16()), [[1, 2], [], None, [65535]]),
        (pyarrow.list_(pyarrow.int64(), 2), [[1, 2], [3, 4], [5, 6]]),
        (pyarrow.list_(pyarrow.bool_()), [[True, False], None, [True]]),
    ],
    ids=str,
)
def test_lists_of_numbers_are_arrays(tmp_path: Path, kind: Any, values: list[Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"x": pyarrow.array(values, kind)}), tmp_path / "a.parquet")
    index_parquet(tmp_path)
    dataset = StreamingDataset(tmp_path)
    for found in ([dataset[at] for at in range(len(values))], dataset.get_many(np.arange(len(values)))):
        for sample, value in zip(found, values, strict=True):
            if value is None:
                assert sample == {"x": None}
                continue
            assert sample["x"].dtype == np.dtype(kind.value_type.to_pandas_dtype())
            assert sample["x"].tolist() == list(value)
            assert sample["x"].flags.writeable


# ---- files that are not what the index says


def test_file_written_while_read_is_named(folder: Path) -> None:
    dataset = StreamingDataset(folder)
    dataset[0]
    path = folder / "a.parquet"
    os.utime(path, ns=(1, 1))
    assert dataset[1]["number"] == 1  # in memory
    with pytest.raises(ShardCorruptError, match=r"a\.parquet must not change while it is read"):
        dataset[499]


def test_page_checksums_are_compared(tmp_path: Path) -> None:
    path = write_groups(
        tmp_path / "a.parquet", [1000], compression="none", write_page_checksum=True, use_dictionary=False
    )
    index_parquet(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"row 500", b"row 599", 1))
    with pytest.raises(ShardCorruptError, match=r"a\.parquet: sample 0, row group 0 cannot .*[Cc][Rr][Cc]"):
        StreamingDataset(tmp_path)[0]


# ---- indexes


def test_remote_folder_is_indexed_where_it_lies(folder: Path, tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    files.put(f"{folder}/", "/parquet-index/rows/", recursive=True)
    files.rm("/parquet-index/rows/_penstock_index.json")
    files.pipe("/parquet-index/rows/_temporary/x.parquet", b"half of a file")
    try:
        shards = index_parquet("memory://parquet-index/rows")
        assert [shard.name for shard in shards] == ["a.parquet", "b.parquet", "c.parquet"]
        dataset = StreamingDataset("memory://parquet-index/rows", tmp_path / "cache")
        assert [dataset[at]["number"] for at in (0, 500, 999)] == [0, 500, 999]
        assert dataset.fingerprint == StreamingDataset(folder).fingerprint
        some = index_parquet("memory://parquet-index/rows/[ab]*.parquet", out=tmp_path / "some")
        assert [shard.samples for shard in some] == [500, 200]
        assert len(StreamingDataset("memory://parquet-index/rows", tmp_path / "some")) == 700
        files.pipe("/parquet-index/rows/d.parquet", b"PAR1 is no file")
        with pytest.raises(ShardCorruptError, match=r"rows/d\.parquet must be a Parquet file"):
            index_parquet("memory://parquet-index/rows")
    finally:
        files.rm("/parquet-index", recursive=True)


def test_local_pattern_selects_files(folder: Path) -> None:
    shards = index_parquet(f"{folder}/[bc].parquet")
    assert [shard.name for shard in shards] == ["b.parquet", "c.parquet"]
    assert len(StreamingDataset(folder)) == 500
    assert all(shard.ranges for shard in shards)
    assert not any(shard.ranges for shard in index_parquet(folder, ranges=False))
    with pytest.raises(DatasetError, match=r"a file must match the pattern x\*\.parquet"):
        index_parquet(f"{folder}/x*.parquet")
    (folder / "_penstock_index.json").unlink()
    index_parquet(f"{folder}/[bc].parquet", out=folder / "beside")
    beside = StreamingDataset(folder, folder / "beside")
    assert (len(beside), beside[0]["number"], (folder / "_penstock_index.json").exists()) == (500, 500, False)


# ---- ranges of remote files


@pytest.fixture
def remote(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    monkeypatch.setattr(file_ranges, "MIN_RANGE_BYTES", 1)
    with ShardServer(folder) as server:
        yield server


def fetched(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*.*/*") if ".penstock" not in path.parts)


def test_only_needed_row_groups_are_fetched(remote: ShardServer, folder: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote.url, tmp_path / "cache", columns=["number"])
    assert [dataset[at]["number"] for at in (0, 49, 60)] == [0, 49, 60]
    ranges = fetched(tmp_path / "cache")
    assert len(ranges) == 3  # two row groups and the footer
    assert all(name.startswith("a.parquet.ranges/") for name in ranges)
    assert dataset.get_many(np.array([999, 1, 540]))[2] == {"number": 540}
    assert dataset.fingerprint == StreamingDataset(folder).fingerprint
    again = StreamingDataset(remote.url, tmp_path / "cache")
    asked = remote.requests["a.parquet"]
    assert again[49] == {"number": 49, "text": "row 49"}
    assert remote.requests["a.parquet"] == asked


def test_changed_remote_file_is_named(remote: ShardServer, folder: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(remote.url, tmp_path / "cache")
    write_groups(folder / "a.parquet", [500])
    with pytest.raises(ShardCorruptError, match=r"a\.parquet"):
        dataset[300]
    (folder / "b.parquet").unlink()
    with pytest.raises(ShardUnavailableError, match=r"b\.parquet"):
        dataset[600]


def test_files_with_hashes_are_fetched_whole(remote: ShardServer, folder: Path, tmp_path: Path) -> None:
    shards = read_index((folder / "_penstock_index.json").read_bytes(), "here")
    hashed = [
        replace(
            shard,
            files=(
                replace(
                    shard.files[0],
                    raw=replace(shard.files[0].raw, hashes={"xxh64": digest_of(folder / shard.name, "xxh64")}),
                ),
            ),
        )
        for shard in shards
    ]
    (folder / "_penstock_index.json").write_bytes(write_index(hashed))
    dataset = StreamingDataset(remote.url, tmp_path / "cache")
    assert dataset[600]["number"] == 600
    assert (tmp_path / "cache" / "b.parquet").is_file()


def test_server_without_ranges_is_named(remote: ShardServer, tmp_path: Path) -> None:
    remote.fault = lambda name: Fault(no_ranges=True)
    dataset = StreamingDataset(remote.url, tmp_path / "cache")
    with pytest.raises(DatasetError, match=r"a\.parquet: the server must send bytes .*index_folder"):
        dataset[0]


def test_error_counts_samples_in_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ranges, "MIN_RANGE_BYTES", 1)
    root = tmp_path / "root"
    root.mkdir()
    late = pyarrow.array([0, 0, 0, 1 << 60], pyarrow.timestamp("us"))  # beyond the years of Python's datetime
    pyarrow.parquet.write_table(pyarrow.table({"at": late}), root / "a.parquet", row_group_size=2)
    index_parquet(root)
    with ShardServer(root) as server:
        dataset = StreamingDataset(server.url, tmp_path / "cache")
        assert dataset[2]
        with pytest.raises(DatasetError, match="sample 3, column 'at': Python cannot hold its value"):
            dataset[3]


def test_ranges_of_an_index_are_checked(folder: Path) -> None:
    shard = read_index((folder / "_penstock_index.json").read_bytes(), "here")[0]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ranges": shard.ranges[:-1]}, "21 offsets up to .*, got 20 up to"),
        ({"ranges": (shard.size + 1, *shard.ranges[1:])}, "21 offsets up to .*, got 21 up to"),
        ({"ranges": (shard.ranges[1], shard.ranges[0], *shard.ranges[2:])}, "an end at or after its beginning"),
        ({"blocks": (1, *shard.blocks[1:])}, "must add up to the shard's 500 samples"),
        ({"blocks": (-1, 51 + 50, *shard.blocks[2:])}, "is invalid: Expected `int` >= 0"),
    ]
    for changed, says in cases:
        with pytest.raises(DatasetError, match=f"shard 0: .*{says}"):
            read_index(write_index([replace(shard, **changed)]), "here")
