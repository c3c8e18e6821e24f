"""The training process ends with a save in flight, in whatever way: finished, or cleanly abandoned, as it was asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from ranked import run
from waiting import until

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.checkpointer import OnExit
from penstock.proto.state.checkpoint_files import checkpoints, damage, leftovers

PROGRAM = """
    import os, signal, sys
    import torch
    from penstock.client.checkpoint import AsyncCheckpointer

    checkpointers = [AsyncCheckpointer(f"{sys.argv[1]}/{on_exit}", on_exit=on_exit) for on_exit in sys.argv[2:]]
    for checkpointer in checkpointers:
        checkpointer.save(1, {"x": torch.ones(1000)})
        checkpointer.wait()
        pid = checkpointer._writer.pid
        os.kill(pid, signal.SIGSTOP)  # it surely has not written what comes
        checkpointer.save(2, {"x": torch.full((1000,), 2.0)})
        print(pid, flush=True)
    # And here is the end of the program: nothing is closed. It has no main guard either, for it needs none.
"""


def check(folder: Path, *, finished: bool) -> None:
    """The checkpoint is complete, and the next process starts clean."""
    assert [one.step for one in checkpoints(folder)] == ([2, 1] if finished else [1])
    for one in checkpoints(folder):
        assert one.manifest is not None
        assert not list(damage(one.path, one.manifest, contents=True))
    with AsyncCheckpointer(folder) as checkpointer:
        found = {"x": torch.zeros(1000)}
        assert checkpointer.restore(found) == (2 if finished else 1)
        assert found["x"].eq(2 if finished else 1).all()
        checkpointer.save(3, found)
        checkpointer.wait()
    assert not leftovers(folder)


def gone(pid: int) -> bool:
    """No process, and no zombie."""
    return not Path(f"/proc/{pid}").exists()


def test_the_end_of_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program), str(tmp_path), "finish", "abandon"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        finishes, abandons = (int(job.stdout.readline()) for _ in range(2))
        os.kill(finishes, signal.SIGCONT)
        assert job.wait(60) == 0
    for pid, on_exit in ((finishes, "finish"), (abandons, "abandon")):
        assert gone(pid)  # at its end, and not some time later
        check(tmp_path / on_exit, finished=on_exit == "finish")


@pytest.mark.parametrize(("on_exit", "raises"), [("finish", True), ("abandon", True), ("abandon", False)])
def test_the_end_of_the_block(tmp_path: Path, on_exit: OnExit, raises: bool) -> None:
    """Leaving the block without an error finishes all saves."""
    finished = on_exit == "finish" or not raises
    with suppress(ValueError), AsyncCheckpointer(tmp_path, on_exit=on_exit) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(1000)})
        checkpointer.wait()
        pid = checkpointer._writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        checkpointer.save(2, {"x": torch.full((1000,), 2.0)})
        if finished:
            os.kill(pid, signal.SIGCONT)
        if raises:
            raise ValueError("the training fails")
    assert pid is not None
    assert gone(pid)
    check(tmp_path, finished=finished)


@contextmanager
def in_flight(tmp_path: Path, on_exit: str, end: str) -> Iterator[tuple[int, Path]]:
    """The stopped writer of a job with a save in flight, and the folder. The job has ended when the block is left."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, 1, "ranked_saves:in_flight", str(tmp_path / "saved"), on_exit, end, str(tmp_path))
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
        writer, trainer = map(int, (tmp_path / "pid").read_text().split())
        try:
            yield writer, tmp_path / "saved"
        finally:
            (tmp_path / "go").touch()
            assert job.result()[0].raised == "killed"
        until(lambda: gone(trainer))


@pytest.mark.parametrize(("end", "on_exit"), [("exit", "finish"), ("killed", "abandon")])
def test_an_end_that_nobody_sees(tmp_path: Path, on_exit: str, end: str) -> None:
    with in_flight(tmp_path, on_exit, end) as (pid, folder):
        pass
    os.kill(pid, signal.SIGCONT)
    until(lambda: gone(pid))
    check(folder, finished=on_exit == "finish")


def test_a_restart_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    """A job that is killed is started again before its writer has done: it goes on from what that still writes."""
    with in_flight(tmp_path, "finish", "killed") as (pid, folder):
        # Let the writer begin, so that it holds the folder, and stop it again before it is done.
        writing = False
        while not writing:
            os.kill(pid, signal.SIGCONT)
            os.sched_yield()
            os.kill(pid, signal.SIGSTOP)
            writing = bool(list(folder.glob("step-2.tmp-*"))) or (folder / "step-2").exists()
    found = {"x": torch.zeros(1000)}
    with AsyncCheckpointer(folder) as checkpointer:
        waker = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
        waker.start()
        assert checkpointer.restore(found) == 2
        waker.join()
    assert found["x"].eq(2).all()
