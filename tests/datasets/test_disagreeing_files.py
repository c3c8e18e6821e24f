"""Files of one dataset whose columns have other types or nulls, as pyarrow writes them: one type for all, or an error
that names both files; nulls are named with column, file and row, or filled."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from penstock.data import LogicalShards, MapLoader, ShardLoader, StreamingDataset, StreamingLoader, index_folder
from penstock.data.formats.arrow import reader as arrow_reader
from penstock.data.formats.parquet.shards import parquet_shards
from penstock.proto.errors import DatasetError, InvalidArgumentError

ROWS = 5
KINDS = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.float32(), pa.float64(), pa.bool_(), pa.null(), pa.string()),
    *(pa.large_string(), pa.binary(), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("s"), pa.date32()),
    *(pa.list_(each) for each in (pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.null())),
    *(pa.large_list(pa.int32()), pa.list_(pa.float32(), 2), pa.struct([("a", pa.int32())])),
    pa.struct([("a", pa.float64()), ("b", pa.string())]),
]


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def values(kind: Any, rng: random.Random) -> pa.Array:
    """Return ROWS values of a type, and now and then a null."""
    if pa.types.is_null(kind):
        return pa.nulls(ROWS)
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([values(field.type, rng) for field in kind], fields=list(kind))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = values(kind.value_type, rng).to_pylist()
        return pa.array(
            [None if rng.random() < 0.1 else [rng.choice(inner) for _ in range(2)] for _ in range(ROWS)], kind
        )
    plain = pa.array([rng.randrange(100) for _ in range(ROWS)], pa.int64())
    if pa.types.is_boolean(kind):
        plain = pa.array([value % 2 == 0 for value in plain.to_pylist()])
    elif pa.types.is_binary(kind):
        plain = plain.cast(pa.string())
    elif pa.types.is_date32(kind):
        plain = plain.cast(pa.int32())
    mask = pa.array([rng.random() < 0.1 for _ in range(ROWS)])
    return pc.if_else(mask, pa.scalar(None, plain.type), plain).cast(kind)


def plain(value: Any) -> Any:
    """Return a value with its dtype, for a comparison."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    return type(value).__name__, value


