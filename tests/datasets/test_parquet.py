"""Parquet files as shards: values as Python has them, row groups read when they are needed, damage named."""

from __future__ import annotations

import contextlib
import datetime
import io
import mmap
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.formats.decoded_blocks import MEMORY
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import read_index, write_index
from penstock.data.formats.parquet import reader as parquet_reader
from penstock.data.formats.parquet.footer import row_groups, tail_of
from penstock.data.formats.parquet.reader import ParquetReader
from penstock.data.formats.parquet.shards import parquet_shards
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.writing.index_parquet import index_parquet
from penstock.proto.errors import DatasetError, ShardCorruptError

ROWS: list[dict[str, Any]] = [
    {
        "number": i if i % 3 else None,
        "text": f"row {i} ü" if i % 4 else None,
        "raw": bytes([i % 256]) * (i % 5),
        "list": [None, i] * (i % 3) if i % 5 else None,
        "nested": {"a": [{"b": i / 2}], "c": None if i % 2 else "x"},
        "when": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=i),
        "flag": bool(i % 2),
    }
    for i in range(1000)
]


def write(path: Path, rows: list[dict[str, Any]], **keywords: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **{"row_group_size": 100, **keywords})
    return path


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample with lists of numbers as Python's."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def shard_of(path: Path) -> Shard:
    (shard,) = parquet_shards([(path.name, path)])
    return shard


def test_row_groups_that_fit_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", ROWS)
    read: list[int] = []
    actual = pyarrow.parquet.ParquetFile.read_row_group

    def counted(self: Any, group: int, *args: Any, **keywords: Any) -> Any:
        read.append(group)
        return actual(self, group, *args, **keywords)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", counted)
    reader = open_shard(shard_of(path), [path])
    assert read == []  # not before a row is asked for
    for index in (950, 20, 960, 30, 99, 100):
        assert plain(reader[index]) == ROWS[index]
    assert read == [9, 0, 1]
    reader.close()

    one = pyarrow.parquet.ParquetFile(path).read_row_group(0).nbytes
    read.clear()
    monkeypatch.setattr(MEMORY, "limit", int(2.5 * one))
    reader = open_shard(shard_of(path), [path])
    for index in (0, 100, 1, 200, 2, 101):  # 1 is the longest unused when 2 comes
        assert plain(reader[index]) == ROWS[index]
    assert read == [0, 1, 2, 1]
    reader.close()

    read.clear()
    monkeypatch.setattr(MEMORY, "limit", 1)
    reader = open_shard(shard_of(path), [path])
    for index in (0, 1, 100, 2):
        assert plain(reader[index]) == ROWS[index]
    assert read == [0, 1, 0]
    reader.close()


NANOSECOND = np.datetime64("2026-01-01T00:00:00.000000001", "ns")
EVEN = np.datetime64("2026-01-01", "ns")


@pytest.mark.parametrize(
    ("kind", "values", "read"),
    [
        (pyarrow.timestamp("ns"), [NANOSECOND, EVEN, None], None),
        (pyarrow.timestamp("ns", "Europe/Berlin"), [1, None], [np.datetime64(1, "ns"), None]),
        (pyarrow.duration("ns"), [np.timedelta64(1, "ns"), np.timedelta64(1000, "ns"), None], None),
        (pyarrow.time64("ns"), [1, 1000, None], [np.timedelta64(1, "ns"), np.timedelta64(1000, "ns"), None]),
        (pyarrow.list_(pyarrow.timestamp("ns")), [[NANOSECOND, None], [], None], None),
        (pyarrow.struct({"a": pyarrow.timestamp("ns"), "b": pyarrow.int8()}), [{"a": NANOSECOND, "b": 1}, None], None),
        (pyarrow.map_(pyarrow.string(), pyarrow.timestamp("ns")), [[("a", NANOSECOND), ("b", None)], None], None),
        (pyarrow.timestamp("us"), [datetime.datetime(2026, 1, 1), None], None),
        (pyarrow.decimal128(5, 2), [Decimal("1.25"), None], None),
        (pyarrow.large_string(), ["a", None], None),
    ],
    ids=str,
)
def test_values_of_good_columns(tmp_path: Path, kind: Any, values: list[Any], read: list[Any] | None) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"x": pyarrow.array(values, kind)}), path)
    reader = open_shard(shard_of(path), [path])
    for index, value in enumerate(values if read is None else read):
        found = reader[index]["x"]
        assert found == value
        assert type(found) is type(value)


