"""Rendezvous of the ranks of one torchrun launch on one machine, which share one embedded appliance.

Local rank 0 starts the daemons and listens on an abstract Unix socket. The other ranks connect, with a deadline, and
receive the daemons' address. The socket's name consists of values that all ranks of a launch share and other launches
do not (the torchrun agent's pid, the master port, the restart count), and of the number of appliances that were shared
before. An abstract name has no file permissions, so both ends get the peer's user from the kernel. Unlike a file with
the token, the socket leaves nothing behind when a rank is killed. Another user can take the name first. Rank 0 then
takes a name that begins with it and ends in a random number, and the others try all such names that the kernel lists.

Ranks finish at slightly different times, and the daemons end with rank 0. So every rank keeps its connection until it
no longer needs the appliance, and rank 0 waits until all connections are closed before it stops the daemons.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.client.api.appliance_settings import Torchrun
from penstock.proto.errors import DeadlineError, PenstockError
from penstock.proto.lane.endpoints import check_peer, connect_local

__all__ = ["DaemonAddresses", "SharedAppliance"]

POLL_S = 0.02
"""Seconds between two attempts to connect to local rank 0."""
LEAVE_S = 60.0
"""Longest time in seconds that local rank 0 waits for the other ranks to close their connections, before it stops the
daemons anyway."""
MAX_MESSAGE = 4096
"""Largest size of the message with the daemons' addresses, in bytes."""
SOCKETS = "/proc/net/unix"
"""File in which the kernel lists the Unix sockets of this network namespace. Names of abstract sockets begin with an
@."""

_shared_so_far = 0
_pause = threading.Event()  # never set: a wait on it is a sleep


@dataclass(frozen=True)
class DaemonAddresses:
    """Address of the daemons that local rank 0 started or uses, the credential token for them, and the job's name."""

    address: str
    token: str = field(repr=False)
    job: str


def _connected(name: str) -> socket.socket | None:
    """Return a connection to the abstract socket of this name if its owner is a process of this user, else None. Do not
    wait, because another user's socket may have a full queue."""
    try:
        return connect_local(name, 0.0)
    except (OSError, PenstockError):
        return None


def _is_ours(name: str) -> bool:
    """Return True if the owner of the socket of this name is a process of this user."""
    sock = _connected(name)
    if sock is not None:
        sock.close()
    return sock is not None


def _names(name: str) -> list[str]:
    """Return the socket name, and all socket names listed by the kernel that begin with it."""
    try:
        listed = Path(SOCKETS).read_bytes().decode(errors="replace").split()
    except OSError:
        listed = []
    return [name, *(word[1:] for word in listed if word.startswith(f"@{name}-"))]


class SharedAppliance:
    """Embedded appliance of all ranks of a launch on this machine. Local rank 0 starts the appliance, and the other
    ranks connect."""

    def __init__(self, torchrun: Torchrun) -> None:
        global _shared_so_far
        port = torchrun.master.rpartition(":")[2]
        self._name = f"penstock-torchrun-{os.getuid()}-{os.getppid()}-{port}-{torchrun.restarts}-{_shared_so_far}"
        _shared_so_far += 1
        self.hosts = torchrun.local_rank == 0
        """True on the rank that starts the daemons."""
        self._pid = os.getpid()
        self._listener: socket.socket | None = None
        self._joined: socket.socket | None = None
        self._others: list[socket.socket] = []
        self._answering: threading.Thread | None = None

    def publish(self, place: DaemonAddresses) -> None:
        """Send the daemons' addresses to each rank that connects, from now on."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                listener.bind("\0" + self._name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or _is_ours(self._name):
                    raise
                listener.bind(f"\0{self._name}-{secrets.token_hex(8)}")
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise PenstockError(
                f"Appliance(): another process of this torchrun launch has already started an embedded appliance as "
                f"local rank 0 ({error}): make one Appliance per process, or pass the address of a coordinator"
            ) from error
        self._listener = listener
        message = json.dumps(asdict(place)).encode()
        self._answering = threading.Thread(
            target=self._answer, args=(listener, message), name="penstock-rendezvous", daemon=True
        )
        self._answering.start()

    def _answer(self, listener: socket.socket, message: bytes) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # the socket is closed: this rank leaves
            try:
                check_peer(sock)
            except (OSError, PenstockError):
                sock.close()
                continue
            self._others.append(sock)  # before the reply: `leave` waits for every rank that has joined
            with contextlib.suppress(OSError):  # the rank is gone already; `leave` detects that
                sock.send(message)

    def join(self, deadline: float, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> DaemonAddresses:
        """Return the daemons' addresses from local rank 0. From then on, rank 0 waits for this rank to leave.

        deadline: a time of time.monotonic(). `waiting` is called repeatedly during the wait. Raises DeadlineError.
        """
        while True:
            for name in _names(self._name):
                if (sock := _connected(name)) is None:
                    continue
                try:
                    sock.settimeout(max(0.1, deadline - time.monotonic()))
                    data = sock.recv(MAX_MESSAGE)
                except OSError:
                    data = b""
                if data:
                    self._joined = sock
                    return DaemonAddresses(**json.loads(data))
                sock.close()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"Appliance(): local rank 0 of this torchrun launch has not started the embedded appliance within "
                    f"{timeout_s:g} s. Create the same appliances in the same order on every rank; or start `penstock "
                    "coordinator` and `penstock worker`, and set PENSTOCK_COORDINATOR"
                )
            waiting()
            _pause.wait(POLL_S)

    def leave(self, stop: Callable[[], None]) -> None:
        """End this rank's use of the appliance. On local rank 0, wait until the other ranks have ended their use, then
        call `stop`."""
        if os.getpid() != self._pid:
            return
        if self._joined is not None:
            self._joined.close()
        if self._listener is None or self._answering is None:
            return
        # A shutdown is needed: a close alone would not end the accept in the other thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        deadline = time.monotonic() + LEAVE_S
        self._answering.join(LEAVE_S)  # also waits for a rank that was accepted just before
        for sock in self._others:
            select.select([sock], [], [], max(0.0, deadline - time.monotonic()))
            sock.close()
        stop()
