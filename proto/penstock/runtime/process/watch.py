"""Watching and signalling of a process by a pidfd, the only reliable sign that it has ended.

Sockets and pipes may be held open by its forks, and an id may be reused. Children also watch their parent by a pidfd
(lifetime.py)."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

LONGEST_S = 1e6
"""Longest timeout of poll(2) in seconds. A longer timeout counts as no limit."""


def wait_for_any(fds: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Return the readable or closed descriptors; [] after `timeout_s`. Unlike select(2), also above 1023."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    forever = timeout_s is None or timeout_s > LONGEST_S
    return [fd for fd, _ in poll.poll(None if forever else max(0.0, timeout_s or 0.0) * 1000)]


def readable(fd: int, timeout_s: float | None = None) -> bool:
    """Return False if the descriptor is not readable within `timeout_s` seconds."""
    return bool(wait_for_any([fd], timeout_s))


class Process:
    """Process that is watched, not necessarily a child, until `close`. `pidfd`: its open pidfd, which `close` closes.
    Raises ProcessLookupError if the process is reaped."""

    def __init__(self, pid: int, pidfd: int | None = None) -> None:
        self.pid = pid
        self._pidfd = -1
        self._unwatch: Callable[[], object] | None = None
        self._pidfd = os.pidfd_open(pid) if pidfd is None else pidfd

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the pidfd, which becomes readable when the process ends; -1 after `close`."""
        return self._pidfd

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return False if the process still runs after `timeout_s` seconds."""
        return readable(self._pidfd, timeout_s)

    @property
    def ended(self) -> bool:
        return self.wait(0)

    def on_end(self, then: Callable[[], object]) -> None:
        """Let the running event loop call `then` once when the process ends, unless `close` is called before."""
        import asyncio

        loop, pidfd = asyncio.get_running_loop(), self._pidfd

        def ended() -> None:
            loop.remove_reader(pidfd)
            self._unwatch = None
            then()

        self._unwatch = lambda: loop.remove_reader(pidfd)
        loop.add_reader(pidfd, ended)

    def send(self, number: int) -> bool:
        """Send the process a signal. Return False if it has ended, or after `close`."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Ask the process to end in order, without waiting."""
        self.send(signal.SIGTERM)

    def end(self, grace_s: float, killed_s: float | None = None) -> bool:
        """Ask the process to end, and kill it after `grace_s` seconds. Return False if it still runs after another
        `killed_s`."""
        self.ask_to_end()
        if self.wait(grace_s):
            return True
        self.kill()
        return self.wait(killed_s)

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the program's name (state, parent, ...); [] if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return []
