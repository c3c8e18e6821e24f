"""Decoders that are conversations: both ends of a local lane, the sender and the receiver between hosts, the opening
Hello.

Each peer is played by the bytes, over real sockets; what they hold is put into frames and packets here, so that a
fuzzer need not find out lengths.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import select
import socket
from collections.abc import Callable
from typing import Any, cast

import torch
from lane_frames import a_frame, frame_of, read_hello
from targets.target import Target, pieces, script

from penstock.client.stream import receiver
from penstock.client.stream.lane_reader import SlotLane
from penstock.proto.batch.digest import batch_digest
from penstock.proto.batch.flatten import Flattener
from penstock.proto.batch.structure import MAX_LEAVES, MAX_RANK
from penstock.proto.errors import LaneLostError
from penstock.proto.lane.frames import (
    BATCH,
    CLOSE,
    END,
    ERROR,
    LANE_PROTOCOL,
    MAX_DIMS,
    RING,
    STRUCTURE,
    Ack,
    Frame,
    framed,
    pack_shapes,
)
from penstock.proto.lane.producer import MOST_WANTED, Producer
from penstock.proto.lane.ring import PAGE, Ring, RingBudget
from penstock.proto.lane.tcp import sealed
from penstock.proto.rpc.tls import host_of
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.worker.daemon.listeners import check_hello
from penstock.worker.daemon.sender import Sender

__all__ = ["TARGETS"]

DEADLINE_S = 60.0
SLOTS = 4
assert MAX_DIMS == MAX_LEAVES * MAX_RANK


def _pair(kind: int) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.settimeout(DEADLINE_S)
    return ours, theirs


# ---- the consumer: what a runner may say to a training job

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _ring_fd(kind: int, content: bytes) -> int:
    """A descriptor as a ring's: a good one, or one of the wrong ones."""
    if kind % 8 == 6:
        read, write = os.pipe()
        os.close(write)
        return read
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if kind % 8 == 5:
        os.ftruncate(fd, 1 << 50)  # with holes
    else:
        os.posix_fallocate(fd, 0, SLOTS * PAGE)
        os.pwrite(fd, content[: SLOTS * PAGE], 0)
    if kind % 8 != 4:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (fcntl.F_SEAL_WRITE if kind % 8 == 3 else 0))
    return fd


def _consumer(data: bytes) -> None:
    """Steps: 0 one frame in a packet, 1 a packet as it is, 2 several frames in one, 3 a descriptor with the ring's
    content, 4 the loop left its epoch, 5 the loop says what it has."""
    peer, sock = _pair(socket.SOCK_SEQPACKET)
    wake = os.eventfd(0)
    lane = SlotLane(0, 1, "the fuzzer's runner")
    lane.attach(sock, wake)
    consumer = lane.consumer
    assert consumer is not None
    held: list[Any] = []
    try:
        with peer:
            peer.setblocking(False)
            for what, piece in pieces(data):
                try:
                    match what % 6:
                        case 0:
                            peer.send(framed(piece))
                        case 1 if piece:
                            peer.send(piece)
                        case 2:
                            peer.send(b"".join(framed(frame) for _, frame in pieces(piece)) or b"\0")
                        case 3:
                            fd = _ring_fd(piece[0] if piece else 0, piece[1:])
                            try:
                                socket.send_fds(peer, [b"\0"], [fd] * (1 + (piece[:1] == b"\7")))
                            finally:
                                os.close(fd)
                        case 4:
                            consumer.abandon(0, 0)
                        case _:
                            consumer.delivered(1)
                            held.clear()
                            lane.ack(1)
                except BlockingIOError:
                    pass  # the socket is full
                _read(lane, held)
        while True:
            if not _read(lane, held):
                return
    except LaneLostError:
        pass  # the script is over
    finally:
        os.close(wake)
        lane.lose(0.0, "over")


def _read(lane: SlotLane, held: list[Any]) -> bool:
    """Do what a loop would do with all frames that have arrived."""
    consumer = lane.consumer
    assert consumer is not None
    while (frame := consumer.receive()) is not None:
        if frame.kind == BATCH:
            held.append(lane.take(frame))
            lane.unacked += 1
        elif frame.kind in (ERROR, CLOSE):
            return False
    return True


def _runner_frames() -> tuple[bytes, bytes, bytes, list[bytes]]:
    """Structure, ring, the ring's content, and a few batches."""
    flat = Flattener().flatten({"x": torch.arange(6), "n": 3, "s": "text"})
    ring = Ring.create(PAGE, SLOTS)
    flat.write_to(ring.address)
    content = bytes(ring.view[: flat.nbytes])
    text = flat.structure.to_bytes()
    structure = a_frame(STRUCTURE, structure=1, inline=text, size=len(text)).encode()
    announced = a_frame(RING, ring=9, entry_bytes=PAGE, entries=SLOTS).encode()
    ring.close_fd()
    digest = batch_digest(flat.structure, content, 0, flat.nbytes, flat.shapes)
    behind = Frame(BATCH, ring=9, structure=1, nbytes=flat.nbytes, total=2, digest=digest, size=len(flat.shapes))
    shapes = pack_shapes(flat.shapes)
    inline = behind._replace(total=1, size=0, rest=shapes)
    return structure, announced, content + shapes, [inline.encode(), behind.encode()]


