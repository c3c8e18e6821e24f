"""TCP lanes under TLS where the two ends do not agree, and what TLS hides from a poll. That a lane under TLS is a lane
like any other is in tests/lanes: the contract runs on it too."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from lane_doors import listeners, refusing
from lane_frames import a_frame, accept_tls_blocking, checked, read_hello
from pki import Pair, Pki
from tests.lanes.conftest import next_frame

from penstock.client.stream.receiver_process import Receiver
from penstock.proto.errors import AuthenticationError, LaneLostError
from penstock.proto.lane import tcp
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, ERROR, LANE_PROTOCOL, RING, STRUCTURE, Ack, connect_local
from penstock.proto.lane.producer import Producer
from penstock.proto.lane.tls_socket import TlsSocket, connect_tls
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import Sender

QUICK_S = 8.0
REFUSED = AuthenticationError("the daemon was asked")
"""Error for a consumer whose Hello reaches the daemon."""


@pytest.fixture(scope="module")
def mutual(pki: Pki, pair: Pair) -> Tls:
    tls = load_tls(pki.ca, pair.cert, pair.key)
    assert tls is not None
    return tls


def heard(ours: Tls | None, theirs: Tls | None) -> tuple[str, str]:
    """Name and message of the error that a consumer gets, whose receiver has `ours`, from doors that have `theirs`."""
    receiver = Receiver(tls=ours)
    try:
        with listeners(refusing(REFUSED), theirs) as (opened, _):
            begun = time.monotonic()
            sock = connect_local(receiver.start(), 5)
            sock.send(lane_pb2.Hello(protocol=LANE_PROTOCOL, target=opened.tcp_address).SerializeToString())
            consumer = Consumer(sock, "a daemon")
            frame = next_frame(consumer)
            consumer.close()
            assert time.monotonic() - begun < QUICK_S
            assert frame.kind == ERROR
            return frame.error.name, frame.error.message
    finally:
        receiver.stop()


def test_ends_that_agree_and_ends_that_do_not(pki: Pki, mutual: Tls) -> None:
    """The words are those of calls: test_tls_calls.py."""
    stranger = pki.self_signed("lane-stranger")
    strange = load_tls(pki.ca, stranger.cert, stranger.key)
    elsewhere = pki.issue("lane-elsewhere", "DNS:penstock")
    for ours, theirs, says in (
        (mutual, mutual, "the daemon was asked"),
        (None, load_tls(pki.ca), "the daemon was asked"),  # a worker that has a CA only has nothing to show
        (None, mutual, "this worker's lane uses TLS, and this end does not"),
        (mutual, None, "does not use TLS, and this end does"),
        (load_tls(pki.ca), mutual, "requests a certificate and this end has none"),
        (strange, mutual, "does not accept the certificate tls_cert="),
        (mutual, strange, "shows a certificate that is not signed by tls_ca="),
        (mutual, load_tls(pki.ca, elsewhere.cert, elsewhere.key), "for another name than the address"),
    ):
        name, message = heard(ours, theirs)
        assert says in message
        assert name == ("AuthenticationError" if "asked" in says else "TlsError")


@pytest.fixture
def ends(mutual: Tls) -> Iterator[tuple[Receiver, Consumer, TlsSocket]]:
    """A receiver, the consumer's end of one lane of it, and the daemon's."""
    receiver = Receiver(tls=mutual)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(QUICK_S)
    sock = connect_local(receiver.start(), 5)
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    sock.send(lane_pb2.Hello(next_total=1, target=target).SerializeToString())
    connection, _ = listener.accept()
    connection.settimeout(QUICK_S)
    far = accept_tls_blocking(connection, mutual.server_context())
    read_hello(far, QUICK_S)
    far.settimeout(QUICK_S)
    consumer = Consumer(sock, "the receiver")
    yield receiver, consumer, far
    consumer.close()
    far.close()
    listener.close()
    receiver.stop()


def batch(total: int, size: int) -> bytes:
    frame = a_frame(kind=BATCH, total=total, ring=1, structure=1, nbytes=size)
    return checked(frame, bytes(size))


def test_what_openssl_holds_back_is_not_forgotten(ends: tuple[Receiver, Consumer, TlsSocket]) -> None:
    """Read the deciphered bytes that a lane has left after a turn of reading: no poll reports them. The receiver is
    stopped while they are sent, so that all are there, and the last of them within a record's rest."""
    receiver, consumer, far = ends
    assert receiver.pid is not None
    ring = a_frame(kind=RING, ring=1, entry_bytes=32 << 10, entries=32)
    structure = a_frame(kind=STRUCTURE, structure=1, inline=b"one", size=3)
    far.sendall(tcp.sealed(ring.encode()) + tcp.sealed(structure.encode()))
    total = 0
    for count, rest in itertools.product(range(5, 15), range(500, 16_500, 1_600)):
        # Beyond SMALL the receiver receives no more than 4 KiB behind a payload, a quarter of a record: a turn is over
        # after some ten of these, in the middle of a record. Of all the lengths some end with that very record.
        sizes = [*[17_000] * count, rest]
        stream = b"".join(batch(total + number, size) for number, size in enumerate(sizes, 1))
        os.kill(receiver.pid, signal.SIGSTOP)
        try:
            far.sendall(stream)
        finally:
            os.kill(receiver.pid, signal.SIGCONT)
        for size in sizes:
            total += 1
            frame = next_frame(consumer)
            assert (frame.kind, frame.total, frame.nbytes) == (BATCH, total, size)
            consumer.release((frame.ring, frame.entry))
            consumer.delivered(total)
        consumer.flush()


def test_connection_cut_under_tls_counts_as_lost(
    ends: tuple[Receiver, Consumer, TlsSocket],
) -> None:
    _, consumer, far = ends
    ring = a_frame(kind=RING, ring=1, entry_bytes=4096, entries=4)
    structure = a_frame(kind=STRUCTURE, structure=1, inline=b"one", size=3)
    far.sendall(tcp.sealed(ring.encode()) + tcp.sealed(structure.encode()) + batch(1, 100))
    assert next_frame(consumer).total == 1
    far.shutdown(socket.SHUT_RDWR)  # without TLS's own farewell, as anybody between the two could
    with pytest.raises(LaneLostError):
        next_frame(consumer)


def test_bytes_behind_the_hello_reach_the_runner(mutual: Tls) -> None:
    """The last of it may be all that the consumer says for long, and may be deciphered with the Hello."""
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname(), QUICK_S)
    connection, _ = listener.accept()
    connection.settimeout(QUICK_S)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_tls_blocking, connection, mutual.server_context())
        far = connect_tls(far, mutual, "127.0.0.1")
        near = accepted.result(QUICK_S)
    hello, ack = lane_pb2.Hello(next_total=1), Ack(open_epochs=3)
    far.sendall(tcp.sealed(hello.SerializeToString()) + tcp.sealed(ack.encode()))
    received = read_hello(near, QUICK_S)
    assert received == hello
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    producer = Producer(1 << 20)
    producer.attach(theirs, received)
    sender = Sender(near, ours, received, "the test")
    sender.start()
    assert select.select([producer], [], [], QUICK_S)[0], "the runner heard nothing"
    producer.take_acks()
    assert producer.open_epochs == 3
    far.close()
    producer.close(0)
    assert sender.stop(QUICK_S)
    listener.close()
