"""Batches made of columns are those made of rows: values, dtypes, order of keys, errors; also after a resume."""

from __future__ import annotations

import contextlib
import datetime
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock.data import LanceRows, MapLoader, StreamingDataset, StreamingLoader, index_folder, index_parquet
from penstock.data.formats.arrow.reader import ArrowReader, index_arrow
from penstock.data.loading import collating, map_reading
from penstock.proto.errors import ShardCorruptError
from penstock.proto.state.assignment import Assignment, assigned
from penstock.worker import collate

WORDS = ["", "a", "ä\n", "longer than the others"]
NOW = np.datetime64("2026-01-01T00:00:00.000000001", "ns")

GOOD: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "int8": (pyarrow.int8(), lambda i: i % 100 - 50),
    "uint32": (pyarrow.uint32(), lambda i: 2**32 - 1 - i),
    "int64": (pyarrow.int64(), lambda i: i - 2**62),
    "uint64": (pyarrow.uint64(), lambda i: i),
    "half": (pyarrow.float16(), lambda i: np.float16(i / 3)),
    "float": (pyarrow.float32(), lambda i: i / 3 if i % 5 else float("nan")),
    "double": (pyarrow.float64(), lambda i: -i / 3),
    "bool": (pyarrow.bool_(), lambda i: i % 3 == 0),
    "text": (pyarrow.string(), lambda i: WORDS[i % 4]),
    "large": (pyarrow.large_string(), lambda i: WORDS[i % 3]),
    "raw": (pyarrow.binary(), lambda i: bytes([i % 256]) * (i % 5)),
    "fixed": (pyarrow.binary(3), lambda i: bytes([i % 256] * 3)),
    "word": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), lambda i: WORDS[i % 4]),
    "tokens": (pyarrow.list_(pyarrow.uint16()), lambda i: [i, 2, 3]),
    "pair": (pyarrow.list_(pyarrow.float32(), 2), lambda i: [i / 2, i]),
    "one": (pyarrow.large_list(pyarrow.int64()), lambda i: [i]),
    "none": (pyarrow.list_(pyarrow.int32()), lambda i: []),
    "flags": (pyarrow.list_(pyarrow.bool_()), lambda i: [i % 2 == 0, True]),
    "struct": (pyarrow.struct([("a", pyarrow.list_(pyarrow.int8()))]), lambda i: {"a": [i % 9]}),
    "grid": (pyarrow.list_(pyarrow.list_(pyarrow.float32())), lambda i: [[i, 0.5], [1.0, 2.0]]),
}
"""Columns that default_collate accepts: type, value of a row."""

BAD: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "huge": (pyarrow.uint64(), lambda i: 2**64 - 1 - i),
    "null": (pyarrow.null(), lambda i: None),
    "nulls": (pyarrow.int32(), lambda i: i if i % 7 else None),
    "lacking": (pyarrow.string(), lambda i: "x" if i % 7 else None),
    "ragged": (pyarrow.list_(pyarrow.int32()), lambda i: [1] * (i % 3)),
    "holes": (pyarrow.list_(pyarrow.int32()), lambda i: [1, None if i % 5 == 0 else 2]),
    "missing": (pyarrow.list_(pyarrow.int32()), lambda i: [1, 2] if i % 6 else None),
    "date": (pyarrow.date32(), lambda i: datetime.date(2026, 1, 1)),
    "nanoseconds": (pyarrow.timestamp("ns"), lambda i: NOW + i),
    "optional": (pyarrow.struct([("a", pyarrow.int8())]), lambda i: {"a": i % 9 or None}),
}
"""Columns that default_collate refuses, or not in every batch."""


def table_of(names: list[str], rows: int) -> pyarrow.Table:
    kinds = {**GOOD, **BAD}
    return pyarrow.table(
        {name: pyarrow.array([kinds[name][1](i) for i in range(rows)], kinds[name][0]) for name in names}
    )


class FakeLance:
    """Stands in for pylance, which the environment of these tests lacks: a dataset over a file of pyarrow."""

    def __init__(self, uri: str) -> None:
        with pyarrow.ipc.open_file(f"{uri}/rows.arrow") as file:
            self._table = file.read_all()
        self.schema, self.version = self._table.schema, 1

    def count_rows(self) -> int:
        return int(self._table.num_rows)

    def get_fragments(self) -> list[Any]:
        return []

    def take(self, numbers: list[int], columns: list[str]) -> Any:
        return self._table.select(columns).take(numbers)


@pytest.fixture(autouse=True)
def lance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", SimpleNamespace(dataset=lambda uri, **_: FakeLance(uri)))


