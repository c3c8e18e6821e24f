"""Every decoder of what a peer says, under bytes of all kinds: an error of ours or a value, soon, in little memory.

The same targets are fuzzed with coverage in `make fuzz`. Here the examples are few and always the same, so that
`make test` says the same twice.
"""

from __future__ import annotations

import functools
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets.every import EVERY
from targets.target import Target, hold

TARGETS = pytest.mark.parametrize("name", EVERY)
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]
PATIENCE = 10
"""Times the limit that stands in a target, for a machine that is busy with other tests."""


SHARE = 0.5
"""Share of a target's examples that are tried here; the rest belongs to `make fuzz`, which knows which inputs are
new."""


@functools.cache
def seeds(name: str) -> list[bytes]:
    return EVERY[name].seeds()


def profile(target: Target, share: float = 1.0) -> settings:
    return settings(
        max_examples=round(share * SHARE * target.examples),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def check(target: Target, data: bytes) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        hold(target, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    took = time.process_time() - began
    assert peak <= target.most_bytes + 64 * len(data), f"{peak} bytes for an input of {len(data)}"
    assert took <= PATIENCE * target.most_s, f"{took:.1f} s for an input of {len(data)} bytes"


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A valid encoding with a few changes: bits flipped, bytes cut out or put in, numbers changed, another's end."""
    data = bytearray(draw(st.sampled_from(seeds(name))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del data[at : at + draw(st.integers(1, 16))]
            case 2:
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case 3:
                size = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(st.sampled_from(NUMBERS)) & ((1 << 8 * size) - 1)
                data[at : at + size] = number.to_bytes(size, "little")
            case _:
                other = draw(st.sampled_from(seeds(name)))
                start = draw(st.integers(0, len(other)))
                data[at:] = other[start:]
    return bytes(data)


@TARGETS
def test_what_an_honest_peer_says_is_taken(name: str) -> None:
    for data in seeds(name):
        assert hold(EVERY[name], data)


@TARGETS
def test_any_bytes(name: str) -> None:
    target = EVERY[name]

    @profile(target, 0.4)
    @given(st.binary(max_size=400))
    def run(data: bytes) -> None:
        check(target, data)

    run()


@TARGETS
def test_damaged_bytes(name: str) -> None:
    target = EVERY[name]

    @profile(target)
    @given(damaged(name))
    def run(data: bytes) -> None:
        check(target, data)

    run()
