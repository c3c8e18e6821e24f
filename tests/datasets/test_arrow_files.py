"""Arrow IPC files and folders of Hugging Face datasets: values as stored, rows read by themselves, damage named."""

from __future__ import annotations

import datetime
import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
from format_folders import plainly, saved_rows

from penstock.data import StreamingDataset, index_folder
from penstock.data.formats.arrow import reader as arrow_file
from penstock.data.formats.arrow.reader import ArrowReader, index_arrow
from penstock.data.formats.columnar.values import value_of
from penstock.proto.errors import DatasetError, ShardCorruptError

SAVED = Path(__file__).parents[1] / "data" / "saved_datasets"

COLUMNS: list[tuple[str, Any, Any]] = [
    ("bool", pyarrow.bool_(), lambda i: bool(i % 2)),
    ("int8", pyarrow.int8(), lambda i: i - 50),
    ("uint64", pyarrow.uint64(), lambda i: 2**64 - 1 - i),
    ("half", pyarrow.float16(), lambda i: np.float16(i)),
    ("double", pyarrow.float64(), lambda i: i / 3),
    ("text", pyarrow.large_string(), lambda i: "ü" * (i % 4)),
    ("raw", pyarrow.binary(), lambda i: bytes([i]) * (i % 3)),
    ("fixed", pyarrow.binary(3), lambda i: bytes([i] * 3)),
    ("decimal", pyarrow.decimal128(10, 2), lambda i: Decimal(i) / 4),
    ("date", pyarrow.date32(), lambda i: datetime.date(2026, 1, 1) + datetime.timedelta(i)),
    ("fine", pyarrow.timestamp("ns"), lambda i: np.datetime64("2026-01-01T00:00:00.000000001", "ns") + i),
    ("null", pyarrow.null(), lambda i: None),
    ("texts", pyarrow.list_(pyarrow.string()), lambda i: ["a", None, str(i)][: i % 4]),
    ("grid", pyarrow.list_(pyarrow.list_(pyarrow.float32())), lambda i: [[i, 0.5], []]),
    (
        "struct",
        pyarrow.struct([("a", pyarrow.list_(pyarrow.int8())), ("b", pyarrow.bool_())]),
        lambda i: {"a": [i], "b": None},
    ),
    ("map", pyarrow.map_(pyarrow.string(), pyarrow.int64()), lambda i: [("k", i)] * (i % 2)),
]
LISTS: list[tuple[str, Any]] = [
    ("tokens", pyarrow.list_(pyarrow.uint16())),
    ("large", pyarrow.large_list(pyarrow.int64())),
    ("pair", pyarrow.list_(pyarrow.float32(), 2)),
    ("flags", pyarrow.list_(pyarrow.bool_())),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record batch is read by itself."""
    monkeypatch.setattr(arrow_file, "MERGED_BYTES", 0)


@pytest.fixture(params=["mapped", "read"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read files as on a local disk, and as on a network file system."""
    monkeypatch.setattr(arrow_file, "_is_local", lambda folder: request.param == "mapped")
    return str(request.param)


def write(path: Path, table: pyarrow.Table, *, stream: bool = False, rows: int = 9, **options: Any) -> Path:
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with make(str(path), table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table.slice(0, 31), max_chunksize=rows)  # record batches of several sizes
        writer.write_table(table.slice(31), max_chunksize=2 * rows)
    return path


def opened(path: Path) -> ArrowReader:
    return ArrowReader(index_arrow(path, path.name), path)


def numbers(count: int) -> pyarrow.Table:
    return pyarrow.table({"number": list(range(count)), "text": [f"row {i}" for i in range(count)]})


@pytest.mark.parametrize(("stream", "options"), [(False, {}), (True, {"compression": "lz4"})], ids=str)
@pytest.mark.usefixtures("where")
def test_every_type_is_as_pyarrow_has_it(stream: bool, options: dict[str, Any], tmp_path: Path) -> None:
    columns = {}
    for name, kind, value in COLUMNS:
        columns[name] = pyarrow.array([None if i % 7 == 2 else value(i) for i in range(100)], kind)
    table = pyarrow.table(columns)
    reader = opened(write(tmp_path / "a.arrow", table, stream=stream, **options))
    order = random.Random(1).sample(range(100), 100)
    for index in order:
        expected = {name: value_of(table.schema.field(name).type)(table[name][index]) for name in table.column_names}
        assert plainly(reader[index]) == plainly(expected)
    reader.close()


def test_lists_of_numbers_are_arrays(tmp_path: Path) -> None:
    """Also where other rows are null, or have nulls; these are lists, as Python has them."""
    rows = [None, [1, 2], [3, None], [5, 6]] * 25
    table = pyarrow.table(
        {
            name: pyarrow.array(
                [row and [each and each % 2 == 0 for each in row] if name == "flags" else row for row in rows], kind
            )
            for name, kind in LISTS
        }
    )
    reader = opened(write(tmp_path / "a.arrow", table))
    for index in range(100):
        for name, kind in LISTS:
            value = reader[index][name]
            if index % 4 in (1, 3):
                assert value.dtype == kind.value_type.to_pandas_dtype()
                value = value.tolist()
            assert value == table[name][index].as_py()


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.usefixtures("where")
def test_rows_read_together_are_the_same(nulls: bool, tmp_path: Path) -> None:
    """In runs of any length, over the ends of record batches, and between rows of another order."""
    kinds = [*((name, kind, value) for name, kind, value in COLUMNS)]
    kinds += [(name, kind, lambda i: [0, 1]) for name, kind in LISTS if name != "flags"]
    kinds += [("flags", pyarrow.list_(pyarrow.bool_()), lambda i: [True, None][: 1 + nulls])]
    columns = {
        name: pyarrow.array([None if nulls and i % 7 == 2 else value(i) for i in range(100)], kind)
        for name, kind, value in kinds
    }
    reader = opened(write(tmp_path / "a.arrow", pyarrow.table(columns), rows=17))
    alone = [reader[row] for row in range(100)]
    draw = random.Random(2)
    for rows in (range(100), [*range(5), 40, *range(2, 9), 99, 0], draw.sample(range(100), 100), [], [7]):
        together = reader.get_many(rows)
        assert plainly(together) == plainly([alone[row] for row in rows])
        for sample, row in zip(together, rows, strict=True):
            assert [*map(type, sample.values())] == [*map(type, alone[row].values())]
            assert all(each.flags.writeable for each in sample.values() if isinstance(each, np.ndarray))


def test_small_record_batches_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_file, "MERGED_BYTES", 5000)
    path = write(tmp_path / "a.arrow", numbers(900), rows=17)
    reader = opened(path)
    assert 3 < len(reader._begins) - 1 < 20
    order = random.Random(3).sample(range(900), 900)
    assert [row["number"] for row in reader.get_many(order)] == order
    columns = reader.get_columns(np.array(order))
    assert columns is not None
    assert list(columns["text"]) == [f"row {number}" for number in order]


