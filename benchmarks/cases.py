"""Batches of each benchmark case, described as data that every player can read.

A player is the process that measures one mode (see `serve.py`). Some players run in a peer's environment, so this
module imports only the standard library. `loaders.py` makes torch sources of a case.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["BUSY_S", "PATH", "SLOW", "SNAPSHOTS", "Case", "Times", "calibrate", "spin"]

BUSY_S = 0.002
"""Seconds of pure Python that a slow source spends on each batch."""
LEAF_SHAPE = (8, 128)
"""Shape of each leaf of the dict case: int64, 8 KiB."""


@dataclass(frozen=True)
class Case:
    """Endless sequence of batches."""

    name: str
    nbytes: int
    """Size of a batch in bytes, over all its leaves."""
    leaves: int = 1
    """Number of leaves. 1: a uint8 tensor. More: a dict of that many int64 tensors of LEAF_SHAPE."""
    busy_s: float = 0.0
    """Seconds that the source is busy with each batch, by the clock."""
    work: int = 0
    """Number of turns of `spin` for each batch, instead of `busy_s`. Such work takes longer if other programs use the
    processor, which `busy_s`, measured by the clock, would hide."""
    state_tensors: int | None = None
    """Number of tensors of 1 KiB in the source's state; None: no state methods."""
    checkpoint_every: int | None = None
    """Penstock's `checkpoint_steps`: N requests a snapshot at every N-th step."""
    counter: str = ""
    """File of 8 bytes in which the source counts the calls of its state_dict; "" = none."""
    slots: int = 4
    """Number of ring entries that the floors use: that of Penstock's ring if it was measured, else computed by
    Penstock's rule."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Times:
    """Durations of a measurement, in seconds."""

    warm_s: float = 0.25
    span_s: float = 0.8
    """Span of throughput and processor time."""
    latency_s: float = 0.2
    """Later span in which every `next()` is timed by itself."""
    at_least: int = 20
    """Smallest number of batches of a span, up to `at_most_s`."""
    at_most_s: float = 6.0


KIB, MIB = 1 << 10, 1 << 20
MAX_ENTRIES, MIN_ENTRIES, RING_BYTES = (
    32,
    4,
    8 << 20,
)  # Penstock's rule for a ring, see proto/penstock/proto/lane/ring.py


def ring_entries(nbytes: int) -> int:
    """Return the number of entries of this many bytes in a ring of Penstock."""
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
"""Ready batches: the speed of the path itself."""

SLOW = (
    _case("2 ms by the clock", MIB, busy_s=BUSY_S),
    _case("2 ms of work", MIB, work=1),  # `work` is calibrated at the suite's start, once for all modes
)
"""Batches of 1 MiB that cost their source 2 ms of pure Python: the cost that the path adds."""

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
"""Batches of 1 MiB from sources with and without a state; each is compared with the one without a state at the same
speed."""


def spin(turns: int) -> int:
    """Run a fixed amount of pure Python."""
    value = 0
    for turn in range(turns):
        value = (value * 31 + turn) & 0xFFFF
    return value


def calibrate(seconds: float) -> int:
    """Return the turns of `spin` that take that many seconds here, from the fastest of several attempts, because other
    programs only slow it."""
    turns = 10_000

    def took() -> float:
        started = time.perf_counter()
        spin(turns)
        return time.perf_counter() - started

    return round(turns * seconds / min(took() for _ in range(50)))
