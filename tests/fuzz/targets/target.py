"""Target of fuzzing: one decoder of what a peer sends, with the property that it must keep.

The property is one function, `hold`: the decoder returns, or raises an error of ours, whatever the bytes are. Two
drivers use it: tests/fuzz/test_decoders.py in `make test`, with damaged encodings, and a coverage-guided fuzzer in
`make fuzz` (tests/fuzz/drive.py). Time and memory are the drivers' to watch, by the limits that stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.proto.errors import PenstockError

__all__ = ["Target", "hold", "pieces", "script", "words"]

MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """Fuzz target: one decoder."""

    name: str
    decode: Callable[[bytes], object]
    """Does with the bytes all that their receiver would do. Raises PenstockError for bytes that cannot be, and
    AssertionError where what came out is not what may come out."""
    seeds: Callable[[], list[bytes]]
    """Valid encodings, small ones. All of them are accepted."""
    most_bytes: int = 8 * MIB
    """Python memory that one short input may cost at its peak."""
    most_s: float = 2.0
    """Processor seconds that one short input may take."""
    examples: int = 150
    """Number of damaged encodings in `make test`; fewer for a slow decoder."""


def hold(target: Target, data: bytes) -> bool:
    """The property. True if the bytes were accepted; any exception but ours is a finding."""
    try:
        target.decode(data)
    except PenstockError:
        return False
    return True


# Many decoders are conversations. Their bytes are read as a script: steps of one byte that says what to do and a u16
# (little endian) with the length of what to do it with; a length beyond the end takes what is there.


def script(*steps: tuple[int, bytes]) -> bytes:
    return b"".join(bytes([what]) + len(data).to_bytes(2, "little") + data for what, data in steps)


def pieces(data: bytes, most: int = 64) -> Iterator[tuple[int, bytes]]:
    """The steps of a script, at most so many."""
    at = 0
    for _ in range(most):
        if at >= len(data):
            return
        size = int.from_bytes(data[at + 1 : at + 3], "little")
        yield data[at], data[at + 3 : at + 3 + size]
        at += 3 + size


def words(data: bytes) -> list[int]:
    """Bytes as u64, the last one padded."""
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
