"""Connections to a worker's host, with a short timeout if the host has just stopped answering.

The first connection may have a long round trip, so its timeout is `CONNECT_S`, in which the kernel sends two SYNs. If a
host has acknowledged nothing for two seconds, or has not answered a try, each of its lanes makes one short try before
it requests another worker. A short try makes a few connections, `AGAIN_S` apart, so that one lost packet moves no slot,
and lasts three of the host's round trips. After `SOON_S` seconds, tries have the long timeout again.
"""

from __future__ import annotations

import select
import socket
import time

from penstock.proto.lane.tcp import round_trip_s
from penstock.proto.lane.tls_socket import check_damage, connect_tls
from penstock.proto.rpc.tls import Renewing, Tls, explain, host_of

__all__ = ["SHAKE_S", "Dialer", "LaneDialer"]

CONNECT_S = 1.25
"""Timeout of a connection to a daemon, seconds. The kernel repeats a SYN after one second; a consumer retries at once
after a timeout."""
LOOK_S = 0.45
"""Smallest timeout of a short try, seconds, if three round trips take less."""
AGAIN_S = 0.12
"""Seconds between the connections of a short try."""
SOON_S = 1.0
"""Seconds after a host stopped answering in which tries are short."""
SHAKE_S = 10.0
"""Deadline of each step of TLS, seconds."""
_MOST = 64
"""Largest number of hosts that are kept; the oldest are dropped first."""


class Dialer:
    """Dialer of one process. Threads may connect at the same time."""

    def __init__(self) -> None:
        self._silent: dict[tuple[str, int], tuple[float, float]] = {}
        """Address -> (timeout of a short try in seconds, monotonic time until which tries are short)."""

    def fell_silent(self, where: tuple[str, int], sock: socket.socket | None = None) -> None:
        """Record that a host has stopped answering. `sock`: the connection on which that was detected."""
        rtt = 0.0 if sock is None else round_trip_s(sock)
        self._silent[where] = min(CONNECT_S, max(LOOK_S, 3 * rtt)), time.monotonic() + SOON_S
        for old in list(self._silent)[:-_MOST]:
            self._silent.pop(old, None)

    def connect(self, where: tuple[str, int]) -> socket.socket:
        """Return a blocking connection. Raises OSError; TimeoutError if the host did not answer."""
        look_s, until = self._silent.get(where, (0.0, 0.0))
        if time.monotonic() < until:
            return _look(where, look_s)
        try:
            return socket.create_connection(where, CONNECT_S)
        except TimeoutError:
            self.fell_silent(where)
            raise


class LaneDialer(Dialer):
    """Dialer of lanes, over TLS if the cluster has it. `tls`: TLS files; None: connections are plain."""

    def __init__(self, tls: Tls | None) -> None:
        super().__init__()
        self._files = None if tls is None else Renewing(tls)

    def open(self, address: str) -> socket.socket:
        """Return a blocking lane to a worker at host:port. Raises OSError, TlsError, BatchCorruptError."""
        where = host_of(address)
        sock = self.connect(where)
        sock.settimeout(SHAKE_S)
        if self._files is None:
            return sock
        try:
            return connect_tls(sock, self._files.renewed(), where[0])
        except OSError as error:
            check_damage(error, heard=False)
            self.check_refusal(error, address)
            raise

    def check_refusal(self, error: OSError, address: str) -> None:
        """Raise TlsError if TLS is the cause of the error."""
        trouble = None if self._files is None else explain(error, f"the worker's lane at {address}", self._files.tls)
        if trouble is not None:
            raise trouble from error


def _look(where: tuple[str, int], look_s: float) -> socket.socket:
    """Return the first of several connections that succeeds."""
    targets = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
    began, poll = time.monotonic(), select.poll()
    trying: dict[int, socket.socket] = {}
    error: OSError = TimeoutError(f"no answer within {look_s:g} s")
    try:
        rounds = 0
        while (spent := time.monotonic() - began) < look_s:
            if spent >= rounds * AGAIN_S:
                rounds += 1
                for family, kind, proto, _, address in targets:
                    sock = socket.socket(family, kind, proto)
                    trying[sock.fileno()] = sock
                    sock.setblocking(False)
                    sock.connect_ex(address)
                    poll.register(sock, select.POLLOUT)
            until = min(look_s, rounds * AGAIN_S)
            for fd, _ in poll.poll(max(0.0, 1000 * (began + until - time.monotonic())) + 1):
                failed = trying[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not failed:
                    found = trying.pop(fd)
                    found.setblocking(True)
                    return found
                poll.unregister(fd)
                trying.pop(fd).close()
                error = OSError(failed, f"connect: {where}")
            if not trying:
                raise error
        raise error
    finally:
        for sock in trying.values():
            sock.close()
