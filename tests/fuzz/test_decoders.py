"""Every decoder of what a peer says, under bytes of all kinds: an error of ours or a value, soon, in little memory.

The same targets are fuzzed with coverage in `make fuzz`. Here the inputs are few and always the same, so that
`make test` says the same twice. They are drawn by hand: hypothesis would take three times as long as the decoders.
"""

from __future__ import annotations

import functools
import random
import time
import tracemalloc

import pytest
from targets.every import EVERY
from targets.target import Target, hold

TARGETS = pytest.mark.parametrize("name", EVERY)
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]
PATIENCE = 10
"""Times the limit that stands in a target, for a machine that is busy with other tests."""


@functools.cache
def seeds(name: str) -> list[bytes]:
    return EVERY[name].seeds()


def check(target: Target, data: bytes) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        hold(target, data)
        _, peak = tracemalloc.get_traced_memory()
    except BaseException as error:
        error.add_note(f"the input was {data!r}")
        raise
    finally:
        tracemalloc.stop()
    took = time.process_time() - began
    assert peak <= target.most_bytes + 64 * len(data), f"{peak} bytes for an input of {data!r}"
    assert took <= PATIENCE * target.most_s, f"{took:.1f} s for an input of {data!r}"


def damaged(name: str, dice: random.Random) -> bytes:
    """A valid encoding with a few changes: bits flipped, bytes cut out or put in, numbers changed, another's end."""
    data = bytearray(dice.choice(seeds(name)))
    for _ in range(dice.randint(1, 4)):
        at = dice.randint(0, len(data))
        match dice.randint(0, 4):
            case 0 if at < len(data):
                data[at] ^= 1 << dice.randint(0, 7)
            case 1:
                del data[at : at + dice.randint(1, 16)]
            case 2:
                data[at:at] = dice.randbytes(dice.randint(1, 8))
            case 3:
                size = dice.choice([1, 2, 4, 8])
                number = dice.choice(NUMBERS) & ((1 << 8 * size) - 1)
                data[at : at + size] = number.to_bytes(size, "little")
            case _:
                other = dice.choice(seeds(name))
                data[at:] = other[dice.randint(0, len(other)) :]
    return bytes(data)


@TARGETS
def test_what_an_honest_peer_says_is_taken(name: str) -> None:
    for data in seeds(name):
        assert hold(EVERY[name], data)


@TARGETS
def test_damaged_bytes(name: str) -> None:
    target, dice = EVERY[name], random.Random(name)
    for _ in range(2 * target.examples // 5):
        check(target, damaged(name, dice))
