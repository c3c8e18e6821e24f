"""Folders of plain files, indexed where they lie: lines found exactly, kills survived, damage named."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from archives import archive
from forked import join_all
from forked_jobs import forked_jobs
from offset_files import forget_fingerprints

from penstock.data import CSVWriter, StreamingDataset, index_folder, job_processes
from penstock.data.formats.records import json_lines
from penstock.data.writing import indexing
from penstock.data.writing.indexing import STAMPS
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError


def write(path: Path, rows: range) -> None:
    path.write_text("".join(json.dumps({"n": n, "text": "ü" * (n % 7)}) + "\n" for n in rows))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1}\n{"a": 2}\n', [1, 2]),
        (b'{"a": 1}\n{"a": 2}', [1, 2]),
        (b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n', [1, 2]),
        (b'\n \n{"a": 1}\n\n\t \n  {"a": 2}\n\n', [1, 2]),
        (b"", []),
        (b"\xef\xbb\xbf", []),
    ],
)
def test_lines_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, expected: list[int]) -> None:
    """However many bytes are read at once."""
    for chunk in (1, 2, 5, 1 << 22):
        monkeypatch.setattr(json_lines, "READ_AT_ONCE", chunk)
        folder = tmp_path / str(chunk)
        folder.mkdir()
        (folder / "a.jsonl").write_bytes(content)
        write(folder / "b.JSONL", range(1))
        assert [shard.samples for shard in index_folder(folder)] == [len(expected), 1]
        dataset = StreamingDataset(folder)
        assert [dataset[i]["a"] for i in range(len(expected))] == expected


def test_killed_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(6):
        write(tmp_path / f"{part}.jsonl", range(part * 5, part * 5 + 5))
    indexed = indexing.index_one

    def dying(index_file: Any, path: Path, name: str, out: Path) -> Any:
        if name == "5.jsonl":
            os.kill(os.getpid(), signal.SIGKILL)
        return indexed(index_file, path, name, out)

    def killed() -> None:
        monkeypatch.setattr(indexing, "index_one", dying)
        index_folder(tmp_path)

    with pytest.raises(AssertionError, match="ended with 9"):
        join_all(killed)
    assert not (tmp_path / "_penstock_index.json").exists()
    with (tmp_path / STAMPS).open("ab") as log:
        log.write(b'["5.jsonl", 1')  # as a kill within a write leaves it
    changed = tmp_path / "1.jsonl"
    changed.write_bytes(changed.read_bytes()[::-1].replace(b"\n", b" ", 2)[::-1])  # of the same size
    before = {n: (tmp_path / f"__penstock__/{n}.jsonl.penstock-index").stat().st_ino for n in range(3)}
    assert [shard.samples for shard in index_folder(tmp_path)] == [5, 4, 5, 5, 5, 5]
    kept = [n for n in range(3) if (tmp_path / f"__penstock__/{n}.jsonl.penstock-index").stat().st_ino == before[n]]
    assert kept == [0, 2]


def test_unchanged_files_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is new or changed is, also if size and time of change are the same."""
    for part in range(5):
        write(tmp_path / f"{part}.jsonl", range(3))
    index_folder(tmp_path)
    assert "have not changed" not in capsys.readouterr().err
    indexed, read = indexing.index_one, list[str]()

    def noted(index_file: Any, path: Path, name: str, out: Path) -> Any:
        read.append(name)
        return indexed(index_file, path, name, out)

    monkeypatch.setattr(indexing, "index_one", noted)
    first = (tmp_path / "_penstock_index.json").read_bytes()
    index_folder(tmp_path)
    assert (read, (tmp_path / "_penstock_index.json").read_bytes()) == ([], first)
    assert f"{tmp_path}: 5 of 5 files have not changed since they were indexed" in capsys.readouterr().err
    changed, times = tmp_path / "1.jsonl", (tmp_path / "1.jsonl").stat()
    changed.write_text(changed.read_text()[::-1].replace("{\n}", "{ }", 1)[::-1])  # two lines, not three
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changed.stat().st_size == times.st_size
    (tmp_path / "2.jsonl").unlink()
    (tmp_path / "__penstock__/3.jsonl.penstock-index").unlink()
    write(tmp_path / "9.jsonl", range(4))
    assert [shard.samples for shard in index_folder(tmp_path)] == [3, 2, 3, 3, 4]
    assert read == ["1.jsonl", "3.jsonl", "9.jsonl"]


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(indexing, "_append", full)
    write(tmp_path / "a.jsonl", range(3))
    with pytest.raises(DatasetError, match=r"cannot be written: .*No space left on device.*Give index_folder"):
        index_folder(tmp_path)
    assert not (tmp_path / "_penstock_index.json").exists()


