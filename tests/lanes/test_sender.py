"""The sender between a producer of this process and a bare TCP socket that plays the receiver."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest
from lane_frames import a_frame, frame_of, read_sealed, received
from tests.lanes.conftest import DEADLINE_S, unpacked
from tests.lanes.runner_child import content
from waiting import until
from xxhash import xxh3_64

from penstock.proto.lane import tcp
from penstock.proto.lane.frames import BATCH, END, MAX_PACKET, RING, STRUCTURE, Ack, Frame, framed, pack_shapes
from penstock.proto.lane.producer import Producer
from penstock.proto.lane.tcp import CHECK_BYTES, check_of, is_checked
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import FRAMES_A_TURN, MAX_OUT, Sender


class Rig:
    """A producer, the sender, and the far end of its TCP connection."""

    def __init__(self, **hello: object) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        listener.close()
        self.far.settimeout(DEADLINE_S)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        greeting = lane_pb2.Hello(**{"next_total": 1, **hello})  # type: ignore[arg-type]
        self.producer = Producer(1 << 26)
        self.producer.know_structure(1, b"one")
        self.producer.attach(theirs, greeting)
        self.sender = Sender(near, ours, greeting, "slot 0")
        self.total = 0
        self.compressed: list[int] = []
        """Batches read that came compressed."""
        self._inbox = tcp.SealedInbox()

    def start(self) -> Rig:
        self.sender.start()
        return self

    def publish(self, *sizes: int) -> None:
        for size in sizes:
            self.total += 1
            reserved = self.producer.reserve(size)
            assert reserved is not None
            reserved.view[:size] = content(self.total, size)
            self.producer.publish(reserved, self.total, 0, 1, size, pack_shapes((size,)), 0)

    def frame(self) -> tuple[Frame, bytes]:
        """The next frame over TCP, and its payload."""
        frame = frame_of(read_sealed(self.far))
        if frame.kind != BATCH:
            return frame, b""
        data = received(self.far, frame.wire if frame.codec else frame.nbytes + 8 * frame.size)
        if is_checked(frame):
            assert received(self.far, CHECK_BYTES) == check_of(xxh3_64(data))
        if frame.codec:
            self.compressed.append(frame.total)
            data = unpacked(frame.codec, data, frame.nbytes + 8 * frame.size)
        return frame, data

    def batches(self, last: int) -> None:
        """Read up to batch `last`, checking all of it."""
        while True:
            frame, payload = self.frame()
            if frame.kind == BATCH:
                assert payload == content(frame.total, frame.nbytes)
                if frame.total == last:
                    return

    def say(self, **ack: object) -> None:
        self.far.sendall(tcp.sealed(Ack(**ack).encode()))  # type: ignore[arg-type]

    def acks(self) -> None:
        """Wait for an ack at the producer."""
        assert select.select([self.producer], [], [], DEADLINE_S)[0]
        self.producer.take_acks()

    def close(self) -> None:
        self.far.close()
        self.producer.close(0)
        assert self.sender.stop(DEADLINE_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig().start()
    yield rig
    rig.close()


def test_frames_are_sent_verbatim_then_payload(rig: Rig) -> None:
    rig.publish(100, 0, 70_000)
    rig.producer.end(0, 3)
    kinds: list[int] = []
    while not kinds or kinds[-1] != END:
        frame, payload = rig.frame()
        kinds.append(frame.kind)
        if frame.kind == RING:
            assert frame.entry_bytes in (4096, 73728)
        if frame.kind == BATCH:
            assert payload == content(frame.total, frame.nbytes)
    batch, ring = BATCH, RING
    assert kinds == [ring, STRUCTURE, batch, batch, ring, batch, END]


def test_acks_are_read_while_the_network_stalls(rig: Rig) -> None:
    rig.publish(*[16 << 20] * 4)  # far more than the kernel buffers
    rig.say(open_epochs=5, wanted=[1, 2])
    rig.acks()
    assert (rig.producer.open_epochs, rig.producer.wanted) == (5, {2: [1]})
    rig.say(delivered=1)  # nonsense, but it is passed on
    rig.acks()
    assert rig.producer.delivered == 1
    rig.batches(4)


def test_lost_runners_frames_are_sent_then_end(rig: Rig) -> None:
    sizes = [16 << 20] * 4
    rig.publish(*sizes)
    rig.producer.detach()
    rig.batches(4)
    assert rig.far.recv(1) == b""
    assert rig.sender.is_alive(), "it stays for the last acks: closing now could destroy what is on its way"
    rig.far.close()
    rig.sender.join(DEADLINE_S)
    assert not rig.sender.is_alive()
    assert "the other end closed the connection" in rig.sender.reason


@pytest.mark.parametrize("words", [{}, {"delivered": 2}, {"delivered": 2, "close": True}])
def test_last_acks_of_lost_receiver_reach_runner(rig: Rig, words: dict[str, object]) -> None:
    rig.publish(*[16 << 20] * 4)  # unread when it leaves: the kernel resets the connection
    if words:
        rig.say(**words)
    rig.far.close()
    rig.sender.join(DEADLINE_S)
    assert not rig.sender.is_alive()
    while rig.producer.attached:
        rig.acks()
    assert rig.producer.closed is bool(words.get("close"))
    assert rig.producer.delivered == words.get("delivered", 0)
    assert rig.sender.reason


def test_bad_receiver_loses_only_its_lane(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.publish(100)
    rig.far.sendall(tcp.sealed(b"\xff\xff"))
    rig.sender.join(DEADLINE_S)
    assert not rig.sender.is_alive()
    assert rig.sender.reason.startswith("ProtocolError: an acknowledgement must have at least")
    assert "ProtocolError" in caplog.text
    while rig.producer.attached:
        rig.acks()
    assert not rig.producer.closed
    assert rig.producer._kept


def test_bad_runner_loses_only_its_lane(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    assert rig.producer._sock is not None
    rig.producer._sock.send(framed(a_frame(kind=BATCH, ring=77).encode()))
    rig.sender.join(DEADLINE_S)
    assert not rig.sender.is_alive()
    assert "are in no entry" in rig.sender.reason
    assert "are in no entry" in caplog.text
    assert rig.far.recv(1) == b""


def test_stop_leaves_both_sides_at_once() -> None:
    rig = Rig().start()
    rig.publish(*[16 << 20] * 4)
    assert rig.sender.stop(DEADLINE_S)
    assert rig.sender.stop(DEADLINE_S)
    assert not rig.sender.is_alive()
    assert rig.sender.reason == "stopped"
    while rig.producer.attached:
        rig.acks()
    assert not rig.producer.closed
    rig.close()


def test_stop_before_the_start() -> None:
    rig = Rig()
    assert rig.sender.stop()
    assert rig.far.recv(1) == b""
    rig.close()


def test_flood_of_announcements_fills_no_memory(rig: Rig) -> None:
    sock = rig.producer._sock
    assert sock is not None
    frame = a_frame(kind=STRUCTURE, structure=1, inline=b"x" * 60_000, size=60_000)
    piece = framed(frame.encode())
    sock.setblocking(False)
    assert len(piece) < MAX_PACKET

    def stopped() -> bool:
        try:
            sock.send(piece)
        except BlockingIOError:
            return len(rig.sender._out) > MAX_OUT
        return False

    until(stopped, what="the flood was not stopped")
    assert len(rig.sender._out) <= MAX_OUT + FRAMES_A_TURN
    rig.say(open_epochs=3)
    rig.acks()
    assert rig.producer.open_epochs == 3
