"""Frame log: the newest frames of a slot's producer in shared memory, for a process that serves a new consumer while
the producer's process is in user code.

The producer's process writes, any process may read, and no reader waits: it copies a frame, and then looks whether the
writer has claimed its place meanwhile. User code in the writer's process can write anything here, so readers check
every number. A new consumer is announced before the log is read, and the writer looks for announcements after each
frame. So a frame is either read for the consumer, or the writer waits for it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from penstock.proto.lane.frames import MAX_PACKET

_FRAMES = 256
_AREA = 256 << 10
"""Bytes for frames: of the at most 32 frames of a full ring, each may have 8 KiB."""
_COUNT, _CLAIMED, _ANNOUNCED, _PASSED_ON, _PLACES = 0, 1, 2, 3, 8
"""Indices among the log's numbers: frames; bytes of all frames, with the one being written; consumers announced, and
those passed on or gone; places of the newest frames: (bytes of all frames before it, its size)."""
_NUMBERS = _PLACES + 2 * _FRAMES
_AREA_AT = _NUMBERS * 8
LOG_BYTES = _AREA_AT + _AREA


class FrameLog:
    """Log of frames in the bytes of `memory` from `offset` on. Frames are numbered from 0."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        # A number is written at once. Struct.pack_into writes zeros first, and a slice takes twice the time.
        self._numbers = memoryview(memory)[offset : offset + _AREA_AT].cast("Q")
        self._area = offset + _AREA_AT
        self.resume()

    def close(self) -> None:
        self._numbers.release()

    def resume(self) -> None:
        self.frames = self._numbers[_COUNT]
        self._claimed = self._numbers[_CLAIMED]

    def add(self, message: bytes) -> int:
        """Write a frame, preceded by its length. Return its number."""
        numbers, number, size = self._numbers, self.frames, len(message)
        begin = self._claimed
        if begin % _AREA + size > _AREA:
            begin += _AREA - begin % _AREA
        # The order is what readers rely on.
        self._claimed = numbers[_CLAIMED] = begin + size
        start = self._area + begin % _AREA
        self._memory[start : start + size] = message
        place = _PLACES + number % _FRAMES * 2
        numbers[place] = begin
        numbers[place + 1] = size
        self.frames = numbers[_COUNT] = number + 1
        return number

    @property
    def announced(self) -> int:
        return self._numbers[_ANNOUNCED]

    @property
    def passed_on(self) -> int:
        """Newest consumer that the writer need not wait for: it was passed on to the writer, or is gone."""
        return self._numbers[_PASSED_ON]

    def announce(self, consumer: int) -> None:
        self._numbers[_ANNOUNCED] = consumer

    def pass_on(self, consumer: int) -> None:
        self._numbers[_PASSED_ON] = consumer

    def newest_first(self) -> Iterator[tuple[int, bytes]]:
        """Yield the frames with their numbers, up to the oldest that is still whole."""
        numbers = self._numbers
        for number in range(numbers[_COUNT] - 1, -1, -1):
            place = _PLACES + number % _FRAMES * 2
            begin, size = numbers[place], numbers[place + 1]
            if size > MAX_PACKET or begin % _AREA + size > _AREA:
                return
            start = self._area + begin % _AREA
            message = self._memory[start : start + size]
            if numbers[_CLAIMED] > begin + _AREA or numbers[_COUNT] - number >= _FRAMES:
                return
            yield number, message