def test_entries_of_another_release_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", range(3))
    index_folder(tmp_path)
    before = (tmp_path / "__penstock__/a.jsonl.penstock-index").stat().st_ino
    monkeypatch.setattr(indexing, "STAMPS_VERSION", 99)
    index_folder(tmp_path)
    assert (tmp_path / "__penstock__/a.jsonl.penstock-index").stat().st_ino != before


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a/x.ndjson", "_temporary/x.jsonl", ".hidden/x.jsonl", "a/.x.jsonl", "_tmp.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, range(3))
    assert [shard.name for shard in index_folder(tmp_path)] == ["a/x.ndjson"]


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="got none"):
        index_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.JPG").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"1 images, such as cat/1.JPG, which need no index: .*ImageFolder\("):
        index_folder(tmp_path)
    write(tmp_path / "a.jsonl", range(3))
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(DatasetError, match="1 of parquet and 1 of json_lines"):
        index_folder(tmp_path)
    assert len(index_folder(tmp_path, "json_lines")) == 1
    (tmp_path / "c.jsonl.gz").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"c\.jsonl\.gz must not be compressed"):
        index_folder(tmp_path, "json_lines")
    for name, columns in (("a.csv", "a,b"), ("b.csv", "b,a")):
        (tmp_path / name).write_text(f"{columns}\n1,2\n")
    with pytest.raises(DatasetError, match=r"same columns: a\.csv has a, b, but b\.csv has b, a"):
        index_folder(tmp_path, "csv_rows")
    with pytest.raises(InvalidArgumentError, match=r"format must be one of parquet, arrow, .*, got 'tar'"):
        index_folder(tmp_path, "tar")
    with pytest.raises(DatasetError, match="must be a folder with a dataset's files"):
        index_folder(tmp_path / "nothing")


def test_a_header_lost_within_a_sample_is_named(tmp_path: Path) -> None:
    """Of an archive that was indexed before: what reads as its end is not the end of the sample."""
    archive(tmp_path / "a.tar", [("1.txt", b"1"), ("1.cls", b"2")])
    index_folder(tmp_path)
    forget_fingerprints(tmp_path)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[1024:1536] = bytes(512)
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ShardCorruptError, match=r"a\.tar: sample 0 cannot be read: .*is damaged"):
        StreamingDataset(tmp_path)[0]


def test_index_of_a_writer_is_kept(tmp_path: Path) -> None:
    with CSVWriter(tmp_path / "made", {"n": "int"}) as shards:
        shards.write({"n": 1})
    before = (tmp_path / "made" / "index.json").read_bytes()
    with pytest.raises(DatasetError, match="must not be replaced, because a writer made it for shards of csv"):
        index_folder(tmp_path / "made")
    assert (tmp_path / "made" / "index.json").read_bytes() == before


@pytest.mark.parametrize("name", ["more", "b.jsonl"])
def test_links_that_lead_to_no_file_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jsonl", range(3))
    (tmp_path / name).symlink_to(tmp_path.parent if name == "more" else tmp_path / "gone")
    with pytest.raises(DatasetError, match=f"{name} must be a file or a folder, got a link"):
        index_folder(tmp_path)


def test_cached_results_of_map_are_left_out(tmp_path: Path) -> None:
    for name in ("ds-train.arrow", "cache-123.arrow"):
        table = pyarrow.table({"a": [1, 2]})
        with pyarrow.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(table)
    assert sum(shard.samples for shard in index_folder(tmp_path)) == 2
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "state.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"Index .*below instead"):
        index_folder(tmp_path)


def test_missing_index_names_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", range(3))
    with pytest.raises(DatasetError, match=r"Call index_folder\('.*'\) to index"):
        StreamingDataset(tmp_path)


@pytest.mark.parametrize("byte", [0, 16, 32, 56], ids=["magic", "size", "records", "offset"])
def test_damaged_offsets_are_named(tmp_path: Path, byte: int) -> None:
    write(tmp_path / "a.jsonl", range(5))
    index_folder(tmp_path)
    path = tmp_path / "__penstock__/a.jsonl.penstock-index"
    table = bytearray(path.read_bytes())
    table[byte] ^= 1
    path.write_bytes(table)
    with pytest.raises(ShardCorruptError, match=r"__penstock__/a\.jsonl\.penstock-index.* Write the index again"):
        StreamingDataset(tmp_path)[0]


# ---- several processes


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files but the first are indexed in two processes, which are forked."""
    monkeypatch.setattr(job_processes, "spawn", forked_jobs(indexing.index_jobs))
    monkeypatch.setattr(indexing, "MEASURE_S", 0.0)
    monkeypatch.setattr(indexing, "WORTH_S", 0.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})


@pytest.mark.usefixtures("in_processes")
def test_processes_share_the_files(tmp_path: Path) -> None:
    for part in range(7):
        write(tmp_path / f"{part}.jsonl", range(part * 5, part * 5 + 5))
    assert [shard.name for shard in index_folder(tmp_path)] == [f"{part}.jsonl" for part in range(7)]
    dataset = StreamingDataset(tmp_path)
    assert [dataset[at]["n"] for at in range(35)] == list(range(35))
