"""Calls that come together: from several threads, and from signal handlers, at any instant of a save."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import run
from torch import nn
from waiting import until

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import CheckpointError, InvalidArgumentError
from penstock.proto.state.checkpoint_files import checkpoints

TIMES = int(os.environ.get("PENSTOCK_SIGNALS", "24"))
"""Signals that are sent at random instants; `make signals` has 200."""
LIVE = 100_000
"""Steps from here on are saved by signal handlers."""


def state_of(mark: float) -> dict[str, Any]:
    return {"x": torch.full((2000,), mark), "y": {"z": torch.full((3,), mark), "note": f"mark {mark}", "n": mark}}


def mark_of(checkpointer: AsyncCheckpointer, step: int) -> float:
    """Return the value of a saved checkpoint; fail if its values come from two saves."""
    state = state_of(-1.0)
    assert checkpointer.restore(state, step=step) == step
    marks = {*state["x"].unique().tolist(), *state["y"]["z"].tolist(), state["y"]["n"]}
    assert len(marks) == 1, marks
    mark = float(marks.pop())
    assert state["y"]["note"] == f"mark {mark}"
    return mark


@contextmanager
def handled(handler: Any, number: int = signal.SIGUSR1) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def signals_at_random(longest_s: float, seen: list[int] | None = None) -> Iterator[None]:
    """Sent to this process, for as long as it is in here."""
    ended, chance = threading.Event(), random.Random(0)

    def send() -> None:
        sent = 0
        while not ended.is_set():
            time.sleep(chance.random() * longest_s)
            if seen is None or len(seen) == sent:  # else two would come within one save of a slow machine
                sent += 1
                os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_threads_that_save_with_one_checkpointer(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path, buffers=2, fsync=False) as checkpointer, ThreadPoolExecutor(8) as pool:
        for ended in [pool.submit(checkpointer.save, step, state_of(float(step))) for step in range(16)]:
            ended.result()
        checkpointer.wait()
        assert [mark_of(checkpointer, step) for step in range(16)] == list(map(float, range(16)))


def test_handlers_that_save_at_random_instants(tmp_path: Path) -> None:
    """The handler saves the complete state of that instant; so is what the loop saves."""
    live = state_of(0.0)
    handled_steps: list[int] = []
    seen: list[int] = []
    busy = False

    def handler(number: int, frame: Any) -> None:
        nonlocal busy
        seen.append(number)
        if len(handled_steps) < TIMES and not busy:
            busy = True
            handled_steps.append(LIVE + len(handled_steps))
            checkpointer.save(handled_steps[-1], live)
            if len(handled_steps) % 10 == 0:
                checkpointer.wait()
            busy = False

    def set_to(mark: float) -> None:
        nonlocal live
        live = state_of(mark)  # at once, as far as a handler can see

    with AsyncCheckpointer(tmp_path, buffers=2, fsync=False) as checkpointer:
        with handled(handler), signals_at_random(0.012, seen):
            step = 0
            while len(handled_steps) < TIMES:
                set_to(float(step))
                checkpointer.save(step, live)
                step += 1
        checkpointer.wait()
        marks = [mark_of(checkpointer, number) for number in range(0, step, 7)]
        assert marks == list(map(float, range(0, step, 7)))
        found = [mark_of(checkpointer, one) for one in handled_steps]
        assert found == sorted(found)
        assert {one.step for one in checkpoints(tmp_path)} == {*range(step), *handled_steps}


def test_handlers_that_raise_at_random_instants(tmp_path: Path) -> None:
    """Ctrl-C: the checkpointer can be used at once, and what is there is whole."""

    interrupted, armed = 0, False

    def handler(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False  # here: a second signal could come before the loop has caught this one
            raise KeyboardInterrupt

    with AsyncCheckpointer(tmp_path, fsync=False) as checkpointer, handled(handler), signals_at_random(0.006):
        for step in range(TIMES // 4):
            try:
                armed = True
                checkpointer.save(step, state_of(float(step)))
                armed = False
            except KeyboardInterrupt:
                interrupted += 1
        checkpointer.wait()
        there = [one.step for one in checkpoints(tmp_path)]
        assert [mark_of(checkpointer, step) for step in there] == list(map(float, there))
    assert interrupted
    assert len(there) >= TIMES // 4 - interrupted


def test_a_handler_may_save_wait_and_leave(tmp_path: Path) -> None:
    """Signal in the middle of a save, during `state_dict`."""

    class Slow:
        def state_dict(self) -> dict[str, int]:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            assert not seen
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    def handler(number: int, frame: Any) -> None:
        seen.append(1)
        checkpointer.save(2, state_of(2.0))
        checkpointer.wait()
        raise SystemExit(7)

    seen: list[int] = []
    with AsyncCheckpointer(tmp_path, fsync=False) as checkpointer:
        with handled(handler), pytest.raises(SystemExit):
            checkpointer.save(1, {"slow": Slow()})
        assert [one.step for one in checkpoints(tmp_path)] == [2, 1]


def test_a_save_within_a_call_is_an_error_by_name(tmp_path: Path) -> None:
    class Saves:
        def state_dict(self) -> dict[str, int]:
            checkpointer.save(2, {"x": 1})
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    with AsyncCheckpointer(tmp_path, fsync=False) as checkpointer:
        with pytest.raises(CheckpointError, match=r"save\(\) was called within save\(\) of the same AsyncCheckpointer"):
            checkpointer.save(1, {"it": Saves()})
        checkpointer.save(3, {"x": 1})
        checkpointer.wait()
        assert [one.step for one in checkpoints(tmp_path)] == [3]

        class Loads(Saves):
            def state_dict(self) -> dict[str, int]:
                return {"a": 1}

            def load_state_dict(self, state: dict[str, int]) -> None:
                checkpointer.save(5, {"x": 1})

        checkpointer.save(4, {"it": Loads()})
        with pytest.raises(CheckpointError, match=r"save\(\) was called within restore\(\) of"):
            checkpointer.restore({"it": Loads()})


def test_an_interrupted_close_finishes_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = AsyncCheckpointer(tmp_path)
    pid = checkpointer._writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    checkpointer.save(1, state_of(1.0))
    with handled(signal.default_int_handler):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
    os.kill(pid, signal.SIGCONT)
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert [one.step for one in checkpoints(tmp_path)] == [1]


def test_only_a_second_interrupt_acts(tmp_path: Path) -> None:
    """Torchrun passes its ranks a SIGTERM that they have got, and Slurm's scripts repeat theirs."""
    repeated = f"""
import os, signal, sys
import torch
from penstock.client.checkpoint import AsyncCheckpointer

class Slow:
    def state_dict(self):
        for number in (signal.SIGTERM, signal.SIGTERM, *sys.argv[1:]):
            os.kill(os.getpid(), int(number))
        return {{"x": 1}}

    def load_state_dict(self, state): ...

with AsyncCheckpointer({str(tmp_path)!r}, on_signal=(signal.SIGTERM, signal.SIGINT), fsync=False) as checkpointer:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpointer.signalled()
    checkpointer.save(1, {{"slow": Slow()}})
    checkpointer.wait()
    os.kill(os.getpid(), signal.SIGTERM)
"""
    command = [sys.executable, "-c", repeated]
    assert subprocess.run(command, timeout=100, check=False).returncode == 0
    assert [one.step for one in checkpoints(tmp_path)] == [1]
    interrupted = subprocess.run([*command, str(int(signal.SIGINT))], timeout=100, check=False, capture_output=True)
    assert interrupted.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in interrupted.stderr


