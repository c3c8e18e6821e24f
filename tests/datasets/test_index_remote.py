"""Remote folders of other libraries' files, indexed where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
from format_folders import FOLDERS, plainly
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from penstock.data import StreamingDataset, index_folder
from penstock.data.formats.index import OWN_INDEX
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.indexing import STAMPS
from penstock.proto.errors import DatasetError, ShardCorruptError

BUCKET = "memory://remote-index"


@pytest.fixture
def upload() -> Iterator[Callable[[Path], None]]:
    """Function that uploads the files in a folder, without what index_folder wrote."""
    files = fsspec.filesystem("memory")

    def send(folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path.name not in (OWN_INDEX, STAMPS) and path.suffix != ".penstock-index":
                files.pipe(f"/remote-index/{path.relative_to(folder).as_posix()}", path.read_bytes())

    yield send
    MemoryFileSystem.store.clear()


def rows_in(folder: str, local: Path) -> list[Any]:
    with closing(StreamingDataset(folder, local)) as dataset:
        return [plainly(sample) for sample in dataset[:]]


def made(name: str, folder: Path) -> tuple[list[Any], list[Any]]:
    """Write a dataset; return (its samples, its shards as a local index lists them)."""
    folder.mkdir()
    samples = FOLDERS[name](folder)
    (folder / OWN_INDEX).unlink(missing_ok=True)
    return [plainly(sample) for sample in samples], index_folder(folder)


@pytest.mark.filterwarnings("ignore:3 members of archives are left out")
@pytest.mark.parametrize("name", ["parquet", "megatron", "saved dataset", "arrow", "webdataset"])
def test_remote_files_are_indexed(name: str, upload: Callable[[Path], None], tmp_path: Path) -> None:
    """The index is that of a local copy, and so is the order."""
    samples, shards = made(name, tmp_path / "from")
    upload(tmp_path / "from")
    assert index_folder(BUCKET, out=tmp_path / "cache") == shards
    rows = rows_in(BUCKET, tmp_path / "cache")
    assert rows == rows_in(str(tmp_path / "from"), tmp_path / "from")
    assert all(row in samples for row in rows)
    assert len(rows) == len(samples)
    assert not [path for path in RemoteFolder(BUCKET).find(deadline_s=9) if "penstock" in path]


def test_index_is_written_beside_the_files(upload: Callable[[Path], None], tmp_path: Path) -> None:
    samples, _ = made("json_lines", tmp_path / "from")
    upload(tmp_path / "from")
    index_folder(BUCKET, "json_lines")
    assert rows_in(BUCKET, tmp_path / "cache") == samples


def test_objects_in_place_of_folders_are_passed(upload: Callable[[Path], None], tmp_path: Path) -> None:
    """Consoles of object stores make an empty object for a folder."""
    (tmp_path / "from" / "below").mkdir(parents=True)
    (tmp_path / "from" / "below" / "a.jsonl").write_text('{"n": 1}\n')
    upload(tmp_path / "from")
    fsspec.filesystem("memory").store["/remote-index/below"] = MemoryFile(path="/remote-index/below")
    assert [shard.name for shard in index_folder(BUCKET, out=tmp_path / "cache")] == ["below/a.jsonl"]


def test_only_new_files_are_fetched(
    upload: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a run that failed, and not of files that were written again."""
    fetched, plain = list[str](), RemoteFolder.download

    def download(self: RemoteFolder, name: str, to: Path, **settings: Any) -> None:
        fetched.append(name)
        plain(self, name, to, **settings)

    monkeypatch.setattr(RemoteFolder, "download", download)
    source, cache = tmp_path / "from", tmp_path / "cache"
    source.mkdir()
    for number in range(8):
        (source / f"{number}.jsonl").write_text('{"n": 1}\n' * (number + 1))
    (source / "7.jsonl").write_text("{\n")
    upload(source)
    with pytest.raises(ShardCorruptError, match=r"7\.jsonl: sample 0 must be a line of JSON"):
        index_folder(BUCKET, out=cache)
    (source / "7.jsonl").write_text('{"n": 1}\n')
    fsspec.filesystem("memory").pipe("/remote-index/7.jsonl", b'{"n": 1}\n')
    fsspec.filesystem("memory").pipe("/remote-index/2.jsonl", b'{"n": 12345678901234567890}')  # of the same size
    fetched.clear()
    assert [shard.samples for shard in index_folder(BUCKET, out=cache)] == [1, 2, 1, 4, 5, 6, 7, 1]
    assert sorted(fetched) == ["2.jsonl", "7.jsonl"]


def test_wrong_remote_folders_are_refused(upload: Callable[[Path], None], tmp_path: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    with pytest.raises(DatasetError, match=r"remote-index must have files of one format .*, got none"):
        index_folder(BUCKET, out=tmp_path / "cache")
    (source / "a.jsonl").write_text("\n")
    (source / ".hidden.csv").write_text("a\n1\n")
    upload(source)
    with pytest.raises(DatasetError, match="remote-index must have at least one sample, but its 1 files of json_lines"):
        index_folder(BUCKET, out=tmp_path / "cache")
