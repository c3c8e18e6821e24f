"""Tables of Delta Lake, read in place: the rows that deltalake's own query engine reads, at each snapshot."""

from __future__ import annotations

import base64
import io
import json
import random
import tarfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from delta_vectors import commit, delete_by_vector, log_of, upgrade
from deltalake import DeltaTable, QueryBuilder, convert_to_deltalake, write_deltalake
from plain_rows import comparable

from penstock.data import StreamingDataset, StreamingLoader, index_folder, index_parquet, index_table
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, SnapshotExpiredError, StateMismatchError

FIXTURES = Path(__file__).parents[1] / "data" / "delta"
VECTORS = ["deletionVectors"]


def read(table: Path | str, cache: Path | None = None, **settings: Any) -> list[dict[str, Any]]:
    with closing(StreamingDataset(table, cache, **settings)) as dataset:
        rows: list[dict[str, Any]] = dataset[:]
        return rows


def expected(table: Path, version: int | None = None) -> list[dict[str, Any]]:
    opened = DeltaTable(table, version=version)
    result = QueryBuilder().register("t", opened).execute("select * from t").read_all()
    rows: list[dict[str, Any]] = pyarrow.table(result).to_pylist()
    return rows


def rename_columns(table: Path, features: list[str]) -> None:
    """Map the columns to their present names, and give them others."""
    meta = next(action["metaData"] for action in reversed(log_of(table)) if "metaData" in action)
    schema = json.loads(meta["schemaString"])
    for number, field in enumerate(schema["fields"]):
        field["metadata"] = {
            "delta.columnMapping.id": number + 1,
            "delta.columnMapping.physicalName": field["name"],
        }
        if field["name"] not in meta["partitionColumns"]:
            field["name"] += " (new)"
    settings = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": str(len(schema["fields"]))}
    mapped = {**meta, "schemaString": json.dumps(schema), "configuration": settings}
    commit(table, upgrade(features), {"metaData": mapped})


def live_rows(table: Path) -> dict[str, int]:
    """Return the number of rows in each file of the newest snapshot."""
    actions = pyarrow.table(DeltaTable(table).get_add_actions()).to_pylist()
    names = {action["path"]: action["num_records"] for action in actions}
    return {path: int(rows) for path, rows in names.items()}


def rows(chance: random.Random, begin: int, columns: int) -> pyarrow.Table:
    count = chance.randint(1, 30)
    numbers = list(range(begin, begin + count))
    made = {
        "i": pyarrow.array(numbers, pyarrow.int64()),
        "part": pyarrow.array([chance.choice(["a", "b c", "ü/%"]) for _ in numbers]),
        "text": pyarrow.array([chance.choice([None, "x" * number]) for number in numbers]),
    }
    for column in range(columns):
        made[f"more{column}"] = pyarrow.array([[number, column] for number in numbers], pyarrow.list_(pyarrow.int32()))
    return pyarrow.table(made)


@pytest.mark.parametrize("seed", range(120))
def test_rows_are_those_of_the_query_engine(seed: int, tmp_path: Path) -> None:
    """A random table at each of its snapshots that are indexed."""
    chance, table, columns = random.Random(seed), tmp_path / "table", 0
    parts = chance.choice([None, ["part"]])
    write_deltalake(table, rows(chance, 0, 0), partition_by=parts)
    indexed = []
    for step in range(1, chance.randint(2, 6)):
        kind = chance.choice(["append", "append", "delete", "overwrite", "column", "compact"])
        columns += kind == "column"
        if kind == "delete":
            DeltaTable(table).delete(f"i % {chance.randint(2, 9)} = 1")
        elif kind == "compact":
            DeltaTable(table).optimize.compact()
        else:
            write_deltalake(
                table,
                rows(chance, 100 * step, columns),
                partition_by=parts,
                mode="overwrite" if kind == "overwrite" else "append",
                schema_mode="merge",
            )
        if chance.random() < 0.3 and expected(table):
            index_table(table)
            indexed.append(DeltaTable(table).version())
    features = VECTORS
    if chance.random() < 0.5:
        rename_columns(table, features := [*VECTORS, "columnMapping"])
    if chance.random() < 0.7:
        chosen = {path: chance.sample(range(n), chance.randint(1, n)) for path, n in live_rows(table).items() if n}
        delete_by_vector(table, chosen, features, inline=chance.random() < 0.5)
    if not expected(table):
        with pytest.raises(DatasetError, match="has no rows"):
            index_table(table)
        return
    index_table(table)
    assert comparable(read(table)) == comparable(expected(table))
    for version in indexed:
        assert comparable(read(table, version=version)) == comparable(expected(table, version))


