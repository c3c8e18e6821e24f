"""Liveness file of a worker daemon: a small file with the times of its last progress, for probes.

A probe cannot call a worker, which listens for lanes only, and a process that exists may hang. So the daemon writes,
after each heartbeat round, the time of that round, and the time of the coordinator's last answer. The two need
different actions. A daemon whose rounds do not end hangs, and must be restarted. A daemon without an answer of the
coordinator still serves its lanes; killing it would turn an outage of the coordinator into one of the training.

Times are those of the monotonic clock, which all processes of a machine share and which cannot be set.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.plain_files import read_plain

__all__ = ["Liveness", "LivenessWriter", "read_liveness"]

LONGEST = 200
"""Largest liveness file, bytes."""
_log = logging.getLogger("penstock.worker")


@dataclass(frozen=True)
class Liveness:
    """Seconds since each event, at the time of reading."""

    turned_s_ago: float
    """Seconds since a heartbeat round ended, with an answer or without."""
    heard_s_ago: float
    """Seconds since the coordinator answered; infinite before the first time."""


class LivenessWriter:
    """Writer of the liveness file, in the daemon. Without a path it does nothing."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._answered = float("-inf")
        self._failed = False

    def turned(self) -> None:
        """Record a round that ended without an answer."""
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
        """Record a round that ended with an answer of the coordinator."""
        self._answered = time.monotonic()
        self.turned()


def read_liveness(path: str) -> Liveness:
    """Return the daemon's last record. Raises InvalidArgumentError if it is missing or invalid."""
    try:
        turned, answered = map(float, read_plain(path, LONGEST).split())
    except OSError as error:
        raise InvalidArgumentError(
            f"the liveness file {path} cannot be read: {error.strerror}. Does a worker run with this --liveness-file?"
        ) from error
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not a worker's liveness file") from error
    now = time.monotonic()
    return Liveness(now - turned, now - answered)