def test_times_as_spark_writes_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"x": pyarrow.array([NANOSECOND])})
    pyarrow.parquet.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
    assert open_shard(shard_of(path), [path])[0] == {"x": NANOSECOND}


def test_a_value_that_python_has_not_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"x": pyarrow.array([0, 1 << 60], pyarrow.timestamp("ms"))}), path)
    reader = open_shard(shard_of(path), [path])
    assert reader[0] == {"x": datetime.datetime(1970, 1, 1)}
    with pytest.raises(DatasetError, match=r"a\.parquet: sample 1, column 'x': Python cannot hold its value") as caught:
        reader[1]
    assert not isinstance(caught.value, ShardCorruptError)


def test_row_group_with_more_text_than_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arrays of 1.5 GiB each, of memory that is never touched. pyarrow cannot make one of them."""
    giant = 3 << 29
    offsets = pyarrow.py_buffer(np.array([0, 1, giant], np.int32))
    text = pyarrow.py_buffer(mmap.mmap(-1, giant))
    array = pyarrow.StringArray.from_buffers(2, offsets, text)
    table = pyarrow.table({"x": pyarrow.chunked_array([array, array])})
    path = write(tmp_path / "a.parquet", [{"x": "\0"}] * 4)
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", lambda self, group, columns, use_threads: table)
    reader = open_shard(shard_of(path), [path])
    assert [reader[index] for index in (0, 2)] == [{"x": "\0"}] * 2


def test_large_list_row_groups_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pyarrow fail as it does with lists of more than 2 GiB of text, and with files that it cannot read at all."""
    path = write(tmp_path / "a.parquet", ROWS[:100])
    several = pyarrow.parquet.ParquetFile.iter_batches
    parts: list[int] = []
    smallest = 10

    def read_row_group(self: Any, group: int, **keywords: Any) -> Any:
        raise pyarrow.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    def iter_batches(self: Any, rows: int, **keywords: Any) -> Any:
        parts.append(rows)
        return several(self, rows, **keywords) if rows <= smallest else read_row_group(self, 0)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", read_row_group)
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", iter_batches)
    reader = open_shard(shard_of(path), [path])
    assert [plain(reader[index]) for index in range(100)] == ROWS[:100]
    assert parts == [50, 12, 3]
    smallest = 0
    with pytest.raises(DatasetError, match=r"a\.parquet: sample 0, row group 0 cannot be read by pyarrow"):
        open_shard(shard_of(path), [path])[0]


def test_plain_files_are_indexed_by_footers(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 0), ("c", 250)):
        write(tmp_path / f"{name}.parquet", ROWS[:count] or ROWS[:1])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]).slice(0, 0), tmp_path / "b.parquet")
    paths = sorted(tmp_path.iterdir())
    shards = parquet_shards((f"train/{path.name}", path) for path in paths)
    assert [shard.samples for shard in shards] == [3, 0, 250]
    assert [shard.name for shard in shards] == ["train/a.parquet", "train/b.parquet", "train/c.parquet"]
    assert [shard.size for shard in shards] == [path.stat().st_size for path in paths]
    # Over a file of any place, of which only the footer is read.
    with fsspec.open(paths[2].as_uri(), "rb") as file:
        assert parquet_shards([("train/c.parquet", file)]) == shards[2:]
    assert [shard.samples for shard in read_index(write_index(shards), "here")] == [3, 0, 250]


def test_files_with_other_columns_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", [{"x": 1, "y": 2}])
    other = write(tmp_path / "b.parquet", [{"x": 1, "z": 2}])
    with pytest.raises(DatasetError, match=r"a\.parquet has .*, but b\.parquet has x, z"):
        parquet_shards([(path.name, path) for path in (first, other)])
    with pytest.raises(ShardCorruptError, match=r"c\.parquet must be a Parquet file"):
        parquet_shards([("c.parquet", io.BytesIO(b"PAR1 or what"))])
    with pytest.raises(ShardCorruptError, match=r"d\.parquet cannot be read: .*No such file"):
        parquet_shards([("d.parquet", tmp_path / "d.parquet")])


