"""A lane between real processes, to be driven step by step.

The test is the training loop (a Consumer) and the daemon (it accepts, reads the Hello, hands the connection on); the
runner is a child process (runner_child.py) that obeys; over TCP the sender is a thread of the test and the receiver a
process of its own, as they are in life. `Link` is that arrangement, for either lane.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lane_frames import accept_tls_blocking, read_hello
from pki import Pki
from tests.lanes.runner_child import content, digest

from penstock.client.stream.receiver_process import Receiver
from penstock.proto.lane.compression import NAMES, Unpacker, load
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, LANE_PROTOCOL, MAX_FRAME, Frame, check_peer, connect_local
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import Sender

DEADLINE_S = 60.0
"""Seconds after which a wait has failed; nothing here takes more than a fraction of one."""

State = dict[str, Any]


class Runner:
    """The child process with the Producer."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("runner_child.py"))
        command = [sys.executable, script, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(DEADLINE_S)
        self._control = ours

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, do: str, *fds: int, **fields: Any) -> State:
        socket.send_fds(self._control, [json.dumps({"do": do, **fields}, ensure_ascii=False).encode()], fds)
        return dict(json.loads(self._control.recv(1 << 17)))

    def until(self, **state: Any) -> State:
        """Wait until these fields of its state are so."""
        try:
            return self.ask("until", state=state)
        except TimeoutError:
            socket.send_fds(self._control, [b'{"do": "state"}'], [])
            raise AssertionError(f"waited for {state}, but: {self._control.recv(1 << 17).decode()}") from None

    def batches(
        self,
        first: int,
        sizes: Sequence[int],
        *,
        epoch: int = 0,
        shapes: Sequence[int] = (1, 2, 3),
    ) -> State:
        """Let it make these batches as slots become free."""
        items = [
            {"kind": "batch", "total": first + index, "epoch": epoch, "size": size, "shapes": list(shapes)}
            for index, size in enumerate(sizes)
        ]
        return self.work(*items)

    def work(self, *items: State) -> State:
        group: list[State] = []
        room = 64 << 10  # of a packet
        for item in items:
            room -= len(json.dumps(item))
            if room < 0 and group:
                self.ask("work", items=group)
                group, room = [], 64 << 10
            group.append(item)
        return self.ask("work", items=group)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._control.close()


class Link:
    """Lane of one kind from `runner` to the consumers that this test makes."""

    def __init__(self, kind: str, runner: Runner, receiver: Receiver, tls: Tls | None = None) -> None:
        self.kind, _, self.codec = kind.partition("+")
        self.tls = tls
        self.runner = runner
        self.receiver = receiver
        self.senders: list[Sender] = []
        self.consumers: list[Consumer] = []
        self._name = f"penstock-test-{secrets.token_hex(8)}"
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._local.bind("\0" + self._name)
        self._tcp = socket.create_server(("127.0.0.1", 0))
        for listener in (self._local, self._tcp):
            listener.settimeout(DEADLINE_S)
            listener.listen()

    def connect(self, **hello: Any) -> Consumer:
        """A consumer that has said Hello, with the runner attached to it."""
        greeting = lane_pb2.Hello(protocol=LANE_PROTOCOL, **{"next_total": 1, **hello})
        if self.kind == "local":
            sock = connect_local(self._name, DEADLINE_S)
            sock.send(greeting.SerializeToString())
            theirs, _ = self._local.accept()
            check_peer(theirs)
            received = lane_pb2.Hello.FromString(theirs.recv(MAX_FRAME))
        else:
            if self.codec:
                greeting.codecs.append(NAMES[self.codec])  # type: ignore[arg-type]
            greeting.target = f"127.0.0.1:{self._tcp.getsockname()[1]}"
            sock = connect_local(self.receiver.start(), DEADLINE_S)
            sock.send(greeting.SerializeToString())
            connection, _ = self._tcp.accept()
            if self.tls is not None:
                connection.settimeout(DEADLINE_S)
                connection = accept_tls_blocking(connection, self.tls.server_context())
            received = read_hello(connection, DEADLINE_S)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.senders.append(Sender(connection, ours, received, "the test"))
            packer = self.senders[-1]._packer
            assert ("" if packer is None else packer.codec.name) == self.codec
        self.runner.ask("attach", theirs.fileno(), hello=base64.b64encode(received.SerializeToString()).decode())
        theirs.close()
        if self.kind == "tcp":
            self.senders[-1].start()
        consumer = Consumer(sock, f"the {self.kind} lane")
        consumer.abandons = greeting.abandons
        self.consumers.append(consumer)
        return consumer

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        for sender in self.senders:
            assert sender.stop(DEADLINE_S)
        self._local.close()
        self._tcp.close()


