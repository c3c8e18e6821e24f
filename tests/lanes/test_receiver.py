"""The receiver as a process, between consumers of this process and bare TCP sockets that play the daemon."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Child
from lane_frames import a_frame, ack_of, checked, read_hello, read_sealed
from tests.lanes.conftest import DEADLINE_S, next_frame, payload
from tests.lanes.runner_child import content
from waiting import until

from penstock.client.stream.receiver_process import Receiver
from penstock.proto.errors import LaneLostError
from penstock.proto.lane import tcp
from penstock.proto.lane.compression import Packer, load
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, CLOSE, END, ERROR, RING, STRUCTURE, Ack, Frame, connect_local
from penstock.proto.v1 import lane_pb2

SLOT = 1 << 20


class Rig:
    """Lane through the receiver; `far` is the daemon's end."""

    def __init__(self, receiver: Receiver, **hello: object) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(DEADLINE_S)
        self.near = connect_local(receiver.start(), DEADLINE_S)
        target = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.hello = lane_pb2.Hello(**{"next_total": 1, "target": target, **hello})  # type: ignore[arg-type]
        self.near.send(self.hello.SerializeToString())
        self.far, _ = self.listener.accept()
        tcp.tune(self.far)
        self.received = read_hello(self.far, DEADLINE_S)
        self.far.settimeout(DEADLINE_S)
        self.consumer = Consumer(self.near, "the receiver")
        self.consumer.abandons = self.hello.abandons

    def begin(self, entry_bytes: int = SLOT) -> None:
        self.far.sendall(stream(ring(entry_bytes), ONE))

    def send_in_vain(self, data: bytes) -> None:
        """Send what will be refused: the receiver may hang up before it has all of it."""
        with contextlib.suppress(ConnectionError):
            self.far.sendall(data)

    def ack(self) -> Ack:
        """The next ack at the daemon's end."""
        return ack_of(read_sealed(self.far))

    def expect(self, total: int, size: int) -> tuple[int, int]:
        frame = next_frame(self.consumer)
        assert (frame.kind, frame.total, frame.nbytes) == (BATCH, total, size)
        assert bytes(payload(self.consumer, frame)) == content(total, size)
        return frame.ring, frame.entry

    def take(self, total: int, size: int) -> None:
        """Receive a batch; the loop drops it."""
        place = self.expect(total, size)
        self.consumer.delivered(total)
        self.consumer.release(place)
        self.consumer.flush()

    def close(self) -> None:
        self.consumer.close()
        self.far.close()
        self.listener.close()


@pytest.fixture
def rig(receiver: Receiver) -> Iterator[Rig]:
    rig = Rig(receiver, codecs=[lane_pb2.LZ4])
    yield rig
    rig.close()


def ring(entry_bytes: int, number: int = 1) -> Frame:
    return a_frame(kind=RING, ring=number, entry_bytes=entry_bytes, entries=32)


def batch(total: int, nbytes: int, **fields: int) -> Frame:
    return a_frame(
        **{"kind": BATCH, "total": total, "ring": 1, "structure": 1, "nbytes": nbytes, **fields}  # type: ignore[arg-type]
    )


ONE = a_frame(kind=STRUCTURE, structure=1, inline=b"one", size=3)


def stream(*frames: Frame) -> bytes:
    """Frames with their payloads, as a sender sends them."""
    return b"".join(
        checked(frame, content(frame.total, frame.nbytes)) if frame.kind == BATCH else tcp.sealed(frame.encode())
        for frame in frames
    )


def packed(data: bytes) -> bytes:
    codec = load(lane_pb2.LZ4)
    assert codec is not None
    wire = Packer(codec).pack(memoryview(data))
    assert wire is not None
    return b"".join(wire[1])


