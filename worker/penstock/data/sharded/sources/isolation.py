"""What a stream's user code sees of the process: random generators of its own, and a job with a single worker. What it
draws must depend only on the stream's seed and position. To save or restore the generators of `random`, numpy and torch
in full takes 80 us, twice for each sample. Two methods reduce this to about 15 us:

- numpy's bit generator is exchanged, not copied. But `normal` makes two numbers and keeps the second one outside of it.
  get_state() returns that in 40 us, so it is called only after a draw (seen in memory), or while a number is kept.
- Python's getstate() (15 us) is called only after a draw, too, where the memory shows draws (in CPython).

Threads and processes that a stream starts are not covered: threads draw from the generators of the stream that runs at
the time, and a loader's worker processes are seeded from torch's generator.
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

_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]
"""Python's global random generator, whose methods are the functions of the module `random`."""
_HEAD, _SIZE = object.__basicsize__, _random.Random.__basicsize__
_WORDS = 625 * 4
"""Size in bytes of the state of MT19937: 624 words, and the index among them."""


def _memory(generator: random.Random) -> bytes:
    """Return the bytes of a generator's C struct; they change with each draw."""
    return ctypes.string_at(id(generator) + _HEAD, _SIZE - _HEAD)


def _memory_shows_draws() -> bool:
    """Return True if the bytes of `_memory` change with each draw and with nothing else."""
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
    def __init__(self) -> None:
        self._python: Any = None
        self._memory = b""
        self._gauss: float | None = None
        self._numpy: Any = None
        self._words: bytes | None = None
        self._numpy_gauss: float | None = None
        self._torch: torch.Tensor | None = None

    def leave(self) -> None:
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
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        if self._numpy_gauss is not None and self._words is not None:
            state: Any = np.random.get_state(legacy=False)
            np.random.set_state({**state, "has_gauss": 1, "gauss": self._numpy_gauss})
        assert self._torch is not None
        torch.set_rng_state(self._torch)


class OwnGenerators:
    """Context with one stream's generators: seeded at the first entry, later as at the last exit."""

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
    """Context in which user code sees one box and one worker. Many datasets split themselves by torch's
    get_worker_info() or current_assignment(); a logical shard that did so would silently lose samples. Threads that a
    stream starts may see the real values. Takes 0.5 us a sample."""

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
