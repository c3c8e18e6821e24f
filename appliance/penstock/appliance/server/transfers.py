"""Transfers of snapshots, blobs and states in parts, of at most the declared size. A sender holds memory for which
others wait, so it must keep a minimum rate; the disk's and the coordinator's own time does not count."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from penstock.proto.errors import DeadlineError, ProtocolError

__all__ = ["MinimumRate", "Transfer", "TransferReader", "ended_when_slow"]


log = logging.getLogger(__name__)


PART_S = 30.0
"""Longest time between two parts (of at most 512 KiB) in transfer, in seconds."""
LEAST_BYTES_PER_S = 1 << 20
"""Lowest average rate, after a grace of PART_S: a blob of 70 MB sent at a byte in 10 s kept every job from starting."""


class _HasData(Protocol):
    data: bytes


_Part = TypeVar("_Part", bound=_HasData)


class MinimumRate(Generic[_Part]):
    """Iterator over arriving parts. Raises DeadlineError if nothing arrives for PART_S seconds, or the sender is
    PART_S behind the minimum rate. `what`: name of the call."""

    def __init__(self, what: str, parts: AsyncIterator[_Part]) -> None:
        self._what = what
        self._parts = parts
        self._came = 0
        self._waited_s = 0.0

    def __aiter__(self) -> MinimumRate[_Part]:
        return self

    async def __anext__(self) -> _Part:
        loop = asyncio.get_running_loop()
        begun, left_s = loop.time(), PART_S + self._came / LEAST_BYTES_PER_S - self._waited_s
        try:
            async with asyncio.timeout(min(left_s, PART_S)):
                part = await anext(self._parts)
        except TimeoutError as error:
            if left_s >= PART_S:
                raise DeadlineError(
                    f"{self._what}: no data arrived for {PART_S:g} s. Check the network, and send again"
                ) from error
            waited_s = self._waited_s + loop.time() - begun
            raise DeadlineError(
                f"{self._what}: the sender must send at least {LEAST_BYTES_PER_S} bytes a second, got {self._came} "
                f"bytes in {waited_s:.0f} s. Check the network, and send again"
            ) from error
        self._waited_s += loop.time() - begun
        self._came += len(part.data)
        return part


class Transfer:
    """Value collected from its parts, which must have exactly `size` bytes together."""

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
    """Progress of one reader: the bytes read, and the time since it began."""

    def __init__(self) -> None:
        self._begun = asyncio.get_running_loop().time()
        self._taken = 0
        self.timer: asyncio.TimerHandle

    def took(self, size: int) -> None:
        self._taken += size

    def left_s(self) -> float:
        """Return the seconds until the caller falls below the minimum rate if it reads nothing more."""
        passed = asyncio.get_running_loop().time() - self._begun
        return PART_S + self._taken / LEAST_BYTES_PER_S - passed


@contextmanager
def ended_when_slow(what: str) -> Iterator[TransferReader]:
    """Cancel the current task if its caller reads below the minimum rate: the value takes memory for which others
    wait. A timeout would have no effect, because the handler may wait inside gRPC."""
    task, loop, reader = asyncio.current_task(), asyncio.get_running_loop(), TransferReader()
    assert task is not None

    def check() -> None:
        left_s = reader.left_s()
        if left_s > 0:
            reader.timer = loop.call_later(left_s, check)
        else:
            log.warning(
                "%s was cancelled, because its caller reads less than %d bytes a second", what, LEAST_BYTES_PER_S
            )
            task.cancel()

    reader.timer = loop.call_later(PART_S, check)
    try:
        yield reader
    finally:
        reader.timer.cancel()