@pytest.mark.parametrize("stream", [False, True])
def test_dictionaries_are_read(stream: bool, tmp_path: Path) -> None:
    """In streams they may change from one record batch to the next."""
    table = pyarrow.table({"word": pyarrow.array([f"w{i % 5}" for i in range(60)]).dictionary_encode()})
    if stream:
        other = pyarrow.table({"word": pyarrow.array([f"x{i % 3}" for i in range(60)]).dictionary_encode()})
        table = pyarrow.concat_tables([table, other])
    reader = opened(write(tmp_path / "a.arrow", table, stream=stream))
    assert [reader[index]["word"] for index in range(len(table))] == table["word"].to_pylist()


def test_files_of_old_writers_are_read(tmp_path: Path) -> None:
    """Before Arrow 0.15 messages had no mark before their size."""
    reader = opened(write(tmp_path / "a.arrow", numbers(50), stream=True, use_legacy_format=True))
    assert [reader[index]["number"] for index in range(50)] == list(range(50))


def test_a_stream_without_its_end_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", numbers(50), stream=True)
    path.write_bytes(path.read_bytes()[:-8])
    assert len(opened(path)) == 50


def test_whole_record_batches_are_blocks(tmp_path: Path) -> None:
    """So that a shuffled order reads each of them once in a while, and not for each row."""
    path = write(tmp_path / "a.arrow", numbers(50), compression="zstd", rows=10)
    shard = index_arrow(path, path.name)
    assert shard.blocks == (10, 10, 10, 1, 19)
    assert index_arrow(write(tmp_path / "b.arrow", numbers(50)), "b.arrow").blocks == ()
    with pytest.raises(ShardCorruptError, match=r"a\.arrow must have the record batches that the index lists"):
        ArrowReader(replace(shard, blocks=(25, 25)), path)
    reader = ArrowReader(shard, path)
    reader.load(4)
    assert list(reader._kept) == [4]
    reader.drop(4)
    assert not reader._kept


def test_a_record_batch_must_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = opened(write(tmp_path / "a.arrow", numbers(50), compression="zstd"))
    monkeypatch.setattr(arrow_file, "free_memory", lambda: 10)
    with pytest.raises(DatasetError, match=r"a.arrow: a record batch must fit .* but 10 are free"):
        reader[0]