def test_wrong_size_or_count_is_found_on_open(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS[:10])
    size = path.stat().st_size
    for shard, words in (
        (Shard("parquet", 11, (ShardFile(StoredFile("a.parquet", size)),)), " must have 11 rows, .* got 10"),
        (Shard("parquet", 10, (ShardFile(StoredFile("a.parquet", 5)),)), f": .* must have 5 bytes, .* got {size}"),
    ):
        with pytest.raises(ShardCorruptError, match=rf"^a\.parquet{words}"):
            open_shard(shard, [path])
    with pytest.raises(ShardCorruptError, match=r"cannot be read: .* Check that it exists"):
        open_shard(shard_of(path), [tmp_path / "gone"])
    shard = shard_of(path)
    path.write_bytes(bytes(size))
    with pytest.raises(ShardCorruptError, match=r"cannot be read: the file must end with a footer, .* write the file"):
        open_shard(shard, [path])


DAMAGED = """
import sys
from pathlib import Path
from penstock.data.formats.parquet.reader import ParquetReader
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, ShardCorruptError
path = Path(sys.argv[1])
good = path.read_bytes()
shard = Shard("parquet", 3, (ShardFile(StoredFile("x.parquet", len(good))),))
refused = 0
for at in range(len(good) - 8 - int.from_bytes(good[-8:-4], "little"), len(good) - 8):
    for value in (4, good[at] ^ 2):
        path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
        try:
            reader = ParquetReader(shard, path)
            reader[0], reader[2]
        except (ShardCorruptError, DatasetError):
            refused += 1
assert refused > 150, refused
"""


def test_no_byte_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """Statistics of sizes that do not fit the schema ended it: nothing catches that exception of pyarrow."""
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"tokens": [[1, 2], [], [3]], "text": ["a", None, "b"]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    done = subprocess.run(
        [sys.executable, "-c", DAMAGED, path], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    os.mkfifo(path)
    with pytest.raises(ShardCorruptError, match="the path must be a regular file"):
        index_parquet(tmp_path)
    with pytest.raises(ShardCorruptError, match="the path must be a regular file"):
        ParquetReader(Shard("parquet", 0, (ShardFile(StoredFile("x.parquet", 0)),)), path)


def test_memory_that_pyarrow_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"number": [1, 2, 3]}), path)
    shard = Shard("parquet", 3, (ShardFile(StoredFile("x.parquet", path.stat().st_size)),))
    reader = ParquetReader(shard, path)

    def read(*_: Any) -> Any:
        raise pyarrow.lib.ArrowMemoryError("malloc of size 70368744177664 failed")

    monkeypatch.setattr(reader, "_table", read)
    with pytest.raises(DatasetError, match=r"row group 0 must fit into memory: malloc of size 70368744177664 failed"):
        reader[0]


def test_footer_s_sizes_are_those_of_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=300)
    footer = pyarrow.parquet.read_metadata(path)
    for number, group in enumerate(row_groups(tail_of(Descriptor(path))[:-8])):
        theirs = footer.row_group(number)
        columns = [theirs.column(place) for place in range(theirs.num_columns)]
        assert group.rows == theirs.num_rows
        assert group.nbytes >= sum(column.total_uncompressed_size for column in columns)
        assert group.nbytes < 3 * sum(column.total_uncompressed_size + 8 * column.num_values for column in columns)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_footer_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        row_groups(data)


def test_nested_lists_in_a_footer_are_bounded() -> None:
    for data in (
        b"\x59" + b"\x19" * 100_000,
        b"\x5c" + b"\x1c" * 100_000,
        b"\x59\xf8" + b"\xff" * 8 + b"\x01",
        b"\x5b\x01",
    ):
        with pytest.raises(ValueError, match="the footer"):
            row_groups(data)


def test_missing_pyarrow_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS[:1])
    shard = shard_of(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for call in (lambda: open_shard(shard, [path]), lambda: shard_of(path)):
        with pytest.raises(DatasetError, match=r"pyarrow\. Run pip install 'penstock\[parquet\]'"):
            call()


def test_repeated_text_is_in_memory_once(tmp_path: Path) -> None:
    """774 bytes took 6 GiB: one text of 16 MiB in a dictionary, and 300 rows of it."""
    path, rows = tmp_path / "a.parquet", 300
    text = pyarrow.array(["x" * (16 << 20)])
    table = pyarrow.table({"t": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), text)})
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30)
    del table, text
    assert path.stat().st_size < 10_000
    reader = open_shard(shard_of(path), [path])
    before = pyarrow.total_allocated_bytes()
    assert len(reader[rows - 1]["t"]) == 16 << 20
    assert pyarrow.total_allocated_bytes() - before < 100 << 20


