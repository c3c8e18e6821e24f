"""Rate limits on calls that make the coordinator store something new: a token bucket for each peer, and one for all.

Pure: the clock is passed in. A refused peer gets the time after which to retry; refusing it costs a comparison of two
numbers. Peers are identified by address without the port. The least recently seen peers are forgotten first and then
start with a full bucket again; the bucket of all peers limits many of them together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import unquote

from penstock.appliance.model.limits import RateLimits
from penstock.proto.errors import OverloadedError

__all__ = ["RateLimiter", "address_of"]


class TokenBucket:
    """A bucket that holds up to `burst` tokens and fills at `per_s`."""

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
    """Limiter consulted before each registration and opening."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._all = TokenBucket(limits.all_per_s, limits.all_burst, clock())
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    def admit(self, peer: str, what: str) -> None:
        """Return if `peer` (an address without port) is within its rate. Raises OverloadedError with
        `retry_after_s`."""
        now, limits = self._clock(), self._limits
        bucket = self._peers.pop(peer, None) or TokenBucket(limits.peer_per_s, limits.peer_burst, now)
        self._peers[peer] = bucket
        while len(self._peers) > limits.peers_max:
            self._peers.popitem(last=False)
        peer_wait_s, all_wait_s = bucket.wait_s(now), self._all.wait_s(now)
        if not peer_wait_s and not all_wait_s:
            bucket.take()
            self._all.take()
            return
        whose = f"from {peer}" if peer_wait_s else "from all addresses together"
        per_s = limits.peer_per_s if peer_wait_s else limits.all_per_s
        wait_s = max(peer_wait_s, all_wait_s)
        error = OverloadedError(
            f"too many {what} calls {whose}: at most {per_s:g} a second are allowed. Retry in {wait_s:.1f} s"
        )
        error.retry_after_s = wait_s
        raise error


def address_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer: "ipv4:10.0.0.1:5", "ipv6:%5B::1%5D:5", "unix:"."""
    scheme, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else scheme
