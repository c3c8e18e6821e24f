"""Delivery of exactly the batches that were made, whatever the network and the memory in between do to them.

The whole TCP lane, with the daemon's own doors and sender and the receiver's process, and a proxy that damages bytes
and mends TCP's checksum; and the local lane, whose ring entries are written into.
"""

from __future__ import annotations

import os
import queue
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from lane_doors import listeners
from pki import Pki
from proxy import Proxy
from tests.client.conftest import FakeRun, FakeRunner, Rig

from penstock.client.stream.lane_reader import CORRUPT_TRIES
from penstock.client.stream.ordered_reader import OrderedReader
from penstock.client.stream.receiver_process import Receiver
from penstock.client.stream.streams import EPOCH_ENDED
from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import BatchCorruptError
from penstock.proto.lane.compression import NAMES
from penstock.proto.lane.frames import LANE_PROTOCOL, connect_local
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2

COUNT = 60
SIZES = (300, 4_000, 100_000, 300_000)
"""Bytes of a batch: up to 256 KiB its digest covers every one, of more its payload's check or a full digest does."""
HANDSHAKE = 16 << 10
"""Bytes of a connection that damage is kept from where TLS would only say that it cannot be begun."""


def batch_of(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    size = SIZES[number % len(SIZES)] // 8
    # More dimensions than fit into a frame follow the batch's bytes in its payload.
    many = [bytes(number)] * (3000 if number % 20 == 7 else 1)
    return {"number": number, "data": torch.randint(0, 1 << 20, (size,), generator=generator), "many": many}


def same(got: dict[str, Any], number: int) -> bool:
    made = batch_of(number)
    return got["number"] == number and bool(torch.equal(got["data"], made["data"])) and got["many"] == made["many"]


class FarRunner(FakeRunner):
    """Makes an epoch in a thread. Its consumers connect through a daemon's listeners, which have read their Hellos."""

    def __init__(self) -> None:
        super().__init__(0)
        self._arrivals: queue.SimpleQueue[tuple[socket.socket, lane_pb2.Hello] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def arrive(self, consumer: tuple[socket.socket, lane_pb2.Hello] | None) -> None:
        self._arrivals.put(consumer)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        self.arrive(None)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.producer.close()
        os.close(self._wake)

    def _wait(self) -> None:
        """Wait for a consumer, its acks, or the end."""
        producer = self.producer
        producer.flush()
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if producer.attached:
            poll.register(producer.fileno(), select.POLLIN | (select.POLLOUT if producer.blocked else 0))
        for fd, _ in poll.poll(10_000):
            if fd != self._wake:
                producer.take_acks()
                continue
            os.eventfd_read(self._wake)
            consumer = self._arrivals.get()
            self._over = consumer is None
            if consumer is not None:
                producer.attach(*consumer)

    def _serve(self) -> None:
        for number in range(COUNT):
            batch = batch_of(number)
            while not self._over and not self.send(batch):
                self._wait()
        if not self._over:
            self.end()
        while not self._over:
            self._wait()


class FarRun(FakeRun):
    """A run whose one slot is on another host, behind the proxy."""

    def __init__(self, runner: FarRunner, receiver: Receiver, proxy: Proxy, codec: str) -> None:
        super().__init__(1, [runner])
        self.receiver, self.proxy, self.codec = receiver, proxy, codec

    def dial(self, view: pb.SlotView, hello: lane_pb2.Hello) -> socket.socket:
        hello.protocol, hello.run, hello.generation = LANE_PROTOCOL, "job/0", view.generation
        hello.target = self.proxy.address
        if self.codec:
            hello.codecs.append(NAMES[self.codec])  # type: ignore[arg-type]
        sock = connect_local(self.receiver.start(), 5)
        sock.send(hello.SerializeToString())
        return sock


class FarRig:
    def __init__(self, kind: str, receivers: dict[str, Receiver], tls: Tls | None) -> None:
        self.stack = ExitStack()
        self.runner = FarRunner()
        if kind == "full":
            self.runner.cover = DigestCover.FULL

        async def attach(connection: socket.socket, hello: lane_pb2.Hello) -> None:
            self.runner.arrive((connection, hello))

        opened, _ = self.stack.enter_context(listeners(attach, tls if kind == "tls" else None))
        self.proxy = self.stack.enter_context(Proxy(opened.tcp_address))
        codec = kind.partition("+")[2]
        run: Any = FarRun(self.runner, receivers["tls" if kind == "tls" else "tcp"], self.proxy, codec)
        self.reader = OrderedReader(run, Position.start(1), "inputs:make", 20.0)

    def run(self) -> None:
        """The whole epoch, each batch compared."""
        for number in range(COUNT):
            assert same(self.reader.next(), number), f"batch {number} is another"
        assert self.reader.next() is EPOCH_ENDED

    def close(self) -> None:
        self.reader.close()
        self.runner.stop()
        self.stack.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    pki = Pki(tmp_path_factory.mktemp("corruption-pki"))
    pair = pki.issue("lane")
    found = load_tls(pki.ca, pair.cert, pair.key)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def receivers(tls: Tls) -> Iterator[dict[str, Receiver]]:
    receivers = {"tcp": Receiver(), "tls": Receiver(tls=tls)}
    yield receivers
    for receiver in receivers.values():
        receiver.stop()


@pytest.fixture
def far(receivers: dict[str, Receiver], tls: Tls) -> Iterator[Callable[[str], FarRig]]:
    made: list[FarRig] = []

    def make(kind: str) -> FarRig:
        made.append(FarRig(kind, receivers, tls))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


KINDS = ["tcp", "tcp+zstd", "tls", "full"]


@pytest.mark.parametrize(("direction", "kind"), [*(("down", kind) for kind in KINDS), ("up", "tcp")])
def test_bit_flips_in_transit_are_not_delivered(
    far: Callable[[str], FarRig], kind: str, direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches and announcements one way; Hello and acks the other."""
    rig, rng, flips = far(kind), random.Random(kind + direction), 0
    chance = 8 / 6_000_000 if direction == "down" else 1 / 2_000

    def damage(towards: str, passed: int, data: bytes) -> bytes:
        nonlocal flips
        if towards != direction or flips >= 8 or passed < HANDSHAKE * (kind == "tls"):
            return data
        found = bytearray(data)
        at = int(rng.expovariate(chance))
        if at < len(found):
            flips += 1
            found[at] ^= 1 << rng.randrange(8)
        return bytes(found)

    rig.proxy.damage = damage
    rig.run()
    if direction == "down":
        assert flips
        assert 0 < rig.reader.stats.corrupt <= flips
        assert "damaged data arrived and is fetched again" in caplog.text


def test_constant_bit_flips_are_a_named_error(far: Callable[[str], FarRig]) -> None:
    rig = far("tls")

    def damage(towards: str, passed: int, data: bytes) -> bytes:
        if towards == "up" or passed < HANDSHAKE:
            return data
        return bytes([data[0] ^ 1]) + data[1:]

    rig.proxy.damage = damage
    with pytest.raises(
        BatchCorruptError, match=rf"arrived damaged {CORRUPT_TRIES} times in a row.*box 0, slot 0, step"
    ):
        rig.run()


@pytest.mark.parametrize("kind", ["tcp", "full"])
def test_one_flipped_byte_of_a_payload_is_fetched_again(far: Callable[[str], FarRig], kind: str) -> None:
    """A byte in the middle of batch 4, of 300,000 bytes: a payload's check finds it, or the full digest that is sent in
    its place."""
    rig, flips = far(kind), 0

    def damage(towards: str, passed: int, data: bytes) -> bytes:
        nonlocal flips
        if towards == "up" or flips or passed < 200_000:
            return data
        flips = 1
        return bytes([data[0] ^ 1]) + data[1:]

    rig.proxy.damage = damage
    rig.run()
    assert (flips, rig.reader.stats.corrupt) == (1, 1)


def test_always_damaged_hello_is_a_named_error(far: Callable[[str], FarRig]) -> None:
    rig = far("tcp")
    rig.proxy.damage = lambda towards, passed, data: (data[:-1] + b"?") if towards == "up" else data
    with pytest.raises(BatchCorruptError, match=r"the checksum of a message of \S+ bytes differs"):
        rig.run()


# ---- memory


def flip(rig: Rig, at: int) -> None:
    """A byte of the newest batch, in its ring entry."""
    kept = rig.runners[0].producer._kept[-1]
    assert kept.reserved is not None
    kept.reserved.view[at] ^= 4


@pytest.mark.parametrize(("size", "at"), [(100, 99), (256 << 10, 200_000), (1 << 20, (1 << 20) - 1)])
def test_overwritten_ring_entry_is_a_named_error(rigs: Any, size: int, at: int) -> None:
    rig = rigs(1)
    rig.numbers(0, 7)
    rig.runners[0].send(torch.zeros(size, dtype=torch.uint8))
    flip(rig, at)
    assert rig.take(1) == [7]
    with pytest.raises(BatchCorruptError, match="batch 2 of the slot arrived damaged"):
        rig.reader.next()
    assert rig.reader.position.step == 1
    assert rig.reader.stats.corrupt == CORRUPT_TRIES
    flip(rig, at)
    assert not rig.reader.next().any(), "who asks again is served, once it is right"


def mended(rig: Rig, times: list[int], sock: socket.socket) -> None:
    """A runner's `attach` to which the newest batch is right again when a consumer comes back."""
    times.append(1)
    if len(times) == 2:
        flip(rig, 0)
    FakeRunner.attach(rig.runners[0], sock)


def test_damage_that_goes_is_fetched_again(rigs: Any, device: Any) -> None:
    for backend in (None, device):
        rig = rigs(1, backend=backend)
        runner = rig.runners[0]
        rig.numbers(0, 1, 2)
        flip(rig, 0)
        times: list[int] = []
        runner.attach = partial(mended, rig, times)
        batches = [rig.reader.next(), rig.reader.next()]
        device.finish()
        assert [int(batch[0]) for batch in batches] == [1, 2]
        assert (len(times), rig.reader.stats.corrupt) == (2, 1)
        del runner.attach


def test_tries_are_counted_in_a_row_only(rigs: Any) -> None:
    rig = rigs(1)
    runner = rig.runners[0]
    for number in range(CORRUPT_TRIES + 1):
        rig.numbers(0, number)
        flip(rig, 0)
        runner.attach = partial(mended, rig, [])
        assert rig.take(1) == [number]
        del runner.attach
    assert rig.reader.stats.corrupt > CORRUPT_TRIES
