"""Ends connections to a gRPC server that show no token, so that they cannot keep others out.

gRPC takes whoever connects, and has no limit for it: a connection costs a descriptor and some 50 KiB before anything is
shown, and a thousand silent ones were the end of a coordinator. So this looks at the process's own sockets, twice a
second or less often. A connection that no call has come by in `DEADLINE_S` is shut down, which gRPC takes for its
peer's end. Where those that have shown no token take more than their share of the descriptors, the address that has
most of them loses its oldest, until they do not: who floods pushes itself out. The log tells, a line in `LOG_EVERY_S`.

A call with a token proves its connection for as long as that lasts; a health check, which needs none, only shows that
it is not silent. What has been proven and makes no call is gRPC's to end (channel.py).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

__all__ = ["Connection", "Connections", "raise_file_limit", "surplus"]

DEADLINE_S = 10.0
"""Without a call. As long as gRPC gives TLS and HTTP/2 to be agreed on."""
EVERY_S = 0.5
"""Between two looks, at least. One that floods has taken all descriptors within this time."""
COST_SHARE = 0.01
"""Of one core's time, for looking: with 10,000 connections a look takes some 30 ms."""
LOG_EVERY_S = 10.0
SHARE = 0.25
"""Of all descriptors, for connections that have shown no token; those of a whole fleet that comes back find room."""
UNPROVEN_MAX = 8192
"""Such connections, however many descriptors there are: gRPC holds about 50 KiB for each."""
FILES_MAX = 1 << 20
"""Descriptors that are asked for: where the hard limit is no limit, some libraries would make tables of that size."""

log = logging.getLogger("penstock.connections")

Peer = tuple[str, int]
"""Address and port."""


def raise_file_limit() -> None:
    """Raises this process's limit of descriptors as far as it may: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("raised the limit of open files from %d to %d", soft, wanted)


@dataclass(frozen=True)
class Connection:
    """One that was accepted."""

    link: str
    """What /proc says of its descriptor: its socket's number, which no other socket has."""
    peer: Peer
    since: float
    """When it was seen first."""
    fd: int


def surplus(unproven: Iterable[Connection], silent: set[Peer], now: float, most: int) -> list[Connection]:
    """Those to end.

    Args:
        unproven: that have shown no token.
        silent: peers of those that have made no call at all.
        now: on the clock of `Connection.since`.
        most: so many may stay.
    """
    left = sorted(unproven, key=lambda one: one.since)
    ended = [one for one in left if one.peer in silent and now - one.since > DEADLINE_S]
    gone = set(ended)
    by_address: dict[str, list[Connection]] = {}
    for one in left:
        if one not in gone:
            by_address.setdefault(one.peer[0], []).append(one)
    count = sum(map(len, by_address.values()))
    while count > most:
        most_of_one = max(by_address.values(), key=len)
        others = sorted(map(len, by_address.values()))[-2] if len(by_address) > 1 else 0
        # Down to what the next one has, and at least one: as many steps as there are addresses, not connections.
        some = max(1, min(count - most, len(most_of_one) - others))
        ended += most_of_one[:some]
        del most_of_one[:some]
        count -= some
    return ended


def _address(host: str) -> str:
    """As gRPC and the kernel both may write it, in one form."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(found)


def _peer_of(said: str) -> Peer | None:
    """Of what gRPC calls a peer: "ipv4:10.0.0.1:5", "ipv6:%5B::1%5D:5"; None for a Unix socket."""
    scheme, _, rest = unquote(said).partition(":")
    host, _, port = rest.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _address(host.strip("[]")), int(port)


class Connections:
    """Those to a server of this process.

    clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._port = 0
        self._heard: dict[str, Peer | None] = {}
        """What gRPC calls a peer that has made a call -> who that is."""
        self._proven: set[Peer | None] = set()
        """Those that have shown a token."""
        self._known: dict[str, Connection] = {}
        self._missing: set[str] = set()
        """Of `_heard`: those without a connection at the last look."""
        self._logged_at = -LOG_EVERY_S
        self._ended: Counter[str] = Counter()
        """By address, since the last line of the log."""

    def heard(self, peer: str, *, proven: bool) -> None:
        """A call has come, with a token or one that needs none. Called for each: it is one look into a dict."""
        if peer not in self._heard:
            self._heard[peer] = _peer_of(peer)
        if proven:
            self._proven.add(self._heard[peer])

    async def watch(self, port: int) -> None:
        """Looks at the connections to `port` again and again, for ever."""
        self._port = port
        while True:
            began = time.perf_counter()
            for said in await asyncio.to_thread(self.look):
                self._proven.discard(self._heard.pop(said))
            await asyncio.sleep(max(EVERY_S, (time.perf_counter() - began) / COST_SHARE))

    def look(self) -> set[str]:
        """Ends what has to be. Returns those of `_heard` whose connections are gone."""
        now = self._clock()
        found = self._found(now)
        heard = self._heard.copy()  # in one step, beside the event loop
        unproven = [one for one in found.values() if one.peer not in self._proven]
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = UNPROVEN_MAX if soft == resource.RLIM_INFINITY else min(UNPROVEN_MAX, int(SHARE * soft))
        silent = {one.peer for one in unproven} - set(heard.values())
        for one in surplus(unproven, silent, now, most):
            if _shut(one):
                self._ended[one.peer[0]] += 1
        here = {one.peer for one in found.values()}
        missing = {said for said, peer in heard.items() if peer not in here}
        gone, self._missing = missing & self._missing, missing  # once may be one that came after the look at sockets
        self._tell(now)
        return gone

    def _found(self, now: float) -> dict[str, Connection]:
        """All that are there, by link."""
        found: dict[str, Connection] = {}
        for fd, link in _sockets():
            known = self._known.get(link)
            if known is None:
                ends = _ends(fd)
                if ends is None or ends[0] != self._port:
                    continue  # listens, is no TCP, or is something else of this process
                known = Connection(link, ends[1], now, fd)
            found[link] = known
        self._known = found
        return found

    def _tell(self, now: float) -> None:
        if self._ended and now - self._logged_at >= LOG_EVERY_S:
            told = ", ".join(f"{count} of {address}" for address, count in self._ended.most_common(5))
            others = f" and others of {len(self._ended) - 5} addresses" if len(self._ended) > 5 else ""
            log.warning("ended connections that showed no token: %s%s", told, others)
            self._ended.clear()
            self._logged_at = now


def _sockets() -> Iterator[tuple[int, str]]:
    """Descriptors of this process that are sockets, with what /proc says of them."""
    try:
        numbers: Iterable[int] = map(int, os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        numbers = range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # all are taken
    for fd in numbers:
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # closed since
        if link.startswith("socket:"):
            yield fd, link


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """gRPC's own descriptor as a socket; there may be none left for another one."""
    borrowed = socket.socket(fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _ends(fd: int) -> tuple[int, Peer] | None:
    """Our port and the peer, of a TCP connection."""
    try:
        with _borrowed(fd) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            host, port = sock.getpeername()[:2]
            return sock.getsockname()[1], (_address(host), port)
    except OSError:
        return None


def _shut(one: Connection) -> bool:
    """Ends it, if its descriptor is still its own. gRPC sees its end, and frees it."""
    try:
        if os.readlink(f"/proc/self/fd/{one.fd}") != one.link:
            return False
        with _borrowed(one.fd) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
