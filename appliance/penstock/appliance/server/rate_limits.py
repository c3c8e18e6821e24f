"""Rate limits on calls that make the coordinator store something new (registrations of workers, openings of runs): a
token bucket for each peer, and one for all peers together. Each call costs up to a millisecond, so a peer that repeats
it in a loop by mistake would delay the others' heartbeats.

A peer is identified by its address without the port. A refused peer gets the time after which to retry; the refusal
itself costs a comparison of two numbers. Buckets are kept for at most PEERS_MAX peers. Beyond that number, the peers
that called least recently are forgotten, and start with a full bucket when they call again. The common bucket still
limits them.

Pure: the clock is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from penstock.proto.errors import OverloadedError

__all__ = ["RateLimiter", "address_of"]


PEER_PER_S = 200.0
PEER_BURST = 12_000
"""Largest burst of calls from one address. Many machines may share an address behind a proxy. The bursts let a whole
fleet register again at once after a restart."""
ALL_PER_S = 1_000.0
ALL_BURST = 24_000
PEERS_MAX = 4096
"""Largest number of addresses of callers whose rates are kept in memory."""


class TokenBucket:
    """Token bucket, in which each call takes one token. It holds at most `burst` tokens and gains `per_s` tokens a
    second."""

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._held = float(burst)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until a token can be taken; 0 if one can be taken now."""
        self._held = min(self._burst, self._held + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, (1.0 - self._held) / self._per_s)

    def take(self) -> None:
        self._held -= 1.0


class RateLimiter:
    """Limiter of the registrations of workers and the openings of runs in a second: for each peer, and for all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = TokenBucket(ALL_PER_S, ALL_BURST, clock())
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    def admit(self, peer: str, what: str) -> None:
        """Take a token for one call of `peer`, an IP address. `what`: name of the call, for the error. Raises
        OverloadedError, with `retry_after_s` set, if `peer` or all peers together are above their rate."""
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
        error = OverloadedError(
            f"at most {per_s:g} {what} calls a second {whose} are allowed, got more: retry in {wait_s:.1f} s"
        )
        error.retry_after_s = wait_s
        raise error


def address_of(peer: str) -> str:
    """Return the IP address in gRPC's name of a peer: "10.0.0.1" for "ipv4:10.0.0.1:5", "::1" for "ipv6:%5B::1%5D:5",
    "unix" for "unix:"."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else scheme
