"""Rendezvous of the ranks of one launch on one machine, which share one embedded appliance.

Local rank 0 starts the daemons and sends the other ranks the coordinator's address and token over an abstract Unix
socket. Its name is made of values that only this launch's ranks share (run id, master address and port, restart count),
and of the number of appliances before; not of ids of processes, because a wrapper may start each rank. Abstract sockets
have no permissions, so each end asks the kernel for the other's user; unlike a file, they leave nothing behind when a
rank is killed. If another user has taken the name, rank 0 appends a random number, and the others try all names with
this beginning that the kernel lists.

Ranks finish at different times, and the daemons end with rank 0. So every rank keeps its connection until it no longer
needs the appliance, and rank 0 waits for that, at most LEAVE_S seconds."""

from __future__ import annotations

import contextlib
import errno
import hashlib
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

from penstock.client.api.appliance_settings import Launcher
from penstock.proto.errors import DeadlineError, PenstockError
from penstock.proto.lane.frames import check_peer, connect_local

POLL_S = 0.02
LEAVE_S = 60.0
MAX_MESSAGE = 4096
SOCKETS = "/proc/net/unix"
"""Lists the Unix sockets of this network namespace; names of abstract ones begin with an @."""

_shared_so_far = 0


@dataclass(frozen=True)
class CoordinatorAccess:
    address: str
    token: str = field(repr=False)
    job: str


def _connected(name: str) -> socket.socket | None:
    """Connect to a socket of this user, else None. Does not wait: another user's socket may never accept."""
    try:
        return connect_local(name, 0.0)
    except (OSError, PenstockError):
        return None


def _is_ours(name: str) -> bool:
    sock = _connected(name)
    if sock is not None:
        sock.close()
    return sock is not None


def _names(name: str) -> list[str]:
    try:
        listed = Path(SOCKETS).read_bytes().decode(errors="replace").split()
    except OSError:
        listed = []
    return [name, *(word[1:] for word in listed if word.startswith(f"@{name}-"))]


class SharedAppliance:
    def __init__(self, launcher: Launcher) -> None:
        global _shared_so_far
        launch = f"{os.getuid()} {launcher.launch} {launcher.restarts}"  # a hash, because a run id may be long
        self._name = f"penstock-ranks-{hashlib.blake2b(launch.encode(), digest_size=12).hexdigest()}-{_shared_so_far}"
        _shared_so_far += 1
        self.hosts = launcher.local_rank == 0
        self._pid = os.getpid()
        self._listener: socket.socket | None = None
        self._joined: socket.socket | None = None
        self._others: list[socket.socket] = []
        self._answering: threading.Thread | None = None

    def publish(self, access: CoordinatorAccess) -> None:
        """On local rank 0: send `access` to each other rank that connects, in a thread, until `leave`."""
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
                f"Appliance(): local rank 0 cannot listen for the other ranks of this launch: {error}. Make "
                "appliances in only one process with LOCAL_RANK=0, or pass the address of a coordinator"
            ) from error
        self._listener = listener
        message = json.dumps(asdict(access)).encode()
        self._answering = threading.Thread(
            target=self._answer, args=(listener, message), name="penstock-rendezvous", daemon=True
        )
        self._answering.start()

    def _answer(self, listener: socket.socket, message: bytes) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # the socket is closed, because this rank calls `leave`
            try:
                check_peer(sock)
            except (OSError, PenstockError):
                sock.close()
                continue
            self._others.append(sock)  # before the reply: `leave` waits for every rank that has joined
            with contextlib.suppress(OSError):  # the other rank is gone already; `leave` detects that
                sock.send(message)

    def join(self, deadline: float, timeout_s: float, waiting: Callable[[], None] = lambda: None) -> CoordinatorAccess:
        """On the other ranks: wait for what local rank 0 sends. It keeps the daemons running until this rank calls
        `leave` or ends, at most LEAVE_S after its own `leave`. `waiting` is called repeatedly."""
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
                    return CoordinatorAccess(**json.loads(data))
                sock.close()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"Appliance(): local rank 0 of this launch has not started the embedded appliance within "
                    f"{timeout_s:g} s: create the same appliances in the same order on every rank"
                )
            waiting()
            time.sleep(POLL_S)

    def leave(self, stop: Callable[[], None]) -> None:
        """End this rank's use. Local rank 0 waits for the others, at most LEAVE_S, then calls `stop`."""
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
