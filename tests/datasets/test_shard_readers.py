"""Readers over raw files: damaged ones are named, and neither crash, hang nor allocate what they claim."""

from __future__ import annotations

import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.data.formats.index import INDEX, read_index
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import Shard, ShardFile
from penstock.data.writing.writers import MDSWriter
from penstock.proto.errors import DatasetError, ShardCorruptError

MDS = Path(__file__).parents[1] / "data" / "mds"
Copy = Callable[[str], tuple[Shard, list[Path]]]
ALL = ["encodings", "shards", "json", "csv", "xsv"]


def shard_of(name: str, number: int = 0) -> tuple[Shard, list[Path]]:
    shard = read_index((MDS / name / INDEX).read_bytes(), name)[number]
    return shard, [MDS / name / file.raw.name for file in shard.files]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    def copy(name: str) -> tuple[Shard, list[Path]]:
        shard, paths = shard_of(name)
        return shard, [Path(shutil.copy(path, tmp_path)) for path in paths]

    return copy


def resized(shard: Shard, *sizes: int) -> Shard:
    """The shard, as an index would list it that knows of the damage."""
    files = [
        ShardFile(replace(file.raw, size=size), file.packed) for file, size in zip(shard.files, sizes, strict=True)
    ]
    return replace(shard, files=tuple(files))


def read_all(shard: Shard, paths: list[Path]) -> Iterator[dict[str, Any]]:
    reader = open_shard(shard, paths)
    try:
        for i in range(len(reader)):
            yield reader[i]
    finally:
        reader.close()


@pytest.mark.parametrize("name", ALL)
def test_another_size_is_found_when_it_is_opened(name: str, copied: Copy) -> None:
    shard, paths = copied(name)
    for path in paths:
        data = path.read_bytes()
        for other in (data[:-1], data + b"x", b""):
            path.write_bytes(other)
            with pytest.raises(
                ShardCorruptError, match=f"{path.name}: .* must have {len(data)} bytes.* got {len(other)}"
            ):
                open_shard(shard, paths)
        path.write_bytes(data)
    paths[-1].unlink()
    with pytest.raises(ShardCorruptError, match="cannot be read"):
        open_shard(shard, paths)


@pytest.mark.parametrize("name", ["shards", "encodings", "json", "csv"])
def test_a_file_cut_short_under_way_is_named(name: str, copied: Copy) -> None:
    """A mapped file would kill the process here."""
    shard, paths = copied(name)
    reader = open_shard(shard, paths)
    last = len(reader) - 1
    assert reader[0]
    os.truncate(paths[0], shard.files[0].raw.size - 1)
    with pytest.raises(ShardCorruptError, match=f"{shard.name} is truncated"):
        reader[last]
    os.truncate(paths[0], 0)
    with pytest.raises(ShardCorruptError, match=f"{shard.name} is truncated: 0 of"):
        reader[0]
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
        (0, 2**32 - 1, "the offsets must be those of"),
        (1, 2**31, "sample 0 must not end before it begins"),
        (1, 0, "the samples must fill the file"),
        (2, 2**32 - 1, "sample 1 must not end before it begins"),
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
        ("json", b'{"i": 3, ', b"[3]      ", "sample 3: "),
        ("csv", b"\n3,", b"\n3;", "sample 3: .*must have 3 values, got 2"),
        ("csv", b"\n3,", b"\nx,", "sample 3, column 'i': .*ValueError"),
        ("csv", b"\n3,", b"33,", "sample 2.*must end with"),
        ("csv", b"sample 3", b"sample,3", "sample 3.*must have 3 values, got 4"),
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


def test_a_format_without_reader_is_named() -> None:
    shard, paths = shard_of("json")
    with pytest.raises(DatasetError, match="format 'json' with 1 files is unknown"):
        open_shard(shard, paths[:1])


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(ALL), number=st.integers(0, 1))
def test_no_damage_is_more_than_an_error(
    data: st.DataObject, name: str, number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes changed, put in and cut out anywhere, with an index that knows the new size: read, or refused by name."""
    shard, sources = shard_of(name)
    folder = tmp_path_factory.mktemp("damaged")
    paths = [Path(shutil.copy(source, folder)) for source in sources]
    victim = paths[number % len(paths)]
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        # The table of offsets and the heads of samples are where it hurts.
        reach = data.draw(st.sampled_from([8, 120, len(content)]))
        place = data.draw(st.integers(0, min(reach, len(content))))
        junk = data.draw(st.binary(max_size=4) | st.integers(0, 2**32 - 1).map(lambda n: n.to_bytes(4, "little")))
        cut = data.draw(st.sampled_from([*[len(junk)] * 6, 0, 1, 4, 1000]))
        content[place : place + cut] = junk
    victim.write_bytes(content)
    tracemalloc.start()
    try:
        for sample in read_all(resized(shard, *(path.stat().st_size for path in paths)), paths):
            assert isinstance(sample, dict)
        said = shard.name
    except ShardCorruptError as error:
        said = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        shutil.rmtree(folder)
    assert said.startswith("shard.00000.")
    assert peak < 16 << 20


def test_images_are_read_when_they_are_used(tmp_path: Path) -> None:
    """Decode images on first use, as mosaicml-streaming does, so that a loader may shrink a JPEG while it is
    decoded."""
    with MDSWriter(tmp_path, {"image": "jpeg"}) as writer:
        writer.write({"image": Image.effect_noise((64, 64), 50)})
    (shard,) = read_index((tmp_path / INDEX).read_bytes(), "here")
    reader = open_shard(shard, [tmp_path / shard.name])
    image = reader[0]["image"]
    reader.close()
    image.draft("L", (8, 8))
    assert image.size == (8, 8)
    image.load()


def test_an_empty_shard_has_no_samples() -> None:
    shard, paths = shard_of("large")
    assert shard.samples == 0
    assert list(read_all(shard, paths)) == []
