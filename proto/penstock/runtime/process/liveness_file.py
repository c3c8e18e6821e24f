"""Liveness file of a worker daemon, with the times of its last heartbeat rounds, which Kubernetes' probe reads: the
daemon accepts no calls, and may hang although its process exists.

If rounds no longer end, the daemon hangs and must be restarted. If only the coordinator does not answer, it still
serves its lanes: killing it would turn an outage of the coordinator into one of the training. Times are monotonic."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.plain_files import read_plain

LONGEST = 200
_log = logging.getLogger("penstock.worker")


@dataclass(frozen=True)
class Liveness:
    turned_s_ago: float
    """Seconds since the last heartbeat round ended, with or without an answer."""
    heard_s_ago: float
    """Seconds since the coordinator last answered; infinite if it has never answered."""


class LivenessWriter:
    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._answered = float("-inf")
        self._failed = False

    def turned(self) -> None:
        """Record that a heartbeat round has ended without an answer from the coordinator."""
        if self._path is None:
            return
        try:
            write_whole(self._path, f"{time.monotonic()} {self._answered}\n".encode(), sync=False)
            self._failed = False
        except OSError as error:
            if not self._failed:
                _log.warning("the liveness file %s cannot be written: %s", self._path, error)
            self._failed = True

    def note_answer(self) -> None:
        self._answered = time.monotonic()
        self.turned()


def read_liveness(path: str) -> Liveness:
    """Raises InvalidArgumentError if the file cannot be read or has other content."""
    try:
        turned, answered = map(float, read_plain(path, LONGEST).split())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} must be the --liveness-file of a worker that runs: {error}") from error
    now = time.monotonic()
    return Liveness(now - turned, now - answered)
