"""Lane tickets: a consumer's credential for a lane, bound to run, attempt, box, slot, generation and time.

The coordinator has a secret in its journal. From the secret and a slot's generation it derives the generation's lane
key, which it sends to the worker with the assignment. From the key and an expiry it derives tickets, which it sends to
the box with the view of the slot. So a worker can check a ticket while the coordinator is down, and a key is valid only
for the slot that its worker runs anyway. A restarted coordinator computes the same keys and tickets.

Only the coordinator's clock counts. It sends its time to workers with every heartbeat, and between two heartbeats they
advance it by a monotonic clock of their own: clocks of other machines may differ and jump. A ticket lasts one to two
TERM_S: the expiry is the same for a whole term, and new tickets come with the views when a term begins. The expiry of a
ticket does not close an open lane; only a reconnect needs a valid ticket.

Tickets expire for this reason: a ticket is of no use once its slot has moved, because the generation is another one.
But a slot may stay on a worker for weeks; with the expiry a leaked ticket (a core dump, a debugger's log) is valid for
hours only.
"""

from __future__ import annotations

import hashlib
import hmac
import math

from penstock.proto.errors import AuthenticationError, SupersededError

__all__ = ["TERM_S", "check_ticket", "expiry", "lane_key", "make_ticket", "term"]

TERM_S = 6 * 3600
"""Length of a term, seconds. A box without connection to the coordinator can reopen its lanes for at least one term."""
_DIGITS = 32
"""Length of the signature, hex digits: 128 bits."""
MAX_TICKET = 64
"""Longest ticket, characters: the longest expiry, and the signature."""


def term(wall_s: float) -> int:
    """Return the number of the term at this time of the coordinator's clock."""
    return math.floor(wall_s / TERM_S)


def expiry(wall_s: float) -> int:
    """Return the expiry of tickets of this term, seconds since the Unix epoch: the same throughout the term."""
    return (term(wall_s) + 2) * TERM_S


def lane_key(secret: bytes, run: str, attempt: int, box: int, slot: int, generation: int) -> bytes:
    """Return the key of one generation of a slot."""
    what = "\0".join(("lane", run, str(attempt), str(box), str(slot), str(generation)))
    return hmac.new(secret, what.encode(), hashlib.sha256).digest()


def make_ticket(key: bytes, expires: int) -> str:
    return f"{expires}.{_signature(key, str(expires))}"


def _signature(key: bytes, expires: str) -> str:
    return hmac.new(key, expires.encode(), hashlib.sha256).hexdigest()[:_DIGITS]


def check_ticket(ticket: str, key: bytes, wall_s: float, what: str) -> None:
    """Check that the ticket opens the lane of the generation with this key, at this time of the coordinator.

    Raises AuthenticationError for a ticket of another generation; SupersededError for an expired one, after which the
    consumer waits for the next view, with a new ticket. `what`: the slot, for messages.
    """
    expires, _, signature = ticket[:MAX_TICKET].partition(".")
    if not key or not hmac.compare_digest(signature.encode(), _signature(key, expires).encode()):
        raise AuthenticationError(
            f"the ticket to read the batches of {what} is wrong: it is for another slot, or was not made by this "
            "worker's coordinator"
        )
    if wall_s > int(expires):
        raise SupersededError(
            f"the ticket to read the batches of {what} expired {wall_s - int(expires):.0f} s ago: the coordinator "
            "sends a new one"
        )
