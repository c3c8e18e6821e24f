"""A queue for tasks that take seconds of processor time: a few run at a time, the others wait in order.

Starting a runner takes an interpreter, torch and the user's imports. If fifty start at once on two cores, each takes
many times longer and exceeds its deadline. So as many start at a time as there are processors; helper tasks
(replayers.py) have another queue of this kind.

A start that does not use a processor does not delay others: a runner whose input_fn reads an index for minutes, or
waits for the other slots of its run, gives up its turn as soon as it is idle, and after `TURN_S` in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable

from penstock.worker.resources.processor_time import LOOK_S, ProcessorDemand

__all__ = ["QueueTurn", "TurnQueue"]

TURN_S = 10.0
"""Largest number of seconds after its fork in which a busy runner keeps its turn."""
IDLE_SHARE = 0.3
"""Share of a processor below which a starting runner counts as idle, and gives its turn up."""
IDLE_LOOKS = 2
"""Consecutive measurements below IDLE_SHARE after which the turn ends."""


class QueueTurn:
    """A turn: in the queue, then running, then over. Made by `TurnQueue.join`."""

    def __init__(self, queue: TurnQueue) -> None:
        self._queue = queue
        self.over = asyncio.Event()
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done once the turn has begun."""

    @property
    def place(self) -> int:
        """Position in the queue, from 1; 0 if it is not in the queue any more."""
        return self._queue.place(self)

    async def end_when_idle(self, pid: int) -> None:
        """Wait until the runner `pid` uses almost no processor time, or for TURN_S at most; then end the turn."""
        demand, idle, until = ProcessorDemand(pid), 0, time.monotonic() + TURN_S
        while idle < IDLE_LOOKS and time.monotonic() < until and not self.over.is_set():
            idle = idle + 1 if demand.look(time.monotonic()) < IDLE_SHARE else 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), LOOK_S)
        self.end()

    def end(self) -> None:
        """End the turn; the next one begins. A second call does nothing."""
        if not self.over.is_set():
            self.over.set()
            self._queue.leave(self)


class TurnQueue:
    """
    Args:
        at_once: largest number of turns at a time.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._under_way = 0
        self._urgent: dict[QueueTurn, None] = {}
        self._others: dict[QueueTurn, None] = {}
        self._places: dict[QueueTurn, int] = {}
        """Positions of the waiting turns; empty until the first request for one."""
        self._lent: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        """Return the count of turns that wait."""
        return len(self._urgent) + len(self._others)

    def place(self, turn: QueueTurn) -> int:
        """Return the position of a turn, see QueueTurn.place."""
        if len(self._places) != len(self):
            self._places = {waiting: number for number, waiting in enumerate([*self._urgent, *self._others], 1)}
        return self._places.get(turn, 0)

    def join(self, *, urgent: bool = False) -> QueueTurn:
        """Join the queue at its end, or after the last urgent turn if `urgent`: urgent turns come first. The caller
        must `end` the returned turn."""
        turn = QueueTurn(self)
        (self._urgent if urgent else self._others)[turn] = None
        self._next()
        return turn

    def leave(self, turn: QueueTurn) -> None:
        """Remove a turn, see QueueTurn.end."""
        waiting = self._urgent if turn in self._urgent else self._others
        if turn in waiting:
            del waiting[turn]
            turn.came.cancel()
        else:
            self._under_way -= 1
        self._next()

    @contextlib.asynccontextmanager
    async def turn(self, *, urgent: bool) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the block."""
        turn = self.join(urgent=urgent)
        try:
            await turn.came
            yield
        finally:
            turn.end()

    def lend_until(self, ended: Awaitable[None]) -> None:
        """Allow one turn less until `ended`, because a start that failed still uses the machine."""
        self._under_way += 1
        lent = asyncio.ensure_future(ended)
        self._lent.add(lent)
        lent.add_done_callback(self._taken_back)

    def _taken_back(self, lent: asyncio.Future[None]) -> None:
        self._lent.discard(lent)
        self._under_way -= 1
        self._next()

    def _next(self) -> None:
        while (waiting := self._urgent or self._others) and self._under_way < self.at_once:
            turn = next(iter(waiting))
            del waiting[turn]
            self._under_way += 1
            if not turn.came.done():  # otherwise the waiting task was cancelled, and is about to end the turn
                turn.came.set_result(None)
        self._places = {}
