"""Folders of plain files, indexed where they lie: lines found exactly, kills survived, damage named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from forked import Child
from forked_jobs import forked_jobs
from small_disk import small_disk_at

from penstock.data import CSVWriter, MDSWriter, StreamingDataset, index_folder, job_processes
from penstock.data.formats.records import json_lines
from penstock.data.writing import indexing
from penstock.data.writing.indexing import STAMPS
from penstock.proto.errors import DatasetError, ShardCorruptError


def write(path: Path, rows: range) -> None:
    path.write_text("".join(json.dumps({"n": n, "text": "ü" * (n % 7)}) + "\n" for n in rows))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 22])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1}\n{"a": 2}\n', [1, 2]),
        (b'{"a": 1}\n{"a": 2}', [1, 2]),
        (b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n', [1, 2]),
        (b'\n \n{"a": 1}\n\n\t \n  {"a": 2}\n\n', [1, 2]),
        (b"", []),
        (b"\n  ", []),
        (b"\xef\xbb\xbf", []),
    ],
)
def test_lines_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, expected: list[int], chunk: int
) -> None:
    monkeypatch.setattr(json_lines, "READ_AT_ONCE", chunk)
    (tmp_path / "a.jsonl").write_bytes(content)
    write(tmp_path / "b.jsonl", range(1))
    assert [shard.samples for shard in index_folder(tmp_path)] == [len(expected), 1]
    dataset = StreamingDataset(tmp_path)
    assert [dataset[i]["a"] for i in range(len(expected))] == expected


def test_killed_run_is_continued(tmp_path: Path) -> None:
    for part in range(6):
        write(tmp_path / f"{part}.jsonl", range(part * 5, part * 5 + 5))
    code = (
        "import dataclasses, sys, time\n"
        "from penstock.data.writing.index_folder import INDEXABLE, index_folder\n"
        "lines = INDEXABLE['json_lines']\n"
        "def slow(path, name, out):\n"
        "    if name == '5.jsonl': time.sleep(600)\n    return lines.index_file(path, name, out)\n"
        "INDEXABLE['json_lines'] = dataclasses.replace(lines, index_file=slow)\n"
        "index_folder(sys.argv[1])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path])
    try:
        deadline = time.monotonic() + 60
        stamps = tmp_path / STAMPS
        while not stamps.exists() or stamps.read_bytes().count(b"\n") < 6:
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    assert not (tmp_path / "index.json").exists()
    with stamps.open("ab") as log:
        log.write(b'["5.jsonl", 1')  # as a kill within a write leaves it
    changed = tmp_path / "1.jsonl"
    changed.write_bytes(changed.read_bytes()[::-1].replace(b"\n", b" ", 2)[::-1])  # of the same size
    before = {n: (tmp_path / f"{n}.jsonl.penstock-index").stat().st_ino for n in range(3)}
    assert [shard.samples for shard in index_folder(tmp_path)] == [5, 4, 5, 5, 5, 5]
    kept = [n for n in range(3) if (tmp_path / f"{n}.jsonl.penstock-index").stat().st_ino == before[n]]
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
    first = (tmp_path / "index.json").read_bytes()
    index_folder(tmp_path)
    assert (read, (tmp_path / "index.json").read_bytes()) == ([], first)
    assert f"{tmp_path}: 5 of 5 files have not changed since they were indexed" in capsys.readouterr().err
    changed, times = tmp_path / "1.jsonl", (tmp_path / "1.jsonl").stat()
    changed.write_text(changed.read_text()[::-1].replace("{\n}", "{ }", 1)[::-1])  # two lines, not three
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changed.stat().st_size == times.st_size
    (tmp_path / "2.jsonl").unlink()
    (tmp_path / "3.jsonl.penstock-index").unlink()
    write(tmp_path / "9.jsonl", range(4))
    assert [shard.samples for shard in index_folder(tmp_path)] == [3, 2, 3, 3, 4]
    assert read == ["1.jsonl", "3.jsonl", "9.jsonl"]


def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call, with more space, reads only what is left."""
    source = tmp_path / "from"
    source.mkdir()
    for part in range(30):
        write(source / f"{part:02}.jsonl", range(part * 1000, part * 1000 + 1000))
    with small_disk_at(tmp_path / "disk", 150_000) as disk:
        with pytest.raises(DatasetError, match=r"cannot be written: .*No space left on device.*Give index_folder"):
            index_folder(source, out=disk)
        assert not (disk / "index.json").exists()
        os.system(f"mount -o remount,size=2000000 {disk}")
        indexed, read = indexing.index_one, list[str]()

        def noted(index_file: Any, path: Path, name: str, out: Path) -> Any:
            read.append(name)
            return indexed(index_file, path, name, out)

        monkeypatch.setattr(indexing, "index_one", noted)
        assert [shard.samples for shard in index_folder(source, out=disk)] == [1000] * 30
        assert 10 < len(read) < 28
        dataset = StreamingDataset(source, disk)
        assert [dataset[at]["n"] for at in range(0, 30_000, 999)] == list(range(0, 30_000, 999))


