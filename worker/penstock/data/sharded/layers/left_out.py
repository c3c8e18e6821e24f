"""Documents that were yielded before a change of layers, and are left out of what the new layers read (restart.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.data.sharded.protocol import Cursor, PositionOf, SavedPosition, ShardedSource
from penstock.data.sharded.runs import Run, RunCursor, take
from penstock.proto.errors import StateCorruptError

LEFT_OUT = "left out"
"""Entry of a saved position around that of a source: a bit for each sample from there on, 1 if it is left out."""

Bits = npt.NDArray[np.bool_]


def left_out(numbers: Sequence[int], saved: SavedPosition) -> SavedPosition:
    """Return a saved position from which samples are left out. `numbers`: counted from there, ascending."""
    if not numbers:
        return saved
    bits = np.zeros(numbers[-1] + 1, np.bool_)
    bits[numbers] = True
    return _around(bits, saved)


def bits_of(saved: Mapping[str, SavedPosition]) -> Bits:
    packed = saved[LEFT_OUT]
    if not isinstance(packed, bytes):
        raise StateCorruptError(f"the saved position is damaged: {LEFT_OUT!r} must be bytes, got {packed!r:.200}")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8)).astype(np.bool_)
    return bits[: int(np.flatnonzero(bits)[-1]) + 1] if bits.any() else bits[:0]


def opened(
    source: ShardedSource,
    shard: int,
    epoch: int,
    seed: int,
    saved: SavedPosition = None,
    position_of: PositionOf | None = None,
) -> Cursor:
    """Open a source. All who open a source that a layer or loader is over do it by this function."""
    if not isinstance(saved, Mapping) or LEFT_OUT not in saved:
        return source.open(shard, epoch, seed, saved, position_of)
    return _Cursor(opened(source, shard, epoch, seed, saved.get("source"), position_of), bits_of(saved))


def _around(bits: Bits, saved: SavedPosition) -> SavedPosition:
    return {LEFT_OUT: np.packbits(bits).tobytes(), "source": saved} if bits.any() else saved


class _Cursor(RunCursor):
    def __init__(self, inner: Cursor, bits: Bits) -> None:
        self._inner, self._bits = inner, bits
        """The bits of the samples from the inner cursor's position on."""

    def take(self, count: int) -> Run:
        self._pass()
        bits = self._bits
        run = take(self._inner, min(count, int(bits.argmax())) if bits.any() else count)
        self._bits, position = bits[run.size :], run.position
        return run._replace(position=lambda number: _around(bits[number:], position(number)))

    def skip(self, count: int) -> int:
        left = count
        while left:
            self._pass()
            wanted = min(left, int(self._bits.argmax())) if self._bits.any() else left
            passed = self._inner.skip(wanted)
            self._bits, left = self._bits[passed:], left - passed
            if passed < wanted:
                break
        return count - left

    def saved_position(self) -> SavedPosition:
        return _around(self._bits, self._inner.saved_position())

    def close(self) -> None:
        self._inner.close()

    def _pass(self) -> None:
        """Skip the samples before the next one that is not left out."""
        kept = np.flatnonzero(~self._bits)
        passed = int(kept[0]) if len(kept) else len(self._bits)
        if passed:
            self._inner.skip(passed)
            self._bits = self._bits[passed:]
