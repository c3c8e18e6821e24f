"""Waiting for what another process or thread does and announces to nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]

SHORTEST_S, LONGEST_S = 0.001, 0.05
"""Between two askings."""
SHARE = 0.1
"""Of the time waited so far, that another asking may come too late by."""
REST = 3.0
"""Pauses per time that asking takes: what is waited for needs the cores, which are few, itself."""


def wait_until(
    true: Callable[[], object], timeout_s: float = 30, what: Callable[[], str] | str = "it did not come true in time"
) -> None:
    """Ask again until it is true. Raises AssertionError with `what` after so long."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        if true():
            return
        now = time.monotonic()
        if now >= began + timeout_s:
            raise AssertionError(what if isinstance(what, str) else what())
        time.sleep(max(SHORTEST_S, min(SHARE * (now - began), LONGEST_S), REST * (now - asked)))