def _consumer_seeds() -> list[bytes]:
    structure, ring, content, batches = _runner_frames()
    end = a_frame(END, total=2).encode()
    error = a_frame(ERROR, error=records_pb2.ErrorDetail(name="InputFnError", message="m")).encode()
    opening = [(0, structure), (0, ring), (3, b"\0" + content)]
    halves = []
    for start, stop in ((0, 20), (20, 1000)):
        piece = frame_of(structure)
        halves.append((0, piece._replace(rest=piece.rest[start:stop]).encode()))
    return [
        script(*opening, *((0, batch) for batch in batches), (5, b""), (0, end), (0, error)),
        script(*halves, (0, ring), (3, b"\1" + content), (2, script(*((0, batch) for batch in batches))), (4, b"")),
    ]


# ---- the producer: what a training job may say to a runner


def _producer(data: bytes) -> None:
    """Steps: 0 an ack, 1 a packet as it is, 2 another consumer with its Hello, 3 the runner makes a batch, 4 it ends a
    pass. Whatever was said, an honest consumer then gets what was not delivered."""
    producer = Producer(1 << 16)
    producer.know_structure(1, b"structure")
    peer: socket.socket | None = None
    total = 0
    try:
        for what, piece in pieces(data):
            match what % 5:
                case 2:
                    if peer is not None:
                        peer.close()
                    peer, sock = _pair(socket.SOCK_SEQPACKET)
                    try:
                        hello = lane_pb2.Hello.FromString(piece)
                    except Exception:
                        hello = lane_pb2.Hello()
                    producer.attach(sock, hello)
                case 3:
                    reserved = producer.reserve(1000)
                    if reserved is not None:
                        total = max(total, producer.delivered) + 1
                        producer.publish(reserved, min(total, (1 << 64) - 1), 0, 1, 1000, pack_shapes([1, 2]), 3)
                case 4:
                    producer.end(0, min(total, (1 << 64) - 1))
                case _ if peer is not None:
                    try:
                        peer.send(piece)
                    except OSError:
                        pass  # it was thrown out
            producer.take_acks()
            producer.flush()
            assert sum(map(len, producer.wanted.values())) <= MOST_WANTED
        _honest(producer)
    finally:
        if peer is not None:
            peer.close()
        producer.close(0.0, say_so=False)


def _honest(producer: Producer) -> None:
    """Every slot is somebody's, and a consumer that comes back is served."""
    peer, sock = _pair(socket.SOCK_SEQPACKET)
    with peer:
        wanted = min(producer.delivered + 1, (1 << 64) - 1)
        producer.attach(sock, lane_pb2.Hello(next_total=wanted, abandons=producer.abandons))
        if wanted <= producer.delivered:
            return
        assert producer.attached, "an honest consumer was refused"
        assert 0 <= producer.free_entries <= producer.ring_entries


def _producer_seeds() -> list[bytes]:
    hello = lane_pb2.Hello(
        protocol=LANE_PROTOCOL, next_total=1, held=[lane_pb2.RingEntry(ring=1, entry=2)]
    ).SerializeToString()
    acks = [
        Ack(delivered=1, open_epochs=2, wanted=[3, 3, 4, 4]),
        Ack(delivered=2, released=[1, 2, 1, 3]),
        Ack(abandon_epoch=1),
        Ack(close=True),
    ]
    said = [(0, ack.encode()) for ack in acks]
    return [
        script((2, hello), (3, b""), (3, b""), *said[:2], (4, b""), *said[2:]),
        script((3, b""), (2, hello), (2, hello)),
    ]


# ---- the sender: a daemon between a runner and another host


def _sender(data: bytes) -> None:
    """Steps: 0 a frame of the runner's, 1 a packet of its, 2 a descriptor, 3 a message of the receiver's, 4 its bytes
    as they are. The first step's content is the Hello."""
    steps = list(pieces(data))
    try:
        hello = lane_pb2.Hello.FromString(steps[0][1] if steps else b"")
    except Exception:
        hello = lane_pb2.Hello()
    runner, local = _pair(socket.SOCK_SEQPACKET)
    far, near = _tcp_pair()
    sender = Sender(near, local, hello, "the fuzzer's slot")
    sender.start()
    with runner, far:
        runner.setblocking(False)
        far.setblocking(False)
        for what, piece in steps[1:]:
            try:
                match what % 5:
                    case 0:
                        runner.send(framed(piece))
                    case 1 if piece:
                        runner.send(piece)
                    case 2:
                        fd = _ring_fd(piece[0] if piece else 0, piece[1:])
                        try:
                            socket.send_fds(runner, [b"\0"], [fd])
                        finally:
                            os.close(fd)
                    case 3:
                        far.send(sealed(piece))
                    case 4:
                        far.send(piece)
            except OSError:
                pass  # full, or it has left
    sender.join(DEADLINE_S)
    assert not sender.is_alive(), "the sender outlived both its peers"


