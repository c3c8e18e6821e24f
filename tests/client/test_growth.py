"""Bytes that the processes of a lane keep for each batch: none, because nothing may grow with the number of batches.

All of a lane runs in this process, so that what malloc and Python have handed out can be asked for: a reused protobuf
message kept 500 bytes of each batch with 40 dims that it parsed, and 57 of each with one. The real processes, for
longer, are `make soak`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lane_frames import read_hello
from tests.client.conftest import FakeRun, FakeRunner

from penstock.client.stream.ordered_reader import OrderedReader
from penstock.client.stream.receiver import ReceiverLoop
from penstock.proto.lane.frames import connect_local
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import Sender

WARM, COUNTED = 1_000, 2_000
LEAVES = {f"leaf{number}": torch.full((2, 4), number) for number in range(20)}
DEADLINE_S = 60.0


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = (
        ("unused", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),
        ("unused_too", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),
        ("free", ctypes.c_size_t * 2),
    )


def in_use() -> int:
    """Bytes of malloc, and of Python's own allocator as many as its objects have at least."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Malloc
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd + 16 * sys.getallocatedblocks())


class RemoteRun(FakeRun):
    """A run whose batches come over TCP, through a sender and a receiver that are threads of this process."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(1, [runner])
        self.name = f"penstock-growth-{secrets.token_hex(8)}"
        self.parent_watch = subprocess.Popen(["sleep", "600"])
        self.loop = ReceiverLoop(self.name, self.parent_watch.pid, 1 << 20)
        self.receiver = threading.Thread(target=self.loop.run)
        self.receiver.start()
        self.listener = socket.create_server(("127.0.0.1", 0))

    def dial(self, view: pb.SlotView, hello: lane_pb2.Hello) -> socket.socket:
        hello.target = f"127.0.0.1:{self.listener.getsockname()[1]}"
        sock = connect_local(self.name, DEADLINE_S)
        sock.send(hello.SerializeToString())
        connection, _ = self.listener.accept()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        received = read_hello(connection, DEADLINE_S)
        self.runners[0].producer.attach(theirs, received)
        self.sender = Sender(connection, ours, received, "the test")
        self.sender.start()
        return sock

    def close(self) -> None:
        assert self.sender.stop(DEADLINE_S)
        self.parent_watch.kill()
        self.parent_watch.wait()
        self.receiver.join(DEADLINE_S)
        self.listener.close()
        self.loop.close()


@pytest.fixture(params=["local", "tcp"])
def lane(request: pytest.FixtureRequest) -> Iterator[tuple[FakeRunner, OrderedReader]]:
    runner = FakeRunner(0)
    remote = RemoteRun(runner) if request.param == "tcp" else None
    run: Any = remote or FakeRun(1, [runner])
    reader = OrderedReader(run, Position.start(1), "inputs:make", DEADLINE_S)
    yield runner, reader
    reader.close()
    if remote is not None:
        remote.close()
    runner.producer.close()
    os.close(run.wake_fd)


def test_nothing_of_a_batch_is_kept(lane: tuple[FakeRunner, OrderedReader]) -> None:
    runner, reader = lane

    def take(count: int) -> None:
        for _ in range(count // 4):
            sent = 0
            while sent < 4:
                sent += runner.send(LEAVES)
            for _ in range(4):
                reader.next()
        reader.flush()

    take(WARM)
    before = in_use()
    take(COUNTED)
    kept = (in_use() - before) / COUNTED  # hundredths of a byte; a thread's buffers now and then make some of it
    assert kept < 10
