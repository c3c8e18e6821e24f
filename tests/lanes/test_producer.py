"""The producer alone: slots, what it tells and to whom, and consumers that cannot be trusted."""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
from collections.abc import Iterator

import pytest
from lane_frames import frame_of
from tests.lanes.conftest import count_rings

from penstock.proto.errors import BatchTooLargeError, LaneLostError
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, END, HEAD, MAX_FRAME, MAX_PACKET, RING, STRUCTURE, Ack, Frame, pack_shapes
from penstock.proto.lane.producer import FreeEntry, Producer
from penstock.proto.lane.ring import PAGE, Ring, RingBudget
from penstock.proto.v1 import lane_pb2

pytestmark = pytest.mark.usefixtures("_nothing_is_left")


@pytest.fixture
def _nothing_is_left() -> Iterator[None]:
    gc.collect()  # what earlier tests left for it would go during this one
    descriptors, rings = len(os.listdir("/proc/self/fd")), count_rings("self")
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert count_rings("self") <= rings


@pytest.fixture
def producer() -> Iterator[Producer]:
    producer = Producer(1 << 20)
    producer.know_structure(1, b"one")
    yield producer
    producer.close(0.0)


def attach(producer: Producer, **hello: object) -> socket.socket:
    """The raw other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    producer.attach(theirs, lane_pb2.Hello(**{"next_total": 1, **hello}))  # type: ignore[arg-type]
    ours.setblocking(False)
    return ours


def publish(producer: Producer, total: int, size: int = 100, epoch: int = 0, structure: int = 1) -> FreeEntry:
    reserved = producer.reserve(size)
    assert reserved is not None
    producer.publish(reserved, total, epoch, structure, size, pack_shapes((size,)), 0)
    return reserved


def packet(sock: socket.socket) -> list[Frame]:
    """The frames of the next packet."""
    data, found = sock.recv(MAX_PACKET), []
    while data:
        (size,) = HEAD.unpack_from(data)
        found.append(frame_of(data[HEAD.size : HEAD.size + size]))
        data = data[HEAD.size + size :]
    return found


def say(sock: socket.socket, producer: Producer, **ack: object) -> None:
    sock.send(Ack(**ack).encode())  # type: ignore[arg-type]
    producer.take_acks()


# ---- slots


def test_batch_above_the_limit_is_refused(producer: Producer) -> None:
    with pytest.raises(BatchTooLargeError, match="must have <= max_batch_bytes=1048576 bytes, got 1048577"):
        producer.reserve((1 << 20) + 1)
    with pytest.raises(BatchTooLargeError):
        producer.reserve(1 << 20, dims=3000)
    assert producer.ring_entries == 0
    reserved = producer.reserve(1 << 20)
    assert reserved is not None
    producer.return_unused(reserved)


def test_rings_double_up_to_the_limit(producer: Producer) -> None:
    sizes = []
    for nbytes in (1, PAGE + 1, 2 * PAGE + 1, 600_000, 600_000 + PAGE, 1 << 20):
        reserved = producer.reserve(nbytes)
        assert reserved is not None
        sizes.append(reserved.ring.entry_bytes)
        assert len(reserved.view) == reserved.ring.entry_bytes
        producer.return_unused(reserved)
    assert sizes == [PAGE, 2 * PAGE, 4 * PAGE, 147 * PAGE, 256 * PAGE, 256 * PAGE]
    assert count_rings("self") >= 1


def test_entry_of_outgrown_ring_can_be_returned(producer: Producer) -> None:
    first = producer.reserve(10)
    second = producer.reserve(PAGE + 1)
    assert first is not None
    assert second is not None
    producer.return_unused(first)
    producer.return_unused(second)
    assert count_rings("self") >= 1
    assert producer.free_entries == 32


def test_reserved_entry_stays_reserved_on_attach(producer: Producer) -> None:
    reserved = producer.reserve(10)
    assert reserved is not None
    sock = attach(producer, next_total=1000)
    assert producer.free_entries == 31
    producer.publish(reserved, 1000, 0, 1, 10, b"", 0)
    assert producer.free_entries == 31
    sock.close()


def test_structures_nobody_needs_are_forgotten(producer: Producer) -> None:
    publish(producer, 1)  # keeps its structure for a consumer that is still to come
    for structure in range(2, 1000):
        producer.know_structure(structure, b"x")
        assert producer.knows_structure(structure)
    assert producer.knows_structure(1)
    assert len(producer.known_structures) <= 128
    sock = attach(producer)
    kinds = [frame.kind for frame in packet(sock)]
    sock.recv(10)
    kinds += [frame.kind for frame in packet(sock)]
    assert kinds == [RING, STRUCTURE, BATCH]
    sock.close()


# ---- packets


def publish_more(producer: Producer, totals: range) -> None:
    for total in totals:
        reserved = producer.reserve(100)
        assert reserved is not None
        producer.publish(reserved, total, 0, 1, 100, pack_shapes((100,)), 0, more=True)


def test_batches_that_more_follow_share_a_packet(producer: Producer) -> None:
    sock = attach(producer)
    publish(producer, 1)  # announces ring and structure
    for _ in range(3):
        sock.recv(MAX_PACKET)
    publish_more(producer, range(2, 5))
    with pytest.raises(BlockingIOError):
        sock.recv(MAX_PACKET)
    publish(producer, 5)
    assert [frame.total for frame in packet(sock)] == [2, 3, 4, 5]
    publish_more(producer, range(6, 8))
    producer.flush()
    assert [frame.total for frame in packet(sock)] == [6, 7]
    publish_more(producer, range(8, 10))
    producer.end(0, 9)
    assert [(frame.kind, frame.total) for frame in packet(sock)] == [
        (BATCH, 8),
        (BATCH, 9),
        (END, 9),
    ]
    sock.close()


# ---- consumers


@pytest.mark.parametrize("data", [b"\xff", b"x" * (MAX_FRAME + 1)])
def test_bad_consumer_alone_is_dropped(producer: Producer, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    sock = attach(producer)
    publish(producer, 1)
    sock.send(data)
    with caplog.at_level(logging.WARNING):
        producer.take_acks()
    assert "invalid ack" in caplog.text
    assert not producer.attached
    assert producer.fileno() == -1
    sock.close()
    again = attach(producer)
    consumer = Consumer(again, "again")
    frame = consumer.receive()
    assert frame is not None
    assert frame.total == 1
    consumer.close()


def test_release_of_undelivered_entry_drops_lane(producer: Producer, caplog: pytest.LogCaptureFixture) -> None:
    sock = attach(producer)
    reserved = publish(producer, 1)
    say(sock, producer, released=[reserved.ring_id, reserved.entry])
    assert "at most batch 0, got 1" in caplog.text
    assert not producer.attached
    assert producer.free_entries == 31
    sock.close()


def test_peer_that_delivers_unsent_is_dropped(producer: Producer, caplog: pytest.LogCaptureFixture) -> None:
    sock = attach(producer)
    publish(producer, 1)
    say(sock, producer, delivered=2)
    assert "batches up to 1 were sent, got an ack of 2" in caplog.text
    assert not producer.attached
    assert producer.delivered == 0
    sock.close()


def test_last_acks_of_killed_consumer_are_read(producer: Producer) -> None:
    sock = attach(producer)
    for total in range(1, 4):
        publish(producer, total)
    sock.send(Ack(delivered=2).encode())
    sock.close()  # with frames unread: the kernel says ECONNRESET before it shows the ack
    producer.take_acks()
    assert (producer.delivered, producer.attached) == (2, False)
    assert len(producer._kept) == 1


def test_later_consumer_replaces_the_earlier(producer: Producer) -> None:
    first, second = attach(producer), None
    publish(producer, 1)
    second = attach(producer)
    consumers = [Consumer(first, "first"), Consumer(second, "second")]
    frame = consumers[0].receive()
    assert frame is not None
    with pytest.raises(LaneLostError):
        consumers[0].receive()
    frame = consumers[1].receive()
    assert frame is not None
    assert frame.total == 1
    for consumer in consumers:
        consumer.close()


# ---- rings


def test_a_ring_cannot_be_resized_once_it_is_made() -> None:
    ring = Ring.create(10_000, 4)
    assert ring.entry_bytes == 3 * PAGE
    with pytest.raises(PermissionError):
        os.ftruncate(ring.fd, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(ring.fd, 100 * PAGE)
    assert len(ring.map) == len(ring.view) == 12 * PAGE
    ring.close_fd()
    ring.close_fd()


def test_every_page_of_a_ring_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MAP_POPULATE")  # the kernel may leave pages out, and says nothing
    ring = Ring.create(1 << 20, 4)
    assert os.fstat(ring.fd).st_blocks * 512 == 4 << 20
    ring.close_fd()


def test_ring_without_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", short)
    with pytest.raises(OSError, match=r"a ring .* of 4,194,304 bytes cannot be made: No space left on device"):
        Ring.create(1 << 20, 4)


def test_the_rings_of_all_lanes_share_a_budget() -> None:
    """Each was as large as its sender said: 64 bytes took 4 GiB for every lane."""
    budget = RingBudget(10 * PAGE)
    first, second = (Producer(1 << 20, 4 * PAGE, budget) for _ in range(2))
    assert first.reserve(PAGE) is not None  # four slots
    assert second.reserve(PAGE) is not None
    with pytest.raises(OSError, match=r"all rings of this process may take 40,960 bytes, and have 32,768"):
        second.reserve(2 * PAGE)
    first.close(say_so=False)
    del first
    gc.collect()
    assert second.reserve(2 * PAGE) is not None
    second.close(say_so=False)
