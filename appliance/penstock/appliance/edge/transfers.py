"""Transfers of snapshots, blobs and states in parts: with a minimum rate, and at most the declared size.

A sender that was admitted holds memory for which others wait, so the sender must keep up a minimum rate. Only the time
in which the coordinator waits for the sender counts, not the time of the disk or of the coordinator itself.
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
    """Iterator over the parts of a value as they arrive, which fails if the sender is slower than a minimum rate.

    Args:
        what: name of the call, for errors.
        parts: parts as gRPC receives them.
        limits: longest pause (`part_s`, in seconds) and minimum rate (`least_bytes_per_s`).

    Raises:
        DeadlineError: nothing arrived for `part_s` seconds, or the sender is `part_s` seconds behind the minimum rate.
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
                raise DeadlineError(
                    f"{self._what}: no data arrived for {self._part_s:g} s. Check the network, and send again"
                ) from error
            waited_s = self._waited_s + loop.time() - begun
            raise DeadlineError(
                f"{self._what}: the sender must send at least {self._least} bytes a second, got {self._came} bytes in "
                f"{waited_s:.0f} s. Check the network, and send again"
            ) from error
        self._waited_s += loop.time() - begun
        self._came += len(part.data)
        return part


class Transfer:
    """Value collected from its parts, whose data must have exactly `size` bytes together."""

    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._data = io.BytesIO()  # a list of short pieces would take more memory than their bytes

    def add(self, piece: bytes) -> None:
        if self._data.tell() + len(piece) > self._size:
            raise ProtocolError(
                f"{self._what}: the data must have the declared {self._size} bytes, got more: send the value again"
            )
        self._data.write(piece)

    def all(self) -> bytes:
        if self._data.tell() != self._size:
            raise ProtocolError(
                f"{self._what}: the data must have the declared {self._size} bytes, got {self._data.tell()}: send the "
                "value again"
            )
        return self._data.getvalue()


class TransferReader:
    """Progress of one caller that reads a value: the bytes that it has read, and the time since it began."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._begun = asyncio.get_running_loop().time()
        self._taken = 0
        self.timer: asyncio.TimerHandle

    def took(self, size: int) -> None:
        self._taken += size

    def left_s(self) -> float:
        """Return the seconds until the caller falls below the minimum rate if it reads nothing more."""
        passed = asyncio.get_running_loop().time() - self._begun
        return self._limits.part_s + self._taken / self._limits.least_bytes_per_s - passed


@contextmanager
def ended_when_slow(what: str, limits: Limits) -> Iterator[TransferReader]:
    """Cancel the current task if the caller that it serves reads below the minimum rate. The value that a slow caller
    reads takes memory for which other calls wait. `what`: name of the call, for the log.

    A timeout in the handler would have no effect, because the handler may be waiting inside gRPC. The caller gets the
    error at its next read, or its own deadline ends the call.
    """
    task, loop, reader = asyncio.current_task(), asyncio.get_running_loop(), TransferReader(limits)
    assert task is not None

    def check() -> None:
        left_s = reader.left_s()
        if left_s > 0:
            reader.timer = loop.call_later(left_s, check)
        else:
            log.warning(
                "%s was cancelled, because its caller reads less than %d bytes a second", what, limits.least_bytes_per_s
            )
            task.cancel()

    reader.timer = loop.call_later(limits.part_s, check)
    try:
        yield reader
    finally:
        reader.timer.cancel()
