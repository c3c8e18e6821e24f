"""A machine is lost in the middle of a save: a job that is started again does not wait for what will not be done."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_states import save_of

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.restoring import places
from penstock.client.checkpoint.saving import folder_save
from penstock.client.checkpoint.saving.folder_save import FolderSave
from penstock.client.checkpoint.saving.save_job import WriteFailed
from penstock.proto.errors import DeadlineError
from penstock.proto.state.checkpoint_files import (
    ASKED,
    LOCK,
    checkpoints,
    leftovers,
    locked,
    report_name,
    sign_name,
    sign_of_life,
)


def saved(folder: Path) -> None:
    with AsyncCheckpointer(folder, fsync=False) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(3)})


def test_a_restore_after_a_lost_node(tmp_path: Path) -> None:
    """The real times apply: rank 0's training process is gone, and rank 1's machine."""
    saved(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(save_of(tmp_path, 0, orphaned=True).run)
        while not (tmp_path / "step-2.tmp-0abc").exists():
            time.sleep(0.01)
        began = time.monotonic()
        with AsyncCheckpointer(tmp_path) as checkpointer:
            state = {"x": torch.zeros(3)}
            assert checkpointer.restore(state) == 1
        assert time.monotonic() - began < 10  # what is promised; 5 s of it are the writer's patience
        with pytest.raises(WriteFailed, match="rank 1: its writer showed no sign of life for 5 s after the"):
            ended.result()


def test_a_writer_that_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training process is gone on both machines, and rank 1's writer has more to write."""
    monkeypatch.setattr(FolderSave, "silence_s", 0.4)
    monkeypatch.setattr(FolderSave, "sign_s", 0.1)
    slow, first = save_of(tmp_path, 1, orphaned=True), save_of(tmp_path, 0, orphaned=True)

    def write() -> list[Any]:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            slow._progress()
            time.sleep(0.05)
        return []

    monkeypatch.setattr(slow, "_write", write)
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(one.run) for one in (first, slow)]:
            ended.result()
    assert [one.step for one in checkpoints(tmp_path)] == [2]
    assert sorted(path.name for path in (tmp_path / "step-2").iterdir()) == [".metadata", "index.json", "penstock.json"]


def test_an_orphaned_writer_leaves_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer holds as much memory as its rank's state."""
    monkeypatch.setattr(FolderSave, "silence_s", 0.2)
    monkeypatch.setattr(folder_save, "PROBE_S", 0.05)
    with pytest.raises(WriteFailed, match=r"rank 0: its writer showed no sign of life for 0\.4 s after the training"):
        save_of(tmp_path, 1, orphaned=True).run()
    assert not leftovers(tmp_path)


def test_ranks_that_train_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderSave, "silence_s", 0.05)
    first = save_of(tmp_path, 0)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(first.run)
        while not first.temporary.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        assert not ended.done()
        assert not (first.temporary / ASKED).exists()
        (first.temporary / report_name(1)).write_text(json.dumps({"save": "0abc", "files": [], "error": None}))
        ended.result()
    assert not (tmp_path / "step-2" / sign_name(1)).exists()


def test_a_lock_that_a_lost_machine_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock stays for a while on a network file system. Complete checkpoints are read all the same."""
    monkeypatch.setattr(places, "SILENCE_S", 0.3)
    saved(tmp_path)
    with locked(tmp_path, 1):
        with AsyncCheckpointer(tmp_path) as checkpointer:
            assert checkpointer.restore({"x": torch.zeros(3)}) == 1
        silent = rf"process {os.getpid()} on .* no sign of life for 0.2 s"
        with pytest.raises(DeadlineError, match=silent), locked(tmp_path, 1800, silence_s=0.2):
            pass
        ended = threading.Event()

        def live() -> None:
            while not ended.wait(0.1):
                sign_of_life(tmp_path / LOCK)

        thread = threading.Thread(target=live)
        thread.start()
        with pytest.raises(DeadlineError, match=r"waited 1.5 s for process"), locked(tmp_path, 1.5, silence_s=1.0):
            pass
        ended.set()
        thread.join()
