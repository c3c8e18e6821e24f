"""Our writers: what they refuse, and that a folder has an index only if all of its samples are there."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import join_all
from fsspec.implementations.memory import MemoryFileSystem

from penstock.data import StreamingDataset, merge_index
from penstock.data.formats.index import INDEX, read_index
from penstock.data.formats.readers import open_shard
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing import writers
from penstock.data.writing.text_writers import CSVWriter, JSONWriter, TSVWriter, XSVWriter
from penstock.data.writing.writers import MDSWriter, Writer
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError
from penstock.runtime.files.atomic_files import write_whole

COLUMNS = {"n": "int", "text": "str", "image": "ndarray:uint8:2,2"}
SAMPLE = {"n": 1, "text": "a", "image": np.zeros((2, 2), np.uint8)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_column(folder: Path, column: str) -> list[Any]:
    values = []
    for shard in read_index((folder / INDEX).read_bytes(), str(folder)):
        reader = open_shard(shard, [folder / file.raw.name for file in shard.files])
        values += [reader[i][column] for i in range(len(reader))]
        reader.close()
    return values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 2**63}, "sample 2, column 'n', 'int': OverflowError"),
        ({"text": None}, "sample 2, column 'text', 'str': TypeError: the value must be str, got NoneType"),
        (
            {"image": np.zeros((2, 3), np.uint8)},
            r"column 'image', 'ndarray:uint8:2,2': ValueError: .* must be \(2, 2\)",
        ),
        ({"more": 1}, "sample 2 must have the columns .* got also 'more'"),
    ],
)
def test_unfit_sample_is_named_and_not_written(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "out", COLUMNS) as writer:
        writer.write(SAMPLE)
        writer.write(SAMPLE)
        with pytest.raises(DatasetError, match=f"out: .*{words}"):
            writer.write({**SAMPLE, **change})
        with pytest.raises(DatasetError, match=r"sample 2, column 'image': .* this column, got the columns 'text'"):
            writer.write({"text": "a"})
        writer.write({**SAMPLE, "n": 3})
    assert read_column(tmp_path / "out", "n") == [1, 1, 3]


@pytest.mark.parametrize(
    ("writer", "columns", "keywords", "words"),
    [
        (MDSWriter, {"n": "integer"}, {}, "column 'n': the encoding must be one of bytes, str.* got 'integer'"),
        (MDSWriter, COLUMNS, {"size_limit": "64mib"}, "size_limit must be .* in powers of 1024, got '64mib'"),
        (MDSWriter, COLUMNS, {"size_limit": "5gb"}, "size_limit must be at most 4294967295 bytes, got '5gb'"),
        (MDSWriter, COLUMNS, {"hashes": ["sha3"]}, "the hash algorithm must be one of .* got 'sha3'"),
        (JSONWriter, {"n": "bytes"}, {}, "column 'n': the encoding must be one of str, int, float, got 'bytes'"),
        (XSVWriter, {"n": "int"}, {"separator": ""}, "separator must not be empty"),
        (CSVWriter, {"n,m": "int"}, {}, "column 'n,m': the name must not contain the separator"),
    ],
)
def test_invalid_settings_make_no_folder(
    writer: Any, columns: dict[str, str], keywords: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        writer(tmp_path / "out", columns, **keywords)
    assert names(tmp_path) == []


def test_tables_refuse_what_would_need_quotes(tmp_path: Path) -> None:
    with TSVWriter(tmp_path, {"n": "int", "text": "str"}) as out:
        for text in ("a,\tb", "a\nb"):
            with pytest.raises(DatasetError, match=r"sample 0, column 'text', 'str': .*which ends a value"):
                out.write({"n": 1, "text": text})
        for value in (True, 1.0, "1"):
            with pytest.raises(DatasetError, match="sample 0, column 'n', 'int': TypeError: the value must be int"):
                out.write({"n": value, "text": ""})
        with pytest.raises(DatasetError, match="UnicodeEncodeError"):
            out.write({"n": 1, "text": "\ud800"})
        out.write({"n": 1, "text": "b"})
    assert read_column(tmp_path, "text") == ["b"]


def test_shard_has_all_samples_that_fit(tmp_path: Path) -> None:
    """Of 1 byte, each of which takes 9 bytes of a shard: at one of 9 limits in a row they fill it exactly."""
    left = set()
    for limit in range(1000, 1009):
        with MDSWriter(tmp_path / str(limit), {"x": "bytes"}, size_limit=limit) as writer:
            for _ in range(200):
                writer.write({"x": b"1"})
        left |= {limit - shard.size for shard in writer.close()[:-1]}
    assert left == set(range(9))


@pytest.mark.parametrize("writer", [MDSWriter, JSONWriter, CSVWriter])
def test_no_shard_outgrows_its_offsets(writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MAX_BYTES", 1000)  # in place of 4 GiB
    with writer(tmp_path, {"a rather long name": "str"}, size_limit=None) as out:
        for _ in range(5):
            out.write({"a rather long name": "x" * 90})
        with pytest.raises(DatasetError, match="sample 5: the shard must have at most 1000 bytes"):
            out.write({"a rather long name": "x" * 1000})
        for size in reversed(range(1000)):
            try:
                out.write({"a rather long name": "x" * size})
            except DatasetError:
                continue
            break  # the longest that still fits
    (shard,) = read_index((tmp_path / INDEX).read_bytes(), "here")
    assert shard.files[0].raw.size == 1000


@pytest.mark.parametrize("killed", [False, True])
def test_a_broken_run_leaves_no_index(tmp_path: Path, killed: bool) -> None:
    def broken() -> None:
        with MDSWriter(tmp_path, {"x": "int"}, size_limit=400) as writer:
            for i in range(100):
                writer.write({"x": i})
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the source broke")

    with pytest.raises(AssertionError, match="ended with 9" if killed else "the source broke"):
        join_all(broken)
    assert "shard.00000.mds" in names(tmp_path)
    assert not [name for name in names(tmp_path) if "index" in name]


def test_folder_with_files_needs_exist_ok(tmp_path: Path) -> None:
    def write(count: int, **keywords: bool) -> Writer:
        with MDSWriter(tmp_path, {"x": "int"}, size_limit=300, exist_ok=keywords.get("exist_ok", False)) as writer:
            for i in range(count):
                writer.write({"x": i})
        return writer

    write(100)
    (tmp_path / "README").write_text("mine")
    (tmp_path / "shard.00000.folder").mkdir()
    before = names(tmp_path)
    with pytest.raises(DatasetError, match=r"must be empty, .* exist_ok=True"):
        write(1)
    assert names(tmp_path) == before
    write(1, exist_ok=True)
    assert names(tmp_path) == ["README", INDEX, "shard.00000.folder", "shard.00000.mds"]
    assert read_column(tmp_path, "x") == [0]


def test_replaced_dataset_loses_its_index_first(tmp_path: Path) -> None:
    """Else a kill in between would leave an old index over new shards."""
    with MDSWriter(tmp_path, {"x": "int"}) as writer:
        writer.write({"x": 1})
    writer = MDSWriter(tmp_path, {"x": "int"}, exist_ok=True)
    assert names(tmp_path) == []
    writer.close()


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    path.chmod(0o640)
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(handle: int) -> None:
        order.append("folder" if Path(f"/proc/self/fd/{handle}").readlink() == tmp_path else "file")
        fsync(handle)

    def seen_replace(old: Path, new: Path) -> None:
        order.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    write_whole(path, b"new")
    assert order == ["file", "rename", "folder"]

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"third")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


def write_numbers(out: Any, first: int = 0, **keywords: Any) -> None:
    with MDSWriter(out, {"n": "int"}, **{"size_limit": "0.25kb", "hashes": ["sha1"], **keywords}) as writer:
        for number in range(first, first + 50):
            writer.write({"n": number})


def write_numbers_and_a_bad_one(out: str) -> None:
    with MDSWriter(out, {"n": "int"}, size_limit=200, exist_ok=True) as writer:
        for number in range(100):
            writer.write({"n": number})
        writer.write({})


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_dataset_is_written_to_another_place(
    bucket: str, compression: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Write with a temporary local folder, one that is emptied, or one that is kept. The files equal those of a local
    dataset."""
    write_numbers(tmp_path / "here", compression=compression)
    write_numbers(bucket, compression=compression, progress=True)
    said = capsys.readouterr().err
    write_numbers((tmp_path / "emptied", f"{bucket}2"), compression=compression, upload_threads=1)
    write_numbers((tmp_path / "kept", f"file://{tmp_path}/3"), compression=compression, keep_local=True)
    assert names(tmp_path) == ["3", "here", "kept"]
    there = {name: (tmp_path / "here" / name).read_bytes() for name in names(tmp_path / "here")}
    assert len(there) > 5
    size = sum(len(data) for name, data in there.items() if name != INDEX)
    assert said == f"{bucket}: uploaded {len(there) - 1} files, {size} bytes\n"
    assert not capsys.readouterr().err
    for folder in (tmp_path / "kept", tmp_path / "3"):
        assert {name: (folder / name).read_bytes() for name in names(folder)} == there
    for url in (bucket, f"{bucket}2"):
        place = RemoteFolder(url)
        assert {name: place.read(name, deadline_s=9) for name in place.names(deadline_s=9)} == there
    with closing(StreamingDataset(bucket, tmp_path / "cache")) as dataset:
        assert [dataset[at]["n"] for at in range(len(dataset))] == list(range(50))
    assert not list(Path(tempfile.gettempdir()).glob(f"penstock-write-{os.getpid()}-*"))


