"""The pulse of a worker daemon: a small file that tells whoever looks when it last made progress.

A worker listens for lanes only, and a process that merely exists is not alive. So the daemon writes, after each round
of its heartbeat, when that was, and when the coordinator last answered one. The two are apart because they ask for
different things: a daemon whose rounds do not end hangs and is to be started again; one that only has no coordinator
serves its lanes meanwhile, and to kill it would turn an outage of the coordinator into one of the training.

Times are those of the monotonic clock, which all processes of a machine share and nobody sets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.proto.errors import InvalidArgumentError

__all__ = ["Liveness", "LivenessWriter", "read_liveness"]

_log = logging.getLogger("penstock.worker")


@dataclass(frozen=True)
class Liveness:
    """Seconds since each, when it was read."""

    turned_s_ago: float
    """A round of the heartbeat ended, with an answer or without."""
    heard_s_ago: float
    """The coordinator answered; infinite before the first time."""


class LivenessWriter:
    """The daemon's side. Without a path it does nothing."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._heard = float("-inf")
        self._failed = False

    def turned(self) -> None:
        """A round ended without an answer."""
        if self._path is None:
            return
        beside = self._path.parent / f".{self._path.name}.{os.getpid()}"
        try:
            beside.write_text(f"{time.monotonic()} {self._heard}\n")
            beside.replace(self._path)
            self._failed = False
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            if not self._failed:
                _log.warning("the pulse cannot be written to %s: %s", self._path, error)
            self._failed = True

    def heard(self) -> None:
        """A round ended with an answer of the coordinator."""
        self._heard = time.monotonic()
        self.turned()


def read_liveness(path: str) -> Liveness:
    """What the daemon wrote last. InvalidArgumentError: nothing yet, or something else."""
    try:
        turned, heard = map(float, Path(path).read_text().split())
    except OSError as error:
        raise InvalidArgumentError(
            f"the liveness file {path} cannot be read: {error.strerror}; does a worker run with this --liveness-file?"
        ) from error
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is no liveness file of a worker") from error
    now = time.monotonic()
    return Liveness(now - turned, now - heard)
