"""A lane that another process serves first: its consumer sees what the producer alone would have sent."""

from __future__ import annotations

import mmap
import os
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lanes.test_hand_over import Event, Lane

from penstock.proto.lane.frame_log import LOG_BYTES, FrameLog
from penstock.proto.lane.frames import BATCH, END, Frame, framed
from penstock.proto.lane.producer import Producer
from penstock.worker.processes.control_channel import ControlMessage
from penstock.worker.slots.lanes import FinishedBatches

SHARED = 4096
"""Offset of the log in its memory."""


class ServedLane(Lane):
    """A lane whose consumers are served by another object first. Between that and the hand-over the producer goes on.
    serve: False to leave all to the producer."""

    def __init__(self, serve: bool) -> None:
        super().__init__()
        self.serve, self.served_frames = serve, 0
        memory = mmap.mmap(-1, SHARED + LOG_BYTES)
        self.producer = Producer(1 << 20, log=FrameLog(memory, SHARED))
        self.finished = FinishedBatches(FrameLog(memory, SHARED))

    def publish(self, number: int) -> None:
        super().publish(number)
        for structure in range(1, 4):
            data = self.producer.known_structures.get(structure)
            if data is not None:
                self.finished.learn_structure(ControlMessage("structure", {"number": structure}, data))
        if self.producer.rings_changed:
            self.producer.rings_changed = False
            rings = list(self.producer.rings.items())
            numbers = [[ring_id, ring.entry_bytes, ring.entries] for ring_id, ring in rings]
            fds = [os.dup(ring.fd) for _, ring in rings]
            self.finished.learn_rings(ControlMessage("rings", {"rings": numbers}, fds=fds))

    def connect(self, late: int) -> None:
        theirs, hello = self.new_consumer()
        served: dict[str, Any] = self.finished.send(theirs, hello) if self.serve else {"served": 0, "rings": []}
        self.served_frames += served["served"]
        # The previous consumer is gone, but what it has sent is still there to be read.
        for number in range(late % 6):
            self.producer.take_acks()
            if self.producer.abandoned:
                break
            self.publish(number * late)
        self.producer.attach(theirs, hello, **served)

    def receive(self, number: int) -> None:
        while number > 0 and self.consumer is not None:
            self.producer.flush()
            before = len(self.seen)
            super().receive(1)
            if len(self.seen) == before:
                return
            if self.seen[-1][0] in (BATCH, END):
                number -= 1
            else:
                self.seen.pop()  # structures and rings may be announced again


OPERATIONS = (
    *("publish", "publish", "publish", "publish", "end", "reserve", "connect", "connect", "detach", "disconnect"),
    *("receive", "receive", "deliver", "deliver", "release", "want", "abandon"),
)


def played(history: list[tuple[str, int]], *, serve: bool) -> tuple[list[Event], int]:
    lane = ServedLane(serve)
    for operation, number in [("connect", 0), *history, ("connect", 3), ("receive", 1000)]:
        lane.do(operation, number)
    lane.disconnect(0)
    lane.producer.close(0.0)
    lane.finished.close()
    return lane.seen, lane.served_frames


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 40)), min_size=40, max_size=120))
def test_a_consumer_does_not_see_who_serves_it(history: list[tuple[str, int]]) -> None:
    assert played(history, serve=True)[0] == played(history, serve=False)[0]


def test_the_histories_serve() -> None:
    assert played([*[("publish", 0)] * 5, ("connect", 2)], serve=True)[1] > 0


def frame(number: int) -> bytes:
    size = random.Random(number).choice((0, 40, 900, 60_000))
    return framed(Frame(BATCH, total=number, rest=bytes([number % 251]) * size).encode())


@given(st.integers(1, 700), st.integers(0, 5))
@settings(max_examples=15)
def test_the_log_returns_the_newest_frames_whole(count: int, after: int) -> None:
    memory = mmap.mmap(-1, LOG_BYTES)
    writer, reader = FrameLog(memory, 0), FrameLog(memory, 0)
    for number in range(count):
        assert writer.add(frame(number)) == number
    frames = reader.newest_first()
    got = [next(frames)]
    for number in range(count, count + after):
        writer.add(frame(number))
    got += frames
    assert [number for number, _ in got] == list(range(count - 1, count - 1 - len(got), -1))
    assert all(message == frame(number) for number, message in got)
    overwritten = count - len(got)
    lost_bytes = sum(len(frame(number)) for number in range(max(0, overwritten - 1), count + after))
    assert not overwritten or count + after - overwritten > 250 or lost_bytes > 1 << 17
    writer.resume()
    assert writer.frames == count + after


def test_a_log_of_nonsense_ends() -> None:
    memory = mmap.mmap(-1, LOG_BYTES)
    memory[:] = random.Random(1).randbytes(LOG_BYTES)
    assert len(list(FrameLog(memory, 0).newest_first())) <= 256
