"""Lanes of a real worker, opened by somebody who can sign tickets: what a ticket opens, and what may be said on it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hostile_coordinator import SECRET, Hostile, assignment, key_of, serving
from waiting import PATIENCE

from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, CLOSE, ERROR, LANE_PROTOCOL, Ack, Frame, connect_local
from penstock.proto.rpc.credentials.tickets import make_ticket
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2

GENERATION = 5
WALL_S = 1_000_000_000
VALID = WALL_S + 3600
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def worker(start_once: Any) -> Iterator[pb.RegisterWorkerRequest]:
    """A worker with two slots that are ready, and what it told of itself."""
    import threading

    hostile = Hostile(  # type: ignore[abstract]
        lambda number: pb.HeartbeatReply(
            assignments=[assignment(GENERATION, 0), assignment(GENERATION, 1)], wall_s=WALL_S
        )
    )
    over: asyncio.Event
    loop: asyncio.AbstractEventLoop
    up = threading.Event()

    async def run() -> None:
        nonlocal over, loop
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        async with serving(hostile) as address:
            options = ["--slots", "2", "--allow", "streams", "--coordinator", address]
            await asyncio.to_thread(start_once, "penstock.worker", *options, token=SECRET)
            while len(hostile.ready) < 2:
                await asyncio.sleep(0.05)
            up.set()
            await over.wait()
            start_once.started[-1].process.terminate()
            await asyncio.to_thread(start_once.started[-1].process.wait, 20)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert up.wait(PATIENCE * 30)
    yield hostile.worker
    loop.call_soon_threadsafe(over.set)
    thread.join()


def hello(ticket: str, **fields: Any) -> lane_pb2.Hello:
    said = {"run": "job/0", "attempt": 1, "generation": GENERATION, "next_total": 1, "open_epochs": 9, **fields}
    return lane_pb2.Hello(protocol=LANE_PROTOCOL, ticket=ticket, **said)


@contextmanager
def lane(worker: pb.RegisterWorkerRequest, said: lane_pb2.Hello) -> Iterator[Consumer]:
    sock = connect_local(worker.local_address, DEADLINE_S)
    sock.send(said.SerializeToString())
    consumer = Consumer(sock, "a worker")
    try:
        yield consumer
    finally:
        consumer.close(say_so=False)


def next_of(consumer: Consumer, *kinds: int) -> Frame | None:
    """The next frame of one of these kinds; None at the end of the lane."""
    import select

    poll = select.poll()
    poll.register(consumer.fileno(), select.POLLIN)
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        try:
            frame = consumer.receive()
        except Exception as error:
            if type(error).__name__ in ("LaneLostError", "LaneClosedError"):
                return None
            raise
        if frame is None:
            poll.poll(100)
        elif frame.kind in kinds:
            return frame
    raise AssertionError("nothing came")


REFUSED: dict[str, tuple[lane_pb2.Hello, str]] = {
    # Other tickets that are wrong are in test_tickets.py.
    "expired": (hello(make_ticket(key_of(GENERATION), WALL_S - 100)), "expired"),
    "of another slot": (hello(make_ticket(key_of(GENERATION, 1), VALID)), "the ticket to read the batches of"),
    "of the last generation, for it": (
        hello(make_ticket(key_of(4), VALID), generation=4),
        "no longer has box 0 slot 0",
    ),
    "of the next generation, for it": (
        hello(make_ticket(key_of(6), VALID), generation=6),
        "no longer has box 0 slot 0",
    ),
    "for a slot that is not here": (
        hello(make_ticket(key_of(GENERATION, 7), VALID), slot=7),
        "no longer has box 0 slot 7",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_ticket_opens_nothing_else(worker: pb.RegisterWorkerRequest, name: str) -> None:
    said, why = REFUSED[name]
    with lane(worker, said) as consumer:
        frame = next_of(consumer, ERROR, CLOSE, BATCH)
        assert frame is not None
        assert frame.kind in (ERROR, CLOSE)
        assert why in frame.error.message


def open_slot(slot: int = 0) -> lane_pb2.Hello:
    return hello(make_ticket(key_of(GENERATION, slot), VALID), slot=slot)


ACKS = {
    "more than was sent": Ack(delivered=1 << 60),
    "more than fits": Ack(delivered=(1 << 64) - 1),
    "an entry that was not delivered": Ack(released=(1, 0)),
    "an unknown entry, many times": Ack(released=(7, 31) * 4000),
    "twice the same": Ack(released=(1, 0, 1, 0, 1, 0)),
    "snapshots of nothing": Ack(wanted=((1 << 64) - 1, (1 << 64) - 1) * 3000),
    "epochs without end": Ack(open_epochs=(1 << 64) - 1),
    "an epoch that is far": Ack(abandon_epoch=1 << 62),
}


@pytest.mark.parametrize("name", ACKS)
def test_no_ack_costs_more_than_its_lane(worker: pb.RegisterWorkerRequest, name: str) -> None:
    """Whoever opens the next lane gets the same batches."""
    with lane(worker, open_slot()) as consumer:
        assert next_of(consumer, BATCH).total == 1  # type: ignore[union-attr]
        socket_of(consumer).send(ACKS[name].encode())
        with contextlib.suppress(BrokenPipeError):  # it may be closed already
            socket_of(consumer).send(ACKS[name].encode())
        time.sleep(0.1)
    if name == "an epoch that is far":
        return  # it may be abandoned: nothing follows
    with lane(worker, open_slot()) as consumer:
        assert next_of(consumer, BATCH).total == 1  # type: ignore[union-attr]


def socket_of(consumer: Consumer) -> socket.socket:
    assert consumer._sock is not None
    return consumer._sock


def test_second_lane_ends_the_first(worker: pb.RegisterWorkerRequest) -> None:
    with lane(worker, open_slot(1)) as first:
        assert next_of(first, BATCH).total == 1  # type: ignore[union-attr]
        with lane(worker, open_slot(1)) as second:
            assert next_of(second, BATCH).total == 1  # type: ignore[union-attr]
            assert next_of(first) is None


def held(worker: pb.RegisterWorkerRequest, name: str) -> int:
    """Return how many descriptors of memory of this name the worker and all its children have open."""
    pids, found = [int(worker.worker.rpartition(":")[2])], 0
    files: list[Path] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            files += Path(f"/proc/{pid}/fd").iterdir()
    for file in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            found += name in os.readlink(file)
    return found


def test_descriptors_in_acks_are_dropped(worker: pb.RegisterWorkerRequest) -> None:
    files = [os.memfd_create("sent-in-acks") for _ in range(100)]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    for _ in range(5):
        sock = connect_local(worker.local_address, DEADLINE_S)
        sock.sendmsg([open_slot(1).SerializeToString()], rights)
        consumer = Consumer(sock, "a worker")
        assert next_of(consumer, BATCH).total == 1  # type: ignore[union-attr]
        for _ in range(20):
            sock.sendmsg([Ack(open_epochs=9).encode()], rights)
        consumer.close(say_so=False)
    for fd in files:
        os.close(fd)
    assert held(worker, "memfd:"), "the rings"
    until = time.monotonic() + DEADLINE_S
    while held(worker, "memfd:sent-in-acks"):
        assert time.monotonic() < until
        time.sleep(0.05)
