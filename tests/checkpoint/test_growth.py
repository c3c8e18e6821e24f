"""A long training: the writer takes no more memory after many saves, and a listing reads no manifest twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.state import checkpoint_files
from penstock.proto.state.checkpoint_files import MANIFEST, Manifest, checkpoints, newest, read_manifest

KIB = 1024


def anonymous_memory(pid: int) -> int:
    """In bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("Anonymous:"))


def test_a_writer_does_not_grow(tmp_path: Path) -> None:
    """A cycle of objects that stays after each save takes 3 KiB or more."""
    with AsyncCheckpointer(tmp_path, keep_last=1, fsync=False) as checkpointer:

        def save(steps: range) -> int:
            for step in steps:
                checkpointer.save(step, {"x": torch.ones(3), "note": "text"})
                checkpointer.wait()
            assert checkpointer._writer.pid
            return anonymous_memory(checkpointer._writer.pid)

        before = save(range(100))
        assert save(range(100, 400)) - before < 800 * KIB  # once an arena of Python's allocator may be added


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoints whose manifests were read."""
    names: list[str] = []

    def read(path: Path, **options: Any) -> Manifest:
        names.append(path.name)
        return read_manifest(path, **options)

    monkeypatch.setattr(checkpoint_files, "read_manifest", read)
    return names


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[AsyncCheckpointer]:
    """Checkpointer with three checkpoints, saved long ago."""
    with AsyncCheckpointer(tmp_path, fsync=False) as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"x": torch.ones(3)})
            checkpointer.wait()
        for path in tmp_path.glob(f"*/{MANIFEST}"):
            os.utime(path, (1e9, 1e9))
        yield checkpointer


def test_a_listing_reads_only_new_manifests(kept: AsyncCheckpointer, reads: list[str]) -> None:
    folder = kept.folder
    assert [one.step for one in checkpoints(folder)] == [2, 1, 0]
    assert sorted(reads) == ["step-0", "step-1", "step-2"]
    reads.clear()
    assert kept.newest() == kept.latest() == 2
    assert not reads
    kept.save(3, {"x": torch.ones(3)})
    kept.wait()
    assert kept.latest() == 3
    assert reads == ["step-3"]


def test_a_manifest_that_changes_is_read_again(kept: AsyncCheckpointer, reads: list[str]) -> None:
    where = kept.folder / "step-2" / MANIFEST
    good = where.read_bytes()
    bad = good.replace(b'"step": 2', b'"step": 7')
    assert kept.latest() == 2
    for _ in range(20):  # each write is a moment after the last reading, and leaves inode and size as they are
        where.write_bytes(bad)
        found = newest(kept.folder)
        assert found is not None
        assert found.step == 1
        where.write_bytes(good)
        assert kept.latest() == 2
    assert {*reads[3:]} == {"step-2"}


def test_a_lost_file_is_seen_though_the_manifest_is_known(kept: AsyncCheckpointer) -> None:
    assert kept.latest() == 2
    (kept.folder / "step-2" / "index.json").unlink()
    with pytest.warns(UserWarning, match="missing"):
        assert kept.latest() == 1
