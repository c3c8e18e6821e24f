"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PATIENCE", "until"]

PATIENCE = 4
"""Factor of the deadlines of all waits. A machine may be slower than the one on which a deadline was chosen, and a
condition that comes true ends its wait at once."""


def until(
    holds: Callable[[], object],
    deadline_s: float = 30.0,
    what: Callable[[], str] | str = "the condition does not come true",
) -> None:
    """Wait for a condition that nobody announces.

    Args:
        holds: the condition.
        deadline_s: longest wait on a fast machine, in seconds.
        what: message of the failure.
    """
    end = time.monotonic() + PATIENCE * deadline_s
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE * deadline_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.01)