def opened(path: Path) -> ParquetReader:
    return ParquetReader(shard_of(path), path)


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_texts_in_any_encoding_are_read(encoding: str, tmp_path: Path) -> None:
    texts = [f"{i:06d}" for i in range(3000)]
    table = pyarrow.table({"text": texts, "nested": [[text] for text in texts]})
    encodings = {"text": encoding, "nested.list.element": encoding}
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, use_dictionary=False, column_encoding=encodings, row_group_size=999)
    assert opened(path).get_many(range(3000)) == [{"text": text, "nested": [text]} for text in texts]


def written_once(path: Path, text: str, rows: int, every: int) -> None:
    """Write `rows` rows, of which one in `every` has `text`, which the file has once."""
    indices = pyarrow.array(np.where(np.arange(rows) % every == 0, 1, 0).astype(np.int32))
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["", text]))
    pyarrow.parquet.write_table(pyarrow.table({"t": column}), path, store_schema=False)


def test_repeated_text_of_many_rows_stays_a_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    written_once(path, "x" * 100_000, 1_000_000, 500)  # 200 MB, decoded
    assert path.stat().st_size < 20_000
    before = pyarrow.total_allocated_bytes()
    reader = opened(path)
    assert [len(reader[row]["t"]) for row in (0, 1, 999_500)] == [100_000, 0, 100_000]
    assert reader._repeated == {"t"}
    assert pyarrow.total_allocated_bytes() - before < 50 << 20


@pytest.mark.parametrize("every", [1, 500])
def test_repeated_text_that_fits_is_expanded(every: int, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    written_once(path, "x" * 1000, 20_000, every)
    reader = opened(path)
    assert [len(sample["t"]) for sample in reader.get_many([0, 1, 500])] == [1000, 1000 if every == 1 else 0, 1000]
    assert not reader._repeated


def test_texts_are_counted_batch_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some columns exceed the limit, and others do not; nested ones are not counted but estimated."""
    rows = 1000
    texts = [f"{row:04d}" * 25 for row in range(rows)]
    same = pyarrow.array(["y" * 5000]).dictionary_encode().take(pyarrow.array([0] * rows))
    table = pyarrow.table(
        {"own": texts, "same": same.cast(pyarrow.string()), "nested": [["z" * 5000, text] for text in texts]}
        | {"delta": ["d" * 5000] * rows}
    )
    path = tmp_path / "a.parquet"
    dictionaries = ["own", "same", "nested.list.element"]
    encoding = {"delta": "DELTA_BYTE_ARRAY"}
    pyarrow.parquet.write_table(table, path, store_schema=False, use_dictionary=dictionaries, column_encoding=encoding)
    monkeypatch.setattr(parquet_reader, "EXPANDED_BYTES", 1 << 20)
    monkeypatch.setattr(parquet_reader, "BATCH_BYTES", 1 << 20)
    reader = opened(path)
    assert reader.get_many(range(rows)) == table.to_pylist()
    assert reader._repeated == {"same", "nested.list.element"}
    pyarrow.parquet.write_table(pyarrow.table({"few": [["z" * 5000] * 1000] * 10}), path)
    reader = opened(path)
    assert reader[9] == {"few": ["z" * 5000] * 1000}
    assert reader._repeated == {"few.list.element"}  # one row may have them all


def test_equal_numbers_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes may be 8 GiB of one number; they are weighed before they are read."""
    rows = 1_000_000
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": pyarrow.array(np.zeros(rows, np.int64))}), path)
    assert path.stat().st_size < 10_000
    reader = open_shard(shard_of(path), [path])
    monkeypatch.setattr(parquet_reader, "free_memory", lambda: 7_999_999)
    with pytest.raises(DatasetError, match=r"row group 0 must fit into memory: 8\d{6} of 7999999 bytes"):
        reader[0]
    monkeypatch.undo()
    assert reader[rows - 1] == {"n": 0}