def test_entries_of_another_release_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", range(3))
    index_folder(tmp_path)
    before = (tmp_path / "a.jsonl.penstock-index").stat().st_ino
    monkeypatch.setattr(indexing, "STAMPS_VERSION", 2)
    index_folder(tmp_path)
    assert (tmp_path / "a.jsonl.penstock-index").stat().st_ino != before


def test_folder_without_samples_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("\n")
    with pytest.raises(DatasetError, match="must have at least one sample, but its 2 files of json_lines have none"):
        index_folder(tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a/x.ndjson", "_temporary/x.jsonl", ".hidden/x.jsonl", "a/.x.jsonl", "_tmp.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, range(3))
    assert [shard.name for shard in index_folder(tmp_path)] == ["a/x.ndjson"]


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="got none"):
        index_folder(tmp_path)
    write(tmp_path / "a.jsonl", range(3))
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(DatasetError, match="1 of parquet and 1 of json_lines"):
        index_folder(tmp_path)
    assert len(index_folder(tmp_path, "json_lines")) == 1
    (tmp_path / "c.jsonl.gz").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"c\.jsonl\.gz must not be compressed"):
        index_folder(tmp_path, "json_lines")


def test_index_of_a_writer_is_kept(tmp_path: Path) -> None:
    with CSVWriter(tmp_path / "made", {"n": "int"}) as shards:
        shards.write({"n": 1})
    before = (tmp_path / "made" / "index.json").read_bytes()
    with pytest.raises(DatasetError, match="must not be replaced, because a writer made it for shards of csv"):
        index_folder(tmp_path / "made")
    assert (tmp_path / "made" / "index.json").read_bytes() == before


@pytest.mark.parametrize("name", ["B.JSONL", "c.Ndjson"])
def test_endings_in_capitals_count(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jsonl", range(3))
    write(tmp_path / name, range(4))
    assert sum(shard.samples for shard in index_folder(tmp_path)) == 7


@pytest.mark.parametrize("name", ["more", "b.jsonl"])
def test_links_that_lead_to_no_file_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jsonl", range(3))
    (tmp_path / name).symlink_to(tmp_path.parent if name == "more" else tmp_path / "gone")
    with pytest.raises(DatasetError, match=f"{name} must be a file or a folder, got a link"):
        index_folder(tmp_path)


@pytest.mark.parametrize("name", ["_delta_log/0.json", ".hoodie/hoodie.properties", "metadata/v1.metadata.json"])
def test_tables_with_removed_files_are_refused(tmp_path: Path, name: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("{}")
    with pytest.raises(DatasetError, match="got a Delta Lake, Hudi or Iceberg table"):
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


def test_index_of_a_writer_is_kept_beside_parquet(tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "made", {"n": "int"}) as shards:
        shards.write({"n": 1})
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "made" / "a.parquet")
    with pytest.raises(DatasetError, match="must not be replaced, because a writer made it for shards of mds"):
        index_folder(tmp_path / "made")


def test_missing_index_names_the_remedy(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", range(3))
    with pytest.raises(DatasetError, match=r"Call index_folder\('.*'\) to index"):
        StreamingDataset(tmp_path)


@pytest.mark.parametrize("damage", ["magic", "count", "order", "short", "grown"])
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "a.jsonl", range(5))
    index_folder(tmp_path)
    sidecar = tmp_path / "a.jsonl.penstock-index"
    table = bytearray(sidecar.read_bytes())
    if damage == "grown":
        write(tmp_path / "a.jsonl", range(6))
    elif damage == "short":
        del table[-3:]
    else:
        table[{"magic": 0, "count": 16, "order": 24 + 16 + 6}[damage]] ^= 1
    sidecar.write_bytes(table)
    with pytest.raises(ShardCorruptError, match=r"a\.jsonl"):
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


@pytest.mark.usefixtures("in_processes")
def test_error_in_a_process_is_raised(tmp_path: Path) -> None:
    for part in range(5):
        write(tmp_path / f"{part}.jsonl", range(3))
    (tmp_path / "3.jsonl").write_text("{\n")
    with pytest.raises(ShardCorruptError, match=r"3\.jsonl: sample 0 must be a line of JSON"):
        index_folder(tmp_path)
    write(tmp_path / "3.jsonl", range(3))
    assert len(index_folder(tmp_path)) == 5


@pytest.mark.usefixtures("in_processes")
def test_killed_processes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(30):
        write(tmp_path / f"{part:02}.jsonl", range(3))
    plain, indexed = job_processes.in_processes, indexing.index_one

    def dying(*given: Any) -> Any:
        for count, said in enumerate(plain(*given)):
            yield said
            if count == 9:
                os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> None:
        monkeypatch.setattr(indexing, "in_processes", dying)
        index_folder(tmp_path)

    child = Child(killed)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == -signal.SIGKILL
    lines = (tmp_path / STAMPS).read_bytes().count(b"\n") - 1
    assert 10 <= lines < 30
    assert not (tmp_path / "index.json").exists()
    read: list[str] = []

    def noted(index_file: Any, path: Path, name: str, out: Path) -> Any:
        read.append(name)
        return indexed(index_file, path, name, out)

    monkeypatch.setattr(indexing, "index_one", noted)
    monkeypatch.setattr(indexing, "WORTH_S", 60.0)
    assert len(index_folder(tmp_path)) == 30
    assert len(read) == 30 - lines
