"""Values that come in parts: paced while they come, gathered up to the size that was declared.

A sender that is let in keeps room in memory from others, so it has to keep up a rate. Only the time in which it is
waited for counts: what the disk or the coordinator takes is no fault of its own.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from penstock.appliance.model.limits import Limits
from penstock.proto.errors import DeadlineError, ProtocolError

__all__ = ["MinimumRate", "Transfer", "TransferReader", "ended_when_slow"]


log = logging.getLogger(__name__)


class _HasData(Protocol):
    data: bytes


_Part = TypeVar("_Part", bound=_HasData)


class MinimumRate(Generic[_Part]):
    """The parts of a value, as they come.

    Raises:
        DeadlineError: nothing came for `part_s`, or what came is behind the least rate by that much.
    """

    def __init__(self, what: str, parts: AsyncIterator[_Part], limits: Limits) -> None:
        self._what = what
        self._parts = parts
        self._part_s = limits.part_s
        self._least = limits.least_bytes_per_s
        self._came = 0
        self._waited_s = 0.0

    def __aiter__(self) -> MinimumRate[_Part]:
        return self

    async def __anext__(self) -> _Part:
        loop = asyncio.get_running_loop()
        begun, left_s = loop.time(), self._part_s + self._came / self._least - self._waited_s
        try:
            async with asyncio.timeout(min(left_s, self._part_s)):
                part = await anext(self._parts)
        except TimeoutError as error:
            if left_s >= self._part_s:
                raise DeadlineError(f"{self._what}: nothing more came for {self._part_s:g} s") from error
            raise DeadlineError(
                f"{self._what}: {self._came} bytes came in {self._waited_s:.0f} s, slower than {self._least} bytes a "
                "second, and others wait for the room"
            ) from error
        self._waited_s += loop.time() - begun
        self._came += len(part.data)
        return part


class Transfer:
    """The data parts that follow a header: never more than was declared, and in the end exactly that."""

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._data = io.BytesIO()  # a list would take more for pieces than for what is in them, if they are short

    def add(self, piece: bytes) -> None:
        if self._data.tell() + len(piece) > self._size:
            raise ProtocolError(f"{self._what}: more than the {self._size} bytes declared")
        self._data.write(piece)

    def all(self) -> bytes:
        if self._data.tell() != self._size:
            raise ProtocolError(f"{self._what}: {self._size} bytes declared, {self._data.tell()} came")
        return self._data.getvalue()


class TransferReader:
    """One who is sent a value: what it has taken, and since when."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._begun = asyncio.get_running_loop().time()
        self._taken = 0
        self.timer: asyncio.TimerHandle
        """The next look at it."""

    def took(self, size: int) -> None:
        self._taken += size

    def left_s(self) -> float:
        """Seconds until it is slower than a reader may be."""
        passed = asyncio.get_running_loop().time() - self._begun
        return self._limits.part_s + self._taken / self._limits.least_bytes_per_s - passed


@contextmanager
def ended_when_slow(what: str, limits: Limits) -> Iterator[TransferReader]:
    """End the call that is being answered if its reader does not keep up the rate of senders: the value is in memory
    until then, and others wait for the room. The handler may be anywhere in gRPC, where no timeout of ours reaches, so
    its task is cancelled. The caller learns it when it reads on, or by its own deadline.
    """
    task, loop, reader = asyncio.current_task(), asyncio.get_running_loop(), TransferReader(limits)
    assert task is not None

    def look() -> None:
        left_s = reader.left_s()
        if left_s > 0:
            reader.timer = loop.call_later(left_s, look)
        else:
            log.warning("%s is ended: its reader takes less than %d bytes a second", what, limits.least_bytes_per_s)
            task.cancel()

    reader.timer = loop.call_later(limits.part_s, look)
    try:
        yield reader
    finally:
        reader.timer.cancel()
