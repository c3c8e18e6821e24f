"""Transfers of snapshots, blobs and states in parts, of at most the declared size. A sender holds memory for which
others wait, so it must keep a minimum rate; the disk's and the coordinator's own time does not count."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from penstock.proto.errors import DeadlineError, ProtocolError

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
            waited_s = self._waited_s + loop.time() - begun
            raise DeadlineError(
                f"{self._what}: {self._came} bytes came in {waited_s:.0f} s, of at least {LEAST_BYTES_PER_S} a second, "
                f"or none for {PART_S:g} s. Check the network, and send again"
            ) from error
        self._waited_s += loop.time() - begun
        self._came += len(part.data)
        return part

    async def whole(self, first: bytes, size: int, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
        """Return the value, which begins with `first` and must have `size` bytes; b"" once it is not wanted."""
        data = io.BytesIO(first)  # a list of short pieces would take more memory than their bytes
        data.seek(len(first))
        async for part in self:
            if not is_wanted():
                return b""
            data.write(part.data)
            if data.tell() > size:
                break
        if (came := data.tell()) != size:
            got = "more" if came > size else came
            raise ProtocolError(f"{self._what}: the data must have the declared {size} bytes, got {got}")
        return data.getvalue()


class _Reader:
    """Reader of a value, which took `taken` bytes; its task is cancelled if it reads below the minimum rate."""

    def __init__(self, what: str) -> None:
        self._what, self._task, self._loop = what, asyncio.current_task(), asyncio.get_running_loop()
        self.taken = 0
        self._begun = self._loop.time()
        self.timer = self._loop.call_later(PART_S, self._check)

    def _check(self) -> None:
        left_s = PART_S + self.taken / LEAST_BYTES_PER_S - (self._loop.time() - self._begun)
        if left_s > 0:
            self.timer = self._loop.call_later(left_s, self._check)
            return
        log.warning("%s was cancelled: its caller reads less than %d bytes a second", self._what, LEAST_BYTES_PER_S)
        assert self._task is not None
        self._task.cancel()


@contextmanager
def ended_when_slow(what: str) -> Iterator[_Reader]:
    """Cancel the current task if its caller reads below the minimum rate: the value takes memory for which others
    wait. A timeout would have no effect, because the handler may wait inside gRPC."""
    reader = _Reader(what)
    try:
        yield reader
    finally:
        reader.timer.cancel()