def compressed(frame: Frame, data: bytes = b"", codec: int = lane_pb2.LZ4, wire: int = 0) -> bytes:
    """A BATCH frame and its payload as a sender sends them, compressed."""
    data = data or packed(content(frame.total, frame.nbytes))
    return checked(frame._replace(codec=codec, wire=wire or len(data)), data)


# ---- the way in


def test_batches_of_any_size_for_any_split(receiver: Receiver) -> None:
    sizes = [0, 1, 100, 16383, 16384, 16385, 40_000, 5, 300_000, 0, SLOT, SLOT - 1, 3]
    rng = random.Random(3)
    for longest in (1, 7, 5000, 100_000, 1 << 22):
        rig = Rig(receiver)
        rig.begin()
        used = [size for size in sizes if size <= 200 * longest]
        data = stream(*(batch(total, size) for total, size in enumerate(used, 1)))
        at = total = 0
        while at < len(data):
            size = rng.randint(1, longest)
            rig.far.sendall(data[at : at + size])
            at += size
            while (frame := rig.consumer.receive()) is not None:
                total += 1
                check(rig, frame, total, used[total - 1])
        while total < len(used):
            total += 1
            check(rig, next_frame(rig.consumer), total, used[total - 1])
        rig.close()


def check(rig: Rig, frame: Frame, total: int, size: int) -> None:
    assert (frame.total, frame.nbytes) == (total, size)
    assert bytes(payload(rig.consumer, frame)) == content(total, size)
    rig.consumer.delivered(total)
    rig.consumer.release([frame.ring, frame.entry])
    rig.consumer.flush()


def push(sock: socket.socket, data: bytes) -> int:
    try:
        return sock.send(data[: 1 << 20])
    except BlockingIOError:
        os.sched_yield()
        return 0


