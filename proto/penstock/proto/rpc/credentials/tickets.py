"""Lane tickets: a consumer's credential for one lane, bound to run, attempt, box, slot, generation and time.

From a secret in its journal the coordinator derives a lane key for each generation of a slot, for the worker, and from
the key and an expiry tickets, for the box. So a worker can check a ticket while the coordinator is down, a leaked key
is valid only for the worker's own slot, and a restarted coordinator computes the same.

Only the coordinator's clock counts, because clocks of machines differ and jump: each heartbeat's reply has its time,
which workers advance by their monotonic clock. A ticket is valid for one to two TERM_S, and needed only to connect.
Tickets expire so that a leaked one is valid for hours only: a slot that stays on one worker for weeks gets no new
generation."""

from __future__ import annotations

import hashlib
import hmac
import math

from penstock.proto.errors import AuthenticationError, SupersededError

TERM_S = 6 * 3600
"""Seconds in which all tickets get one expiry. Without the coordinator lanes reopen for at least one term."""
_DIGITS = 32
"""Hexadecimal digits of a ticket's signature: 128 bits."""
MAX_TICKET = 64
"""Characters to which a received ticket is cut before it is checked."""


def term(wall_s: float) -> int:
    return math.floor(wall_s / TERM_S)


def expiry(wall_s: float) -> int:
    return (term(wall_s) + 2) * TERM_S


def lane_key(secret: bytes, run: str, attempt: int, box: int, slot: int, generation: int) -> bytes:
    """Return the key by which a worker checks tickets for one generation of a slot. `secret`: the coordinator's."""
    what = "\0".join(("lane", run, str(attempt), str(box), str(slot), str(generation)))
    return hmac.new(secret, what.encode(), hashlib.sha256).digest()


def make_ticket(key: bytes, expires: int) -> str:
    return f"{expires}.{_signature(key, str(expires))}"


def _signature(key: bytes, expires: str) -> str:
    return hmac.new(key, expires.encode(), hashlib.sha256).hexdigest()[:_DIGITS]


def check_ticket(ticket: str, key: bytes, wall_s: float, what: str) -> None:
    """Raise an error unless a ticket opens the lane of the slot generation that has this key, at the coordinator's
    time: AuthenticationError if it is for another generation or slot, SupersededError if it has expired; the consumer
    then waits for the next view."""
    expires, _, signature = ticket[:MAX_TICKET].partition(".")
    if not key or not hmac.compare_digest(signature.encode(), _signature(key, expires).encode()):
        raise AuthenticationError(f"the ticket to read the batches of {what} is wrong: start the training job again")
    if wall_s > int(expires):
        late_s = wall_s - int(expires)
        raise SupersededError(f"the ticket for the batches of {what} expired {late_s:.0f} s ago: wait for a new one")
