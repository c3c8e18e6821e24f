"""Findings of code reading and fuzzing, each as a test of its own: lanes, and the children of a daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from typing import Any

import pytest
import torch
from lane_frames import a_frame
from tests.client.conftest import Rig

from penstock.proto.errors import LaneLostError, ProtocolError
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, CLOSE, MAX_FRAME, Ack, framed, pack_shapes
from penstock.proto.lane.producer import MOST_WANTED, Producer
from penstock.proto.lane.tcp import sealed
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import Sender
from penstock.worker.processes.child_processes import Child
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage, counts, packed
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.slots.snapshots import MAX_BYTES, MOST, SlotSnapshots, StoredSnapshot

DEADLINE_S = 60.0


def seqpacket() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    return ours, theirs


# ---- lanes


def test_failed_frame_costs_lane_not_batch() -> None:
    producer = Producer(1 << 20)
    producer.know_structure(1, b"one")
    small, sock = seqpacket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes 4.5 KiB of it
    producer.attach(sock, lane_pb2.Hello())
    reserved = producer.reserve(100)
    assert reserved is not None
    producer.publish(reserved, 1, 0, 1, 100, pack_shapes([1 << 40] * 2000), 7)  # EMSGSIZE
    assert not producer.attached
    peer, sock = seqpacket()
    producer.attach(sock, lane_pb2.Hello(next_total=1))
    consumer = Consumer(peer, "slot 0")
    frame = consumer.receive()
    assert frame is not None
    assert (frame.kind, frame.total, len(frame.dims) // 8) == (BATCH, 1, 2000)
    producer.close(0.0)
    consumer.close()
    small.close()


def test_failed_ack_costs_lane_not_credits() -> None:
    peer, sock = seqpacket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    consumer = Consumer(sock, "slot 0")
    peer.send(framed(a_frame(kind=CLOSE).encode()))
    consumer.release([(1 << 32) - 1] * 2000)
    assert consumer.flush()
    assert peer.recv(MAX_FRAME) == b"", "the producer hears that the lane is over"
    frame = consumer.receive()
    assert frame is not None
    assert frame.kind == CLOSE, "what had come before is still read"
    with pytest.raises(LaneLostError):
        consumer.receive()
    consumer.close()
    peer.close()


def test_useless_frames_are_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of an epoch that was left."""
    monkeypatch.setattr("penstock.proto.lane.consumer.MAX_UNUSED", 20)
    peer, sock = seqpacket()
    consumer = Consumer(sock, "slot 0")
    consumer.abandons = 1
    peer.send(21 * framed(a_frame(kind=BATCH, structure=1, inline=b"x", size=1).encode()))
    with pytest.raises(ProtocolError, match="without a batch"):
        [consumer.receive() for _ in range(30)]
    consumer.close(say_so=False)
    peer.close()


def test_endless_duplicate_batches_end_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.stream.ordered_reader.MAX_UNUSED", 20)
    rig = Rig()
    try:
        rig.numbers(0, 1)
        assert rig.take(1) == [1]
        runner = rig.runners[0]
        for _ in range(30):
            runner.total = 0
            assert runner.send(torch.tensor([1]))
        with pytest.raises(ProtocolError, match="21 batches and messages that are not needed"):
            rig.reader.next()
    finally:
        rig.close()


def test_producers_memory_of_acks_is_bounded() -> None:
    producer = Producer(1 << 20)
    peer, sock = seqpacket()
    producer.attach(sock, lane_pb2.Hello())
    for start in range(1, 1 << 20, 1000):
        pairs = [number for total in range(start, start + 1000) for number in (total, total)]
        try:
            peer.send(Ack(wanted=pairs).encode())
        except OSError:
            break
        producer.take_acks()
    assert not producer.attached
    assert len(producer.wanted) <= MOST_WANTED
    peer.close()


def test_remote_acks_in_the_daemon_are_bounded() -> None:
    runner, local = seqpacket()  # a runner in user code reads nothing
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    listener.close()
    sender = Sender(near, local, lane_pb2.Hello(), "slot 0")
    sender.start()
    far.settimeout(DEADLINE_S)
    flood = sealed(Ack(wanted=[1 << 40] * 4000).encode()) * 8
    sent = 0
    try:
        while sent < 10_000 * len(flood):
            far.sendall(flood)
            sent += len(flood)
    except (ConnectionResetError, BrokenPipeError):
        pass
    sender.join(DEADLINE_S)
    assert not sender.is_alive()
    assert "sends acknowledgements faster" in sender.reason
    far.close()
    runner.close()


# ---- what a daemon hears of its children


def test_child_cannot_truncate_progress_page() -> None:
    progress_page = ProgressPage.create()
    with pytest.raises(PermissionError):
        os.ftruncate(progress_page.fd, 0)
    progress_page.refresh()  # SIGBUS otherwise
    progress_page.close()


@pytest.mark.parametrize("value", [None, -1, True, 1 << 64])
def test_a_count_from_a_child_is_a_count(value: Any) -> None:
    with pytest.raises(ProtocolError):
        counts(ControlMessage("point", {"total": value}), "total")
    assert counts(ControlMessage("point", {"total": 3}), "total") == [3]


def _said(*raw: bytes, fds: bool = False) -> tuple[int, list[ControlMessage]]:
    """A real process that is a child of the daemon's, and says this: its exit status, 0 if it lives after a message
    "last"; and what was heard."""
    heard: list[ControlMessage] = []

    async def run() -> int:
        last = asyncio.Event()

        def hear(message: ControlMessage) -> None:
            heard.append(message)
            if message.kind == "last":
                last.set()

        process = subprocess.Popen(["sleep", "60"], process_group=0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        child = Child(ControlChannel(ours), read, "the child", hear, lambda: None)
        child.begun(process.pid, os.pidfd_open(process.pid))
        for data in raw:
            socket.send_fds(theirs, [data], [0] if fds else [])
        theirs.close()
        os.close(write)
        try:
            ended = asyncio.ensure_future(asyncio.to_thread(process.wait, DEADLINE_S))
            heard_all = asyncio.ensure_future(last.wait())
            await asyncio.wait({ended, heard_all}, timeout=DEADLINE_S, return_when="FIRST_COMPLETED")
            return ended.result() if ended.done() else 0
        finally:
            child.kill()
            process.wait()
            child.gone(0)
            await child.exited

    return asyncio.run(run()), heard


def test_only_a_child_with_bad_messages_is_killed() -> None:
    good, last = (b"".join(packed(ControlMessage(kind))[0]) for kind in ("begun", "last"))
    assert _said(good, last)[0] == 0
    status, heard = _said(good, b"\2\0\0\0[]")
    assert status == -signal.SIGKILL
    assert [message.kind for message in heard] == ["begun"]


def test_a_child_that_sends_descriptors_is_killed() -> None:
    assert _said(b"".join(packed(ControlMessage("begun"))[0]), fds=True)[0] == -signal.SIGKILL


def test_number_of_epoch_starts_is_bounded() -> None:
    store = SlotSnapshots()
    data = bytes(MAX_BYTES)  # one object: what counts is what is kept
    for total in range(1, 200):
        store.add(StoredSnapshot(0, total, total, 0, True, 0, data), 0)
    kept = list(store)
    assert len(kept) <= MOST + 2
    assert (kept[0].total, kept[-1].total) == (1, 199)