def unpacked(name: str, to: Path) -> Path:
    data = zstandard.ZstdDecompressor().stream_reader((FIXTURES / name).read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(to, filter="data")
    return to


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.glob("*.zst")))
def test_tables_of_spark(name: str, tmp_path: Path) -> None:
    """Tables with vectors, renamed columns by name and by number, old times, partitions of all types, names with
    escapes, checkpoints of both versions; deltalake's query engine refuses widened types."""
    table = unpacked(name, tmp_path / "table")
    index_folder(table)
    found = read(table)
    if not name.startswith("type-widening"):
        assert comparable(found) == comparable(expected(table))
        return
    files = [pyarrow.parquet.read_table(path).to_pylist()[0] for path in table.glob("*.parquet")]
    assert comparable(found) != comparable(files)
    wide = {name: type(value) for name, value in found[1].items()}
    for row, stored in zip(sorted(found, key=str), sorted(files, key=str), strict=False):
        assert {name: type(value) for name, value in row.items()} == wide
        assert [row["byte_long"], row["float_double"]] in [[each["byte_long"], each["float_double"]] for each in files]
        assert stored.keys() == row.keys()


def test_partitions_are_those_of_the_log(tmp_path: Path) -> None:
    """Also where a file has the column, and not where only the name of its folder has one."""
    table = tmp_path / "table"
    write_deltalake(table, pyarrow.table({"i": [1, 2], "day": [7, 7]}))
    meta = next(action["metaData"] for action in log_of(table) if "metaData" in action)
    [add] = [action["add"] for action in log_of(table) if "add" in action]
    commit(table, {"metaData": meta | {"partitionColumns": ["day"]}}, {"add": add | {"partitionValues": {"day": "8"}}})
    index_table(table)
    assert read(table) == [{"i": 1, "day": 8}, {"i": 2, "day": 8}]
    assert read(table, columns=["day"]) == [{"day": 8}] * 2


def test_tables_as_their_library_writes_them(tmp_path: Path) -> None:
    """It names a reader feature for variants, of which there is none; and lists of one length, such as embeddings."""
    vectors = pyarrow.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pyarrow.list_(pyarrow.float32(), 2))
    data = pyarrow.table({"n": [1, 2, 3], "vector": vectors})
    write_deltalake(tmp_path, data, configuration={"delta.enableDeletionVectors": "true"})
    index_table(tmp_path)
    assert comparable(read(tmp_path)) == comparable(expected(tmp_path))


