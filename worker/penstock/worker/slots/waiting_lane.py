"""The connection of a training job that waits until the slot's runner can take it.

Only one connection waits at a time. If a newer one arrives, the older one is refused. Otherwise a consumer that opens
lanes again and again would fill the runner's control socket and the daemon's table of descriptors. When the slot ends,
the connection that waits is refused at once: no runner will take it, and it would stay open until the deadline, also if
its training job has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.proto.errors import SupersededError

__all__ = ["WaitingLane"]


class WaitingLane:
    """Holder of the one connection of a training job that waits for a slot's runner. name: name of the slot, for
    messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: asyncio.Future[None] | None = None
        self._ended = False

    async def wait(self, until_attachable: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until `until_attachable` returns, and raise what it raises. Raise SupersededError if a newer connection
        arrives meanwhile, or if the slot ends or has ended.

        until_attachable: waits until the slot's runner can take a connection.
        """
        self._refuse_waiting()
        if self._ended:
            raise self._refusal()
        waiting = self._waiting = asyncio.ensure_future(until_attachable())
        try:
            await waiting
        except asyncio.CancelledError:
            if self._waiting is waiting:  # not refused, but cancelled by the caller
                raise
            raise self._refusal() from None

    def end(self) -> None:
        """Refuse the connection that waits, and all later ones, because the slot ends."""
        self._ended = True
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()

    def _refusal(self) -> SupersededError:
        why = "the slot's runner has ended" if self._ended else "a newer connection reads its batches"
        return SupersededError(f"the connection to {self._name} is closed, because {why}")
