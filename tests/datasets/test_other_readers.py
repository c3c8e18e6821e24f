"""Indexing leaves a folder readable for other libraries, and an index by its old name is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.data import MDSWriter, StreamingDataset, index_folder, index_parquet, merge_index
from penstock.proto.errors import ShardUnavailableError

TABLE = pyarrow.table({"i": list(range(7)), "text": [f"row {n}" for n in range(7)]})


def parquet(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(TABLE, folder / "a.parquet")
    return folder


def test_pyarrow_reads_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index_parquet(parquet(tmp_path / "parquet"))
    assert "pyarrow and pandas read the folder as before, polars with hidden_file_prefix" in capsys.readouterr().err
    assert pyarrow.parquet.read_table(tmp_path / "parquet").equals(TABLE)
    for format in ("json", "csv"):
        folder = tmp_path / format / "b=1"
        folder.mkdir(parents=True)
        if format == "csv":
            pyarrow.csv.write_csv(TABLE, folder / "a.csv")
        else:
            (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
        index_folder(tmp_path / format)
        read = pyarrow.dataset.dataset(tmp_path / format, format=format, partitioning="hive").to_table()
        assert read.select(["i", "text"]).equals(TABLE)


def test_pandas_reads_on(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    index_folder(parquet(tmp_path))
    assert pandas.read_parquet(tmp_path)["i"].tolist() == list(range(7))


def test_polars_reads_on(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    index_folder(parquet(tmp_path / "here"))
    prefix: dict[str, Any] = {"hidden_file_prefix": ("_", ".")}
    assert polars.scan_parquet(tmp_path / "here", **prefix).collect()["i"].to_list() == list(range(7))
    index_folder(parquet(tmp_path / "there"), out=tmp_path / "out")
    assert polars.read_parquet(tmp_path / "there")["i"].to_list() == list(range(7))


def test_old_name_is_read_until_the_folder_is_indexed_again(tmp_path: Path) -> None:
    index_folder(parquet(tmp_path))
    (tmp_path / "_penstock_index.json").rename(tmp_path / "index.json")
    with pytest.raises(pyarrow.ArrowInvalid):
        pyarrow.parquet.read_table(tmp_path)
    dataset = StreamingDataset(tmp_path)
    assert [row["i"] for row in dataset[:]] == list(range(7))
    before = dataset.fingerprint
    index_folder(tmp_path)
    assert not (tmp_path / "index.json").exists()
    assert pyarrow.parquet.read_table(tmp_path).num_rows == 7
    assert StreamingDataset(tmp_path).fingerprint == before


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("train/a.jsonl", "test/b.jsonl")])
def test_hugging_face_datasets_reads_on(tmp_path: Path, names: Sequence[str]) -> None:
    """It leaves out folders that begin with `__`, and hidden files."""
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"i": i}) + "\n")
    index_folder(tmp_path)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()} - set(map(Path, names))
    assert all(
        "__penstock__" in path.parts for path in made - {Path("_penstock_index.json"), Path(".penstock-indexed")}
    )
    assert [StreamingDataset(tmp_path, split=split)[0] for split in ("train", "test")] == [{"i": 0}, {"i": 1}]
    datasets = pytest.importorskip("datasets")
    read = datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / ".cache"))
    assert {split: list(rows["i"]) for split, rows in read.items()} == {"train": [0], "test": [1]}


def test_writers_keep_the_name_that_mosaicml_reads(tmp_path: Path) -> None:
    with MDSWriter(tmp_path, {"i": "int"}) as writer:
        writer.write({"i": 1})
    assert (tmp_path / "index.json").exists()
    assert not (tmp_path / "_penstock_index.json").exists()


def test_merged_and_appended_indexes(tmp_path: Path) -> None:
    for part in ("a", "b"):
        index_folder(parquet(tmp_path / part))
    merge_index(tmp_path)
    assert (tmp_path / "_penstock_index.json").exists()
    assert pyarrow.parquet.read_table(tmp_path).num_rows == 14
    opened = StreamingDataset(tmp_path)
    index_folder(parquet(tmp_path / "c"))
    merge_index(tmp_path, [tmp_path / "c"], append=True)
    assert [len(StreamingDataset(tmp_path, version=version)) for version in (None, 1, 2)] == [21, 14, 21]
    assert opened[13]["i"] == 6  # the version that was opened


class _Bucket(MemoryFileSystem):  # type: ignore[misc]
    """Answers "forbidden" for files that do not exist, as S3 does to one who may not list the bucket."""

    protocol = "forbidding"
    store: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("forbidding://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return self._asked(super().cat_file, path, start, end, **options)

    def info(self, path: str, **options: Any) -> Any:
        return self._asked(super().info, path, **options)

    def _open(self, path: str, *given: Any, **options: Any) -> Any:
        return self._asked(super()._open, path, *given, **options)

    def _asked(self, call: Any, *given: Any, **options: Any) -> Any:
        try:
            return call(*given, **options)
        except FileNotFoundError:
            raise PermissionError(13, "Forbidden") from None


@pytest.mark.parametrize("scheme", ["memory", "forbidding"])
def test_remote_folders(tmp_path: Path, scheme: str) -> None:
    fsspec.register_implementation("forbidding", _Bucket, clobber=True)
    _Bucket.store, bucket = MemoryFileSystem.store, f"{scheme}://others-{scheme}"
    files = fsspec.filesystem("memory")
    files.pipe(f"/others-{scheme}/a.parquet", (parquet(tmp_path / "from") / "a.parquet").read_bytes())
    files.pipe(f"/others-{scheme}/index.json", b"from an earlier release")
    index_folder(f"memory://others-{scheme}")
    assert not files.exists(f"/others-{scheme}/index.json")
    for _ in range(2):
        assert len(StreamingDataset(bucket, tmp_path / "cache")) == 7
    assert (tmp_path / "cache" / "_penstock_index.json").exists()
    with pytest.raises(ShardUnavailableError, match=r"index\.json"):
        StreamingDataset(f"{bucket}/nothing", tmp_path / "other")
