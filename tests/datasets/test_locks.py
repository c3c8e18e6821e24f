"""Locks on files, between processes and through a fork."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from forked import join_all

from penstock.data.cache.file_locks import take


def test_forked_child_has_no_locks_of_its_parent(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    lock = take(*os.path.split(path), shared=False)
    assert lock

    def work() -> None:
        assert take(*os.path.split(path), shared=True) is None
        lock.release()
        assert take(*os.path.split(path), shared=True) is None
        own = take(str(tmp_path), "another", shared=False)  # gets the number of what the parent's lock had open
        assert own
        lock.release()
        assert take(str(tmp_path), "another", shared=False) is None

    join_all(work)
    assert take(*os.path.split(path), shared=True) is None
    lock.release()


def test_a_file_that_was_removed_is_opened_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    lock = take(*os.path.split(path), shared=False)
    assert lock
    lock.remove()
    new = take(*os.path.split(path), shared=False)
    assert new, "the removed file's lock keeps nobody off the new one"
    lock.release()
    assert take(*os.path.split(path), shared=False) is None
    new.release()
    new = take(*os.path.split(path), shared=False, create=False)
    assert new
    new.remove()
    new.release()
    with pytest.raises(FileNotFoundError):
        take(*os.path.split(path), shared=False, create=False)


def test_file_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "lock")
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        os.unlink(path)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = take(*os.path.split(path), shared=False)
    assert lock
    assert take(*os.path.split(path), shared=False) is None
    lock.release()
