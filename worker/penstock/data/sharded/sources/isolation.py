"""Exchange of the states of the process's random generators (those of `random`, numpy and torch) between a stream and
its caller. A stream is the sequence of samples of one of the user's iterables.

The code of a stream may draw from these generators. The numbers must depend only on the stream's seed and position, and
not on what the caller, another stream or another worker draws. So the generators have the stream's states while its
code runs, and the caller's states again afterwards.

States are exchanged twice for each sample. To save or restore all three generators in full takes 80 us. Two methods
reduce this to about 15 us:

- numpy's bit generator is not copied. The stream and its caller have one object each, and the objects are exchanged.
  One value is not in the object: numpy's `normal` makes two numbers and keeps the second one for its next call.
  get_state() returns it, but takes 40 us. So get_state() is called only after a draw, which shows in the generator's
  memory (0.3 us to compare), or while a number is kept.
- Python's getstate(), which takes 15 us, is called only after a draw, too. In CPython the generator's memory changes
  with each draw. In any other interpreter getstate() is called each time.

Threads and processes that a stream starts are not covered. A loader's own worker processes are seeded from torch's
generator, as torch does. Threads draw from the generators of the stream that runs at the time.
"""

from __future__ import annotations

import _random
import ctypes
import random
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data._utils import worker as torch_worker

from penstock.proto.state.assignment import Assignment, step_aside, step_back
from penstock.proto.state.generators import seed_rng, torch_rng_state

__all__ = ["OwnGenerators", "SoleWorker"]


_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
"""Python's global random generator: the instance of random.Random whose methods are the functions of the module
`random`."""
_HEAD, _SIZE = object.__basicsize__, _random.Random.__basicsize__
_WORDS = 625 * 4
"""Size in bytes of the state of MT19937, Python's random generator: 624 words, and the index among them."""


def _memory(generator: random.Random) -> bytes:
    """Return the bytes of a generator's C struct; they change with each draw."""
    return ctypes.string_at(id(generator) + _HEAD, _SIZE - _HEAD)


def _memory_shows_draws() -> bool:
    """Return True if, in this interpreter, the bytes that `_memory` returns change with each draw and with nothing
    else."""
    if _SIZE - _HEAD < _WORDS:
        return False
    trial = random.Random(1)
    before, state = _memory(trial), trial.getstate()
    trial.random()
    after = _memory(trial)
    trial.setstate(state)
    return before != after and _memory(trial) == before


_SHOWS_DRAWS = _memory_shows_draws()


class _Side:
    """States of the three random generators for one side of the exchange: for the stream, or for its caller."""

    def __init__(self) -> None:
        self._python: Any = None
        self._memory = b""
        self._gauss: float | None = None
        self._numpy: Any = None
        self._words: bytes | None = None
        self._numpy_gauss: float | None = None
        self._torch: torch.Tensor | None = None

    def leave(self) -> None:
        """Save the present states of the random generators, before the other side's states are restored."""
        memory, gauss = _memory(_PYTHON) if _SHOWS_DRAWS else b"", _PYTHON.gauss_next  # type: ignore[attr-defined]
        if self._python is None or not _SHOWS_DRAWS or memory != self._memory or gauss != self._gauss:
            self._python, self._memory, self._gauss = random.getstate(), memory, gauss
        numpy = mtrand.get_bit_generator()
        words = ctypes.string_at(numpy.ctypes.state_address, _WORDS) if type(numpy) is np.random.MT19937 else None
        drawn = numpy is not self._numpy or words is None or words != self._words
        if drawn or self._numpy_gauss is not None:
            state: Any = np.random.get_state(legacy=False)
            self._numpy_gauss = state["gauss"] if state["has_gauss"] else None
            self._numpy, self._words = numpy, words
        self._torch = torch_rng_state()

    def enter(self) -> None:
        """Set the global random generators to the states that `leave` saved."""
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        if self._numpy_gauss is not None and self._words is not None:
            state: Any = np.random.get_state(legacy=False)
            np.random.set_state({**state, "has_gauss": 1, "gauss": self._numpy_gauss})
        assert self._torch is not None
        torch.set_rng_state(self._torch)


class OwnGenerators:
    """Context manager inside which the process's random generators have the states of one stream. At the first entry
    they are seeded. At each later entry they continue where they were at the last exit."""

    def __init__(self, seed: int) -> None:
        self._caller, self._own = _Side(), _Side()
        self._caller.leave()
        try:
            mtrand.set_bit_generator(np.random.MT19937(0))
            seed_rng(seed)
            self._own.leave()
        finally:
            self._caller.enter()

    def __enter__(self) -> None:
        self._caller.leave()
        self._own.enter()

    def __exit__(self, *_: object) -> None:
        self._own.leave()
        self._caller.enter()


class SoleWorker:
    """Context manager inside which user code sees a job with one box and one worker. `within`: another context manager,
    which is entered and left with this one. To enter and leave it takes 0.5 us, once for each sample."""

    def __init__(self, within: AbstractContextManager[None]) -> None:
        self._within = within
        self._assignment: Assignment
        self._info: Any = None

    def __enter__(self) -> None:
        self._within.__enter__()
        self._assignment, self._info = step_aside(), torch_worker._worker_info
        torch_worker._worker_info = None

    def __exit__(self, *why: Any) -> None:
        torch_worker._worker_info = self._info
        step_back(self._assignment)
        self._within.__exit__(*why)
