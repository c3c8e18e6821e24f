"""The watch over a runner's progress: an activity that lasts long is reported, with the runner's stack.

An activity that takes half of the training loop's deadline is reported while it lasts, so that the loop's own timeout
error can show the activity and the stack. User code may take any time: a slow runner is never killed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["HANG_S", "LOOKS", "Stall", "hang_s"]

HANG_S = 60.0
"""Seconds after which an activity of a runner is reported if the training loop's deadline is not known: half of the
default deadline."""
SHARE = 0.5
"""Fraction of the training loop's deadline after which an activity of a runner is reported. The rest of the deadline is
a reserve: the report takes time to arrive, and the loop may have begun to wait before the activity began."""
LOOKS = 8
"""Smallest number of times that an activity is checked before it is reported."""
_IDLE = ("waiting", "sending")
_CALLS = {"input_fn": "input_fn", "iter": "iter()", "next": "next()", "state_dict": "state_dict()"}
_CALLS["load_state_dict"] = "load_state_dict()"


def hang_s(timeout_s: float) -> float:
    """Return the seconds after which a runner's activity is reported. timeout_s: the training loop's deadline for a
    batch in seconds, 0 = unknown."""
    return SHARE * timeout_s if timeout_s > 0 else HANG_S


@dataclass
class Stall:
    """Activity of a runner, such as "next", its number of batches (`total`), and the monotonic time in seconds since
    which both are unchanged."""

    activity: str = "starting"
    total: int = -1
    since: float = 0.0

    def look(self, now: float, activity: str, for_s: float, total: int) -> float:
        """Record the runner's activity and number of batches (`total`). Return the seconds that the runner has been in
        this activity without a new batch.

        now: monotonic time in seconds. for_s: seconds since the activity began, from the progress page.
        """
        if (activity, total) != (self.activity, self.total):
            self.activity, self.total, self.since = activity, total, now
        self.since = max(self.since, now - for_s)
        return now - self.since

    @property
    def idle(self) -> bool:
        """True while the runner waits for others: for the training loop to take batches or to open an epoch."""
        return self.activity in _IDLE

    def text(self, now: float, wall: float) -> str:
        """Return a text about the activity, such as "in next() of batch 17 since 12:03:41 UTC by the worker's clock".

        now: monotonic time, seconds. wall: Unix time, seconds.
        """
        what = _CALLS.get(self.activity, self.activity)
        batch = f" of batch {self.total + 1}" if self.activity == "next" else ""
        clock = time.strftime("%H:%M:%S", time.gmtime(wall - (now - self.since)))
        return f"in {what}{batch} since {clock} UTC by the worker's clock"
