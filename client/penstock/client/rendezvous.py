"""How the ranks of one torchrun launch on one machine come to share one embedded appliance.

Local rank 0 starts the daemons and publishes where they are in a small file; the others wait for it, with a deadline. The
file lies in a directory that only this user can enter, for it holds the token. Its name is made of what all ranks of a
launch share and other launches do not (the torchrun agent's pid, the master port, the restart count) and of how many
appliances the process has shared before.

Ranks leave at slightly different times, and the daemons end with rank 0. So every rank that joins holds a shared lock on
the file's companion, and rank 0 takes it exclusively before it stops the daemons: the kernel gives the lock back for a
rank that was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.client.settings import Torchrun
from penstock.proto.errors import DeadlineError, PenstockError

__all__ = ["Meeting", "Place"]

POLL_S = 0.02
LEAVE_S = 60.0
"""Seconds that rank 0 waits for the others before it stops the daemons under them."""

_shared_so_far = 0
_pause = threading.Event()  # never set: a wait on it is a sleep that a signal handler may leave


@dataclass(frozen=True)
class Place:
    """Where the daemons of local rank 0 are."""

    address: str
    token: str
    job: str


def _directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PenstockError(
            f"{path} must be a directory that only this user can enter, and it is not: remove it, or set TMPDIR to a place "
            "of your own"
        )
    return path


class Meeting:
    """One appliance that the ranks of a launch share."""

    def __init__(self, torchrun: Torchrun) -> None:
        global _shared_so_far
        key = f"{os.getppid()}-{torchrun.master.rpartition(':')[2]}-{torchrun.restarts}-{_shared_so_far}"
        _shared_so_far += 1
        self._file = _directory() / f"torchrun-{key}.json"
        self._lock_file = self._file.with_suffix(".lock")
        self._lock_fd = -1
        self._hosts = torchrun.local_rank == 0
        self._pid = os.getpid()

    @property
    def hosts(self) -> bool:
        """This is the rank that starts the daemons."""
        return self._hosts

    def publish(self, place: Place) -> None:
        """Tell the other ranks, all at once or not at all."""
        text = json.dumps({"address": place.address, "token": place.token, "job": place.job, "pid": os.getpid()})
        fresh = self._file.with_suffix(f".{os.getpid()}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            file.write(text)
        fresh.rename(self._file)

    def join(self, deadline: float, timeout_s: float) -> Place:
        """Wait for the place that local rank 0 publishes; from then on it waits for this rank to leave.

        deadline: time.monotonic(). Raises DeadlineError.
        """
        while True:
            found = self._read()
            if found is not None:
                self._lock_fd = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
                return found
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"Appliance(): waited {timeout_s:g} s for local rank 0 of this torchrun launch to start the embedded "
                    "appliance. Every rank must create it, in the same order; or start `penstock coordinator` and `penstock "
                    "worker`, and set PENSTOCK_COORDINATOR"
                )
            _pause.wait(POLL_S)

    def _read(self) -> Place | None:
        try:
            fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with open(fd) as file:
            value = json.load(file)
        if not os.path.exists(f"/proc/{value['pid']}"):
            return None  # left by a rank 0 that was killed; the new one is about to write its own
        return Place(value["address"], value["token"], value["job"])

    def leave(self, stop: Callable[[], None]) -> None:
        """Give the lock back; on local rank 0, wait for the others first, then `stop`."""
        if os.getpid() != self._pid:
            return
        if not self._hosts:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
            return
        self._file.unlink(missing_ok=True)
        try:
            fd = os.open(self._lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            fd = -1  # nobody came
        if fd >= 0:
            deadline = time.monotonic() + LEAVE_S
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    _pause.wait(POLL_S)
            os.close(fd)
        self._lock_file.unlink(missing_ok=True)
        stop()
