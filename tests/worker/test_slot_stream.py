"""A slot's stream between its daemon and a training loop, in the process that runs the loader."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from typing import Any

import torch
from waiting import until

from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.worker.loader.restart_points import END, StreamPosition
from penstock.worker.processes.control_channel import ControlChannel
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.runner.slot_stream import SlotStream
from penstock.worker.slots.lanes import FinishedBatches


class GatedLoader:
    """Makes as many batches as it is allowed to."""

    name, digest, chain, spent_s, saves_state = "gated", 0, 0, 0.0, False

    def __init__(self) -> None:
        self.allowed: queue.Queue[bool] = queue.Queue()
        self.asked = 0
        self.position = StreamPosition(0, 0, 0, 0)

    def next(self) -> Any:
        self.asked += 1
        if not self.allowed.get(timeout=60):
            self.position.epoch += 1
            return END
        self.position.total += 1
        return torch.tensor([self.position.total])

    def changed_counts(self) -> bytes:
        return b""


def test_a_batch_that_is_finished_while_a_consumer_comes() -> None:
    """The daemon has read the log before batch 3, and the runner gets the connection after it. The first consumer is
    gone before that, and the next one comes."""
    assignment = records_pb2.WorkerAssignment(run="job/0", num_boxes=1, num_workers_per_box=1)
    assignment.loader.options.max_batch_bytes = 1 << 20
    daemons, runners = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = ProgressPage.create()
    stream = SlotStream(assignment, ControlChannel(runners), ProgressPage(os.dup(page.fd)))
    loader = GatedLoader()
    stream.source = loader  # type: ignore[assignment]
    daemon, finished = ControlChannel(daemons), FinishedBatches(page.frame_log)

    def learn() -> None:
        while (message := daemon.receive(wait=False)) is not None:
            if message.kind == "rings":
                finished.learn_rings(message)
            elif message.kind == "structure":
                finished.learn_structure(message)

    runner = threading.Thread(target=stream.stream_epoch, daemon=True)
    runner.start()
    for _ in range(2):
        loader.allowed.put(True)
    until(lambda: loader.asked == 3, 20, "two batches were not made")
    for late in range(2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        consumer = Consumer(ours, "the lane")
        hello = lane_pb2.Hello(next_total=1)
        number = finished.announce()
        learn()
        served = finished.send(theirs, hello)
        if not late:
            theirs.close()
            consumer.close()
            finished.pass_on(number)
    loader.allowed.put(True)
    time.sleep(0.2)
    assert loader.asked == 3, "the runner went into user code without the consumer"
    daemon.send("attach", hello.SerializeToString(), [theirs.fileno()], **served)
    theirs.close()
    finished.pass_on(number)
    got: list[int] = []

    def receive() -> bool:
        while (frame := consumer.receive()) is not None:
            assert frame.kind == BATCH
            got.append(frame.total)
        return len(got) == 3

    until(receive, 20, "batch 3 waits for batch 4")
    assert got == [1, 2, 3]
    until(lambda: loader.asked == 4, 20, "the runner does not go on")
    loader.allowed.put(False)
    runner.join()
    consumer.close()
    stream.producer.close()
    stream.page.close()
    page.close()
    finished.close()
    daemons.close()
    runners.close()
