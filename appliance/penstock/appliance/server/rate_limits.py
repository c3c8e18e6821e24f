"""Rate limits on calls that store something new (registrations, openings of runs): a token bucket for each peer, and
one for all.

Each call costs up to a millisecond, so a peer that repeats it by mistake would delay heartbeats. A peer is an address
without the port; a refused one gets the time after which to retry. Beyond PEERS_MAX, the least recent peers are
forgotten and start with a full bucket; the common bucket still limits them. Pure: the clock is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from penstock.proto.errors import OverloadedError

PEER_PER_S = 200.0
PEER_BURST = 12_000
"""Largest burst of an address: machines may share one, and a whole fleet registers at once after a restart."""
ALL_PER_S = 1_000.0
ALL_BURST = 24_000
PEERS_MAX = 4096
"""Most addresses whose rates are kept in memory."""


class TokenBucket:
    """Bucket of at most `burst` tokens that gains `per_s` a second; each call takes one."""

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._held = float(burst)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until a token can be taken."""
        self._held = min(self._burst, self._held + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, (1.0 - self._held) / self._per_s)

    def take(self) -> None:
        self._held -= 1.0


class RateLimiter:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = TokenBucket(ALL_PER_S, ALL_BURST, clock())
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    def admit(self, peer: str, what: str) -> None:
        """Take a token for one call of IP address `peer`. Raises OverloadedError with `retry_after_s` above a rate."""
        now = self._clock()
        bucket = self._peers.pop(peer, None) or TokenBucket(PEER_PER_S, PEER_BURST, now)
        self._peers[peer] = bucket
        while len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        peer_wait_s, all_wait_s = bucket.wait_s(now), self._all.wait_s(now)
        if not peer_wait_s and not all_wait_s:
            bucket.take()
            self._all.take()
            return
        whose = f"from {peer}" if peer_wait_s else "from all addresses together"
        per_s = PEER_PER_S if peer_wait_s else ALL_PER_S
        wait_s = max(peer_wait_s, all_wait_s)
        error = OverloadedError(f"at most {per_s:g} {what} calls a second {whose} are allowed: retry in {wait_s:.1f} s")
        error.retry_after_s = wait_s
        raise error


def address_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer: "10.0.0.1" for "ipv4:10.0.0.1:5", "::1" for "ipv6:%5B::1%5D:5",
    "unix" for "unix:"."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else scheme
