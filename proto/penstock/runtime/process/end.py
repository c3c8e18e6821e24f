"""Killing and reaping of child processes by ids, with their groups, and texts that say how a process ended. The orderly
end (SIGTERM, a grace period, SIGKILL) is `Process.end` in watch.py."""

from __future__ import annotations

import contextlib
import os
import signal

from penstock.runtime.process.watch import stat_of


def signal_child(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a child of this process, not reaped yet: its process id cannot have been reused then."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(pid: int) -> None:
    """Kill a process group, whose leader `pid` must not be reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap(pid: int, *, group: bool = True) -> int:
    """Wait for a child that leads a group. Return its exit status, or minus a signal. `group`: kill the rest of it."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if group:
        kill_group(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reap_orphan(pid: int) -> bool:
    """Reap an orphan that has become a child of this process. Return False if it has not ended."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    return False


def zombie_status(pid: int) -> tuple[bool, int | None]:
    """Return whether a process, also another's child, is a zombie, and its exit status if the kernel shows it."""
    fields = stat_of(pid)
    try:
        return (True, os.waitstatus_to_exitcode(int(fields[-1]))) if fields[0] == "Z" else (False, None)
    except (ValueError, IndexError):
        return False, None


def exit_words(status: int) -> str:
    """ "was killed by SIGTERM", "exited with status 3", for an exit status or minus the number of the signal."""
    return f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"


def describe_exit(status: int | None) -> str:
    if status is None:
        return "died of an unknown cause (its parent process does not answer)"
    how = exit_words(status)
    if -status == signal.SIGKILL:
        return f"{how} (by the kernel for lack of memory, unless someone sent the signal)"
    return how if status else f"{how} before the end of its input (os._exit?)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal has no name
