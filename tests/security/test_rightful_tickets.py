"""Lanes of a real worker, opened by somebody who can sign tickets: what a ticket opens."""

from __future__ import annotations

import asyncio
import select
from typing import Any

from coroutines import in_loop
from hostile_coordinator import SECRET, Hostile, assignment, key_of
from tests.security.conftest import answering

from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, CLOSE, ERROR, LANE_PROTOCOL, connect_local
from penstock.proto.rpc.credentials.tickets import make_ticket
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2

GENERATION = 5
WALL_S = 1_000_000_000
VALID = WALL_S + 3600
DEADLINE_S = 60.0


def hello(key: bytes, expires: int = VALID, **fields: Any) -> lane_pb2.Hello:
    said = {"run": "job/0", "attempt": 1, "generation": GENERATION, "next_total": 1, "open_epochs": 9, **fields}
    return lane_pb2.Hello(protocol=LANE_PROTOCOL, ticket=make_ticket(key, expires), **said)


def answer(local_address: str, said: lane_pb2.Hello) -> str:
    """What a consumer with this Hello gets: "batch", or the text of the error."""
    sock = connect_local(local_address, DEADLINE_S)
    sock.send(said.SerializeToString())
    consumer = Consumer(sock, "a worker")
    poll = select.poll()
    poll.register(consumer.fileno(), select.POLLIN)
    try:
        while True:
            frame = consumer.receive()
            if frame is None:
                assert poll.poll(1000 * DEADLINE_S), "nothing came"
            elif frame.kind == BATCH:
                return "batch"
            elif frame.kind in (ERROR, CLOSE):
                return frame.error.message
    finally:
        consumer.close(say_so=False)


@in_loop
async def test_a_ticket_opens_its_slot_and_nothing_else(start: Any) -> None:
    assignments = [assignment(GENERATION, 0), assignment(GENERATION, 1)]
    hostile = Hostile(lambda number: pb.HeartbeatReply(assignments=assignments, wall_s=WALL_S))  # type: ignore[abstract]
    async with answering("127.0.0.1:0", SECRET, servicer=hostile) as served:
        options = ["--slots", "2", "--allow", "streams", "--coordinator", served.address]
        started = await asyncio.to_thread(start, "penstock.worker", *options, token=SECRET)
        while len(hostile.ready) < 2:
            await asyncio.sleep(0.05)
        for said, answered in (
            (hello(key_of(GENERATION)), "batch"),
            (hello(key_of(GENERATION), WALL_S - 100), "expired"),
            (hello(key_of(GENERATION, 1)), "the ticket to read the batches of"),
            (hello(key_of(6), generation=6), "no longer has box 0 slot 0"),
            (hello(key_of(GENERATION, 7), slot=7), "no longer has box 0 slot 7"),
        ):
            assert answered in await asyncio.to_thread(answer, hostile.worker.local_address, said)
        started.process.terminate()
        await asyncio.to_thread(started.process.wait, 20)
