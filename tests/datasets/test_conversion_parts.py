"""Conversion in parts: after kills, by several processes, beside other runs, to full disks and to remote folders."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import files_in, names_in, rows_in, to_mds
from forked import Child, join_all
from forked_jobs import forked_jobs
from fsspec.implementations.memory import MemoryFileSystem
from offset_files import forget_fingerprints
from shardsets import numbers

from penstock.data import convert_dataset, index_folder, job_processes
from penstock.data.converting import convert, convert_part
from penstock.data.formats.index import INDEX
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, ShardCorruptError


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_processes, "spawn", forked_jobs(convert_part.converting))


@pytest.fixture
def part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each shard a part of its own, however small."""
    monkeypatch.setattr(convert_part, "SHARD_BYTES", convert_part.PART_BYTES)


def run_until(fsyncs: int, work: Callable[[], object]) -> None:
    """Do the work, and kill this process at one of its fsyncs."""
    plain, left = os.fsync, fsyncs

    def fsync(fd: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        work()


def finished(folder: Path) -> dict[str, int]:
    """Inode of the shard in each part that has an index."""
    return {path.parent.name: next(path.parent.glob("shard.*")).stat().st_ino for path in folder.glob(f"*/{INDEX}")}


def test_killed_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill every run after some writes, more from time to time, until one comes to its end. A part has two shards."""
    monkeypatch.setattr(convert_part, "SHARD_BYTES", convert_part.PART_BYTES // 4)
    numbers(tmp_path / "from", 100)

    def work(folder: str = "to") -> Any:
        return to_mds(tmp_path / "from", tmp_path / folder)

    work("whole")
    kept: dict[str, int] = {}
    for runs in range(1, 60):
        child = Child(partial(run_until, 2 + runs, work))
        try:
            child.join()
            break
        except AssertionError as error:
            if "ended with 9" not in str(error):
                raise
        kept = {**kept, **finished(tmp_path / "to")}
        assert (tmp_path / "to" / INDEX).exists() or kept.items() <= finished(tmp_path / "to").items()
    assert runs > 3
    assert {name: next((tmp_path / "to" / name).glob("shard.*")).stat().st_ino for name in kept} == kept
    assert work().made == 0
    assert files_in(tmp_path / "to") == files_in(tmp_path / "whole")


def sized(size: int, samples: int, blocks: tuple[int, ...] = ()) -> Shard:
    return Shard("mds", samples, (ShardFile(StoredFile("shard", size)),), blocks=blocks)


def test_parts_have_every_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, within the limits, of shards that are large, small and empty, with blocks and without."""
    monkeypatch.setattr(convert_part, "PART_BYTES", 1000)
    monkeypatch.setattr(convert_part, "SHARD_BYTES", 20)
    for seed in range(20):
        draw = np.random.default_rng(seed)
        shards = [sized(int(draw.choice([0, 5, 400, 3000])), int(draw.choice([0, 1, 7, 30]))) for _ in range(40)]
        shards += [sized(4000, 20, (3, 10, 0, 7)), sized(0, 0)]
        parts = convert_part.parts_of(shards)
        pieces = [[(shards[number], range(begin, end)) for number, begin, end in part] for part in parts]
        taken = [(id(shard), number) for piece in pieces for shard, numbers in piece for number in numbers]
        assert taken == [(id(shard), number) for shard in shards for number in range(shard.samples)]
        for piece in pieces:
            sizes = [20 + shard.size * len(numbers) / shard.samples for shard, numbers in piece]
            assert len(piece) == 1 or sum(sizes[:-1]) < 500
    assert convert_part.parts_of([sized(4000, 20, (3, 10, 0, 7))]) == [[(0, 0, 3)], [(0, 3, 13)], [(0, 13, 20)]]
    assert convert_part.parts_of([]) == []


@pytest.mark.usefixtures("forked_processes", "part_each")
def test_parts_are_shared_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails ends the run; the others are kept, and the next run makes only the rest."""
    monkeypatch.setattr(convert_part, "PART_BYTES", 500)
    monkeypatch.setattr(convert, "SAMPLED_ROWS", 3)  # the damaged one is not looked at before
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"n": {n}, "name": "{name}"}}\n' for n in range(99)))
    index_folder(tmp_path)
    forget_fingerprints(tmp_path)
    damaged = (tmp_path / "b.jsonl").read_bytes()
    stat = (tmp_path / "b.jsonl").stat()
    (tmp_path / "b.jsonl").write_bytes(damaged.replace(b'{"n": 70,', b'("n": 70,'))
    os.utime(tmp_path / "b.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ShardCorruptError, match=r"b.jsonl, samples \d+ to \d+: .*sample 70 must be a line"):
        to_mds(tmp_path, tmp_path / "to", processes=3)
    assert not (tmp_path / "to" / INDEX).exists()
    before = finished(tmp_path / "to")
    (tmp_path / "b.jsonl").write_bytes(damaged)
    os.utime(tmp_path / "b.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    done = to_mds(tmp_path, tmp_path / "to", processes=2)
    assert (done.parts, done.made, done.samples) == (done.parts, done.parts - len(before), 198)
    assert 8 < done.parts < 20
    assert [row["n"] for row in rows_in(tmp_path / "to")] == [*range(99), *range(99)]


def test_each_part_is_taken_once() -> None:
    """By processes that read from one position."""
    records = range(100_000)
    with contextlib.ExitStack() as stack:
        jobs = stack.enter_context(job_processes.shared_file(b"".join(map(job_processes.JOB.pack, records))))
        taken = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)]

        def take(into: Any) -> None:
            while job := os.read(jobs, job_processes.JOB.size):
                into.write(job)
            into.flush()

        join_all(*(partial(take, into) for into in taken))
        found = b"".join(os.pread(into.fileno(), 1 << 20, 0) for into in taken)
    assert sorted(number for (number,) in job_processes.JOB.iter_unpack(found)) == list(records)


@pytest.mark.usefixtures("forked_processes", "part_each")
def test_killed_process_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers(tmp_path / "from", 40)
    monkeypatch.setattr(convert_part.PartConverter, "convert", lambda self, number: os.kill(os.getpid(), 9))
    with pytest.raises(DatasetError, match=r"ended with exit status -9 before its work was done\. Try again"):
        to_mds(tmp_path / "from", tmp_path / "to", processes=2)


@pytest.mark.usefixtures("part_each")
def test_other_files_are_never_touched(tmp_path: Path) -> None:
    numbers(tmp_path / "from", 30)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").write_text("mine")
    with pytest.raises(DatasetError, match=r"must be empty, but it has mine\. Give another folder"):
        to_mds(tmp_path / "from", tmp_path / "to")
    numbers(tmp_path / "other", 10)
    before = files_in(tmp_path / "other")
    with pytest.raises(DatasetError, match=r"must be empty, but it has shard\.00000\.mds"):
        to_mds(tmp_path / "from", tmp_path / "other")
    assert (files_in(tmp_path / "other"), names_in(tmp_path / "to")) == (before, ["mine"])
    with pytest.raises(AssertionError, match="ended with 9"):
        join_all(lambda: run_until(9, lambda: to_mds(tmp_path / "from", tmp_path / "begun")))
    kept = finished(tmp_path / "begun")
    assert kept
    for change in ({"compression": "zstd"}, {"columns": ["number"], "types": {"number": "str_int"}}):
        with pytest.raises(DatasetError, match="must be empty, but it has a dataset of other data or with other sett"):
            to_mds(tmp_path / "from", tmp_path / "begun", **change)
    os.utime(next((tmp_path / "from").glob("shard.*")))
    with pytest.raises(DatasetError, match="must be empty, but it has a dataset of other data or with other settings"):
        to_mds(tmp_path / "from", tmp_path / "begun")
    assert finished(tmp_path / "begun") == kept


@pytest.mark.usefixtures("part_each")
def test_run_beside_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one begins and ends while this one writes a part: this one ends, and the result stays whole."""
    numbers(tmp_path / "from", 30)
    plain = convert_part.PartConverter._verify

    def verify(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        monkeypatch.setattr(convert_part.PartConverter, "_verify", plain)
        assert to_mds(tmp_path / "from", tmp_path / "to").made == 3

    to_mds(tmp_path / "from", tmp_path / "whole")
    monkeypatch.setattr(convert_part.PartConverter, "_verify", verify)
    with pytest.raises(DatasetError, match=r"could not be written: No such file.* Finished parts are kept"):
        to_mds(tmp_path / "from", tmp_path / "to")
    assert files_in(tmp_path / "to") == files_in(tmp_path / "whole")


@pytest.mark.usefixtures("part_each")
def test_remote_to_remote(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that fails ends the run; the next one makes the rest."""
    numbers(f"{bucket}/from", 40, compression="zstd", hashes=["sha1"])  # type: ignore[arg-type]
    plain, sent = MemoryFileSystem.put_file, 0

    def put_file(self: Any, lpath: str, rpath: str, **keywords: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == 3:
            raise PermissionError(rpath)
        plain(self, lpath, rpath, **keywords)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(DatasetError, match=r"could not be written after 1 try"):
        convert_dataset(f"{bucket}/from", f"{bucket}/to", "parquet", processes=1)
    done = convert_dataset(f"{bucket}/from", f"{bucket}/to", "parquet", processes=1)
    assert done.parts - done.made == 2
    rows = rows_in(f"{bucket}/to", local=tmp_path / "cache")
    assert [row["number"] for row in rows] == list(range(40))
    names = RemoteFolder(f"{bucket}/to").find(deadline_s=9)
    assert len([name for name in names if not name.startswith("part-")]) == 1, names


@pytest.mark.usefixtures("part_each")
def test_written_parts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that the disk changed is noticed before it counts."""
    numbers(tmp_path / "from", 30)
    plain = convert_part.PartConverter._verify

    def verify(self: Any, folder: str, shards: Any, digest: Any) -> None:
        path = Path(folder, shards[0].name)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        plain(self, folder, shards, digest)

    monkeypatch.setattr(convert_part.PartConverter, "_verify", verify)
    with pytest.raises(DatasetError, match=r"must have 10 rows of it with digest .* reading them back gives 10 with"):
        to_mds(tmp_path / "from", tmp_path / "to")
    assert not list((tmp_path / "to").rglob(INDEX))
