"""Lane tickets. A ticket is a consumer's credential for one lane, bound to run, attempt, box, slot, generation (number
of the slot's assignment to a worker) and time.

The coordinator has a secret in its journal. From the secret and a slot's generation it derives the generation's lane
key, which it sends to the worker with the assignment. From the key and an expiry it derives tickets, which it sends to
the box with the view of the slot. So a worker can check a ticket while the coordinator is down. A leaked key is valid
only for the slot that its worker runs anyway. A restarted coordinator computes the same keys and tickets.

Only the coordinator's clock counts, because clocks of other machines may differ and jump. The coordinator sends its
time to workers in the reply to each heartbeat, and between two heartbeats workers advance it by their own monotonic
clock. A ticket is valid for one to two TERM_S: the expiry is the same for a whole term, and new tickets are sent with
the views when a term begins. The expiry of a ticket does not close an open lane; only a reconnect needs a valid ticket.

Tickets expire so that a leaked ticket (in a core dump or a debugger's log) is valid for hours only. A slot that moves
gets a new generation, for which old tickets are invalid, but a slot may stay on one worker for weeks.
"""

from __future__ import annotations

import hashlib
import hmac
import math

from penstock.proto.errors import AuthenticationError, SupersededError

__all__ = ["TERM_S", "check_ticket", "expiry", "lane_key", "make_ticket", "term"]

TERM_S = 6 * 3600
"""Seconds in which all tickets get the same expiry. A box that cannot reach the coordinator can still reopen its lanes
for at least one term."""
_DIGITS = 32
"""Hexadecimal digits of a ticket's signature: 128 bits."""
MAX_TICKET = 64
"""Characters to which a received ticket is cut before it is checked."""


def term(wall_s: float) -> int:
    return math.floor(wall_s / TERM_S)


def expiry(wall_s: float) -> int:
    """Expiry of tickets made at this time; both are Unix times."""
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
    """Raise an error unless a ticket opens the lane of the slot generation that has this key. `wall_s`: present time of
    the coordinator's clock.

    Raises AuthenticationError if the ticket is for another generation or slot, SupersededError if it has expired; the
    consumer then waits for the coordinator's next view of the slot, which has a new ticket.
    """
    expires, _, signature = ticket[:MAX_TICKET].partition(".")
    if not key or not hmac.compare_digest(signature.encode(), _signature(key, expires).encode()):
        raise AuthenticationError(
            f"the ticket to read the batches of {what} is wrong: it is for another worker slot or generation, or "
            "another coordinator made it. Start the training job again"
        )
    if wall_s > int(expires):
        raise SupersededError(
            f"the ticket to read the batches of {what} expired {wall_s - int(expires):.0f} s ago: wait for the new one "
            "that the coordinator sends"
        )