def test_damaged_bytes_never_end_the_process(tmp_path: Path) -> None:
    """Any byte of a record batch: values may differ, and what cannot be read is an error with a name."""
    columns = {name: pyarrow.array([value(i) for i in range(20)], kind) for name, kind, value in COLUMNS}
    paths = []
    for compression in (None, "zstd"):
        path = write(tmp_path / f"{compression}.arrow", pyarrow.table(columns), rows=20, compression=compression)
        paths.append(path)
    done = subprocess.run(
        [sys.executable, "-c", DAMAGED, *paths], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr


DAMAGED = """
import random
import sys
from pathlib import Path
import numpy as np
from penstock.data.formats.arrow import reader as arrow
from penstock.data.formats.shards import columns_of_rows
from penstock.proto.errors import DatasetError
arrow._is_local = lambda folder: draw.random() < 0.5  # mapped, or read as on a network file system
good = {Path(path): Path(path).read_bytes() for path in sys.argv[1:]}
draw = random.Random(1)
refused = 0
for number in range(400):
    path = [*good][number % 2]
    data = bytearray(good[path])
    for _ in range(draw.choice((1, 1, 8))):
        data[draw.randrange(len(data))] = draw.choice((0, 1, 127, 128, 255))
    path.write_bytes(data)
    try:
        shard = arrow.index_arrow(path, "a.arrow")
        reader = arrow.ArrowReader(shard, path)
        count = min(len(reader), 20)
        for read in (lambda: reader[count - 1], lambda: reader.get_many(range(count)),
                     lambda: columns_of_rows(reader, np.arange(count)[::-1])) * bool(count):
            try:
                read()
            except DatasetError:
                refused += 1
    except DatasetError:
        refused += 1
assert refused > 20, refused
"""


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_files_are_named(stream: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", numbers(50), stream=stream)
    data = path.read_bytes()
    for size in (0, 1, 7, 8, 100, len(data) // 2, len(data) - (20 if stream else 1)):
        path.write_bytes(data[:size])
        with pytest.raises(ShardCorruptError, match=r"a.arrow must be an Arrow IPC file: .*\. Write the file again"):
            opened(path)
    with pytest.raises(ShardCorruptError, match=r"nothing.arrow: .* cannot be read"):
        opened(tmp_path / "nothing.arrow")


def test_a_damaged_name_of_a_column_is_found(tmp_path: Path) -> None:
    table = pyarrow.table({"number": [1], "struct": [{"within": 1}]})
    for name, damaged in ((b"number", b"n\xffmber"), (b"within", b"w\xffthin")):
        path = write(tmp_path / "a.arrow", table, stream=True)
        path.write_bytes(path.read_bytes().replace(name, damaged))
        with pytest.raises(ShardCorruptError, match=r"a.arrow must be an Arrow IPC file: .*invalid start byte"):
            opened(path)


def test_equal_names_of_columns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", numbers(3).rename_columns(["a", "a"]))
    with pytest.raises(DatasetError, match=r"a\.arrow: the names of columns must be unique, got a, a"):
        index_arrow(path, "a.arrow")


def test_saved_splits_are_read(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "splits", tmp_path / "data")
    shards = index_folder(tmp_path / "data")
    assert [shard.name for shard in shards] == ["train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow"]
    for split in ("train", "test"):
        dataset = StreamingDataset(tmp_path / "data", tmp_path / "cache", split=split)
        rows = [plainly(dataset[index]) for index in range(len(dataset))]
        assert rows == [plainly(row) for row in saved_rows(f"splits/{split}")]


def change(**values: Any) -> Any:
    def changed(folder: Path) -> None:
        path = folder / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return changed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(_indices_data_files=[{"filename": "i.arrow"}]), r"state.json: .* Call flatten_indices\(\)"),
        (change(_data_files=[]), r"state.json lists no files, because the dataset that was saved has no rows"),
        (change(_data_files=[{"filename": "../a.arrow"}]), r"state.json: _data_files must be a list"),
        (change(_data_files=[{"filename": "b.arrow"}]), r"b.arrow must exist, as state.json lists it"),
        (lambda folder: (folder / "state.json").write_text("{"), r"state.json is damaged"),
        (lambda folder: (folder / "state.json").write_text("[]"), r"state.json must be a JSON object, got list"),
        (lambda folder: (folder / "dataset_dict.json").write_text('{"splits": ["x"]}'), r"x/state.json must exist"),
        (lambda folder: (folder / "dataset_dict.json").write_text('{"splits": [".."]}'), r"list of folder names"),
    ],
)
def test_damaged_saved_datasets_are_named(damage: Any, message: str, tmp_path: Path) -> None:
    shutil.copytree(SAVED / "chosen", tmp_path / "data")
    damage(tmp_path / "data")
    with pytest.raises(DatasetError, match=message):
        index_folder(tmp_path / "data")


def test_a_cache_of_several_splits_is_refused(tmp_path: Path) -> None:
    for name in ("x-train.arrow", "x-test.arrow"):
        write(tmp_path / name, numbers(40))
    info = tmp_path / "dataset_info.json"
    info.write_text('{"splits": {"train": {}, "test": {}}}')
    with pytest.raises(DatasetError, match=r"the files of one split, got train, test\. .* save_to_disk"):
        index_folder(tmp_path)
    info.write_text('{"splits": {"train": {}}}')
    assert len(index_folder(tmp_path)) == 2
