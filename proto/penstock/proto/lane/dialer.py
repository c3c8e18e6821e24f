"""TCP connections to workers' hosts, with a short timeout if the host has just stopped answering.

A host is *silent* if it has acknowledged nothing for two seconds, or an attempt to connect has timed out after
`CONNECT_S`. For the next `SILENT_S` seconds attempts are short, so that each of its lanes can soon request another
worker: three round trips, but at least `SHORT_S` and at most `CONNECT_S`. A short attempt starts another connection
every `STAGGER_S` seconds, so that one lost packet does not move a slot."""

from __future__ import annotations

import os
import select
import socket
import time

from penstock.proto.lane.tcp import round_trip_s
from penstock.proto.lane.tls_socket import check_damage, connect_tls
from penstock.proto.rpc.tls import Renewing, Tls, explain, host_of

CONNECT_S = 1.25
"""Timeout in seconds. The kernel repeats a SYN after one second, and the caller retries at once after a timeout."""
SHORT_S = 0.45
STAGGER_S = 0.12
"""Seconds between the connections that one short attempt to connect starts."""
SILENT_S = 1.0
"""Seconds for which attempts to connect to a host are short, after the host has stopped answering."""
HANDSHAKE_S = 10.0
"""Deadline in seconds of each step of the TLS handshake. The connections that LaneDialer returns have it as timeout."""
_SILENT_KEPT = 64


class LaneDialer:
    """Maker of connections to workers' lanes, also for several threads at a time."""

    def __init__(self, tls: Tls | None) -> None:
        self._files = None if tls is None else Renewing(tls)
        self._silent: dict[tuple[str, int], tuple[float, float]] = {}
        """Silent host -> (timeout of a short attempt in seconds, monotonic time until which attempts are short)."""

    def fell_silent(self, where: tuple[str, int], sock: socket.socket | None = None) -> None:
        """Record that a host has stopped answering. `sock`: connection on which this was noticed."""
        rtt = 0.0 if sock is None else round_trip_s(sock)
        self._silent[where] = min(CONNECT_S, max(SHORT_S, 3 * rtt)), time.monotonic() + SILENT_S
        for old in list(self._silent)[:-_SILENT_KEPT]:
            self._silent.pop(old, None)

    def connect(self, where: tuple[str, int]) -> socket.socket:
        """Raises TimeoutError if the host does not answer, OSError if the connection fails otherwise."""
        timeout_s, until = self._silent.get(where, (0.0, 0.0))
        if time.monotonic() < until:
            return _short_attempt(where, timeout_s)
        try:
            return socket.create_connection(where, CONNECT_S)
        except TimeoutError:
            self.fell_silent(where)
            raise

    def open(self, address: str) -> socket.socket:
        """Return a blocking connection to a worker's lanes. Raises OSError, TlsError, BatchCorruptError."""
        where = host_of(address)
        sock = self.connect(where)
        sock.settimeout(HANDSHAKE_S)
        if self._files is None:
            return sock
        try:
            return connect_tls(sock, self._files.renewed(), where[0])
        except OSError as error:
            check_damage(error, heard=False)
            self.check_refusal(error, address)
            raise

    def check_refusal(self, error: OSError, address: str) -> None:
        """Raise TlsError, with the reason, if a connection has failed because of TLS."""
        trouble = None if self._files is None else explain(error, f"the worker's lane at {address}", self._files.tls)
        if trouble is not None:
            raise trouble from error


def _short_attempt(where: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect to each address every STAGGER_S seconds; return the first success, or raise the last OSError."""
    targets = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
    began, poll = time.monotonic(), select.poll()
    trying: dict[int, socket.socket] = {}
    error: OSError = TimeoutError(f"no answer within {timeout_s:g} s")
    try:
        rounds = 0
        while (spent := time.monotonic() - began) < timeout_s:
            if spent >= rounds * STAGGER_S:
                rounds += 1
                for family, kind, proto, _, address in targets:
                    sock = socket.socket(family, kind, proto)
                    trying[sock.fileno()] = sock
                    sock.setblocking(False)
                    sock.connect_ex(address)
                    poll.register(sock, select.POLLOUT)
            until = min(timeout_s, rounds * STAGGER_S)
            for fd, _ in poll.poll(max(0.0, 1000 * (began + until - time.monotonic())) + 1):
                failed = trying[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not failed:
                    found = trying.pop(fd)
                    found.setblocking(True)
                    return found
                poll.unregister(fd)
                trying.pop(fd).close()
                error = OSError(failed, os.strerror(failed))
            if not trying:
                raise error
        raise error
    finally:
        for sock in trying.values():
            sock.close()
