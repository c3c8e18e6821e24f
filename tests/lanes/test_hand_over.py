"""A lane whose producer is handed from process to process: its consumer sees what it would see of a single one."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lanes.conftest import count_rings

from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, END, pack_shapes
from penstock.proto.lane.producer import Producer
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.v1 import lane_pb2

SIZES = (0, 10, 5000, 20_000)
"""Sizes of batches: each larger one starts a larger ring."""
LARGE_STRUCTURE = 100_000
"""Bytes of a structure that is announced in several frames."""

Event = tuple[object, ...]


def structure_bytes(structure: int, size: int) -> bytes:
    """Return the bytes that are announced as this structure."""
    return random.Random(-structure).randbytes(size)


def handed_over(old: Producer) -> Producer:
    """Return a Producer that continues the end of the lane of another one, as in another process: it gets the record as
    bytes, and descriptors of its own."""
    record, fds = old.hand_over()
    data, copies = encode_state(record), [os.dup(fd) for fd in fds]
    old.release_socket()
    for fd in fds[record["attached"] :]:
        os.close(fd)
    new = Producer(old.max_batch_bytes, old.ring_bytes)
    new.take_over(cast(Any, decode_state(data)), copies)
    new.map_rings()
    return new


class Lane:
    """A producer, its consumers one after the other, and all that they have seen."""

    def __init__(self) -> None:
        self.producer = Producer(1 << 20)
        self.total = self.epoch = 0
        self.consumer: Consumer | None = None
        self.abandons = self.left = self.delivered = self.next_epoch = 0
        self.expected = 1
        self.new: list[tuple[int, int, int]] = []
        """Batches that were received and not delivered: total, ring, entry."""
        self.held: list[tuple[int, int]] = []
        self.rings: dict[int, int] = {}
        """Ring id, which begins at a random number, -> ordinal."""
        self.seen: list[Event] = []

    def do(self, operation: str, number: int) -> None:
        getattr(self, operation)(number)
        self.producer.flush()
        self.producer.take_acks()
        while self.producer.abandoned:
            self.epoch, self.total = self.producer.abandoned.popleft() + 1, self.producer.delivered

    def publish(self, number: int) -> None:
        producer, size = self.producer, SIZES[number % 4]
        reserved = producer.reserve(size)
        if reserved is None:
            return
        if number % 7 == 6:
            producer.return_unused(reserved)
            return
        self.total += 1
        structure = 1 + number % 3
        producer.know_structure(structure, structure_bytes(structure, LARGE_STRUCTURE if structure == 3 else 9))
        reserved.view[:size] = random.Random(self.total).randbytes(size)
        producer.publish(reserved, self.total, self.epoch, structure, size, pack_shapes((size,)), number)

    def end(self, _: int) -> None:
        self.producer.end(self.epoch, self.total)
        self.epoch += 1

    def reserve(self, _: int) -> None:
        """Reserve an entry for a batch that is not finished: a hand-over makes it free, and so does an end of use."""
        reserved = self.producer.reserve_current()
        if reserved is not None:
            self.producer.return_unused(reserved)

    def connect(self, _: int) -> None:
        theirs, hello = self.new_consumer()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 68 << 10)  # so that frames wait in the producer
        self.producer.attach(theirs, hello)

    def new_consumer(self) -> tuple[socket.socket, lane_pb2.Hello]:
        """Return the other end's socket, and the Hello of a new consumer in place of the previous one."""
        self.disconnect(0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hello = lane_pb2.Hello(next_total=self.delivered + 1, delivered=self.delivered, abandons=self.abandons)
        hello.abandon_epoch = self.left
        for ring, entry in self.held:
            hello.held.add(ring=ring, entry=entry)
        self.consumer = Consumer(ours, "the lane")
        self.consumer.abandons = self.abandons
        self.expected = self.delivered + 1
        self.seen.append(("connected",))
        return theirs, hello

    def disconnect(self, _: int) -> None:
        if self.consumer is not None:
            self.consumer.close(say_so=False)
            self.consumer = None
            self.new.clear()

    def detach(self, _: int) -> None:
        self.producer.detach()
        self.disconnect(0)

    def receive(self, number: int) -> None:
        consumer = self.consumer
        for _ in range(number):
            frame = None if consumer is None else consumer.receive_any()
            if consumer is None or frame is None:
                return
            event: Event = frame.kind, frame.total, frame.epoch, frame.abandons, frame.structure, frame.size
            if frame.kind == BATCH:
                assert frame.total == self.expected
                self.expected += 1
                ring = consumer.rings[frame.ring]
                start = frame.entry * ring.entry_bytes
                content = bytes(ring.view[start : start + frame.nbytes])
                assert content == random.Random(frame.total).randbytes(frame.nbytes)
                where = self.rings.setdefault(frame.ring, len(self.rings)), frame.entry
                event += (frame.digest, consumer.structures[frame.structure], *where)
                self.new.append((frame.total, frame.ring, frame.entry))
            elif frame.kind == END:
                self.next_epoch = frame.epoch + 1
            self.seen.append(event)
            self.producer.flush()

    def deliver(self, number: int) -> None:
        if self.consumer is not None and self.new:
            taken, self.new = self.new[: number + 1], self.new[number + 1 :]
            self.delivered = taken[-1][0]
            self.held += [(ring, entry) for _, ring, entry in taken]
            self.consumer.delivered(self.delivered)
            self.consumer.open_epochs(self.next_epoch + 2)
            self.consumer.flush()

    def release(self, number: int) -> None:
        if self.consumer is not None:
            gone, self.held = self.held[: number + 1], self.held[number + 1 :]
            self.consumer.release(chain.from_iterable(gone))
            self.consumer.flush()

    def want(self, number: int) -> None:
        if self.consumer is not None:
            self.consumer.want([3 * number, self.delivered + number])
            self.consumer.flush()

    def abandon(self, _: int) -> None:
        if self.consumer is not None:
            self.next_epoch = max(self.next_epoch, self.epoch)
            self.abandons, self.left = self.abandons + 1, self.next_epoch + 1
            self.consumer.abandon(self.next_epoch, self.delivered)
            self.next_epoch += 1
            self.new.clear()
            self.expected = self.delivered + 1

    def hand_over(self, _: int) -> None:
        self.producer = handed_over(self.producer)

    def state(self) -> list[object]:
        producer = self.producer
        return [
            *(producer.attached, producer.closed, producer.delivered, producer.open_epochs, producer.abandons),
            *(sorted(producer.wanted.items()), producer.free_entries, producer.ring_entries, producer.entry_bytes),
            *(len(producer.rings), sum(map(len, producer._lent.values())), len(producer._kept)),
        ]


OPERATIONS = (
    *("publish", "publish", "publish", "publish", "end", "reserve", "connect", "detach", "disconnect"),
    *("receive", "receive", "deliver", "deliver", "release", "want", "abandon"),
)


def played(history: Iterable[tuple[str, int, bool]], *, hand_over: bool) -> tuple[list[Event], list[object]]:
    lane = Lane()
    lane.do("connect", 0)
    for operation, number, moves in history:
        lane.do(operation, number)
        if moves and hand_over:
            lane.do("hand_over", 0)
    lane.do("connect", 0)
    lane.do("receive", 1000)
    result = lane.seen, lane.state()
    for operation in ("deliver", "release", "abandon"):  # all that is in use comes back
        lane.do(operation, 10_000)
    assert sum(map(len, lane.producer._lent.values())) == 0
    assert lane.producer.free_entries == lane.producer.ring_entries
    lane.disconnect(0)
    lane.producer.close(0.0)
    return result


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 40), st.booleans()), min_size=40, max_size=120))
def test_a_consumer_sees_no_hand_over(history: list[tuple[str, int, bool]]) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), count_rings("self")
    assert played(history, hand_over=True) == played(history, hand_over=False)
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), count_rings("self")) == before, "descriptors and mappings are closed"