def _sender_seeds() -> list[bytes]:
    structure, ring, content, batches = _runner_frames()
    hello = lane_pb2.Hello(protocol=LANE_PROTOCOL, next_total=1, codecs=[lane_pb2.LZ4]).SerializeToString()
    acks = [Ack(delivered=1, wanted=[4, 4]), Ack(delivered=2), Ack(abandon_epoch=1)]
    said = [(3, ack.encode()) for ack in acks]
    opening = [(0, hello), (0, structure), (0, ring), (2, b"\0" + content)]
    return [script(*opening, *((0, batch) for batch in batches), *said)]


_listener: list[socket.socket] = []


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    if not _listener:
        _listener.append(socket.create_server(("127.0.0.1", 0)))
        atexit.register(_listener[0].close)
    near = socket.create_connection(_listener[0].getsockname())
    far, _ = _listener[0].accept()
    # Ports would run out: what is left of a connection is of no interest.
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return far, near


# ---- the receiver: what another host may say


class _Loop:
    """The receiver's loop, for one lane that is driven by hand."""

    def __init__(self) -> None:
        self.watched: dict[int, int] = {}
        self.address = "nobody:0"
        self.rings = RingBudget()

    def watch(self, lane: object, fd: int, mask: int) -> None:
        self.watched[fd] = mask

    def forget(self, lane: object, *fds: int) -> None:
        self.watched.clear()

    def connect(self, address: str, then: Callable[[socket.socket | OSError], None]) -> None:
        self.address, self.then = address, then


def _receiver(data: bytes) -> None:
    """Steps: 0 a frame of the sender's, 1 its bytes as they are, 2 an ack, 3 the consumer reads. The first step's
    content is the Hello."""
    steps = list(pieces(data))
    loop = _Loop()
    consumer, local = _pair(socket.SOCK_SEQPACKET)
    consumer.setblocking(False)
    far, near = _tcp_pair()
    lane = receiver.ReceiverLane(cast(receiver.ReceiverLoop, loop), local, 1 << 16)
    fd = local.fileno()
    with consumer, far, near:
        consumer.send(steps[0][1] if steps and steps[0][1] else b"\0")
        lane.on_event(fd, select.EPOLLIN)
        if lane.over:
            return
        assert 0 <= host_of(loop.address)[1] <= 65535
        loop.then(near)
        for what, piece in steps[1:]:
            try:
                match what % 4:
                    case 0:
                        far.send(sealed(piece))
                    case 1:
                        far.send(piece)
                    case 2:
                        consumer.send(piece)
                    case _:
                        while consumer.recv(1 << 17):
                            pass
            except OSError:
                pass  # full, empty, or it has left
            _drive(lane, loop)
        far.close()
        consumer.close()
        _drive(lane, loop)
        lane.end("the fuzzer has")


def _drive(lane: receiver.ReceiverLane, loop: _Loop) -> None:
    for _ in range(100):
        if lane.over:
            return
        poll = select.epoll()
        with poll:
            for fd, mask in loop.watched.items():
                if mask:
                    poll.register(fd, mask & ~select.EPOLLOUT)
            events = poll.poll(0)
        if not events:
            return
        for fd, seen in events:
            if not lane.over:
                lane.on_event(fd, seen)


def _receiver_seeds() -> list[bytes]:
    structure, ring, content, batches = _runner_frames()
    hello = lane_pb2.Hello(
        protocol=LANE_PROTOCOL, next_total=1, target="127.0.0.1:1", codecs=[lane_pb2.ZSTD, lane_pb2.LZ4]
    )
    payload = content[: frame_of(batches[0]).nbytes]
    ack = Ack(delivered=1).encode()
    return [
        script(
            *((0, hello.SerializeToString()), (0, structure), (0, ring), (0, batches[0]), (1, payload), (3, b"")),
            *((2, ack), (1, sealed(batches[0]) + payload), (0, a_frame(END, total=1).encode())),
        )
    ]


# ---- the opening


def _hello(data: bytes) -> None:
    """Read a Hello as it comes over TCP."""
    peer, sock = _pair(socket.SOCK_STREAM)
    with peer, sock:
        peer.send(data[: 1 << 16])
        peer.shutdown(socket.SHUT_WR)
        hello = read_hello(sock, DEADLINE_S)
        check_hello(hello)


def _hello_seeds() -> list[bytes]:
    hello = lane_pb2.Hello(
        protocol=LANE_PROTOCOL, run="job/0", attempt=1, slot=2, generation=3, ticket="t" * 32, next_total=9
    )
    return [sealed(hello.SerializeToString())]


TARGETS = [
    Target("consumer", _consumer, _consumer_seeds, examples=120),
    Target("producer", _producer, _producer_seeds),
    Target("sender", _sender, _sender_seeds, examples=60),
    Target("receiver", _receiver, _receiver_seeds, examples=100),
    Target("hello", _hello, _hello_seeds, examples=60),
]
