"""A queue for tasks that take seconds of processor time. A few tasks run at a time; the others wait in order. A task's
*turn* is its place in the queue, and later its permission to run.

If fifty runners start at once on two cores, each start takes many times longer and exceeds its deadline. So the number
of simultaneous starts is the number of processors, unless the operator sets another (--starts). Helper tasks have
another queue of this kind.

A start that does not use a processor does not delay others: a runner may be idle for minutes, because its input_fn
reads an index or waits for other slots of its run. Its turn ends as soon as it is idle or ready, and `TURN_S` seconds
after its fork in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable

from penstock.worker.processes.process_use import LOOK_S, ProcessorDemand

TURN_S = 10.0
"""Largest number of seconds for which a starting runner keeps the next one waiting."""
IDLE_SHARE = 0.3
"""Share of time in which a starting runner's main thread runs or waits for a processor, below which it counts as
idle."""
IDLE_LOOKS = 2


class QueueTurn:
    """Place of one task in a TurnQueue. First the task waits, then it may run, then `end` makes room for the next
    task."""

    def __init__(self, queue: TurnQueue) -> None:
        self._queue = queue
        self.over = asyncio.Event()
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def position(self) -> int:
        """Position of the task in the queue, counted from 1; 0 once it may run."""
        return self._queue.position_of(self)

    async def end_when_idle(self, pid: int) -> None:
        """End the turn when the main thread of the starting runner, process `pid`, needs almost no processor time,
        after TURN_S seconds at the latest."""
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
    """Queue that lets `at_once` tasks run at the same time."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._under_way = 0
        self._urgent: dict[QueueTurn, None] = {}
        self._others: dict[QueueTurn, None] = {}
        self._positions: dict[QueueTurn, int] = {}
        self._occupied: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def position_of(self, turn: QueueTurn) -> int:
        if len(self._positions) != len(self):
            self._positions = {waiting: number for number, waiting in enumerate([*self._urgent, *self._others], 1)}
        return self._positions.get(turn, 0)

    def join(self, *, urgent: bool = False) -> QueueTurn:
        """Add a task to the queue, and return its turn, which the caller must end. urgent: True puts the task behind
        the last urgent one and before all others."""
        turn = QueueTurn(self)
        (self._urgent if urgent else self._others)[turn] = None
        self._next()
        return turn

    def leave(self, turn: QueueTurn) -> None:
        waiting = self._urgent if turn in self._urgent else self._others
        if turn in waiting:
            del waiting[turn]
            turn.came.cancel()
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

    def occupy_until(self, ended: Awaitable[None]) -> None:
        """Lower the limit by one until `ended` is done: a failed start still uses the machine until its process has
        ended."""
        self._under_way += 1
        occupied = asyncio.ensure_future(ended)
        self._occupied.add(occupied)
        occupied.add_done_callback(self._freed)

    def _freed(self, occupied: asyncio.Future[None]) -> None:
        self._occupied.discard(occupied)
        self._under_way -= 1
        self._next()

    def _next(self) -> None:
        while (waiting := self._urgent or self._others) and self._under_way < self.at_once:
            turn = next(iter(waiting))
            del waiting[turn]
            self._under_way += 1
            if not turn.came.done():  # otherwise the waiting task was cancelled, and is about to end the turn
                turn.came.set_result(None)
        self._positions = {}