def next_frame(consumer: Consumer) -> Frame:
    """The next frame, within the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while (frame := consumer.receive()) is None:
        consumer.flush()
        left = deadline - time.monotonic()
        assert left > 0, f"{consumer.name}: nothing came"
        select.select([consumer], [], [], left)
    return frame


def payload(consumer: Consumer, frame: Frame) -> memoryview:
    """The batch where it lies."""
    ring = consumer.rings[frame.ring]
    start = frame.entry * ring.entry_bytes
    return ring.view[start : start + frame.nbytes]


def take(consumer: Consumer, total: int, size: int, *, epoch: int = 0) -> tuple[int, int]:
    """Receive batch `total`, check all of it, and return its place in the ring."""
    frame = next_frame(consumer)
    assert (frame.kind, frame.total, frame.epoch, frame.nbytes) == (BATCH, total, epoch, size)
    assert (frame.codec, frame.wire) == (0, 0), "a consumer gets nothing that is compressed"
    assert frame.digest == digest(total)
    assert bytes(payload(consumer, frame)) == content(total, size)
    return frame.ring, frame.entry


def finish(consumer: Consumer, total: int, place: tuple[int, int]) -> None:
    """The loop was handed batch `total` and has dropped it."""
    consumer.delivered(total)
    consumer.release(place)
    consumer.flush()


def consume(consumer: Consumer, totals: Iterable[int], size: int, *, epoch: int = 0) -> None:
    """Receive these batches; the loop drops each."""
    for total in totals:
        finish(consumer, total, take(consumer, total, size, epoch=epoch))


def cut(consumer: Consumer, runner: Runner) -> None:
    """Break the connection."""
    consumer.close(say_so=False)
    runner.until(attached=False)


def unpacked(codec: int, data: bytes, size: int) -> bytes:
    """A payload of `size` bytes that came compressed."""
    found = load(codec)
    assert found is not None
    unpacker, slot, at = Unpacker(found), bytearray(size), 0
    target: memoryview | None = unpacker.begin(memoryview(slot), len(data))
    while target is not None:
        target[:] = data[at : at + len(target)]
        at += len(target)
        target = unpacker.step()
    assert at == len(data)
    return bytes(slot)


def count_rings(pid: int | str) -> int:
    """Rings that a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        return sum("memfd:penstock-ring" in line for line in maps)


@pytest.fixture(scope="session")
def _runners() -> Iterator[list[Runner]]:
    """The runner in use; a test that kills it makes the next one start another."""
    runners: list[Runner] = []
    yield runners
    for runner in runners:
        runner.kill()


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Yield one receiver for all tests; a test that needs it after it was killed starts it again."""
    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture
def runner(_runners: list[Runner]) -> Runner:
    """A runner with a new Producer."""
    if _runners and not _runners[0].alive:
        with contextlib.suppress(OSError):
            _runners.pop().kill()
    if not _runners:
        _runners.append(Runner())
    _runners[0].ask("reset", max_batch_bytes=64 << 20)
    return _runners[0]


@pytest.fixture(scope="session")
def lane_tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Return the certificates that both ends of a lane show and trust."""
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not here to make certificates with")
    pki = Pki(tmp_path_factory.mktemp("lane-pki"))
    pair = pki.issue("lane")
    tls = load_tls(pki.ca, pair.cert, pair.key)
    assert tls is not None
    return tls


@pytest.fixture(scope="session")
def tls_receiver(lane_tls: Tls) -> Iterator[Receiver]:
    """The receiver of lanes under TLS."""
    receiver = Receiver(tls=lane_tls)
    yield receiver
    receiver.stop()


@pytest.fixture(params=["local", "tcp", "tls+zstd"])
def link(request: pytest.FixtureRequest, runner: Runner, receiver: Receiver) -> Iterator[Link]:
    """The lane under test, in all its kinds."""
    if request.param == "tls+zstd":
        found = request.getfixturevalue
        link = Link("tcp+zstd", runner, found("tls_receiver"), found("lane_tls"))
    else:
        link = Link(request.param, runner, receiver)
    yield link
    link.close()