def test_remote_dataset_needs_exist_ok(bucket: str, tmp_path: Path) -> None:
    """Its index goes first and comes last; other files stay."""
    write_numbers(bucket)
    place = RemoteFolder(bucket)
    place.write("README", b"", deadline_s=9)
    before = len(place.names(deadline_s=9))
    with pytest.raises(DatasetError, match=r"must be empty, .* exist_ok=True"):
        write_numbers(bucket)
    with pytest.raises(DatasetError, match="column 'n': the sample must have this column"):
        write_numbers_and_a_bad_one(bucket)
    assert INDEX not in place.names(deadline_s=9)
    write_numbers(bucket, first=7, exist_ok=True)
    assert len(place.names(deadline_s=9)) == before
    with closing(StreamingDataset(bucket, tmp_path / "cache")) as dataset:
        assert dataset[0] == {"n": 7}
    assert not list(Path(tempfile.gettempdir()).glob(f"penstock-write-{os.getpid()}-*"))


def test_failed_upload_writes_no_index(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_file(self: Any, lpath: str, rpath: str, **keywords: Any) -> None:
        raise PermissionError(rpath)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(ShardUnavailableError, match=r"train/shard.0000\d.mds could not be written after 1 try"):
        write_numbers(bucket, upload_threads=1)
    assert RemoteFolder(bucket).names(deadline_s=9) == []


def test_address_is_never_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match="must be a folder of this machine, got the address"):
        MDSWriter(Path("s3://bucket/train"), {"n": "int"})
    with pytest.raises(InvalidArgumentError, match="must be a folder of this machine, got the address"):
        StreamingDataset(local="s3://bucket/train")
    with pytest.raises(DatasetError, match="got a web server, which accepts no files"):
        MDSWriter("https://example.org/train", {"n": "int"})
    with pytest.raises(InvalidArgumentError, match=r"keep_local=True needs out=.* got only a remote"):
        MDSWriter("memory://train", {"n": "int"}, keep_local=True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("given", [False, True])
def test_remote_indexes_are_merged_remotely(bucket: str, given: bool, tmp_path: Path) -> None:
    for part in range(3):
        write_numbers(f"{bucket}/{part}", first=100 * part)
    parts = [f"{bucket}/{part}/index.json" for part in (2, 0)] if given else None
    shards = merge_index((tmp_path / "here", bucket), parts)
    expected = (
        [*range(200, 250), *range(50)] if given else [number for at in (0, 100, 200) for number in range(at, at + 50)]
    )
    assert read_index((tmp_path / "here" / INDEX).read_bytes(), "here") == shards
    with closing(StreamingDataset(bucket, tmp_path / "cache")) as dataset:
        assert [dataset[at]["n"] for at in range(len(dataset))] == expected
    with pytest.raises(InvalidArgumentError, match="must name folders below"):
        merge_index(bucket, ["memory://elsewhere/0"])
    with pytest.raises(DatasetError, match=r"must have at least one folder with an index.json"):
        merge_index(f"{bucket}/none")
