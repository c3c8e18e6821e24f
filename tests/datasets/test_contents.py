"""What was indexed is what is read: another file under a name, or a dataset saved again, is an error or other data."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from penstock.data import StreamingDataset, StreamingLoader, index_folder
from penstock.data.formats.index import read_index, write_index
from penstock.deploy.cli.main import app
from penstock.proto.errors import DatasetError, ShardCorruptError, StateMismatchError

ROWS = [{"i": n, "text": f"row {n:04}" * 20} for n in range(2000)]


def jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def comma(path: Path, rows: list[dict[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["i", "text"])
    writer.writeheader()
    writer.writerows(rows)
    path.with_suffix(".csv").write_text(text.getvalue())


def parquet(path: Path, rows: list[dict[str, object]]) -> None:
    # without dictionaries and compression, so that the size does not change with the values
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), compression="none", use_dictionary=False)


def groups(path: Path, rows: list[dict[str, object]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    options = {"compression": "none", "use_dictionary": False, "row_group_size": 500}
    pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), **options)


def arrow(path: Path, rows: list[dict[str, object]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(path.with_suffix(".arrow"), table.schema) as file:
        file.write_table(table)


def tar(path: Path, rows: list[dict[str, object]]) -> None:
    with tarfile.open(path.with_suffix(".tar"), "w") as file:
        for row in rows[:300]:
            member = tarfile.TarInfo(f"{row['i']:04}.json")
            data = json.dumps(row).encode()
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


WRITERS = [jsonl, comma, parquet, arrow, tar]
Write = Callable[[Path, list[dict[str, object]]], None]


def others() -> list[dict[str, object]]:
    """Rows of the same size, each with another text."""
    return [{**row, "text": str(row["text"]).replace("row", "ROW")} for row in ROWS]


@pytest.mark.parametrize("write", WRITERS)
def test_differing_copy_on_one_node(tmp_path: Path, write: Write) -> None:
    """With an index of its own the state does not fit; with a copy of the index the file is refused."""
    for node, rows in (("a", ROWS), ("b", others())):
        (tmp_path / node).mkdir()
        write(tmp_path / node / "x", rows)
    sizes = [next(path.stat().st_size for path in (tmp_path / node).glob("x.*")) for node in ("a", "b")]
    assert sizes[0] == sizes[1]
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for node in ("a", "b"):
        index_folder(tmp_path / node)
    a, b = (StreamingDataset(tmp_path / node) for node in ("a", "b"))
    assert a.fingerprint != b.fingerprint
    loader = StreamingLoader(a, global_batch_size=4, shuffle=True)
    begun = iter(loader)
    next(begun)
    with pytest.raises(StateMismatchError, match="data"):
        StreamingLoader(b, global_batch_size=4, shuffle=True).load_state_dict(loader.state_dict())
    data = shutil.ignore_patterns(*(path.name for path in (tmp_path / "c").iterdir()))
    shutil.copytree(tmp_path / "a", tmp_path / "c", ignore=data, dirs_exist_ok=True)
    with pytest.raises(ShardCorruptError, match=r"the file that was indexed, got another one\..*drop the saved states"):
        _ = StreamingDataset(tmp_path / "c")[0]


@pytest.mark.parametrize("write", WRITERS)
def test_moved_data_are_the_same(tmp_path: Path, write: Write) -> None:
    """Indexed where they lie, in any way."""
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "x", ROWS)
    bucket = f"memory://contents-{write.__name__}"
    fsspec.filesystem("memory").put(f"{tmp_path}/a/", f"/contents-{write.__name__}/", recursive=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for node in ("a", "b"):
        index_folder(tmp_path / node, out=tmp_path / f"out-{node}")
    index_folder(bucket, out=tmp_path / "cache")
    opened = [
        StreamingDataset(folder, tmp_path / local)
        for folder, local in ((tmp_path / "a", "out-a"), (tmp_path / "b", "out-b"), (bucket, "cache"))
    ]
    assert len({dataset.fingerprint for dataset in opened}) == 1
    assert opened[2][5] == opened[0][5]


@pytest.mark.parametrize("write", WRITERS)
def test_hashes_are_those_of_whole_files(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "x", ROWS)
    index_folder(tmp_path, hashes=True)
    data = next(path for path in tmp_path.glob("x.*") if "penstock" not in path.name)
    assert StreamingDataset(tmp_path, validate_hash="xxh3_128")[3]["__key__" if write is tar else "i"] is not None
    content = bytearray(data.read_bytes())
    content[content.index(b"row 0003")] ^= 1
    data.write_bytes(content)
    with pytest.raises(ShardCorruptError, match="is damaged: its xxh3_128 hash must be"):
        _ = StreamingDataset(tmp_path, validate_hash="xxh3_128")[0]
    done = CliRunner().invoke(app, ["data", "verify", str(tmp_path)])
    assert done.exit_code == 28


def test_verify_reads_what_indexing_read(tmp_path: Path) -> None:
    """One byte of a line, which no piece of the file has."""
    jsonl(tmp_path / "x", ROWS)
    index_folder(tmp_path)
    assert CliRunner().invoke(app, ["data", "verify", str(tmp_path)]).exit_code == 0
    data = bytearray((tmp_path / "x.jsonl").read_bytes())
    data[data.index(b"row", 20_000)] ^= 1
    (tmp_path / "x.jsonl").write_bytes(data)
    done = CliRunner().invoke(app, ["data", "verify", str(tmp_path)])
    assert done.exit_code == 28
    assert "must be the file that was indexed" in done.output


SAVED = Path(__file__).parents[1] / "data/saved_datasets"


@pytest.mark.parametrize("remote", [False, True])
def test_dataset_that_is_saved_again_with_fewer_shards(tmp_path: Path, remote: bool) -> None:
    """Files of datasets 5.2.0, which leaves those that it had written before."""
    folder = tmp_path / "a"
    shutil.copytree(SAVED / "chosen", folder)
    address, local = (f"memory://saved-{remote}", tmp_path / "cache") if remote else (str(folder), None)
    bucket = fsspec.filesystem("memory")
    bucket.put(f"{folder}/", f"/saved-{remote}/", recursive=True)
    index_folder(address)
    assert len(StreamingDataset(address, local)) == 30
    shutil.copytree(SAVED / "splits/test", folder, dirs_exist_ok=True)
    bucket.put(f"{folder}/", f"/saved-{remote}/", recursive=True)
    with pytest.raises(DatasetError, match=r"but the dataset was saved again\..*and drop the saved states"):
        StreamingDataset(address, local)
    index_folder(address)
    assert len(StreamingDataset(address, tmp_path / "another" if remote else None)) == 2
    if not remote:
        (folder / "state.json").unlink()
        with pytest.raises(DatasetError, match=r"state\.json cannot be read"):
            StreamingDataset(address)


def test_folder_of_saved_splits_names_them(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "splits", tmp_path / "a")
    index_folder(tmp_path / "a")
    with pytest.raises(DatasetError, match="Give split, one of its folders that have one: test, train"):
        StreamingDataset(tmp_path / "a")


def test_content_goes_into_the_index_and_comes_back(tmp_path: Path) -> None:
    jsonl(tmp_path / "x", ROWS)
    [shard] = index_folder(tmp_path)
    assert shard.content.startswith("whole:")
    assert read_index(write_index([shard]), "it") == [shard]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("large", [False, True])
def test_remote_file_that_is_written_again(tmp_path: Path, format: str, large: bool) -> None:
    """Also one of the same size, whole or in parts, whose index did not change; a copy elsewhere is another file."""
    size = 6000 if large else 10
    write, files = {"jsonl": jsonl, "parquet": groups}[format], fsspec.filesystem("memory")
    here, there = (f"again-{place}-{format}-{large}" for place in ("here", "there"))

    def upload(place: str, letter: str) -> None:
        write(tmp_path / "x", [{"i": n, "text": letter * size} for n in range(2000)])
        files.pipe(f"/{place}/x.{format}", (tmp_path / f"x.{format}").read_bytes())

    upload(here, "x")
    index_folder(f"memory://{here}", out=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    assert StreamingDataset(f"memory://{here}", tmp_path / "one")[7]["text"] == "x" * size
    upload(here, "y")
    with pytest.raises(
        DatasetError, match=r"x\.\w+ was written again since it was indexed\. Put the indexed file back"
    ):
        _ = StreamingDataset(f"memory://{here}", tmp_path / "two")[7]
    upload(there, "x")
    assert StreamingDataset(f"memory://{there}", tmp_path / "three")[7]["text"] == "x" * size
