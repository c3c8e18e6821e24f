"""Lane tickets: bound to the slot's generation and to time, renewed before they expire, alive through a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeCluster

from penstock.appliance.journal.journal import StateDir
from penstock.proto.errors import AuthenticationError, SupersededError
from penstock.proto.rpc.credentials.tickets import TERM_S, check_ticket, expiry, lane_key, make_ticket

SECRET = b"s" * 32
PLACE = ("job/0", 1, 0, 2, 7)
NOW = 1_700_000_000.0


def test_ticket_opens_its_lane_until_it_expires() -> None:
    key, expires = lane_key(SECRET, *PLACE), expiry(NOW)
    ticket = make_ticket(key, expires)
    assert TERM_S <= expires - NOW <= 2 * TERM_S
    check_ticket(ticket, key, NOW, "slot 2")
    check_ticket(ticket, key, float(expires), "slot 2")
    with pytest.raises(
        SupersededError,
        match="the ticket for the batches of slot 2 expired 1 s ago: wait for a new one",
    ):
        check_ticket(ticket, key, expires + 1.0, "slot 2")


@pytest.mark.parametrize(
    "other",
    [("job/1", 1, 0, 2, 7), ("job/0", 2, 0, 2, 7), ("job/0", 1, 1, 2, 7), ("job/0", 1, 0, 3, 7), (*PLACE[:4], 8)],
)
def test_it_opens_no_other(other: tuple[str, int, int, int, int]) -> None:
    ticket = make_ticket(lane_key(SECRET, *other), expiry(NOW))
    with pytest.raises(AuthenticationError, match="the ticket to read the batches of slot 2 is wrong"):
        check_ticket(ticket, lane_key(SECRET, *PLACE), NOW, "slot 2")


def test_changed_or_malformed_tickets_are_refused() -> None:
    key = lane_key(SECRET, *PLACE)
    ticket = make_ticket(key, expiry(NOW))
    _, _, signature = ticket.partition(".")
    later = f"{expiry(NOW) + TERM_S}.{signature}"
    for wrong in ("", ".", signature, later, f"{ticket}0", ticket[:-1], f"x.{signature}", "9" * 10_000, "é.ü"):
        with pytest.raises(AuthenticationError):
            check_ticket(wrong, key, NOW, "slot 2")
    with pytest.raises(AuthenticationError):
        check_ticket(make_ticket(b"", expiry(NOW)), b"", NOW, "a slot whose worker was given no key")


def test_new_term_brings_ticket_and_keeps_the_old() -> None:
    world = FakeCluster()
    world.wall = NOW
    world.boot(None)
    box, worker = world.open(), world.worker("w")
    worker.ready()
    first = box.watch()
    key = worker.of(0).lane_key
    world.wall += TERM_S
    world.run_for(0.5, [worker, box])
    second = box.watch()
    assert second.version > first.version
    old, new = first.slots[0].ticket, second.slots[0].ticket
    assert new != old
    assert worker.of(0).lane_key == key, "a worker's key is its generation's, whatever the time"
    for ticket in (old, new):
        check_ticket(ticket, key, worker.heartbeat().wall_s, "the slot")
    with pytest.raises(SupersededError):
        check_ticket(old, key, world.wall + TERM_S, "the slot")
    check_ticket(new, key, world.wall + TERM_S, "the slot")
    again = box.watch().version
    world.run_for(2.0, [worker, box])
    assert box.watch().version == again, "nothing changes within a term"


def test_keys_and_tickets_survive_a_restart(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    box, worker = world.open(), world.worker("w")
    worker.ready()
    key, ticket = worker.of(1).lane_key, box.watch().slots[1].ticket
    world.restart()
    worker.register()
    assert worker.of(1).lane_key == key
    assert box.watch().slots[1].ticket == ticket
    directory.close()