def test_other_deleted_rows_are_other_data(table: Path) -> None:
    """For a state's comparison: as many rows of the same files, but others."""
    index_table(table)
    [path] = [action["remove"]["path"] for action in log_of(table) if "remove" in action]
    delete_by_vector(table, {path: list(range(1, 20, 2))}, VECTORS, inline=True)
    index_table(table)
    datasets = [StreamingDataset(table, version=version) for version in (2, 3)]
    assert len(datasets[0]) == len(datasets[1]) == 30
    assert datasets[0].fingerprint != datasets[1].fingerprint


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of 40 rows in two files, of whose snapshot 1 half of the first 20 rows are deleted by a vector."""
    path = tmp_path / "table"
    for begin in (0, 20):
        write_deltalake(path, pyarrow.table({"i": list(range(begin, begin + 20))}), mode="append")
    [first] = [action["add"]["path"] for action in log_of(path)[:4] if "add" in action]
    delete_by_vector(path, {first: list(range(0, 20, 2))}, VECTORS, inline=False)
    return path


LIVE = [*range(1, 20, 2), *range(20, 40)]


def numbers(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch["i"].tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
def test_state_goes_on_in_its_snapshot(table: Path, shuffle: bool) -> None:
    index_table(table)

    def loader(**settings: Any) -> StreamingLoader:
        return StreamingLoader(StreamingDataset(table, **settings), batch_size=4, shuffle=shuffle, seed=5)

    began = loader()
    batches = iter(began)
    before = [number for _ in range(3) for number in next(batches)["i"].tolist()]
    state = began.state_dict()
    rest = numbers(batches)
    assert sorted(before + rest) == LIVE
    DeltaTable(table).optimize.compact()
    write_deltalake(table, pyarrow.table({"i": [99]}), mode="append")
    index_table(table)
    resumed = loader()
    assert resumed.dataset.versions == [4]
    resumed.load_state_dict(state)
    assert resumed.dataset.versions == [2]
    assert numbers(resumed) == rest
    if not shuffle:
        assert before + rest == LIVE
    ended = began.state_dict()
    newest = loader(version="newest")
    newest.load_state_dict(ended)
    assert sorted(numbers(newest)) == [*LIVE, 99]
    with pytest.raises(StateMismatchError, match="version"):
        loader(version=4).load_state_dict(state)


@pytest.mark.parametrize("out", [True, False])
def test_remote_snapshots(out: bool, bucket: str, tmp_path: Path) -> None:
    table = tmp_path / "table"
    cache = tmp_path / "cache"
    for number in range(3):
        write_deltalake(table, pyarrow.table({"i": list(range(10 * number, 10 * number + 10))}), mode="append")
    DeltaTable(table).delete("i < 5")
    [first] = [path for path, rows in live_rows(table).items() if rows == 5]
    delete_by_vector(table, {first: [0]}, VECTORS, inline=True)
    with closing(RemoteFolder(bucket)) as remote:
        for path in table.rglob("*"):
            if path.is_file():
                remote.upload(path.relative_to(table).as_posix(), path, deadline_s=30)
    to = cache if out else None
    index_table(bucket, out=to)
    index_table(bucket, 2, out=to)
    assert sorted(row["i"] for row in read(bucket, cache)) == list(range(6, 30))
    assert sorted(row["i"] for row in read(bucket, cache, version=2)) == list(range(30))
    with pytest.raises(DatasetError, match="index_table"):
        index_parquet(f"{bucket}/_delta_log/..")


def test_expired_snapshots_are_named(table: Path) -> None:
    index_table(table)
    old = StreamingDataset(table)
    write_deltalake(table, pyarrow.table({"i": [1]}), mode="overwrite")
    index_table(table)
    DeltaTable(table).vacuum(0, enforce_retention_duration=False, dry_run=False)
    for read_old in (lambda: old[0], lambda: read(table, version=2), lambda: index_table(table, 2)):
        with pytest.raises(SnapshotExpiredError, match=r"snapshot 2 .*(vacuumed|expired)"):
            read_old()
    assert [row["i"] for row in read(table)] == [1]
    DeltaTable(table).create_checkpoint()
    for path in sorted(table.glob("_delta_log/*.json"))[:2]:
        path.unlink()
    with pytest.raises(SnapshotExpiredError, match=r"version 1 .*can no longer be read"):
        index_table(table, 1)
    with pytest.raises(DatasetError, match="at most the newest version"):
        index_table(table, 99)


def test_what_is_not_read_is_refused_by_name(table: Path, tmp_path: Path) -> None:
    commit(table, upgrade([*VECTORS, "variantShredding-preview"]))
    with pytest.raises(DatasetError, match="variantShredding-preview"):
        index_table(table)
    vectored = tmp_path / "clone"
    write_deltalake(vectored, pyarrow.table({"i": [1]}))
    [add] = [action["add"] for action in log_of(vectored) if "add" in action]
    commit(vectored, {"add": add | {"path": "file:///elsewhere/a.parquet"}})
    with pytest.raises(DatasetError, match="shallow clones"):
        index_table(vectored)
    with pytest.raises(DatasetError, match=r"must be the folder of a Delta Lake or Iceberg table"):
        index_table(tmp_path)


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("mark", ["_delta_log/0.json", ".hoodie/hoodie.properties", "metadata/v1.metadata.json"])
def test_tables_are_recognised(mark: str, below: bool, tmp_path: Path, bucket: str) -> None:
    """From a folder in which their files lie, on this machine and in a bucket."""
    inside = "day=1/a.parquet" if below else "a.parquet"
    for name in (f"table/{inside}", f"table/{mark}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / name)
        with closing(RemoteFolder(bucket)) as remote:
            remote.upload(name, tmp_path / name, deadline_s=30)
    kind = {"_": "Delta Lake", ".": "Hudi", "m": "Iceberg"}[mark[0]]
    for root in (str(tmp_path), bucket):
        with pytest.raises(DatasetError, match=rf"a {kind} table .*{root}/table is such"):
            index_parquet(f"{root}/table/day=1" if below else f"{root}/table")
        with pytest.raises(DatasetError, match=rf"{kind} table|pyiceberg"):
            index_folder(f"{root}/table")


def test_files_of_a_table_are_never_read_without_its_log(tmp_path: Path) -> None:
    """A partition of a table, a folder with a table, and a plain folder that became one after it was indexed."""
    parts = tmp_path / "above" / "parts"
    write_deltalake(parts, pyarrow.table({"i": [1, 2], "day": [0, 1]}), partition_by=["day"])
    plain = tmp_path / "plain"
    plain.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"i": list(range(9))}), plain / "a.parquet")
    for folder in (parts / "day=1", tmp_path / "above", parts.parent):
        with pytest.raises(DatasetError, match=r"index_table\('.*above/parts'\)"):
            index_folder(folder)
    with pytest.raises(DatasetError, match="Delta Lake"):
        index_parquet(parts)
    index_folder(plain)
    convert_to_deltalake(plain)
    DeltaTable(plain).delete("i < 5")
    with pytest.raises(DatasetError, match="index_table"):
        StreamingDataset(plain)
    index_folder(plain)
    assert sorted(row["i"] for row in read(plain)) == [5, 6, 7, 8]


def test_remote_folders_that_became_tables_are_refused(bucket: str, tmp_path: Path) -> None:
    """By a job that fetches the index; one that has it in its cache asks for nothing."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"i": [1]}), path)
    with closing(RemoteFolder(bucket)) as remote:
        remote.upload("a.parquet", path, deadline_s=30)
        index_parquet(bucket)
        assert read(bucket, tmp_path / "old") == [{"i": 1}]
        remote.write("_delta_log/00000000000000000000.json", b"{}", deadline_s=30)
    with pytest.raises(DatasetError, match="Delta Lake table"):
        StreamingDataset(bucket, tmp_path / "new")
    assert read(bucket, tmp_path / "old") == [{"i": 1}]


def test_damaged_index_is_refused(table: Path) -> None:
    """The index's own list of deleted rows, which comes from another process."""
    index_table(table)
    path = table / "_penstock_index-000002.json"
    text = path.read_text()
    [listed] = [shard.deleted for shard in index_table(table) if shard.deleted]
    longer = base64.b64encode(zlib.compress(bytes(1 << 20))).decode()
    for other in (longer, listed[:-4], "€"):
        path.write_text(text.replace(listed, other))
        with pytest.raises(DatasetError, match="deleted rows"):
            read(table)