def test_signals_are_passed_on_to_earlier_handlers(tmp_path: Path) -> None:
    seen: list[int] = []
    with handled(lambda number, frame: seen.append(number)):
        with AsyncCheckpointer(tmp_path, on_signal=signal.SIGUSR1, fsync=False) as checkpointer:
            model = nn.Linear(2, 2)
            assert not checkpointer.signalled()
            os.kill(os.getpid(), signal.SIGUSR1)
            until(checkpointer.signalled)
            assert len(seen) == 1  # who was there before is told too
            checkpointer.save(1, {"model": model})
        handler = signal.getsignal(signal.SIGUSR1)
        assert callable(handler)
        handler(1, None)
        assert len(seen) == 2
        with pytest.raises(InvalidArgumentError, match=r"on_signal must be .*, got 999"):
            AsyncCheckpointer(tmp_path, on_signal=999)
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(InvalidArgumentError, match="must be created on the main thread"),
        ):
            pool.submit(AsyncCheckpointer, tmp_path, on_signal=[signal.SIGUSR1]).result()


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """A signal comes to one of them."""
    found = [one.value for one in run(2, "ranked_saves:preempted", str(tmp_path))]
    assert found[0] == found[1]
    assert [one.step for one in checkpoints(tmp_path)] == [found[0]]
