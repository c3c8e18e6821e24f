"""TFRecord files of TensorFlow: what an example may hold, checksums compared, damage named."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offset_files import forget_fingerprints

from penstock.data import StreamingDataset, index_folder
from penstock.data.formats.index import OWN_INDEX
from penstock.data.formats.readers import open_shard
from penstock.data.formats.tfrecord import tfrecord_file
from penstock.data.formats.tfrecord.example_messages import example_of
from penstock.proto.errors import InvalidArgumentError, ShardCorruptError

google_crc32c = pytest.importorskip("google_crc32c")

DATA = Path(__file__).parents[1] / "data" / "tfrecord"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of 25 examples."""
    shutil.copy(DATA / "a.tfrecord", tmp_path)
    return tmp_path


def framed(*records: bytes) -> bytes:
    """Return records as a TFRecord file has them."""
    masked = tfrecord_file._masked
    return b"".join(
        struct.pack("<QI", len(data), masked(struct.pack("<Q", len(data)))) + data + struct.pack("<I", masked(data))
        for data in records
    )


def test_records_are_what_the_format_says(folder: Path) -> None:
    for name, keys in (("tfrecord", 7), ("tfrecord-example", 7), ("tfrecord-bytes", 1)):
        index_folder(folder, name)
        assert len(StreamingDataset(local=folder)[3]) == keys
    assert example_of(StreamingDataset(local=folder)[3]["record"])["label"].tolist() == [3]
    shutil.copy(DATA / "bytes" / "c.tfrec", folder)
    (folder / "d.tfrecord").write_bytes(b"")  # which says nothing
    index_folder(folder)
    assert len(StreamingDataset(local=folder)[3]) == 1
    index_folder(folder, "tfrecord-example")
    assert len(StreamingDataset(local=folder)[3]) == 7
    with pytest.raises(InvalidArgumentError, match=r"tfrecord-bytes, tfrecord-example, .*, got 'tfrecords'"):
        index_folder(folder, "tfrecords")


def test_records_larger_than_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord_file, "READ_AT_ONCE", 100)
    draw = random.Random(1)
    records = [draw.randbytes(draw.choice([0, 1, 50, 84, 85, 300])) for _ in range(60)]
    (tmp_path / "a.tfrecord").write_bytes(framed(*records))
    index_folder(tmp_path, "tfrecord-bytes")
    dataset = StreamingDataset(local=tmp_path)
    assert [dataset[i]["record"] for i in range(60)] == records


def test_every_flipped_bit_is_found(folder: Path) -> None:
    """In a record's length, data and checksums."""
    (shard,) = index_folder(folder)
    path, *others = [folder / file.raw.name for file in shard.files]
    data = path.read_bytes()
    offsets = np.fromfile(folder / "__penstock__/a.tfrecord.penstock-index", "<i8")[6:]
    forget_fingerprints(folder)
    for at in range(int(offsets[2]), int(offsets[3])):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        reader = open_shard(shard, [path, *others])
        assert reader[1]
        with pytest.raises(ShardCorruptError, match=r"a.tfrecord: sample 2 (is damaged|must have \d+ bytes)"):
            reader[2]
        reader.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (framed(b"a", b"bcd")[:-1], "record 1 at byte 17 is truncated: it has 3 bytes, but 2 are left"),
        (framed(b"a", b"bcd")[:-17], "record 1 at byte 17 is truncated or damaged"),
        (framed(b"a") + b"garbage of some length", "record 1 at byte 17 is truncated or damaged"),
        (b"\x1f\x8b" + bytes(40), "It is compressed with gzip: decompress it"),
        (struct.pack("<QI", 2**63, 0), "record 0 at byte 0 is truncated or damaged, or this is not a TFRecord file"),
        (framed(b"")[:12] + framed(b"x"), "record 1 at byte 16 is truncated or damaged"),
    ],
)
def test_damage_is_found_while_records_are_counted(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(data)
    with pytest.raises(ShardCorruptError, match=f"a.tfrecord: .*{message}"):
        index_folder(tmp_path)
    assert not (tmp_path / OWN_INDEX).exists()


@pytest.mark.parametrize(
    ("number", "values", "expected"),
    [
        (2, b"\x12\x04\0\0\x80?", []),  # a field that is unknown
        (2, b"\x0d\0\0\x80?", [1.0]),  # one by one
        (2, b"\x0a\x04\0\0\x80?\x0a\x04\0\0\0@", [1.0, 2.0]),  # in two pieces
        (3, b"\x08\x05\x08\x06", [5, 6]),
    ],
)
def test_lists_may_be_stored_in_any_way(number: int, values: bytes, expected: list[float]) -> None:
    assert read_list(number, values) == expected


def varint(value: int) -> bytes:
    value, found = value & (1 << 64) - 1, b""
    while value > 127:
        value, found = value >> 7, found + bytes([value & 127 | 128])
    return found + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def read_list(number: int, values: bytes) -> Any:
    """The only feature of an example, which has this list of values."""
    return example_of(field(1, field(1, field(1, b"x") + field(2, field(number, values)))))["x"].tolist()
