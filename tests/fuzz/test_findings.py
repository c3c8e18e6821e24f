"""Findings of code reading and fuzzing, each as a test of its own: lanes, and the children of a daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from typing import Any

import pytest
import torch
from census import open_as
from lane_frames import a_frame
from tests.client.conftest import Rig

from penstock.client.stream.checkpoint_schedule import CheckpointSchedule
from penstock.client.stream.ordered_reader import OUTRUN
from penstock.proto.errors import LaneLostError, ProtocolError, StateCorruptError, UnsupportedStateError
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import (
    BATCH,
    CLOSE,
    KNOWN_BYTES,
    MAX_FRAME,
    MAX_PACKET,
    PIECE,
    RING,
    STRUCTURE,
    Ack,
    framed,
    pack_shapes,
)
from penstock.proto.lane.producer import MOST_ABANDONS, MOST_WANTED, Producer
from penstock.proto.lane.ring import MAX_ENTRIES
from penstock.proto.lane.tcp import sealed
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import Sender
from penstock.worker.loader.restart_points import RestartPoint
from penstock.worker.processes.child_processes import Child
from penstock.worker.processes.control_channel import (
    MAX_FDS,
    MAX_PAYLOAD,
    ControlChannel,
    ControlMessage,
    MessageInbox,
    counts,
    encode_head,
)
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.slots.snapshots import MAX_BYTES, MOST, SlotSnapshots, StoredSnapshot

DEADLINE_S = 60.0


def seqpacket() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    return ours, theirs


# ---- lanes


def test_frame_above_packet_size_is_refused() -> None:
    producer = Producer(1 << 20)
    producer.know_structure(1, b"one")
    peer, sock = seqpacket()
    producer.attach(sock, lane_pb2.Hello())
    frame = a_frame(kind=BATCH, total=1, structure=1, inline=bytes(MAX_FRAME))
    reserved = producer.reserve(100)
    assert reserved is not None
    with pytest.raises(ProtocolError, match=str(MAX_PACKET)):
        producer.forward(reserved, frame)
    producer.close(0.0)
    peer.close()


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


@pytest.mark.parametrize("kind", [STRUCTURE, BATCH])
def test_useless_frames_are_not_read_for_ever(kind: int) -> None:
    """Announcements, or batches of an epoch that was left."""
    peer, sock = seqpacket()
    consumer = Consumer(sock, "slot 0")
    consumer.abandons = 1
    useless = framed(a_frame(kind=kind, structure=1, inline=b"x", size=1).encode())
    packet = useless * (MAX_FRAME // len(useless))

    def flood() -> None:
        try:
            while True:
                peer.send(packet)
        except OSError:
            pass

    flooding = threading.Thread(target=flood)
    flooding.start()

    def read() -> None:
        while True:
            assert consumer.receive() is None

    try:
        with pytest.raises(ProtocolError, match="without a batch"):
            read()
    finally:
        consumer.close(say_so=False)
        flooding.join(DEADLINE_S)
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


def test_both_ends_drop_structures_alike() -> None:
    """Three of 3 MiB are more than is remembered: the first is announced anew, and nothing breaks."""
    producer = Producer(1 << 20)
    peer, sock = seqpacket()
    producer.attach(sock, lane_pb2.Hello())
    consumer = Consumer(peer, "slot 0")
    size = 3 << 20
    assert 2 * size <= KNOWN_BYTES < 3 * size
    announced = 0
    for total, structure in enumerate([1, 2, 3, 1, 3, 2, 2], 1):
        producer.know_structure(structure, bytes([structure]) * size)
        reserved = producer.reserve(10)
        assert reserved is not None
        producer.publish(reserved, total, 0, structure, 10, b"", 0)
        while True:
            frame = consumer.receive_any()
            if frame is None:
                producer.flush()
            elif frame.kind == STRUCTURE:
                announced += len(frame.rest)
            elif frame.kind != RING:
                break
        assert (frame.total, consumer.structures[structure][:1]) == (total, bytes([structure]))
        assert sum(map(len, consumer.structures.values())) <= KNOWN_BYTES
        consumer.delivered(total)
        consumer.release([frame.ring, frame.entry])
        consumer.flush()
        producer.take_acks()
    assert announced == 5 * size, "1, 2, 3, then 1 in place of 2, then 2 in place of 3"
    assert announced % PIECE == 0
    producer.close(0.0)
    consumer.close()


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


def test_exhausted_abandon_count_is_survived() -> None:
    producer = Producer(1 << 20)
    producer.know_structure(1, b"one")
    peer, sock = seqpacket()
    producer.attach(sock, lane_pb2.Hello(abandons=MOST_ABANDONS))
    peer.send(Ack(abandon_epoch=1).encode())
    producer.take_acks()
    assert not producer.attached
    reserved = producer.reserve(10)
    assert reserved is not None
    producer.publish(reserved, 1, 0, 1, 10, b"", 0)
    producer.close(0.0)
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


def test_steps_are_announced_with_many_slots() -> None:
    slots = 16
    rig = Rig(slots)
    try:
        rig.reader._refresh()
        assert rig.reader.announce(CheckpointSchedule.of(1), None) == (slots * OUTRUN - 1) // 2 + 1
        rig.reader.flush()
        for runner in rig.runners:
            runner.producer.take_acks()
            assert sorted(runner.producer.wanted) == list(range(1, OUTRUN + 1))
        assert OUTRUN // 2 > MAX_ENTRIES, "when the loop is half way there, a whole ring ahead of it is still announced"
    finally:
        rig.close()


@pytest.mark.parametrize("live", [slice(None), slice(1)])
def test_announced_steps_fit_with_very_many_slots(live: slice) -> None:
    slots = 64
    rig = Rig(slots)
    position = rig.reader.position
    position.live = position.live[live]
    try:
        rig.reader._refresh()
        for _ in range(2):  # the second time right away, as at the end of a short epoch
            again = rig.reader.announce(CheckpointSchedule.of(1), None)
            rig.reader.flush()
            runner = rig.runners[0]
            runner.producer.take_acks()
            assert runner.producer.attached, "the runner accepts all requests"
        assert set(range(1, OUTRUN + 1)) <= runner.producer.wanted.keys()
        assert again is not None
        at = position.copy()
        while at.step < again:
            at.deliver()
        assert max(runner.producer.wanted) - at.total[0] > MAX_ENTRIES, "a whole ring ahead is still announced"
        hello = lane_pb2.Hello()
        next(lane for lane in rig.reader._lanes if lane.slot == 0).hello(hello)
        assert hello.ByteSize() < MAX_FRAME // 2, "the lane can be opened again"
    finally:
        rig.close()


# ---- what a daemon hears of its children


def test_child_cannot_truncate_progress_page() -> None:
    progress_page = ProgressPage.create()
    with pytest.raises(PermissionError):
        os.ftruncate(progress_page.fd, 0)
    progress_page.refresh()  # SIGBUS otherwise
    progress_page.close()


@pytest.mark.parametrize("text", [b"[]", b"3", b'"kind"', b"{}", b'{"kind": 3}', b"[" * 100_000, b"\xff", b'{"kind": '])
def test_control_message_is_an_object_with_kind(text: bytes) -> None:
    inbox = MessageInbox()
    head = bytearray(encode_head(ControlMessage("x"))[:13])
    head[:4] = len(text).to_bytes(4, "little")
    inbox.feed(bytes(head) + text, [])
    with pytest.raises(ProtocolError):
        inbox.take()


def test_unannounced_descriptors_are_closed() -> None:
    inbox = MessageInbox()
    inbox.feed(b"", [os.memfd_create("unannounced") for _ in range(MAX_FDS)])
    with pytest.raises(ProtocolError, match=f"got {MAX_FDS + 1}"):
        inbox.feed(b"", [os.memfd_create("unannounced")])
    assert not open_as("/memfd:unannounced")


@pytest.mark.parametrize("value", [None, -1, 1.5, True, "3", 1 << 64, [1]])
def test_a_count_from_a_child_is_a_count(value: Any) -> None:
    with pytest.raises(ProtocolError):
        counts(ControlMessage("point", {"total": value}), "total")
    assert counts(ControlMessage("point", {"total": 3}), "total") == [3]


def test_unloadable_state_is_refused_when_made() -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return MAX_PAYLOAD + 1

    ours, theirs = socket.socketpair()
    with pytest.raises(UnsupportedStateError, match=str(MAX_PAYLOAD)):
        ControlChannel(ours).send("point", Large())
    ours.close()
    theirs.close()


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
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
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

    return asyncio.run(run()), heard


def test_only_a_child_with_bad_messages_is_killed() -> None:
    good = encode_head(ControlMessage("begun"))
    assert _said(good, encode_head(ControlMessage("last")))[0] == 0
    status, heard = _said(good, b"\2\0\0\0" + bytes(9) + b"[]")
    assert status == -signal.SIGKILL
    assert [message.kind for message in heard] == ["begun"]


def test_a_child_that_sends_descriptors_is_killed() -> None:
    announced = bytearray(encode_head(ControlMessage("begun")))
    announced[12] = 1
    assert _said(bytes(announced), fds=True)[0] == -signal.SIGKILL


def test_number_of_epoch_starts_is_bounded() -> None:
    store = SlotSnapshots()
    data = bytes(MAX_BYTES)  # one object: what counts is what is kept
    for total in range(1, 200):
        store.add(StoredSnapshot(0, total, total, 0, True, 0, data), 0)
    kept = list(store)
    assert len(kept) <= MOST + 2
    assert (kept[0].total, kept[-1].total) == (1, 199)


@pytest.mark.parametrize(
    "value", [None, [], {}, {"restart": {}}, {"user": 1, "restart": {"epoch_start": {}, "at": [1]}}]
)
def test_invalid_restart_point_is_a_damaged_state(value: Any) -> None:
    with pytest.raises(StateCorruptError):
        RestartPoint.decode(encode_state(value))
