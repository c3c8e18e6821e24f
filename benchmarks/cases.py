"""Cases of the benchmarks: descriptions of the batches to deliver, as plain data that every player can read.

A mode is one of the compared ways to deliver batches, such as Penstock's TCP lane or torch's DataLoader. A player is
the process that measures one mode (see `serve.py`). Players of other libraries (peers) run in Python environments of
their own, so this module imports only the standard library. `loaders.py` makes torch datasets that yield the batches of
a case.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["BUSY_S", "PATH", "SLOW", "SNAPSHOTS", "Case", "Times", "calibrate", "spin"]

BUSY_S = 0.002
"""Seconds for which a slow source runs Python code for each batch."""
LEAF_SHAPE = (8, 128)
"""Shape of each tensor in a batch that is a dict: int64, 8 KiB."""


@dataclass(frozen=True)
class Case:
    """Description of an endless sequence of batches, and of the work that its source (the dataset that yields them)
    does for each batch."""

    name: str
    nbytes: int
    """Size of a batch in bytes: all its tensors together."""
    leaves: int = 1
    """Number of tensors of a batch. 1: the batch is a uint8 tensor. More: it is a dict of that many int64 tensors of
    LEAF_SHAPE."""
    busy_s: float = 0.0
    """Seconds of wall-clock time for which the source runs Python code for each batch."""
    work: int = 0
    """Number of rounds of `spin`, a fixed amount of work, that the source does for each batch, instead of `busy_s`.
    Such work takes longer if other programs use the processor, which `busy_s`, measured by the clock, would hide."""
    state_tensors: int | None = None
    """Number of tensors of 1 KiB in the source's state; None: the source has no state methods."""
    checkpoint_every: int | None = None
    """Value of Penstock's `checkpoint_steps`: N lets the worker take a snapshot at every N-th step. None: no checkpoint
    steps."""
    counter: str = ""
    """Path of a file of 8 bytes in which the source counts the calls of its state_dict; "": the calls are not
    counted."""
    slots: int = 4
    """Number of distinct pieces of memory that the floors (plain copies, see floors.py) use: as many as Penstock's ring
    had entries, if it was measured before, else as many as Penstock's rule gives."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Times:
    """Durations of the parts of a measurement, in seconds."""

    warm_s: float = 0.25
    span_s: float = 0.8
    """Seconds for which throughput and processor time are measured."""
    latency_s: float = 0.2
    """Seconds for which, after that, every `next()` is timed by itself."""
    at_least: int = 20
    """Smallest number of batches in each of these measurements. A measurement that has fewer after its time goes on, up
    to `at_most_s` seconds."""
    at_most_s: float = 6.0


KIB, MIB = 1 << 10, 1 << 20
MAX_ENTRIES, MIN_ENTRIES, RING_BYTES = (
    32,
    4,
    8 << 20,
)  # Penstock's rule for a ring, see proto/penstock/proto/lane/ring.py


def ring_entries(nbytes: int) -> int:
    """Return the number of entries that Penstock gives a ring whose entries have `nbytes` bytes."""
    return max(MIN_ENTRIES, min(MAX_ENTRIES, RING_BYTES // max(nbytes, 1)))


def _case(name: str, nbytes: int, **more: Any) -> Case:
    return Case(name, nbytes, slots=ring_entries(nbytes), **more)


PATH = (
    _case("4 KiB", 4 * KIB),
    _case("64 KiB", 64 * KIB),
    _case("1 MiB", MIB),
    _case("8 MiB", 8 * MIB),
    _case("dict of 8 x 8 KiB", 64 * KIB, leaves=8),
)
"""Cases with batches that exist already, so that only the delivery takes time."""

SLOW = (
    _case("2 ms by the clock", MIB, busy_s=BUSY_S),
    _case("2 ms of work", MIB, work=1),  # `work` is calibrated at the suite's start, once for all modes
)
"""Cases with batches of 1 MiB for each of which the source runs Python code for 2 ms, to measure what the delivery adds
to that."""

_NONE = _case("no state", MIB)
_SLOW_NONE = _case("no state, 2 ms", MIB, busy_s=BUSY_S)
SNAPSHOTS = (
    _NONE,
    replace(_NONE, name="1 KiB", state_tensors=1),
    replace(_NONE, name="100 x 1 KiB", state_tensors=100),
    replace(_NONE, name="1 KiB, every step", state_tensors=1, checkpoint_every=1),
    _SLOW_NONE,
    replace(_SLOW_NONE, name="1 KiB, every step, 2 ms", state_tensors=1, checkpoint_every=1),
)
"""Cases with batches of 1 MiB from sources with and without a state. Each source with a state is compared with one of
the same speed without a state."""


def spin(turns: int) -> int:
    """Run a fixed amount of pure Python code, `turns` times."""
    value = 0
    for turn in range(turns):
        value = (value * 31 + turn) & 0xFFFF
    return value


def calibrate(seconds: float) -> int:
    """Return the argument with which `spin` takes `seconds` seconds on this machine. The fastest of several attempts
    counts, because other programs can only make it slower."""
    turns = 10_000

    def took() -> float:
        started = time.perf_counter()
        spin(turns)
        return time.perf_counter() - started

    return round(turns * seconds / min(took() for _ in range(50)))
