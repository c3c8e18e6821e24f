"""Input that a consumer refuses: whatever a peer sends, it ends in a ProtocolError or LaneLostError and in nothing
else."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from census import open_as
from lane_frames import a_frame, ack_of
from tests.lanes.conftest import count_rings

from penstock.proto.errors import ProtocolError
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import (
    BATCH,
    END,
    ERROR,
    FRAME_BYTES,
    KNOWN_STRUCTURES,
    MAX_FRAME,
    MAX_PACKET,
    RING,
    STRUCTURE,
    Ack,
    check_peer,
    framed,
)
from penstock.proto.lane.ring import PAGE, Ring, entries_for, ring_bytes

Pair = tuple[socket.socket, Consumer]


def make_pair() -> Pair:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ours, Consumer(theirs, "slot 3 of box 0")


@pytest.fixture
def pair() -> Iterator[Pair]:
    peer, consumer = make_pair()
    yield peer, consumer
    consumer.close()
    peer.close()


def say(peer: socket.socket, **frame: object) -> None:
    peer.send(framed(a_frame(**frame).encode()))  # type: ignore[arg-type]


def pass_ring(peer: socket.socket, fd: int, ring: int = 1, entry_bytes: int = PAGE, entries: int = 4) -> None:
    say(peer, kind=RING, ring=ring, entry_bytes=entry_bytes, entries=entries)
    socket.send_fds(peer, [b"\0"], [fd])


def memfd(size: int, *, sealed: bool) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def batch(peer: socket.socket, **frame: object) -> None:
    say(peer, **{"kind": BATCH, "total": 1, "ring": 1, "structure": 1, "nbytes": 8, **frame})


def announce(peer: socket.socket) -> None:
    ring = Ring.create(PAGE, 4)
    pass_ring(peer, ring.fd)
    ring.close_fd()
    say(peer, kind=STRUCTURE, structure=1, inline=b"abc", size=3)


# ---- rings


def test_a_ring_and_its_descriptor_may_come_apart(pair: Pair) -> None:
    peer, consumer = pair
    ring = Ring.create(PAGE, 4)
    say(peer, kind=RING, ring=5, entry_bytes=PAGE, entries=4)
    for _ in range(3):
        assert consumer.receive() is None, "it does not wait for the second packet"
    assert consumer.rings == {}
    socket.send_fds(peer, [b"\0"], [ring.fd])
    assert consumer.receive() is None
    assert list(consumer.rings) == [5]
    ring.view[PAGE : PAGE + 3] = b"abc"
    assert bytes(consumer.rings[5].view[PAGE : PAGE + 3]) == b"abc"
    assert consumer.rings[5].fd == -1
    ring.close_fd()


@pytest.mark.parametrize(
    ("sealed", "entry_bytes", "announced", "says"),
    [
        (False, PAGE, 4, "must be sealed"),
        (True, PAGE, 5, "entries of whole pages"),
        (True, PAGE, 3, "entries of whole pages"),
        (True, 1000, 4, "entries of whole pages"),
    ],
)
def test_unsealed_or_wrong_ring_is_never_mapped(
    pair: Pair, sealed: bool, entry_bytes: int, announced: int, says: str
) -> None:
    peer, consumer = pair
    fd = memfd(4 * entry_bytes, sealed=sealed)
    pass_ring(peer, fd, entry_bytes=entry_bytes, entries=announced)
    os.close(fd)
    with pytest.raises(ProtocolError, match=says):
        consumer.receive()
    assert not open_as("/memfd:test")
    assert consumer.rings == {}


def test_a_ring_of_huge_pages_is_refused(pair: Pair) -> None:
    """A hole in one ends its reader with SIGBUS where no huge page is free."""
    peer, consumer = pair
    size = 2 << 20
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, 4 * size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    pass_ring(peer, fd, entry_bytes=size)
    os.close(fd)
    with pytest.raises(ProtocolError, match="got huge pages"):
        consumer.receive()
    assert consumer.rings == {}


@pytest.mark.parametrize("count", [0, 2])
def test_a_ring_comes_with_exactly_one_descriptor(pair: Pair, count: int) -> None:
    peer, consumer = pair
    fd = memfd(4 * PAGE, sealed=True)
    say(peer, kind=RING, ring=1, entry_bytes=PAGE, entries=4)
    socket.send_fds(peer, [b"\0"], [fd] * count)
    os.close(fd)
    with pytest.raises(ProtocolError, match=f"one file descriptor, got {count}"):
        consumer.receive()
    assert not open_as("/memfd:test"), "what came too much is closed"


def test_ring_numbers_only_rise(pair: Pair) -> None:
    peer, consumer = pair
    announce(peer)
    ring = Ring.create(PAGE, 4)
    pass_ring(peer, ring.fd, ring=1)
    ring.close_fd()
    with pytest.raises(ProtocolError, match="ring 1 must be above"):
        consumer.receive()


def test_number_of_unused_rings_is_bounded(pair: Pair) -> None:
    peer, consumer = pair
    ring = Ring.create(PAGE, 4)
    gc.collect()  # rings of earlier tests must not go during this one
    before = count_rings("self")
    for number in range(1, 65):
        pass_ring(peer, ring.fd, ring=number)
        assert consumer.receive() is None
    say(peer, kind=RING, ring=65, entry_bytes=PAGE, entries=4)
    with pytest.raises(ProtocolError, match="at most 64"):
        consumer.receive()
    consumer.close()
    ring.close_fd()
    assert count_rings("self") == before


def test_the_rings_of_a_box_share_its_memory() -> None:
    share = ring_bytes(256)
    assert share == 2 << 20
    assert [entries_for(size, share) for size in (0, 4096, 1 << 18, 1 << 19, 1 << 20, 8 << 20)] == [32, 32, 8, 4, 3, 3]
    for rings in (1, 16, 64):
        assert entries_for(1 << 20, ring_bytes(rings)) == 8


# ---- frames


@pytest.mark.parametrize(
    "frame",
    [
        {"ring": 2},
        {"ring": 0},
        {"entry": 4},
        {"nbytes": PAGE + 1},
        {"nbytes": (1 << 64) - 1},
        {"nbytes": PAGE - 16, "size": 3},
        {"size": (1 << 32) - 1},
    ],
)
def test_batch_must_lie_in_an_announced_entry(pair: Pair, frame: dict[str, int]) -> None:
    peer, consumer = pair
    announce(peer)
    batch(peer, nbytes=PAGE)
    batch(peer, **frame)
    assert consumer.receive() is not None
    with pytest.raises(ProtocolError, match="are in no entry"):
        consumer.receive()


def test_batch_must_have_announced_structure(pair: Pair) -> None:
    peer, consumer = pair
    announce(peer)
    batch(peer, structure=2)
    with pytest.raises(ProtocolError, match="structure 2 of a batch must be announced"):
        consumer.receive()


def test_structure_id_is_not_announced_twice(pair: Pair) -> None:
    """Refuse a second structure with the same number, because its batches would be read by the layout that was compiled
    for the first."""
    peer, consumer = pair
    for data in (b"one", b"one", b"two"):
        say(peer, kind=STRUCTURE, structure=1, inline=data, size=3)
    assert consumer.receive_any() is not None
    consumer.compiled[1] = "made of it"
    assert consumer.receive_any() is not None
    assert consumer.compiled == {1: "made of it"}
    with pytest.raises(ProtocolError, match="must have the same contents each time"):
        consumer.receive_any()


def test_compiled_structure_is_dropped_with_it(pair: Pair) -> None:
    peer, consumer = pair
    for number in range(KNOWN_STRUCTURES + 1):
        say(peer, kind=STRUCTURE, structure=number, inline=b"one", size=3)
        assert consumer.receive_any() is not None
        consumer.compiled[number] = number
    say(peer, kind=STRUCTURE, structure=0, inline=b"two", size=3)
    assert consumer.receive_any() is not None
    assert 0 not in consumer.compiled


@pytest.mark.parametrize(
    "pieces",
    [
        [(1, b"abc", 6), (1, b"abcd", 6)],
        [(1, b"abc", 6), (2, b"abc", 6)],
        [(1, b"", 6)],
        [(1, b"abc", (4 << 20) + 1)],
    ],
)
def test_pieces_of_a_structure_that_do_not_fit(pair: Pair, pieces: list[tuple[int, bytes, int]]) -> None:
    peer, consumer = pair
    for structure, inline, size in pieces:
        say(peer, kind=STRUCTURE, structure=structure, inline=inline, size=size)
    with pytest.raises(ProtocolError, match="slot 3 of box 0"):
        consumer.receive()
    assert consumer.structures == {}


def test_an_unknown_kind(pair: Pair) -> None:
    peer, consumer = pair
    say(peer, kind=7, total=1)
    with pytest.raises(ProtocolError, match="must have a known kind, got"):
        consumer.receive()


def test_frame_too_large_is_an_error_not_cut(pair: Pair) -> None:
    peer, consumer = pair
    packet = framed(a_frame(kind=END, inline=b"x" * MAX_FRAME).encode())
    peer.send(packet)
    with pytest.raises(ProtocolError, match=f"got {len(packet)}"):
        consumer.receive()
    say(peer, kind=END, inline=b"x" * (MAX_FRAME - FRAME_BYTES))  # as long as a frame may be
    assert consumer.receive() is not None
    assert len(consumer.framed) == MAX_PACKET


@pytest.mark.parametrize("rest", [b"\0\0\0", b"\5\0\0\0x"])
def test_a_packet_that_ends_within_a_frame(pair: Pair, rest: bytes) -> None:
    peer, consumer = pair
    for before in (b"", framed(a_frame(kind=END, total=7).encode())):
        # What an earlier packet left behind in the buffer must not be taken for the rest.
        peer.send(framed(a_frame(kind=END, inline=b"y" * 100).encode()))
        assert consumer.receive() is not None
        peer.send(before + rest)
        if before:
            assert consumer.receive() is not None
        with pytest.raises(ProtocolError, match="must hold whole frames"):
            consumer.receive()
        consumer.close()
        peer.close()
        peer, consumer = make_pair()
    consumer.close()
    peer.close()


def test_stale_frames_are_ignored_not_errors(pair: Pair) -> None:
    peer, consumer = pair
    announce(peer)
    batch(peer, abandons=0)
    say(peer, kind=END, abandons=0)
    say(peer, kind=ERROR, abandons=0)
    batch(peer, abandons=1, total=9)
    consumer.abandon(0, 0)
    frame = consumer.receive()
    assert frame is not None
    assert frame.kind == ERROR
    frame = consumer.receive()
    assert frame is not None
    assert frame.total == 9


# ---- acks and the end


def acks(peer: socket.socket) -> Iterator[Ack]:
    peer.setblocking(False)
    while True:
        try:
            data = peer.recv(MAX_FRAME)
        except BlockingIOError:
            return
        except ConnectionResetError:
            continue  # shown once, before what was sent last
        if not data:
            return
        yield ack_of(data)


def test_nothing_to_say_says_nothing(pair: Pair) -> None:
    peer, consumer = pair
    consumer.release([])
    consumer.open_epochs(0)
    consumer.delivered(0)
    assert consumer.flush()
    consumer.flush()
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):  # an empty packet would read as the end of the lane
        peer.recv(1)


def test_an_abandoned_epoch_has_its_last_batch_also_where_an_earlier_ack_had_it(pair: Pair) -> None:
    """The process that has read the earlier one may be killed."""
    peer, consumer = pair
    consumer.delivered(7)
    consumer.flush()
    consumer.abandon(0, 7)
    assert [(ack.delivered, ack.abandon_epoch) for ack in acks(peer)] == [(7, 0), (7, 1)]


def test_what_waits_for_room_keeps_its_order(pair: Pair) -> None:
    peer, consumer = pair
    consumer.release([1, 1] * 2000)
    while consumer.flush():
        consumer.release([1, 1] * 2000)
    consumer.delivered(7)
    consumer.abandon(0, 7)
    consumer.delivered(8)
    consumer.release([2, 2] * 5000)
    consumer.abandon(1, 8)
    consumer.delivered(9)
    heard = []
    for _ in range(1000):
        heard += list(acks(peer))
        if consumer.flush() and not consumer._unsent:
            break
    heard += list(acks(peer))
    assert [(ack.delivered, ack.abandon_epoch) for ack in heard if ack.abandon_epoch] == [(7, 1), (8, 2)]
    assert [ack.delivered for ack in heard if ack.delivered][-1] == 9
    assert sum(list(ack.released).count(2) for ack in heard) == 10_000
    assert all(len(ack.encode()) < MAX_FRAME // 2 for ack in heard)


# ---- who is there


class FromUser:
    """A socket whose other end runs as the given user."""

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return b"".join(number.to_bytes(4, "little") for number in (4242, self.uid, 0))


@pytest.mark.parametrize(
    ("me", "peer", "may"), [(1000, 1000, True), (1000, 0, True), (1000, 1001, False), (0, 1000, False)]
)
def test_only_this_user_and_root_may_connect(monkeypatch: pytest.MonkeyPatch, me: int, peer: int, may: bool) -> None:
    monkeypatch.setattr(os, "getuid", lambda: me)
    sock: Any = FromUser(peer)
    if may:
        assert check_peer(sock) == 4242
    else:
        with pytest.raises(ProtocolError, match=f"must run as user {me} or root, got user {peer}"):
            check_peer(sock)
