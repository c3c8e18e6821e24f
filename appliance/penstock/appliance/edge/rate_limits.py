"""How fast peers may make the coordinator remember something new: a bucket of tokens for each peer, and one for all.

A pure piece: the clock is given. Who finds its bucket empty is told when to come back, and has cost a look at two
numbers. Peers are told apart by address without the port; the least recently seen are forgotten first, with a full
bucket, for the bucket of all bounds what many peers together can do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from penstock.appliance.model.limits import RateLimits
from penstock.proto.errors import OverloadedError

__all__ = ["RateLimiter", "address_of"]


class TokenBucket:
    """Holds up to `burst`, fills with `per_s`."""

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._held = float(burst)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until one can be taken; 0 if one can be now."""
        self._held = min(self._burst, self._held + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, (1.0 - self._held) / self._per_s)

    def take(self) -> None:
        self._held -= 1.0


class RateLimiter:
    """Asked before each registration and opening."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._all = TokenBucket(limits.all_per_s, limits.all_burst, clock())
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    def admit(self, peer: str, what: str) -> None:
        """Returns if `peer` (an address without port) may go on. Raises OverloadedError with when it may."""
        now, limits = self._clock(), self._limits
        bucket = self._peers.pop(peer, None) or TokenBucket(limits.peer_per_s, limits.peer_burst, now)
        self._peers[peer] = bucket
        while len(self._peers) > limits.peers_max:
            self._peers.popitem(last=False)
        of_peer, of_all = bucket.wait_s(now), self._all.wait_s(now)
        if not of_peer and not of_all:
            bucket.take()
            self._all.take()
            return
        whose = f"from {peer}" if of_peer else "from all peers together"
        per_s = limits.peer_per_s if of_peer else limits.all_per_s
        wait_s = max(of_peer, of_all)
        error = OverloadedError(
            f"too many calls of {what} {whose}, more than {per_s:g} a second: it will be taken in {wait_s:.1f} s"
        )
        error.retry_after_s = wait_s
        raise error


def address_of(peer: str) -> str:
    """The address in what gRPC calls a peer: "ipv4:10.0.0.1:5", "ipv6:%5B::1%5D:5", "unix:"."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else scheme
