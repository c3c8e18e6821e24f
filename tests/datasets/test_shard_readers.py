"""Readers over raw files: damaged ones are named. Any damage is tried in test_format_contract.py and tests/fuzz."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.data.formats.index import INDEX, read_index
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import Shard
from penstock.proto.errors import ShardCorruptError

MDS = Path(__file__).parents[1] / "data" / "mds"
Copy = Callable[[str], tuple[Shard, list[Path]]]


def shard_of(name: str, number: int = 0) -> tuple[Shard, list[Path]]:
    shard = read_index((MDS / name / INDEX).read_bytes(), name)[number]
    return shard, [MDS / name / file.raw.name for file in shard.files]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    def copy(name: str) -> tuple[Shard, list[Path]]:
        shard, paths = shard_of(name)
        return shard, [Path(shutil.copy(path, tmp_path)) for path in paths]

    return copy


def read_all(shard: Shard, paths: list[Path]) -> Iterator[dict[str, Any]]:
    reader = open_shard(shard, paths)
    try:
        for i in range(len(reader)):
            yield reader[i]
    finally:
        reader.close()


@pytest.mark.parametrize("name", ["shards", "json", "csv"])
def test_another_count_is_found_when_it_is_opened(name: str) -> None:
    shard, paths = shard_of(name)
    for samples in (0, shard.samples - 1, shard.samples + 1, 2**32 + shard.samples, 10**18):
        with pytest.raises(ShardCorruptError, match=f"those of {samples} samples, got {shard.samples}"):
            open_shard(replace(shard, samples=samples), paths)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, 10, "the offsets must be those of"),
        (1, 2**31, "sample 0 must not end before it begins"),
        (1, 0, "the samples must fill the file"),
        (2, 0, "sample 0 must not end before it begins"),
        (-1, 2**32 - 1, "the samples must fill the file"),
    ],
)
def test_wrong_offsets_are_found_on_open(place: int, value: int, words: str, copied: Copy) -> None:
    shard, paths = copied("shards")
    data = bytearray(paths[0].read_bytes())
    struct.pack_into("=I", data, 4 * (place if place >= 0 else shard.samples + 1), value)
    paths[0].write_bytes(data)
    with pytest.raises(ShardCorruptError, match=f"^shard.00000.mds: .*{words}"):
        open_shard(shard, paths)


def test_wrong_sizes_in_a_sample_are_named(copied: Copy) -> None:
    shard, paths = copied("shards")
    good = paths[0].read_bytes()
    begin = struct.unpack_from("=I", good, 4 * 4)[0]  # of sample 3
    for size in (0, 2**32 - 1, 2**31):
        data = bytearray(good)
        struct.pack_into("=I", data, begin, size)
        paths[0].write_bytes(data)
        reader = open_shard(shard, paths)
        assert reader[2]["i"] == 2
        with pytest.raises(ShardCorruptError, match=r"^shard\.00000\.mds: sample 3: the stored bytes must be"):
            reader[3]
        assert reader[4]["i"] == 4
        reader.close()


def test_a_broken_value_is_named_with_its_column(copied: Copy) -> None:
    shard, paths = copied("shards")
    data = paths[0].read_bytes()
    paths[0].write_bytes(data.replace(b"sample 3", b"sample\xff3", 1))
    reader = open_shard(shard, paths)
    with pytest.raises(ShardCorruptError, match=r"sample 3, column 'text': .*UnicodeDecodeError") as caught:
        reader[3]
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)
    reader.close()


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("json", b'"i": 3', b'"i" 33', "sample 3: .*JSONDecodeError"),
        ("csv", b"\n3,", b"\n3;", "sample 3: .*must have 3 values, got 2"),
        ("csv", b"\n3,", b"33,", "sample 2.*must end with"),
        ("csv", b"sample 3", b"sampl\xff 3", "sample 3: .*UnicodeDecodeError"),
    ],
)
def test_broken_lines_are_named(name: str, old: bytes, new: bytes, words: str, copied: Copy) -> None:
    shard, paths = copied(name)
    data = paths[0].read_bytes()
    assert old in data
    paths[0].write_bytes(data.replace(old, new, 1))
    with pytest.raises(ShardCorruptError, match=f"{shard.name}: {words}"):
        list(read_all(shard, paths))
