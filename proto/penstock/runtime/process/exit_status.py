"""What the exit status of a child process means, in words."""

from __future__ import annotations

import signal

__all__ = ["describe_exit"]


def describe_exit(status: int | None) -> str:
    """Say how a process ended: "was killed by SIGTERM", for example.

    `status` is the process's exit code, or minus the number of the signal that killed it. None if nobody can tell.
    """
    if status is None:
        return "died, cause unknown: the process that could tell does not answer"
    if status < 0:
        how = f"was killed by {_signal_name(-status)}"
        return f"{how} (out of memory, if nobody sent it)" if -status == signal.SIGKILL else how
    how = f"exited with status {status}"
    return how if status else f"{how}, which is no end of its input (os._exit?)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one
