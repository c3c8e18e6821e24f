"""Ends processes that this one forked, with all that they started, and says in words how a process ended."""

from __future__ import annotations

import contextlib
import os
import signal

from penstock.runtime.process.watch import stat_of

__all__ = [
    "describe_exit",
    "exit_words",
    "has_ended",
    "kill_child",
    "kill_group",
    "reap",
    "reap_orphan",
    "zombie_status",
]


def kill_child(pid: int) -> None:
    """Kill a child of this process that is not reaped: until then its number is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill the process group that a process leads, which is not reaped: itself, and what it left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended; it is not reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap(pid: int, *, group: bool = True) -> int:
    """Wait for the end of a child that leads a group, and return its exit status, negative for a signal.

    group: kill what it left behind in its group, too.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if group:
        kill_group(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reap_orphan(pid: int) -> bool:
    """Reap a process that has come to this one, if it has ended; return whether it had."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    return False


def zombie_status(pid: int) -> tuple[bool, int | None]:
    """Return whether a dead process is still there, for nobody has reaped it; and its exit status, if the kernel shows
    it. For processes that are another's children."""
    fields = stat_of(pid)
    try:
        return (True, os.waitstatus_to_exitcode(int(fields[-1]))) if fields[0] == "Z" else (False, None)
    except (ValueError, IndexError):
        return False, None


def exit_words(status: int) -> str:
    """Say how a process ended: "was killed by SIGTERM", "exited with status 3".

    status: the process's exit code, or minus the number of the signal that killed it.
    """
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"


def describe_exit(status: int | None) -> str:
    """Say how a process that runs user code ended, and what that hints at. None if nobody can tell."""
    if status is None:
        return "died, cause unknown: the process that could tell does not answer"
    how = exit_words(status)
    if -status == signal.SIGKILL:
        return f"{how} (out of memory, if nobody sent it)"
    return how if status else f"{how}, which is no end of its input (os._exit?)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one
