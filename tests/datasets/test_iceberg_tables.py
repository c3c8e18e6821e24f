"""Tables of Iceberg, read in place: the rows that pyiceberg reads at each snapshot, and those of the specification
where it reads none (equality deletes)."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from iceberg_deletes import DeleteCommit
from plain_rows import comparable
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.table import StaticTable
from pyiceberg.table.update import AddPartitionSpecUpdate, SetDefaultSpecUpdate
from pyiceberg.transforms import VoidTransform
from pyiceberg.types import LongType, StringType

from penstock.data import StreamingDataset, index_folder, index_table
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.tables.iceberg import iceberg_snapshot
from penstock.proto.errors import DatasetError, SnapshotExpiredError

FIXTURES = Path(__file__).parents[1] / "data" / "iceberg"


def read(table: Path | str, cache: Path | None = None, **settings: Any) -> list[dict[str, Any]]:
    with closing(StreamingDataset(table, cache, **settings)) as dataset:
        rows: list[dict[str, Any]] = dataset[:]
        return rows


def newest(table: Path) -> Any:
    return StaticTable.from_metadata(str(max(table.glob("metadata/*.metadata.json"))))


def expected(table: Path, snapshot: int | None = None) -> list[dict[str, Any]]:
    found = newest(table)
    chosen = found.current_snapshot().snapshot_id if snapshot is None else snapshot
    rows: list[dict[str, Any]] = found.scan(snapshot_id=chosen).to_arrow().to_pylist()
    return rows


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = InMemoryCatalog("tests", warehouse=str(tmp_path_factory.mktemp("warehouse")))
    found.create_namespace("tests")
    return found


def folder_of(table: Any) -> Path:
    return Path(str(table.location()).removeprefix("file://"))


def rows_for(chance: random.Random, begin: int, schema: pyarrow.Schema) -> pyarrow.Table:
    numbers = list(range(begin, begin + chance.randint(1, 30)))
    makers: dict[str, Any] = {
        "int32": lambda i: i,
        "int64": lambda i: i,
        "string": lambda i: chance.choice([None, "x" * (i % 7)]),
        "large_string": lambda i: chance.choice([None, "x" * (i % 7)]),
        "struct": lambda i: {"a": i, "b": [{"c": str(i)}] * (i % 3)},
    }

    def values(field: Any) -> Any:
        if field.name == "part":
            return [chance.choice(["a", "b c", "ü/%"]) for _ in numbers]
        return [makers[str(field.type).partition("<")[0]](i) for i in numbers]

    return pyarrow.table({field.name: pyarrow.array(values(field), field.type) for field in schema}, schema)


START = pyarrow.schema(
    [
        ("i", pyarrow.int32()),
        ("part", pyarrow.string()),
        ("text", pyarrow.string()),
        (
            "nested",
            pyarrow.struct([("a", pyarrow.int32()), ("b", pyarrow.list_(pyarrow.struct([("c", pyarrow.string())])))]),
        ),
    ]
)


def evolve(table: Any, chance: random.Random, step: int) -> None:
    names = [field.name for field in table.schema().fields]
    with table.update_schema() as change:
        kind = chance.choice(["add", "rename", "widen", "inner"])
        if kind == "add":
            change.add_column(f"more{step}", chance.choice([LongType(), StringType()]))
        elif kind == "rename":
            change.rename_column(names[2], f"text{step}")
        elif kind == "widen":
            change.update_column(names[0], field_type=LongType())
        else:
            change.add_column(("nested", f"inner{step}"), StringType())
            change.update_column(("nested", "a"), field_type=LongType())


@pytest.mark.filterwarnings("ignore:Delete operation did not match any records")
@pytest.mark.parametrize("seed", range(60))
def test_rows_are_those_of_pyiceberg(seed: int, catalog: Any) -> None:
    """A random table at each of its snapshots that are indexed."""
    chance = random.Random(seed)
    table = catalog.create_table(f"tests.t{seed}", START)
    folder, indexed = folder_of(table), []
    table.append(rows_for(chance, 0, START))
    for step in range(1, chance.randint(2, 4)):
        kind = chance.choice(["append", "delete", "overwrite", "schema", "schema", "partition"])
        if kind == "delete":
            table.delete(f"i >= {chance.randint(0, 20)} and i < 25")
        elif kind == "schema":
            evolve(table, chance, step)
        elif kind == "partition" and not table.spec().fields:
            with table.update_spec() as change:
                change.add_identity("part")
        schema = table.schema().as_arrow()
        added = rows_for(chance, 100 * step, pyarrow.schema([field.remove_metadata() for field in schema]))
        (table.overwrite if kind == "overwrite" else table.append)(added)
        if chance.random() < 0.3:
            index_table(folder)
            indexed.append(table.current_snapshot().snapshot_id)
    for kind in chance.sample(["positions", "vectors"], 2)[: chance.randint(0, 2)]:
        change = DeleteCommit(folder, 3 if kind == "vectors" else 2)
        counts = {file.file_path: file.record_count for file in change.data_files()}
        chosen = {
            path: chance.sample(range(n), chance.randint(1, n)) for path, n in counts.items() if chance.random() < 0.7
        }
        if not chosen or (kind == "positions" and change.table.metadata.format_version == 3):
            continue
        getattr(change, kind)(chosen)
        change.commit()
    if not expected(folder):
        with pytest.raises(DatasetError, match="has no rows"):
            index_table(folder)
        return
    index_table(folder)
    assert comparable(read(folder)) == comparable(expected(folder))
    for snapshot in indexed:
        assert comparable(read(folder, version=snapshot)) == comparable(expected(folder, snapshot))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("by_partition", [False, True])
def test_equality_deletes_are_those_of_the_specification(seed: int, by_partition: bool, catalog: Any) -> None:
    """Rows that were added before a delete, in its partition, and equal it in its columns, nulls too, are deleted."""
    chance = random.Random(seed)
    schema = pyarrow.schema([("a", pyarrow.int64()), ("b", pyarrow.string()), ("part", pyarrow.string())])
    table = catalog.create_table(f"tests.equal{seed}{by_partition}", schema)
    if by_partition:
        with table.update_spec() as change:
            change.add_identity("part")
    folder, live = folder_of(table), list[dict[str, Any]]()

    def some(count: int) -> list[dict[str, Any]]:
        texts = [None, "x", "y", "z"]
        return [
            {"a": chance.choice([None, 0, 1, 2]), "b": chance.choice(texts), "part": chance.choice("pq")}
            for _ in range(count)
        ]

    live += (rows := some(40))
    table.append(pyarrow.Table.from_pylist(rows, schema))
    for names in (["a"], ["b", "a"]):
        change = DeleteCommit(folder)
        like = chance.choice(change.data_files())
        deletes = some(2)
        columns = {name: pyarrow.array([row[name] for row in deletes], schema.field(name).type) for name in names}
        change.equal(columns, like)
        change.commit()
        keys = [[row[name] for name in names] for row in deletes]
        part = like.partition[0] if by_partition else None
        live = [
            row
            for row in live
            if [row[name] for name in names] not in keys or (part is not None and row["part"] != part)
        ]
    index_table(folder)
    assert comparable(read(folder)) == comparable(live)


def test_rows_added_after_an_equality_delete_stay(catalog: Any, tmp_path: Path) -> None:
    table = catalog.create_table("tests.later", pyarrow.schema([("a", pyarrow.int64())]))
    folder = folder_of(table)
    table.append(pyarrow.table({"a": [1, 2]}))
    change = DeleteCommit(folder)
    change.equal({"a": pyarrow.array([2])}, change.data_files()[0])
    change.commit()
    registered = catalog.register_table("tests.later2", str(max(folder.glob("metadata/*.metadata.json"))))
    registered.append(pyarrow.table({"a": [2, 3]}))
    index_table(folder)
    assert [row["a"] for row in read(folder)] == [1, 2, 3]


def test_equality_deletes_of_void_partitions_are_global(catalog: Any) -> None:
    """A removed partition stays as a void field in a table that was of version 1."""
    schema = pyarrow.schema([("a", pyarrow.int64()), ("part", pyarrow.string())])
    table = catalog.create_table("tests.void", schema)
    with table.update_spec() as spec:
        spec.add_identity("part")
    rows = pyarrow.table({"a": [1, 2], "part": ["x", "y"]}, schema)
    table.append(rows)
    void = PartitionSpec(PartitionField(2, 1001, VoidTransform(), "part_void"), spec_id=2)
    with table.transaction() as transaction:
        transaction._apply((AddPartitionSpecUpdate(spec=void), SetDefaultSpecUpdate.model_validate({"spec-id": -1})))
    catalog.load_table("tests.void").append(rows)
    change = DeleteCommit(folder_of(table))
    change.equal({"a": pyarrow.array([1])}, next(file for file in change.data_files() if file.spec_id == 2))
    change.commit()
    index_table(folder_of(table))
    assert read(folder_of(table)) == [{"a": 2, "part": "y"}] * 2


def test_tables_of_spark(tmp_path: Path) -> None:
    """Its equality deletes; the rows are those that its test of the other project names."""
    data = zstandard.ZstdDecompressor().stream_reader((FIXTURES / "equality-deletes.tar.zst").read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(tmp_path, filter="data")
    for name, ids in (("mytable", [4, 5]), ("mytable_partitioned", [1, 4, 5])):
        index_folder(tmp_path / name)
        assert sorted(row["id"] for row in read(tmp_path / name)) == ids


@pytest.fixture
def table(catalog: Any, request: pytest.FixtureRequest) -> Path:
    """A table of 40 rows in two files, of which position deletes remove each second one of the first."""
    name = f"tests.{request.node.name.translate({ord(each): '_' for each in '[]-'})}"
    made = catalog.create_table(name, pyarrow.schema([("i", pyarrow.int64())]))
    folder = folder_of(made)
    made.append(pyarrow.table({"i": list(range(20))}))
    change = DeleteCommit(folder)
    [first] = change.data_files()
    change.positions({first.file_path: range(0, 20, 2)})
    change.commit()
    later = catalog.register_table(f"{name}_2", str(max(folder.glob("metadata/*.metadata.json"))))
    later.append(pyarrow.table({"i": list(range(20, 40))}))
    return folder


LIVE = [*range(1, 20, 2), *range(20, 40)]


def test_remote_table(table: Path, bucket: str, tmp_path: Path) -> None:
    """A copy of a table: its metadata name files by their first address."""
    with closing(RemoteFolder(bucket)) as remote:
        for path in table.rglob("*"):
            if path.is_file():
                remote.upload(path.relative_to(table).as_posix(), path, deadline_s=30)
    index_table(bucket, out=tmp_path / "cache")
    assert [row["i"] for row in read(bucket, tmp_path / "cache")] == LIVE
    first = newest(table).metadata.snapshots[0].snapshot_id
    index_table(bucket, first, out=tmp_path / "cache")
    assert [row["i"] for row in read(bucket, tmp_path / "cache", version=first)] == list(range(20))
    assert [row["i"] for row in read(bucket, tmp_path / "cache")] == LIVE


def test_expired_snapshots_are_named(table: Path) -> None:
    index_table(table)
    opened = StreamingDataset(table)
    for path in table.glob("data/*.parquet"):
        path.unlink()
    with pytest.raises(SnapshotExpiredError, match=r"snapshot \d+ .*expired"):
        opened[0]
    with pytest.raises(SnapshotExpiredError, match=r"snapshot \d+ .*expired"):
        index_table(table)
    with pytest.raises(SnapshotExpiredError, match="snapshot 1 of the Iceberg table is not, or no longer"):
        index_table(table, 1)


def test_what_is_not_read_is_refused_by_name(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = max(table.glob("metadata/*.metadata.json"))
    text = path.read_text()
    for old, new, match in (
        ('"type":"long"', '"type":"geometry"', "geometry"),
        ('"format-version":2', '"format-version":9', "cannot be read by pyiceberg"),
        (f'"location":"{table}"', '"location":"s3://elsewhere"', "outside of its folder"),
    ):
        if match.startswith("outside"):
            monkeypatch.setattr(RemoteFolder, "address", "/elsewhere")
        path.write_text(text.replace(old, new))
        with pytest.raises(DatasetError, match=match):
            iceberg_snapshot(RemoteFolder(table), [path.name], None, 10)


def test_newest_metadata_are_read_or_named(table: Path) -> None:
    path = max(table.glob("metadata/*.metadata.json"))
    path.with_name(path.name.replace("-", "-0", 1)).write_text(path.read_text())
    with pytest.raises(DatasetError, match="one newest file of metadata"):
        index_table(table)
    index_table(path)
    assert [row["i"] for row in read(table)] == LIVE
    path.with_name("v9.gz.metadata.json").write_bytes(gzip.compress(path.read_bytes()))
    path.with_name("version-hint.text").write_text("9")
    index_table(table)


def test_files_without_numbers_are_refused(table: Path) -> None:
    """Their columns cannot be told apart, if the table has no names for them."""
    for path in table.glob("data/0*.parquet"):
        plain = pyarrow.parquet.read_table(path)
        if plain.column_names == ["i"]:  # files of deletes have random names
            pyarrow.parquet.write_table(plain.cast(pyarrow.schema([("i", pyarrow.int64())])), path)
    with pytest.raises(DatasetError, match="no numbers of its columns"):
        index_table(table)
