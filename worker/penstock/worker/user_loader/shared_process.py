"""Global state of a process in which several workers run. Each worker's own values are set before its user code is
called, and the earlier values are restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.proto.state import assignment as assignments
from penstock.proto.state.generators import capture_rng, restore_rng
from penstock.worker.user_loader import worker_info

__all__ = ["ProcessGlobals"]


class ProcessGlobals:
    """Global state of one of the workers that share a process: the random generators, the assignment, and the answers
    of torch's get_worker_info().

    Workers in one process still share PYTHONHASHSEED, environment variables, the working directory, and globals of the
    user's modules.
    """

    def __init__(self) -> None:
        self._generators: bytes | None = None
        self._seat: assignments.Seat | None = None
        self._answers: worker_info.Answers | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use this worker's global state while the `with` block runs. The exchange takes 0.2 ms, mostly for the random
        generators."""
        generators = capture_rng()
        if self._generators is not None:
            restore_rng(self._generators)
        seat = assignments.exchange(self._seat)
        answers = worker_info.exchange(self._answers)
        try:
            yield
        finally:
            self._answers = worker_info.exchange(answers)
            self._seat = assignments.exchange(seat)
            self._generators = capture_rng()
            restore_rng(generators)
