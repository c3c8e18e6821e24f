"""Queue for tasks that take seconds of processor time; a few run at a time. A *turn* is a task's place, and later its
permission to run.

Fifty starts at once on two cores each take many times longer and exceed their deadlines. So as many run as there are
processors. Helper tasks have another queue. A start that is idle, as input_fn reads
an index or waits for other slots, delays no others, so its turn ends when it is idle or ready, or after `TURN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from penstock.worker.processes.process_use import LOOK_S, ProcessorDemand

TURN_S = 10.0
"""Seconds for which a starting runner may keep the next one waiting."""
IDLE_SHARE = 0.3
"""Share of time running or waiting for a processor, below which a starting runner counts as idle."""
IDLE_LOOKS = 2


class QueueTurn:
    """Place of one task: it waits, then may run, then `end` makes room for the next."""

    def __init__(self, queue: TurnQueue, *, urgent: bool) -> None:
        self._queue, self.urgent = queue, urgent
        self.over = asyncio.Event()
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.position = 0
        """Position in the queue, from 1; 0 once the task may run."""

    async def end_when_idle(self, pid: int) -> None:
        """End the turn when the main thread of process `pid` needs almost no processor, after TURN_S at the latest."""
        demand, idle, until = ProcessorDemand(pid), 0, time.monotonic() + TURN_S
        while idle < IDLE_LOOKS and time.monotonic() < until and not self.over.is_set():
            idle = idle + 1 if demand.look(time.monotonic()) < IDLE_SHARE else 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), LOOK_S)
        self.end()

    def end(self) -> None:
        if not self.over.is_set():
            self.over.set()
            self._queue.leave(self)


class TurnQueue:
    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._under_way = 0
        self._waiting: list[QueueTurn] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, *, urgent: bool = False) -> QueueTurn:
        """Return a turn, which the caller must end. urgent: behind the last urgent one and before all others."""
        turn = QueueTurn(self, urgent=urgent)
        self._waiting.append(turn)
        self._waiting.sort(key=lambda waiting: not waiting.urgent)
        self._next()
        return turn

    def leave(self, turn: QueueTurn) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
            turn.came.cancel()
            turn.position = 0
        else:
            self._under_way -= 1
        self._next()

    @contextlib.asynccontextmanager
    async def turn(self, *, urgent: bool) -> AsyncIterator[None]:
        turn = self.join(urgent=urgent)
        try:
            await turn.came
            yield
        finally:
            turn.end()

    def _next(self) -> None:
        while self._waiting and self._under_way < self.at_once:
            turn = self._waiting.pop(0)
            turn.position = 0
            self._under_way += 1
            if not turn.came.done():  # otherwise the waiting task was cancelled, and is about to end the turn
                turn.came.set_result(None)
        for position, turn in enumerate(self._waiting, 1):
            turn.position = position
