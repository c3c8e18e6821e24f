"""Limits on the connections to a gRPC server on which no call with a valid token was made.

gRPC accepts connections without a limit. Each costs a descriptor and some 50 KiB, and a thousand silent ones stopped a
coordinator. So this module looks at the process's own sockets, at most twice a second. A connection without a call in
`DEADLINE_S` is shut down. If those without a token exceed their share of the descriptors, the oldest of the address
with most connections are closed, so that a flood from one address costs that address its own. The log gets at most one
line in `LOG_EVERY_S` seconds.

After a call with a token a connection counts as proven until it ends. A health check shows only that it is not
silent."""

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

DEADLINE_S = 10.0
"""Seconds after which a connection without a call is ended, as gRPC ends handshakes."""
EVERY_S = 0.5
"""Shortest time between two checks in seconds, in which a flood of connections can still take all descriptors."""
COST_SHARE = 0.01
"""Largest share of one core's time for the checks. With 10,000 connections one takes some 30 ms."""
SHORT_S = 0.002
"""Seconds up to which a check is made in the event loop itself, which spares the wakeups of another thread."""
LOG_EVERY_S = 10.0
SHARE = 0.25
"""Share of the process's descriptors for connections without a token: enough for a whole cluster that reconnects."""
UNPROVEN_MAX = 8192
"""Largest number of connections without a token. gRPC takes about 50 KiB for each."""
FILES_MAX = 1 << 20
"""Largest limit of open descriptors to set: some libraries allocate tables as large as the limit."""

log = logging.getLogger("penstock.connections")

Peer = tuple[str, int]


def raise_file_limit() -> None:
    """Raise this process's limit of open descriptors as far as the system allows, because each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("raised the limit of open files from %d to %d", soft, wanted)


@dataclass(frozen=True)
class Connection:
    link: str
    """Target of the descriptor's link in /proc, with a number that is unique to the socket."""
    peer: Peer
    since: float
    """Monotonic time of the first check that found the connection."""
    fd: int


def surplus(unproven: Iterable[Connection], silent: set[Peer], now: float, most: int) -> list[Connection]:
    """Return the connections to end. `silent`: peers that have made no call; `most`: unproven ones that may stay."""
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
        # Down to the count of the next address, and at least one: a loop over addresses is faster than one over
        # connections.
        some = max(1, min(count - most, len(most_of_one) - others))
        ended += most_of_one[:some]
        del most_of_one[:some]
        count -= some
    return ended


def _address(host: str) -> str:
    """IP address in the form that Python gives it, because gRPC and the kernel write addresses differently."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(found)


def _peer_of(said: str) -> Peer | None:
    """Peer from gRPC's name of it, "ipv4:10.0.0.1:5" or "ipv6:%5B::1%5D:5"; None for a Unix socket."""
    scheme, _, rest = unquote(said).partition(":")
    host, _, port = rest.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _address(host.strip("[]")), int(port)


class Connections:
    """Connections to the gRPC server in this process, and which of them have shown a token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._port = 0
        self._callers: dict[str, Peer | None] = {}
        self._proven: set[Peer | None] = set()
        self._known: dict[str, Connection] = {}
        self._missing: set[str] = set()
        """Names in `_callers` whose connection the last check did not find."""
        self._logged_at = -LOG_EVERY_S
        self._ended: Counter[str] = Counter()
        """Connections of an IP address that were ended since the last line in the log."""

    def note_call(self, peer: str, *, proven: bool) -> None:
        """Record a call. For a known peer this costs only one look-up in a dict, because it is done for each call."""
        if peer not in self._callers:
            self._callers[peer] = _peer_of(peer)
        if proven:
            self._proven.add(self._callers[peer])

    async def watch(self, port: int) -> None:
        """Check the connections to the server's `port` periodically, until cancelled."""
        self._port = port
        took_s = 0.0
        while True:
            began = time.perf_counter()
            gone = self.look() if took_s < SHORT_S else await asyncio.to_thread(self.look)
            took_s = time.perf_counter() - began
            for said in gone:
                self._proven.discard(self._callers.pop(said))
            await asyncio.sleep(max(EVERY_S, took_s / COST_SHARE))

    def look(self) -> set[str]:
        """End the connections that exceed the limits. Return the names in `_callers` whose connections are gone."""
        now = self._clock()
        found = self._found(now)
        callers = self._callers.copy()  # one atomic operation, because the event loop runs at the same time
        unproven = [one for one in found.values() if one.peer not in self._proven]
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = UNPROVEN_MAX if soft == resource.RLIM_INFINITY else min(UNPROVEN_MAX, int(SHARE * soft))
        silent = {one.peer for one in unproven} - set(callers.values())
        for one in surplus(unproven, silent, now, most):
            if _shut(one):
                self._ended[one.peer[0]] += 1
        here = {one.peer for one in found.values()}
        missing = {said for said, peer in callers.items() if peer not in here}
        gone, self._missing = missing & self._missing, missing  # twice in a row: names may be newer than `found`
        self._tell(now)
        return gone

    def _found(self, now: float) -> dict[str, Connection]:
        found: dict[str, Connection] = {}
        for fd, link in _sockets():
            known = self._known.get(link)
            if known is None:
                ends = _ends(fd)
                if ends is None or ends[0] != self._port:
                    continue  # a listening socket, not TCP, or another socket of this process
                known = Connection(link, ends[1], now, fd)
            found[link] = known
        self._known = found
        return found

    def _tell(self, now: float) -> None:
        if self._ended and now - self._logged_at >= LOG_EVERY_S:
            busiest = ", ".join(f"{count} of {address}" for address, count in self._ended.most_common(5))
            others = f" and others of {len(self._ended) - 5} addresses" if len(self._ended) > 5 else ""
            log.warning("closed connections without a valid token, silent or too many: %s%s", busiest, others)
            self._ended.clear()
            self._logged_at = now


def _sockets() -> Iterator[tuple[int, str]]:
    """Descriptor of each socket of this process, with the target of its link in /proc."""
    try:
        numbers: Iterable[int] = map(int, os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        numbers = range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # no descriptor is free to list /proc
    for fd in numbers:
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # closed since
        if link.startswith("socket:"):
            yield fd, link


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Socket object for a descriptor that belongs to gRPC, not duplicated, because no descriptor may be free."""
    borrowed = socket.socket(fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _ends(fd: int) -> tuple[int, Peer] | None:
    try:
        with _borrowed(fd) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            host, port = sock.getpeername()[:2]
            return sock.getsockname()[1], (_address(host), port)
    except OSError:
        return None


def _shut(one: Connection) -> bool:
    """Shut a connection down, so that gRPC frees its descriptor. False if that belongs to another socket by now."""
    try:
        if os.readlink(f"/proc/self/fd/{one.fd}") != one.link:
            return False
        with _borrowed(one.fd) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