@pytest.fixture
def by_column(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of columns of each batch that was made of columns."""
    made: list[int] = []
    plain = collating.collate_columns

    def counted(columns: Any) -> Any:
        made.append(len(columns))
        return plain(columns)

    monkeypatch.setattr(map_reading, "collate_columns", counted)
    return made


def parquet(folder: Path, table: pyarrow.Table, rows: int) -> None:
    cut = len(table) // 2
    for name, part in (("a", table[:cut]), ("b", table[cut:])):
        pyarrow.parquet.write_table(part, folder / f"{name}.parquet", row_group_size=rows, compression="none")
    index_parquet(folder)


def arrow(folder: Path, table: pyarrow.Table, rows: int, compression: str | None = None) -> None:
    cut = len(table) // 3
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    for name, part in (("a", table[:cut]), ("b", table[cut:])):
        with pyarrow.ipc.new_file(str(folder / f"{name}.arrow"), table.schema, options=options) as writer:
            writer.write_table(part, max_chunksize=rows)
    index_folder(folder)


def packed_arrow(folder: Path, table: pyarrow.Table, rows: int) -> None:
    arrow(folder, table, rows, "zstd")


def lance_rows(folder: Path, table: pyarrow.Table, rows: int) -> None:
    with pyarrow.ipc.new_file(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


FORMATS = {"parquet": parquet, "arrow": arrow, "packed": packed_arrow, "lance": lance_rows}
WITHOUT = {"parquet": {"half"}, "lance": set(), "arrow": set(), "packed": set()}
"""Columns that a format cannot hold in every version of pyarrow."""


def loader_of(kind: str, folder: Path, **options: Any) -> Any:
    if kind == "lance":
        return MapLoader(LanceRows(folder), **options)
    return StreamingLoader(StreamingDataset(local=folder), **options)


def by_rows(samples: list[Any]) -> Any:
    """Collate as the default does; as a function of the user's, it needs samples."""
    return collate(samples)


def outcome(batches: Iterator[Any]) -> Any:
    """Return the next batch, the name and text of its error, or None at the end."""
    try:
        return next(batches, None)
    except Exception as error:
        return type(error), str(error)


def check_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.is_contiguous()) == (two.dtype, two.shape, True)
        assert one.numpy().tobytes() == two.numpy().tobytes()
    elif isinstance(one, Mapping):
        assert list(one) == list(two)
        for name in one:
            check_same(one[name], two[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for each, other in zip(one, two, strict=True):
            check_same(each, other)
    else:
        assert one == two


@pytest.mark.parametrize("kind", FORMATS)
def test_batches_are_those_of_rows(
    kind: str, tmp_path: Path, by_column: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random columns, orders, batch sizes, topologies and resumes. No row is made where columns allow it."""
    draw = random.Random(kind)
    good = [name for name in GOOD if name not in WITHOUT[kind] and (kind == "packed" or name != "word")]
    for number in range(3):
        names = draw.sample(good, draw.randint(1, 4)) + draw.sample(list(BAD), draw.choice([0, 0, 0, 1]))
        draw.shuffle(names)
        folder = tmp_path / str(number)
        folder.mkdir()
        FORMATS[kind](folder, table_of(names, draw.randint(12, 90)), draw.choice([1, 5, 8, 30, 100]))
        options: dict[str, Any] = {
            "global_batch_size": draw.choice([4, 5, 12]),
            "shuffle": draw.random() < 0.6,
            "seed": number,
            "tail": draw.choice(["emit", "drop", "pad"]) if kind != "lance" else "pad",
            "keys": draw.choice([None, "key"]),
            "fetch_threads": draw.choice([0, 0, 1]),
        }
        boxes, workers = draw.choice([(1, 1), (2, 1), (1, 3), (3, 2)])
        worker = draw.randrange(boxes * workers)
        with assigned(Assignment(worker // workers, boxes, worker % workers, workers, 0, 1)):
            compare(lambda **more: loader_of(kind, folder, **options, **more), draw)  # noqa: B023
    assert len(by_column) > 8
    before = len(by_column)
    folder = tmp_path / "good"
    folder.mkdir()
    FORMATS[kind](folder, table_of(good, 60), 7)
    monkeypatch.setattr(map_reading.MapReader, "samples", lambda *_: pytest.fail("read by row"))
    assert len(list(loader_of(kind, folder, batch_size=8, shuffle=True))) == 8
    assert by_column[before:] == [len(good)] * 8


def compare(make: Callable[..., Any], draw: random.Random) -> None:
    """Compare two epochs by rows with the same by column, whose loader is made anew, or passes a batch over, now and
    then."""
    rows, columns = make(collate_fn=by_rows, reseed=False), make()
    for _ in range(2):
        of_rows, of_columns = iter(rows), iter(columns)
        while True:
            expected = outcome(of_rows)
            check_same(outcome(of_columns), expected)
            assert rows.state_dict() == columns.state_dict()
            if expected is None or isinstance(expected, tuple):
                break
            with contextlib.suppress(StopIteration):
                if draw.random() < 0.1:
                    of_rows.skip_batch()
                    of_columns.skip_batch()
            if draw.random() < 0.2:
                state, columns = columns.state_dict(), make()
                columns.load_state_dict(state)
                of_columns = iter(columns)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_batch_is_its_own(kind: str, tmp_path: Path, by_column: list[int]) -> None:
    """Writing to a batch changes no other one, nor what is in memory."""
    FORMATS[kind](tmp_path, table_of(["int64", "tokens", "pair"], 30), 30)
    loader = loader_of(kind, tmp_path, batch_size=10)
    first = list(loader)
    kept = [{name: value.clone() for name, value in batch.items()} for batch in first]
    for batch in first:
        for value in batch.values():
            value.zero_()
    for batch, expected in zip(loader, kept, strict=True):
        check_same(batch, expected)
    assert len(by_column) == 6


def test_a_box_without_a_row_gets_no_row(tmp_path: Path) -> None:
    parquet(tmp_path, table_of(["int64", "text"], 2), 2)
    with assigned(Assignment(2, 3, 0, 1, 0, 1)), pytest.warns(UserWarning, match="fewer samples than there are boxes"):
        (batch,) = StreamingLoader(StreamingDataset(local=tmp_path), global_batch_size=3)
    check_same(batch, {"int64": torch.zeros(0, dtype=torch.int64), "text": []})


class Doubled(StreamingDataset):
    def __getitem__(self, index: Any) -> Any:
        return {"int64": 2 * super().__getitem__(index)["int64"]}


class Many(StreamingDataset):
    def get_many(self, samples: Any) -> Any:
        return [{"int64": -1} for _ in samples]


def test_code_of_the_users_needs_rows(tmp_path: Path, by_column: list[int]) -> None:
    parquet(tmp_path, table_of(["int64"], 30), 30)
    plain = next(iter(StreamingLoader(StreamingDataset(local=tmp_path), batch_size=4)))["int64"]
    assert by_column == [1]
    for dataset, expected in ((Doubled(local=tmp_path), 2 * plain), (Many(local=tmp_path), torch.full((4,), -1))):
        assert next(iter(StreamingLoader(dataset, batch_size=4)))["int64"].tolist() == expected.tolist()
    for options in ({"reseed": True}, {"collate_fn": by_rows}):
        check_same(
            next(iter(StreamingLoader(StreamingDataset(local=tmp_path), batch_size=4, **options)))["int64"], plain
        )
    assert by_column == [1]


def test_registered_collate_functions_apply(
    tmp_path: Path, by_column: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path, table_of(["text", "int64"], 30), 30)
    loader = StreamingLoader(StreamingDataset(local=tmp_path), batch_size=4)
    monkeypatch.setitem(default_collate_fn_map, str, lambda batch, **_: "".join(batch))
    assert next(iter(loader))["text"] == "".join(WORDS)
    assert not by_column


def test_files_of_other_types_are_joined(tmp_path: Path, by_column: list[int]) -> None:
    """Numbers of other widths as default_collate joins them, and columns in another order by row."""
    tables = [
        {"a": pyarrow.array([1, 2, 3], pyarrow.int8()), "b": [[1, 2]] * 3},
        {"a": pyarrow.array([4, 5, 6], pyarrow.int64()), "b": [[3, 4]] * 3},
        {"b": [[5, 6]] * 3, "a": pyarrow.array([7, 8, 9], pyarrow.int64())},
    ]
    for number, columns in enumerate(tables):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{number}.parquet")
    index_parquet(tmp_path)
    for size in (6, 9):
        rows = StreamingLoader(StreamingDataset(local=tmp_path), batch_size=size, collate_fn=by_rows)
        for one, other in zip(rows, StreamingLoader(StreamingDataset(local=tmp_path), batch_size=size), strict=True):
            check_same(one, other)
    assert len(by_column) == 2  # not the two batches that have both orders


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_damage_is_named_as_by_rows(kind: str, tmp_path: Path) -> None:
    FORMATS[kind](tmp_path, pyarrow.table({"text": [f"row {i}" for i in range(90)]}), 90)
    for path in tmp_path.glob(f"*.{kind}"):
        path.write_bytes(path.read_bytes().replace(b"row 75", b"row \xff5"))
    rows, columns = (
        iter(loader_of(kind, tmp_path, batch_size=3, **options)) for options in ({"collate_fn": by_rows}, {})
    )
    while not isinstance(expected := outcome(rows), tuple):
        assert expected is not None
        check_same(outcome(columns), expected)
    assert outcome(columns) == expected
    assert expected[0] is ShardCorruptError


def test_a_closed_reader_gives_no_columns(tmp_path: Path) -> None:
    """Not even of what it has kept in memory, as by row."""
    arrow(tmp_path, table_of(["int64"], 9), 9)
    path = tmp_path / "b.arrow"
    reader = ArrowReader(index_arrow(path, path.name), path)
    rows = np.array([0, 2, 4])
    for _ in range(3):
        found = reader.get_columns(rows)
        assert found is not None
        assert list(found["int64"]) == [3 - 2**62, 5 - 2**62, 7 - 2**62]
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.get_columns(rows)
