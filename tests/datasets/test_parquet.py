"""Parquet files as shards: values as Python has them, row groups read when they are needed, damage named."""

from __future__ import annotations

import datetime
import mmap
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from penstock.data.formats.descriptors import Descriptor
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
        (pyarrow.map_(pyarrow.string(), pyarrow.timestamp("ns")), [[("a", NANOSECOND), ("b", None)], None], None),
        (pyarrow.timestamp("us"), [datetime.datetime(2026, 1, 1), None], None),
        (pyarrow.decimal128(5, 2), [Decimal("1.25"), None], None),
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


def test_files_with_other_columns_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", [{"x": 1, "y": 2}])
    other = write(tmp_path / "b.parquet", [{"x": 1, "z": 2}])
    with pytest.raises(DatasetError, match=r"a\.parquet has .*, but b\.parquet has x, z"):
        parquet_shards([(path.name, path) for path in (first, other)])
    damaged = tmp_path / "c.parquet"
    damaged.write_bytes(b"PAR1 or what")
    with pytest.raises(ShardCorruptError, match=r"c\.parquet must be a Parquet file"):
        parquet_shards([("c.parquet", damaged)])
    with pytest.raises(ShardCorruptError, match=r"d\.parquet cannot be read: .*No such file"):
        parquet_shards([("d.parquet", tmp_path / "d.parquet")])


def test_another_count_is_found_on_open(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS[:10])
    shard = Shard("parquet", 11, (ShardFile(StoredFile("a.parquet", path.stat().st_size)),))
    with pytest.raises(ShardCorruptError, match=r"^a\.parquet must have 11 rows, .* got 10"):
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


def test_nested_lists_in_a_footer_are_bounded() -> None:
    for data in (
        b"\x59" + b"\x19" * 100_000,
        b"\x5c" + b"\x1c" * 100_000,
        b"\x59\xf8" + b"\xff" * 8 + b"\x01",
        b"\x5b\x01",
    ):
        with pytest.raises(ValueError, match="the footer"):
            row_groups(data)


def test_repeated_text_is_in_memory_once(tmp_path: Path) -> None:
    """774 bytes took 6 GiB: one text in a dictionary, and 300 rows of it."""
    path, rows = tmp_path / "a.parquet", 300
    text = pyarrow.array(["x" * (4 << 20)])
    table = pyarrow.table({"t": pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), text)})
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30)
    del table, text
    assert path.stat().st_size < 10_000
    reader = open_shard(shard_of(path), [path])
    before = pyarrow.total_allocated_bytes()
    assert len(reader[rows - 1]["t"]) == 4 << 20
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


def test_a_codec_that_pyarrow_lacks_is_named(tmp_path: Path) -> None:
    """LZO, which no pyarrow has: the footer of a file is changed to say so."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(100))}), path, compression="snappy")
    data, snappy, lzo = path.read_bytes(), b"\x18\x01n\x15\x02", b"\x18\x01n\x15\x06"
    assert data.count(snappy) == 1  # the column's path, and its codec
    path.write_bytes(data.replace(snappy, lzo))
    index_parquet(tmp_path)
    with pytest.raises(DatasetError, match=r"a\.parquet: sample 0, row group 0 is compressed in a way that .* LZO "):
        _ = open_shard(parquet_shards([("a.parquet", path)])[0], [path])[0]
