"""Lane tickets: what a consumer shows to open a lane, bound to run, attempt, box, slot, generation and time.

The coordinator has a secret in its journal. From it and a slot's generation it derives that generation's lane key,
which goes to the worker with the assignment; from the key and an expiry it derives tickets, which go to the box with
the view of the slot. So a worker checks a ticket alone, also while the coordinator is away, and a key is good for
nothing but the slot that its worker runs anyway. All of it is derived: a restarted coordinator finds the same keys and
tickets.

Time is the coordinator's alone. It tells workers what its clock says with every heartbeat, and between two heartbeats
they count on by a monotonic clock of their own: clocks of other machines may differ as they like, and may jump. A
ticket lasts one to two TERM_S: what expires is the same for a whole term, and new ones come with the views when a term
begins. An open lane is never cut by the expiry of its ticket; only a reconnect needs a valid one.

What the time buys. Generations already fence: a ticket is worthless once its slot has moved. But a slot may stay where
it is for weeks, and a ticket of it that got out (a core dump, a debugger's log) is then good for hours, not for weeks.
"""

from __future__ import annotations

import hashlib
import hmac
import math

from penstock.proto.errors import AuthenticationError, SupersededError

__all__ = ["TERM_S", "check_ticket", "expiry", "lane_key", "make_ticket", "term"]

TERM_S = 6 * 3600
"""Seconds. For so long at least a box that is cut off from the coordinator can reopen its lanes."""
_DIGITS = 32
"""Hex digits of the signature: 128 bits."""
MAX_TICKET = 64
"""Characters: the longest expiry, and the signature."""


def term(wall_s: float) -> int:
    """The number of the term at that time of the coordinator's clock."""
    return math.floor(wall_s / TERM_S)


def expiry(wall_s: float) -> int:
    """When tickets of this term expire, seconds since the epoch: the same throughout the term."""
    return (term(wall_s) + 2) * TERM_S


def lane_key(secret: bytes, run: str, attempt: int, box: int, slot: int, generation: int) -> bytes:
    """The key of one generation of a slot."""
    what = "\0".join(("lane", run, str(attempt), str(box), str(slot), str(generation)))
    return hmac.new(secret, what.encode(), hashlib.sha256).digest()


def make_ticket(key: bytes, expires: int) -> str:
    return f"{expires}.{_signature(key, str(expires))}"


def _signature(key: bytes, expires: str) -> str:
    return hmac.new(key, expires.encode(), hashlib.sha256).hexdigest()[:_DIGITS]


def check_ticket(ticket: str, key: bytes, wall_s: float, what: str) -> None:
    """Returns if the ticket opens the lane of the generation whose key this is, at this time of the coordinator.

    Raises AuthenticationError for a ticket that is not this generation's; SupersededError for one that has expired, to
    which the consumer answers by waiting for the next view, with a new one. `what`: the slot, for messages.
    """
    expires, _, signature = ticket[:MAX_TICKET].partition(".")
    if not key or not hmac.compare_digest(signature.encode(), _signature(key, expires).encode()):
        raise AuthenticationError(f"wrong ticket for {what}")
    if wall_s > int(expires):
        raise SupersededError(
            f"the ticket for {what} expired {wall_s - int(expires):.0f} s ago: the coordinator has a new one"
        )
