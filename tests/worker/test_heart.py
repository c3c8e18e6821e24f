"""The daemon's lease while its event loop is busy with something else."""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import Queue

from waiting import until

from penstock.proto.errors import CoordinatorUnavailableError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.worker.daemon.heartbeats import HANGS_S, LATE, Heartbeats

LEASE_S = 0.4
DEADLINE_S = 60.0


class Coordinator:
    def __init__(self) -> None:
        self.heard, self.closed, self.calls = threading.Semaphore(0), threading.Event(), 0

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        self.calls += 1
        if self.calls == 1:
            raise CoordinatorUnavailableError("it is away")
        assert not request.slots
        self.heard.release()
        return pb.HeartbeatReply()

    def close(self) -> None:
        self.closed.set()


def test_busy_event_loop_keeps_its_lease() -> None:
    coordinator = Coordinator()
    heart = Heartbeats(lambda: coordinator, lambda: pb.HeartbeatRequest(worker="w"), lambda: LEASE_S)
    heart.start()
    for _ in range(3):  # nobody tells it of any answer
        assert coordinator.heard.acquire(timeout=DEADLINE_S)
    heart.stop()
    assert coordinator.closed.wait(DEADLINE_S)
    assert heart.heartbeats >= 2


def answered(heart: Heartbeats, coordinator: Coordinator) -> bool:
    """Answer the event loop; return whether the thread has closed its connection."""
    heart.note_answer()
    return coordinator.closed.is_set()


def test_connection_is_closed_once_the_loop_is_back() -> None:
    made: Queue[Coordinator] = Queue()

    def connect() -> Coordinator:
        made.put(coordinator := Coordinator())
        return coordinator

    heart = Heartbeats(connect, pb.HeartbeatRequest, lambda: LEASE_S)
    heart.start()
    for _ in range(2):
        coordinator = made.get(timeout=DEADLINE_S)
        assert coordinator.heard.acquire(timeout=DEADLINE_S), "the call after the one in vain uses the same connection"
        assert made.empty()
        assert not coordinator.closed.is_set()
        until(partial(answered, heart, coordinator), DEADLINE_S)
    heart.stop()


def test_thread_beats_for_a_late_loop_that_runs() -> None:
    heart = Heartbeats(Coordinator, pb.HeartbeatRequest, lambda: 3.0)
    heart.note_answer()
    now = time.monotonic()
    assert not heart.is_due(now, 3.0), "it was heard just now"
    assert heart.is_due(now + 3.0 * LATE + 1, 3.0)
    assert not heart.is_due(now + 3.0 * LATE + 1, 0.0), "no lease is known"
    assert not heart.is_due(now + HANGS_S + 1, 3.0), "the loop hangs: others are to take over"
