"""Process-wide globals of a worker, for workers that share one process: set before each call of user code, and restored
after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.proto.state import assignment as place_of
from penstock.proto.state.generators import capture_rng, restore_rng
from penstock.worker.user_loader import worker_info

__all__ = ["ProcessGlobals"]


class ProcessGlobals:
    """The random generators, the assignment, and the answers of torch's get_worker_info() of one worker.

    Workers still share PYTHONHASHSEED, environment variables, the working directory, and globals of the user's modules.
    """

    def __init__(self) -> None:
        self._generators: bytes | None = None
        self._seat: place_of.Seat | None = None
        self._answers: worker_info.Answers | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run this worker's code in this block. Takes 0.2 ms, most of it for the generators."""
        generators = capture_rng()
        if self._generators is not None:
            restore_rng(self._generators)
        seat = place_of.exchange(self._seat)
        answers = worker_info.exchange(self._answers)
        try:
            yield
        finally:
            self._answers = worker_info.exchange(answers)
            self._seat = place_of.exchange(seat)
            self._generators = capture_rng()
            restore_rng(generators)
