"""The order in which runners start, and how long others wait."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from coroutines import in_loop

from penstock.worker.processes.process_use import wait_while_active
from penstock.worker.processes.turn_queue import TurnQueue


@contextmanager
def running(*command: str) -> Iterator[int]:
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(10)


@in_loop
async def test_first_come_first_served() -> None:
    queue = TurnQueue(2)
    turns = [queue.join() for _ in range(5)]
    assert [turn.position for turn in turns] == [0, 0, 1, 2, 3]
    assert [turn.came.done() for turn in turns] == [True, True, False, False, False]
    turns[3].end()  # given up while it waited
    assert [turn.position for turn in turns] == [0, 0, 1, 0, 2]
    turns[0].end()
    turns[0].end()
    assert [turn.position for turn in turns] == [0, 0, 0, 0, 1]
    for turn in turns:
        turn.end()
    assert len(queue) == 0
    assert [queue.join().position for _ in range(3)] == [0, 0, 1]


@in_loop
async def test_urgent_turns_come_first() -> None:
    """A slot of a job that trains goes on before others begin."""
    queue = TurnQueue(1)
    queue.join()
    turns = [queue.join(urgent=urgent) for urgent in (False, True, False, True)]
    assert [turn.position for turn in turns] == [3, 1, 4, 2]


@pytest.mark.parametrize("how", ["stands still", "is ready"])
def test_turn_ends_before_its_time(how: str) -> None:
    """A runner that needs no processor keeps nobody waiting, nor does one that is ready."""

    async def body(pid: int) -> None:
        queue = TurnQueue(1)
        turn, after = queue.join(), queue.join()
        ending = asyncio.ensure_future(turn.end_when_idle(pid))
        if how == "is ready":
            turn.end()
        await asyncio.wait_for(asyncio.gather(after.came, ending), 9)

    command = ["sleep", "60"] if how == "stands still" else ["sh", "-c", "while :; do :; done"]
    with running(*command) as pid:
        asyncio.run(body(pid))


def test_deadline_counts_time_of_standing_still() -> None:
    async def body(idle: int, busy: int) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_while_active(asyncio.Event().wait(), idle, 0.6, 100), 50)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_while_active(asyncio.Event().wait(), busy, 100, 0.6), 50)
        await wait_while_active(asyncio.sleep(1.2), busy, 0.6, 100)

    with running("sleep", "60") as idle, running("sh", "-c", "while :; do :; done") as busy:
        asyncio.run(body(idle, busy))
