"""TFRecord files of TensorFlow: examples as its own protobuf reads them, checksums compared, damage named."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from offset_files import forget_fingerprints
from shard_server import ShardServer

from penstock.data import StreamingDataset, index_folder
from penstock.data.formats import file_ranges
from penstock.data.formats.index import INDEX, read_index
from penstock.data.formats.readers import open_shard
from penstock.data.formats.tfrecord import tfrecord_file
from penstock.data.formats.tfrecord.example_messages import example_of, is_example
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

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


def test_other_records_are_bytes(tmp_path: Path) -> None:
    shutil.copy(DATA / "bytes" / "c.tfrec", tmp_path)
    index_folder(tmp_path)
    dataset = StreamingDataset(local=tmp_path)
    assert [dataset[i] for i in range(9)] == [{"record": bytes([255 - i]) * i * 30} for i in range(9)]


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


def test_sequence_examples_are_not_examples(folder: Path) -> None:
    """Their second field has lists of features, which an Example has not."""
    index_folder(folder, "tfrecord-bytes")
    example = StreamingDataset(local=folder)[3]["record"]
    assert is_example(example)
    assert not is_example(example + b"\x12\x00")


def test_an_empty_file_has_no_records(folder: Path) -> None:
    (folder / "b.tfrecord").write_bytes(b"")
    assert [shard.samples for shard in index_folder(folder)] == [25, 0]


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
    offsets = np.fromfile(folder / "a.tfrecord.penstock-index", "<i8")[6:]
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
    assert not (tmp_path / INDEX).exists()


def test_damaged_offsets_are_named(folder: Path) -> None:
    index_folder(folder)
    path = folder / "a.tfrecord.penstock-index"
    data = path.read_bytes()
    for at, message in (
        (0, "must begin with PENSTOCK OFFSET2"),
        (16, "got that of"),
        (32, "25 records"),
        (58, "damaged"),
    ):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ShardCorruptError, match=rf"a.tfrecord.penstock-index.*{message}.* with index_folder"):
            StreamingDataset(local=folder)[0]


def test_a_file_that_was_replaced_is_found(tmp_path: Path) -> None:
    """Also by one of the same size, whose records begin elsewhere."""
    path = tmp_path / "a.tfrecord"
    path.write_bytes(framed(b"ab", b"cd"))
    index_folder(tmp_path)
    path.write_bytes(framed(b"abc", b"d"))
    with pytest.raises(ShardCorruptError, match=r"a.tfrecord must be the file that was indexed, got another"):
        StreamingDataset(local=tmp_path)[0]
    forget_fingerprints(tmp_path)
    with pytest.raises(ShardCorruptError, match=r"a.tfrecord: sample 0 is damaged: its stored length must be 2 bytes"):
        StreamingDataset(local=tmp_path)[0]


def test_error_counts_samples_in_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_ranges, "SPAN_BYTES", 1)
    monkeypatch.setattr(file_ranges, "MIN_RANGE_BYTES", 1)
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.tfrecord").write_bytes(framed(b"ab", b"ef"))
    index_folder(root, format="tfrecord-example")
    with ShardServer(root) as server, pytest.raises(ShardCorruptError, match=r"sample 1 must be a tf\.train\.Example"):
        StreamingDataset(server.url, tmp_path / "cache")[1]


def test_an_unknown_kind_of_records_is_refused(folder: Path) -> None:
    index_folder(folder)
    index = (folder / INDEX).read_bytes().replace(b'"example"', b'"sequence"')
    with pytest.raises(DatasetError, match="shard 0: records must be one of example, bytes, got 'sequence'"):
        read_index(index, "it")


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tfrecord_file._crc32c.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "google_crc32c", None)
    with pytest.raises(DatasetError, match=r"pip install 'penstock\[tfrecord\]'"):
        index_folder(folder)
    tfrecord_file._crc32c.cache_clear()


def example_class() -> Any:
    """tf.train.Example, by protobuf's own library."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):
        file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("Bytes", "Float", "Int64"), 1):
        feature.field.add(
            name=f"{name.lower()}_list", number=number, type=field.TYPE_MESSAGE, type_name=f".t.{name}List",
            label=field.LABEL_OPTIONAL, oneof_index=0,
        )  # fmt: skip
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, type_name=".t.Feature", label=field.LABEL_OPTIONAL)
    features.field.add(
        name="feature", number=1, type=field.TYPE_MESSAGE, type_name=".t.Features.FeatureEntry",
        label=field.LABEL_REPEATED,
    )  # fmt: skip
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features", number=1, type=field.TYPE_MESSAGE, type_name=".t.Features", label=field.LABEL_OPTIONAL
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = example_class()
VALUES = st.one_of(
    st.tuples(st.just("int64_list"), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30)),
    st.tuples(st.just("int64_list"), st.lists(st.integers(0, 200), max_size=30)),
    st.tuples(st.just("int64_list"), st.lists(st.integers(2**28, 2**35 - 1), min_size=4, max_size=9)),
    st.tuples(st.just("float_list"), st.lists(st.floats(width=32, allow_nan=False), max_size=5)),
    st.tuples(st.just("bytes_list"), st.lists(st.binary(max_size=200), max_size=5)),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=20), VALUES, max_size=5))
def test_examples_are_as_protobuf_reads_them(features: dict[str, tuple[str, list[Any]]]) -> None:
    made = Example()
    for name, (kind, values) in features.items():
        stored = getattr(made.features.feature[name], kind)
        stored.SetInParent()
        stored.value.extend(values)
    read = example_of(made.SerializeToString())
    assert read.keys() == features.keys()
    for name, (kind, values) in features.items():
        found = read[name] if kind == "bytes_list" else read[name].tolist()
        assert found == list(getattr(made.features.feature[name], kind).value) == values


@pytest.mark.parametrize(
    ("number", "values", "expected"),
    [
        (2, b"\x12\x04\0\0\x80?", []),  # a field that is unknown
        (2, b"\x0d\0\0\x80?", [1.0]),  # one by one
        (2, b"\x0a\x04\0\0\x80?\x0a\x04\0\0\0@", [1.0, 2.0]),  # in two pieces
        (3, b"\x08\x05\x08\x06", [5, 6]),
        (3, b"\x0a\xd8\x04" + b"\x07" * 600, [7] * 600),
        (3, b"\x12\xd8\x04" + b"\x07" * 600, []),
    ],
)
def test_lists_may_be_stored_in_any_way(number: int, values: bytes, expected: list[float]) -> None:
    def field(number: int, data: bytes) -> bytes:
        size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
        return bytes([number << 3 | 2]) + size + data

    entry = field(1, b"x") + field(2, field(number, values))
    assert example_of(field(1, field(1, entry)))["x"].tolist() == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 255))
def test_damaged_examples_are_value_errors(junk: bytes, at: int, octet: int) -> None:
    whole = bytearray((DATA / "a.tfrecord").read_bytes()[400:800])
    whole[at : at + 1] = bytes([octet])
    for data in (junk, bytes(whole[12:])):
        try:
            example_of(data)
        except ValueError:
            continue