def test_abandon_within_a_payload(rig: Rig) -> None:
    """Of a compressed payload, and of a plain one."""
    size = SLOT
    rig.begin()
    for abandons in range(12):
        total, of_pass = 10 * abandons + 1, {"abandons": abandons, "epoch": abandons}
        first = compressed(batch(total, size, **of_pass))
        stale = packed(bytes(size // 2) + random.Random(abandons).randbytes(size // 4) + bytes(size // 4))
        frame, check = batch(total + 1, size, codec=lane_pb2.LZ4, wire=len(stale), **of_pass), tcp.CHECK_BYTES
        if abandons % 2:
            frame, stale, check = batch(total + 1, 50_000, **of_pass), content(total + 1, 50_000), 0
        head = tcp.sealed(frame.encode())
        half = (len(stale) * abandons) // 12
        left = len(stale) + check - half
        rig.far.sendall(first + head + stale[:half])
        place = rig.expect(total, size)
        rig.consumer.delivered(total)
        rig.consumer.release(place)
        rig.consumer.abandon(abandons, total)
        ack = rig.ack()
        assert (ack.delivered, ack.abandon_epoch) == (total, abandons + 1)
        # What still comes of it may be anything: nobody may look at it.
        rig.far.sendall(b"?" * left + head + b"?" * (left + half))
        rig.far.sendall(stream(a_frame(kind=END, total=total + 3, abandons=abandons, epoch=abandons)))
        rig.far.sendall(compressed(batch(total + 1, size, abandons=abandons + 1, epoch=abandons + 1)))
        rig.take(total + 1, size)
        rig.ack()
    slots = next(iter(rig.consumer.rings.values())).entries
    noise = [
        checked(batch(total, size, abandons=12, epoch=12), content(total, size)) for total in range(200, 200 + slots)
    ]
    rig.far.sendall(b"".join(noise))
    assert len({rig.expect(total, size) for total in range(200, 200 + slots)}) == slots, "all slots are there"


def test_its_ring_is_no_larger_than_the_senders(rig: Rig) -> None:
    ring = a_frame(kind=RING, ring=1, entry_bytes=1 << 20, entries=3)
    rig.far.sendall(stream(ring, ONE, batch(1, 10)))
    rig.expect(1, 10)
    assert [known.entries for known in rig.consumer.rings.values()] == [3]


def test_a_ring_of_each_lane_has_its_own_number(receiver: Receiver) -> None:
    rigs = [Rig(receiver), Rig(receiver)]
    for rig in rigs:
        rig.begin()
        rig.far.sendall(stream(batch(1, 10)))
    places = {rig.expect(1, 10)[0] for rig in rigs}
    assert len(places) == 2
    for rig in rigs:
        rig.close()


# ---- ends


def test_backlog_is_forwarded_after_the_end(rig: Rig) -> None:
    rig.begin()
    ends = [a_frame(kind=END, epoch=epoch, inline=b"x" * 1000) for epoch in range(2000)]
    rig.far.sendall(stream(*ends))
    rig.far.close()
    for epoch in range(2000):
        assert next_frame(rig.consumer).epoch == epoch
    with pytest.raises(LaneLostError):
        next_frame(rig.consumer)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_missing_daemon_is_a_lost_lane(receiver: Receiver, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nobody's, once it is closed
    sock = connect_local(receiver.start(), DEADLINE_S)
    sock.send(lane_pb2.Hello(target=f"{host}:{port}").SerializeToString())
    consumer = Consumer(sock, "the receiver")
    said = next_frame(consumer)
    assert said.kind == CLOSE
    assert said.error.name == "LaneLostError"
    assert said.error.message.startswith(f"no connection to {host}:{port}: "), "the loop may ask for another worker"
    with pytest.raises(LaneLostError):
        next_frame(consumer)
    consumer.close()


# ---- streams that cannot be


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (tcp.sealed(b"\xff\xff"), "at least"),
        (stream(ring(SLOT), ONE, batch(1, SLOT + 1)), "must fit into an entry of a ring"),
        (stream(ring(SLOT), ONE, batch(1, 10, size=(1 << 32) - 1)), "must fit into an entry of a ring"),
        (stream(ring(SLOT), ONE, batch(1, 10, structure=2)), "must announce a structure before its batches"),
        (stream(a_frame(kind=STRUCTURE, structure=1, inline=b"", size=3)), "pieces"),
        (stream(a_frame(total=5)), "frames of known kinds"),
        (
            stream(ONE, a_frame(kind=STRUCTURE, structure=1, inline=b"two", size=3)),
            "must have the same contents each time",
        ),
        (stream(ring(SLOT), ONE) + compressed(batch(1, 5000), codec=lane_pb2.ZSTD), "codec that the receiver"),
        (stream(ring(SLOT), ONE) + compressed(batch(1, 5000), wire=5000), "when compressed"),
        (stream(ring(SLOT), ONE) + compressed(batch(1, 5000), packed(content(1, 4992))), "damaged in transit"),
    ],
)
def test_invalid_stream_is_a_named_error(rig: Rig, data: bytes, says: str) -> None:
    rig.send_in_vain(data)
    frame = next_frame(rig.consumer)
    name = "BatchCorruptError" if "damaged" in says else "ProtocolError"
    assert (frame.kind, frame.error.name) == (ERROR, name)
    assert says in frame.error.message
    with pytest.raises(LaneLostError):
        next_frame(rig.consumer)


def test_unread_batches_wait_in_the_network(receiver: Receiver) -> None:
    """A peer that says something without end fills no memory: every frame of its kind is kept until it is read."""
    rig = Rig(receiver)
    error = tcp.sealed(a_frame(kind=ERROR, total=1, inline=bytes(30_000)).encode())
    rig.far.settimeout(2.0)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 256 << 20:
            sent += rig.far.send(error[sent % len(error) :])
    assert sent < 128 << 20
    rig.far.settimeout(DEADLINE_S)
    assert next_frame(rig.consumer).kind == ERROR
    rig.close()


def test_too_large_entry_is_refused_unallocated(rig: Rig) -> None:
    rig.begin(entry_bytes=1 << 40)
    rig.send_in_vain(tcp.sealed(batch(1, 1 << 39).encode()))
    frame = next_frame(rig.consumer)
    assert (frame.kind, frame.error.name) == (ERROR, "BatchTooLargeError")


def test_lanes_do_not_wait_for_each_other(receiver: Receiver) -> None:
    stuck, half, free = rigs = [Rig(receiver) for _ in range(3)]
    for rig in rigs:
        rig.begin()
    stuck.far.setblocking(False)
    data = stream(*(batch(total, SLOT) for total in range(1, 200)))
    while push(stuck.far, data):
        pass
    half.far.sendall(stream(batch(1, SLOT))[: SLOT // 2])
    for total in range(1, 100):
        free.far.sendall(stream(batch(total, 70_000)))
        free.take(total, 70_000)
    for rig in rigs:
        rig.close()


# ---- the process


def test_it_is_one_process_without_torch_or_numpy(receiver: Receiver) -> None:
    name, pid = receiver.start(), receiver.pid
    assert receiver.start() == name
    assert receiver.pid == pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "python" in maps
    assert [word for word in ("torch", "numpy", "grpc") if word in maps] == []
    assert len(os.listdir(f"/proc/{pid}/task")) == 1


def test_one_that_was_killed_is_started_again(receiver: Receiver) -> None:
    name, pid = receiver.start(), receiver.pid
    assert pid is not None
    rig = Rig(receiver)
    os.kill(pid, 9)
    with pytest.raises(LaneLostError):
        next_frame(rig.consumer)
    assert rig.far.recv(1) == b""
    rig.close()
    until(lambda: receiver.pid is None, what="a killed process still runs")
    assert receiver.start() != name
    assert receiver.pid not in (None, pid)


def test_it_outlives_signals_and_ends_with_the_training_process() -> None:
    ours, theirs = socket.socketpair()

    def train() -> None:
        receiver = Receiver()
        theirs.send(f"{receiver.start()} {receiver.pid}".encode())
        time.sleep(DEADLINE_S)

    with ours, theirs, Child(train) as trainer:
        name, pid = ours.recv(1000).decode().split()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(int(pid), number)
        time.sleep(0.2)
        connect_local(name, 1).close()
        trainer.kill()

    def refuses() -> bool:
        try:
            connect_local(name, 1).close()
        except ConnectionRefusedError:
            return True
        return False

    until(refuses, what="it outlived the training process")


def test_passes_left_while_their_batches_come_in(rig: Rig) -> None:
    size = 50_000
    rig.begin()
    for abandons in range(20):
        total, of_pass = 2 * abandons + 1, {"abandons": abandons, "epoch": abandons}
        stale = stream(*(batch(total + index, size, **of_pass) for index in (1, 2, 3)))
        rig.far.sendall(stream(batch(total, size, **of_pass)) + stale[:80_000])
        place = rig.expect(total, size)
        rig.consumer.delivered(total)
        rig.consumer.release(place)
        rig.consumer.abandon(abandons, total)
        ack = rig.ack()
        assert (ack.delivered, ack.abandon_epoch) == (total, abandons + 1)
        # The sender does not stop within a frame, and what it sends now has been overwritten: nobody may see it.
        second = len(stale) // 3
        rig.far.sendall(b"?" * (2 * second - 80_000) + stale[2 * second :])
        rig.far.sendall(stream(a_frame(kind=END, total=total + 3, abandons=abandons, epoch=abandons)))
        rig.far.sendall(stream(batch(total + 1, size, abandons=abandons + 1, epoch=abandons + 1)))
        rig.take(total + 1, size)
        assert rig.ack().delivered == total + 1
    rig.far.sendall(stream(*(batch(total, size, abandons=20, epoch=20) for total in range(41, 49))))
    assert len({rig.expect(total, size) for total in range(41, 49)}) == 8, "all slots are there"