def as_in(wide: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column as samples have them: numbers in lists as arrays, without nulls in them."""
    kind = wide.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        return [plain(value) for value in wide.to_pylist()]
    dtype = np.dtype(kind.value_type.to_pandas_dtype())
    return [plain(value if value is None or None in value else np.array(value, dtype)) for value in wide.to_pylist()]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_random_folders_are_unified_as_by_pyarrow(tmp_path: Path, ending: str) -> None:
    found = {"unified": 0, "refused": 0}
    for number in range(100):
        rng = random.Random(f"{ending} {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        near = rng.sample(KINDS, 2)
        tables = [
            pa.table({name: values(rng.choice(near), rng) for name in ("x", "y")}) for _ in range(rng.randrange(2, 5))
        ]
        for part, table in enumerate(tables):
            write(folder / f"{part}.{ending}", table)
        try:
            wide = pa.concat_tables(tables, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            with pytest.raises(
                DatasetError, match=rf"column '[xy]' must have types that fit .*\d\.{ending} has .* but "
            ):
                index_folder(folder)
            found["refused"] += 1
            continue
        index_folder(folder)
        with closing(StreamingDataset(None, folder)) as dataset:
            samples = dataset.get_many(np.arange(len(dataset)))
            columns = dataset.get_columns(np.arange(len(dataset)))
        assert columns is not None
        for name in ("x", "y"):
            assert [plain(sample[name]) for sample in samples] == as_in(wide[name]), (number, wide.schema)
            assert [plain(each)[1] for each in columns[name]] == [value for _, value in as_in(wide[name])]
        found["unified"] += 1
    assert min(found.values()) > 20


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("mapped", [True, False])
def test_no_batch_s_dtype_depends_on_the_file(
    tmp_path: Path, ending: str, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_reader, "_is_local", lambda folder: mapped)
    for part, (number, tokens) in enumerate(((pa.int64(), pa.int32()), (pa.float64(), pa.int64()))):
        table = pa.table({"n": pa.array(range(40), number), "tokens": pa.array([[1, 2]] * 40, pa.list_(tokens))})
        write(tmp_path / f"{part}.{ending}", table)
    shards = index_folder(tmp_path)
    assert [sorted(shard.settings) for shard in shards] == [["column_names", "types"], ["column_names"]]
    loaders = [
        StreamingLoader(StreamingDataset(None, tmp_path), batch_size=8, shuffle=True, seed=2),
        StreamingLoader(StreamingDataset(None, tmp_path), batch_size=8, collate_fn=torch.utils.data.default_collate),
        ShardLoader(LogicalShards([StreamingDataset(None, tmp_path)], shards=2), batch_size=8),
    ]
    for loader in loaders:
        batches = list(loader)
        assert {(batch["n"].dtype, batch["tokens"].dtype) for batch in batches} == {(torch.float64, torch.int64)}
        assert sorted(torch.cat([batch["n"] for batch in batches]).tolist()) == sorted(2 * [*map(float, range(40))])


def test_what_does_not_fit_names_both_files(tmp_path: Path) -> None:
    for part, kind in enumerate((pa.timestamp("us"), pa.timestamp("us"), pa.timestamp("us", "UTC"))):
        write(tmp_path / f"{part}.parquet", pa.table({"t": pa.array([0, 1], kind)}))
    words = (
        r"column 't' must .*: 0\.parquet has timestamp\[us\], but 2\.parquet has timestamp\[us, tz=UTC\]\. Write one"
    )
    with pytest.raises(DatasetError, match=words):
        index_folder(tmp_path)
    assert len(parquet_shards([("0", tmp_path / "0.parquet"), ("1", tmp_path / "1.parquet")])) == 2


def test_a_number_that_the_wider_type_cannot_hold_is_named(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", pa.table({"n": [1, 2**53 + 1]}))
    write(tmp_path / "1.parquet", pa.table({"n": [0.5]}))
    index_folder(tmp_path)
    with pytest.raises(DatasetError, match=r"0\.parquet: column 'n' must be readable as double, .*9007199254740993"):
        _ = StreamingDataset(None, tmp_path)[0]


# ---- nulls


@pytest.fixture
def holes(tmp_path: Path) -> Path:
    """A file that is all null, and a null in another one."""
    write(tmp_path / "0.parquet", pa.table({"n": pa.array([1, 2, 3, 4]), "x": pa.array([1.0, 2.0, None, 4.0])}))
    write(tmp_path / "1.parquet", pa.table({"n": pa.nulls(4), "x": pa.array([1.0, 2.0, 3.0, 4.0])}))
    index_folder(tmp_path)
    return tmp_path


def with_null(kind: Any, value: Any, other: Any) -> pa.Array:
    return pa.array([value, None, other, value], kind)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_filled_column_keeps_its_type(tmp_path: Path, ending: str) -> None:
    large = 2**24 + 1  # float32 rounds it
    columns = {
        "i": (pa.int64(), large, -large, 0.0, (-1.5, 0.5, float("nan"), "0", False, 2**70)),
        "b": (pa.bool_(), True, False, False, (0, 0.0, "no")),
        "f": (pa.float32(), 1.5, 2.0, 0, ("0",)),
        "s": (pa.string(), "x", "y", "", (0, 0.5)),
        "d": (pa.dictionary(pa.int8(), pa.string()), "x", "y", "new", (0,)),
        "l": (pa.list_(pa.int32()), [1, 2], [3, 4], np.zeros(2), ([0.5, 1.0], [True], 0)),
        "t": (pa.struct([("x", pa.int16())]), {"x": 1}, {"x": 2}, {"x": 0}, ({"x": 0.5},)),
    }
    write(tmp_path / f"0.{ending}", pa.table({n: with_null(*column[:3]) for n, column in columns.items()}))
    write(tmp_path / f"1.{ending}", pa.table({n: pa.array([c[1]] * 4, c[0]) for n, c in columns.items()}))
    # a file that is all null has the type of the others
    write(tmp_path / f"2.{ending}", pa.table({name: pa.nulls(4) for name in columns}))
    index_folder(tmp_path)
    dataset = StreamingDataset(None, tmp_path, fill={name: column[3] for name, column in columns.items()})
    assert dataset[1]["i"] == dataset[9]["i"] == 0
    assert isinstance(dataset[1]["i"], int)
    assert dataset[8]["d"] == "new"
    for options in ({}, {"shuffle": True, "seed": 1}, {"collate_fn": torch.utils.data.default_collate}):
        batches: list[Any] = list(StreamingLoader(dataset, batch_size=3, **options))
        kinds = {name: {batch[name].dtype for batch in batches} for name in "ibfl" if name in batches[0]}
        assert kinds == {"i": {torch.int64}, "b": {torch.bool}, "f": {torch.float64}, "l": {torch.int32}}
        assert {batch["t"]["x"].dtype for batch in batches} == {torch.int64}
        assert sorted(torch.cat([batch["i"] for batch in batches]).tolist()) == [-large] + [0] * 5 + [large] * 6
    for name, (*_, wrong) in columns.items():
        for value in wrong:
            with pytest.raises(InvalidArgumentError, match=f"fill .*: column '{name}' has "):
                StreamingDataset(None, tmp_path, fill={name: value})


@pytest.mark.parametrize("collate", [torch.utils.data.default_collate, None])
def test_a_null_in_nested_values_is_named(tmp_path: Path, collate: Any) -> None:
    columns: dict[str, list[Any]] = {
        "rows": [[1, 2], [3, 4], None, [5, 6]],
        "within": [[1, 2], [3, 4], [5, None], [5, 6]],
        "field": [{"x": 1}, {"x": 2}, {"x": None}, {"x": 4}],
        "deep": [[{"x": 1}], [{"x": 1}], [{"x": None}], [{"x": 1}]],
    }
    write(tmp_path / "0.parquet", pa.table({name: [values[0]] for name, values in columns.items()}))
    write(tmp_path / "1.parquet", pa.table(columns))
    index_folder(tmp_path)
    options: dict[str, Any] = {} if collate is None else {"collate_fn": collate}
    for name in columns:
        dataset = StreamingDataset(None, tmp_path, columns=[name])
        what = "is null" if name == "rows" else "has a null within its value"
        with pytest.raises(DatasetError, match=rf"1\.parquet: sample 2: column '{name}' {what}, of which no batch"):
            list(StreamingLoader(dataset, batch_size=5, **options))
        with pytest.raises(DatasetError, match=rf"sample 3 of a batch of .*: column '{name}' {what}"):
            list(ShardLoader(LogicalShards([dataset], shards=1), batch_size=5, **options))


@pytest.mark.parametrize("collate", [torch.utils.data.default_collate, None])
def test_a_null_is_named_with_column_file_and_row(holes: Path, collate: Any) -> None:
    options: dict[str, Any] = {} if collate is None else {"collate_fn": collate}
    for columns, words in (
        (["x"], r"0\.parquet: sample 2: column 'x' is null"),
        (["n"], r"1\.parquet: sample 0: column 'n'"),
    ):
        dataset = StreamingDataset(None, holes, columns=columns)
        for loader in (
            StreamingLoader(dataset, batch_size=4, **options),
            MapLoader(dataset, batch_size=4, **options),
        ):
            with pytest.raises(DatasetError, match=words):
                list(loader)
        with pytest.raises(DatasetError, match=r"sample [02] of a batch of 4 samples, of which the first .* is null"):
            list(ShardLoader(LogicalShards([dataset], shards=1), batch_size=4, **options))


def test_nulls_are_filled(holes: Path) -> None:
    dataset = StreamingDataset(None, holes, fill={"n": -1, "x": 0.5})
    assert (dataset[2], dataset[5]) == ({"n": 3, "x": 0.5}, {"n": -1, "x": 2.0})
    for loader in (
        StreamingLoader(dataset, batch_size=4),
        ShardLoader(LogicalShards([dataset], shards=1), batch_size=4),
    ):
        first, second = loader
        assert (first["n"].tolist(), first["x"].tolist()) == ([1, 2, 3, 4], [1.0, 2.0, 0.5, 4.0])
        assert (second["n"].tolist(), second["n"].dtype) == ([-1] * 4, torch.int64)
    with pytest.raises(InvalidArgumentError, match=r"columns must be some of n, x, got y"):
        StreamingDataset(None, holes, fill={"y": 0})
    with pytest.raises(InvalidArgumentError, match=r"fill: columns must be some of n, got x"):
        StreamingDataset(None, holes, columns=["n"], fill={"x": 0})
