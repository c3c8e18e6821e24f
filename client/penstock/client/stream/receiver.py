"""The receiver: a process that receives batches over TCP into a ring on this host, for a training job with workers on
other hosts. Its argument is a JSON object: the arguments of ReceiverLoop, those of load_tls under "tls", "parent_pid",
and "ready_fd", a descriptor for a newline once it listens.

A thread would share the interpreter lock with the loop. It imports neither torch nor numpy: `receiver_process.Receiver`
starts this file by its path, because `python -m` would import penstock.client.

For the consumer, whose Hello names the worker's daemon (`target`), the receiver is a producer like any other, but
batches come from TCP straight into a ring entry, and acks are forwarded to the sender. Each lane is a state machine,
and one thread serves all. No code waits for a single socket: a receiver that did not read from its consumer would not
forward the acks that the sender waits for.

The ring is the flow control: without a free entry nothing is read from TCP. One receive gets many small batches, copied
out of the buffer; a large one goes into its entry, and the bytes after it into the buffer in the same call. A
compressed batch comes in pieces, each unpacked while the next is on its way. Frames and payloads have checksums
(penstock.proto.lane.tcp), summed piece by piece while in the processor's cache. A difference is an ERROR frame to the
consumer, which reconnects and gets the data again.

With TLS a receive returns at most 16 KiB, and epoll does not report the bytes that TLS has already read: a lane with
such bytes enters itself in `ReceiverLoop.again`. An invalid certificate on either side is an error and not a lost
connection, because a retry would not help.

Ends. If TCP is lost or refused, complete batches are forwarded, then the consumer's socket ends, and it reconnects.
Only an error from the daemon, or an invalid stream, is an ERROR frame. If the consumer is gone, its last acks are sent,
then TCP is closed. The process ends with its parent, or killed by it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError
from xxhash import xxh3_64

from penstock.proto.errors import BatchCorruptError, PenstockError, ProtocolError, malformed
from penstock.proto.lane import tcp
from penstock.proto.lane.compression import Unpacker, check_claim, load
from penstock.proto.lane.dialer import HANDSHAKE_S, LaneDialer
from penstock.proto.lane.frames import (
    BATCH,
    CLOSE,
    END,
    ERROR,
    MAX_FRAME,
    MAX_RINGS,
    RING,
    STRUCTURE,
    Ack,
    Frame,
    StructurePieces,
    check_peer,
    read_frame,
)
from penstock.proto.lane.producer import FreeEntry, Producer
from penstock.proto.lane.ring import BOX_BYTES, PAGE, RingBudget
from penstock.proto.lane.tls_socket import TlsSocket, check_damage
from penstock.proto.rpc.tls import Tls, host_of, load_tls
from penstock.proto.tracebacks import format_remote
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process.lifetime import Parent
from penstock.runtime.process.titles import name_process
from penstock.runtime.telemetry.logs import log_lines

_log = logging.getLogger("penstock.client.stream.receiver")

HELLO_S = 10.0
"""Deadline of a new consumer's Hello, and of a lane's last acks once its consumer has left."""
SMALL = 16 << 10
"""Largest payload that is copied out of the receive buffer: one system call receives many such payloads."""
AHEAD = 4 << 10
"""Bytes after a large payload that are received in the same call: enough for the next frame."""
WAKE_AT = 512 << 10
"""Bytes of a large payload that must have arrived before they are received. Otherwise one call gets 160 KiB of 8 MiB,
and the wake-ups cost both ends a tenth of their time (benchmarks/README.md)."""
READS_A_TURN = 32
PACKED_AHEAD = 32 << 10
"""Bytes after a compressed piece in the same call: they may unpack to many times their length."""
PACKED_READS_A_TURN = 8
"""READS_A_TURN in the middle of a compressed payload, because unpacking a piece takes 0.2 ms."""
NEVER = float("inf")

Connection = socket.socket | OSError | PenstockError


class ReceiverLane:
    """Socket to the consumer in the training process, TCP connection to the worker, and the ring between."""

    def __init__(self, loop: ReceiverLoop, sock: socket.socket, max_batch_bytes: int) -> None:
        sock.setblocking(False)
        self.deadline = time.monotonic() + HELLO_S
        self.over = False
        self._loop = loop
        self._consumer = sock
        self._consumer_fd = sock.fileno()
        self._tcp: socket.socket | None = None
        self._tcp_fd = -1
        self._address = ""  # address of the daemon
        self._tcp_answered = False  # True once bytes have come over TCP
        self._silence: PenstockError | None = None  # reason of the end: the other host does not acknowledge data
        most = (max_batch_bytes + PAGE - 1) // PAGE * PAGE  # rounded as the sender rounds its entries
        self._producer = Producer(most, budget=loop.rings)
        self._producer.on_ack = self._relay
        self._has_hello = False
        self._ended = False  # True if TCP is not read any more
        self._inbox = tcp.SealedInbox()
        self._out: deque[bytes | memoryview] = deque()  # hello and acks that wait to be sent to the sender
        self._frame = Frame()  # frame that was read last
        self._waiting = False  # True if `_frame` is a batch that waits for a ring entry
        self._reserved: FreeEntry | None = None  # ring entry for its payload
        self._target: memoryview | None = None  # the part of the payload that is still to come
        self._unpackers: dict[int, Unpacker] = {}  # for the codecs that the consumer requested
        self._unpacker: Unpacker | None = None  # for the present payload, if it is compressed
        self._hasher: xxh3_64 | None = None  # for the present payload, if a check follows it
        self._whole = False  # True if the payload is complete; its check may be missing
        self._to_skip = 0  # bytes of an unneeded payload that are still to come
        self._wake_at = 1  # bytes that must arrive before TCP counts as readable
        self._limit = 1 << 20  # largest receive into the buffer, in bytes
        self._entry_bytes: dict[int, int] = {}  # entry sizes of the sender's rings in bytes
        self._pieces = StructurePieces()
        loop.watch(self, self._consumer_fd, select.EPOLLIN)

    def on_event(self, fd: int, events: int) -> None:
        try:
            if fd != self._consumer_fd:
                if events & ~select.EPOLLOUT:
                    self._receive()
            elif self._has_hello:
                if events & ~select.EPOLLOUT:
                    self._producer.take_acks()
                if self._waiting:
                    self._receive()
            else:
                self._greet()
            self._settle()
        except Exception as error:  # an error of one lane, or of this code, must not affect other lanes
            self.fail(error)

    def end(self, why: str) -> None:
        """End the lane, and close both sockets. The consumer can still read what was sent to it."""
        if self.over:
            return
        _log.info("the lane to %s has ended: %s", self._address or "no worker yet", why)
        self.over = True
        self._target = self._reserved = self._unpacker = None
        self._unpackers.clear()
        self._loop.forget(self, self._consumer_fd, self._tcp_fd)
        self._producer.close(say_so=False)
        self._consumer.close()
        if self._tcp is not None:
            self._tcp.close()

    def fail(self, error: BaseException) -> None:
        _log.warning("the lane to %s failed: %s: %s", self._address or "no worker yet", type(error).__name__, error)
        known = isinstance(error, PenstockError)
        detail = records_pb2.ErrorDetail(
            name=type(error).__name__ if known else PenstockError.__name__,
            message=f"in the receiver: {error!s}" if known else f"in the receiver: {type(error).__name__}: {error}",
            remote_traceback="" if known else format_remote(error),
        )
        self._producer.fail(0, 0, detail)
        self._ended = True
        self._settle()

    # ---- the consumer

    def _greet(self) -> None:
        hello = lane_pb2.Hello()
        try:
            data = self._consumer.recv(MAX_FRAME + 1)
            hello.ParseFromString(data)
            host, _, port = hello.target.rpartition(":")
            if len(data) > MAX_FRAME:
                raise ProtocolError(f"a Hello of a consumer must have at most {MAX_FRAME} bytes, got more")
            if not host or not port.isdecimal() or int(port) > 65535:
                raise ProtocolError(f"target of a Hello must be HOST:PORT, got {hello.target!r}")
        except BlockingIOError:
            return
        except (OSError, DecodeError, ProtocolError) as error:
            self.end(f"the consumer sent no valid Hello: {error}")
            return
        self._has_hello = True
        self.deadline = time.monotonic() + 2 * HANDSHAKE_S
        self._producer.attach(self._consumer, hello)
        hello_target = hello.target
        # Entry numbers belong to this end's ring; the sender has another ring.
        hello.ClearField("target")
        hello.ClearField("held")
        codecs = [codec for codec in map(load, hello.codecs) if codec is not None]
        self._unpackers = {codec.number: Unpacker(codec) for codec in codecs}
        hello.ClearField("codecs")
        hello.codecs.extend(self._unpackers)  # type: ignore[arg-type]
        self._out.append(tcp.sealed(hello.SerializeToString()))
        self._address = hello_target
        self._loop.connect(hello_target, self._connected)

    def _relay(self, ack: Ack) -> None:
        message = ack._replace(released=()).encode()
        if message:
            self._out.append(tcp.sealed(message))

    # ---- TCP

    def _connected(self, sock: Connection) -> None:
        if isinstance(sock, OSError):
            self._cut_off(tcp.unreachable_error(self._address, sock))
        elif isinstance(sock, PenstockError):
            self.fail(sock)
        elif self.over:
            sock.close()
        else:
            self.deadline = NEVER
            tcp.tune(sock, user_timeout=True)
            sock.setblocking(False)
            self._tcp, self._tcp_fd = sock, sock.fileno()
            self._settle()

    def _cut_off(self, error: PenstockError) -> None:
        """End the lane because the worker's host cannot be reached. A CLOSE frame tells the consumer why."""
        detail = records_pb2.ErrorDetail(name=type(error).__name__, message=error.message)
        self._producer.forward_end(Frame(CLOSE, rest=detail.SerializeToString()))
        self.end(error.message)

    def _receive(self) -> None:
        """Read from TCP until no bytes have arrived, the lane has had its turn, or no ring entry is free."""
        sock, inbox = self._tcp, self._inbox
        if sock is None or self._ended:
            return
        try:
            if (self._waiting and not self._work_through()) or self._crowded():
                return
            for _ in range(READS_A_TURN if self._unpacker is None else PACKED_READS_A_TURN):
                target = self._target
                try:
                    if target is None:
                        size = behind = sock.recv_into(inbox.room(self._limit))
                    else:
                        size = sock.recvmsg_into([target, inbox.room(self._limit)])[0]
                        behind = max(0, size - len(target))
                        if self._hasher is not None:
                            self._hasher.update(target[: size - behind])
                        self._target = target[size - behind :]
                except BlockingIOError:
                    return
                except OSError as error:
                    check_damage(error, heard=self._tcp_answered)
                    if not self._tcp_answered:
                        self._loop.dialer.check_refusal(error, self._address)
                    self._silence = self._silence or tcp.silence_error(self._address, error)
                    size = 0
                if not size:
                    self._ended = True
                    return
                self._tcp_answered = True
                inbox.add(behind)
                if not self._work_through() or self._crowded():
                    return
            if isinstance(sock, TlsSocket) and sock.pending():
                self._loop.again.add(self)
        except PenstockError as error:
            self.fail(error)

    def _crowded(self) -> bool:
        """True if the consumer does not read its frames: then nothing is received, and TCP stops the sender."""
        if self._producer.crowded:
            self._producer.flush()
        return self._producer.crowded

    def _work_through(self) -> bool:
        """Process the frames in the receive buffer. Return False if a batch must wait for a free ring entry."""
        inbox, producer = self._inbox, self._producer
        while True:
            if self._waiting and not self._open_entry():
                return False
            if self._to_skip:
                self._to_skip -= len(inbox.take_bytes(self._to_skip))
                if self._to_skip:
                    return True
            if self._target is not None:
                if not self._fill():
                    return True
                if self._to_skip:
                    continue
            if self._whole:
                if self._hasher is not None and not inbox.take_check(self._hasher, self._frame.total):
                    return True
                self._publish()
            message = inbox.take()
            if message is None:
                return True
            frame = self._frame = read_frame(message, 0, len(message))
            kind = frame.kind
            if kind == BATCH:
                self._check_claims(frame)
                self._waiting = True
            elif kind == RING:
                self._entry_bytes[frame.ring] = frame.entry_bytes
                producer.ring_bytes = min(frame.entry_bytes * frame.entries, BOX_BYTES)  # as large as the sender's
                if len(self._entry_bytes) > MAX_RINGS:
                    del self._entry_bytes[min(self._entry_bytes)]
            elif kind == STRUCTURE:
                whole = self._pieces.add(frame)
                if whole is not None:
                    producer.know_structure(frame.structure, whole)
            elif kind == END and frame.abandons < producer.abandons:
                pass  # kept, it would also keep the next epoch's batches, whose numbers are below its own
            elif kind in (END, ERROR, CLOSE):
                producer.forward_end(frame)
            else:
                raise malformed(f"a worker must send frames of known kinds, got kind {kind}")

    def _check_claims(self, frame: Frame) -> None:
        """Check the numbers in a worker's BATCH frame before memory is allocated for the batch."""
        size = frame.nbytes + 8 * frame.size
        if size > self._entry_bytes.get(frame.ring, -1):
            raise malformed(f"a batch must fit into an entry of a ring that the worker announced, got {size} bytes")
        if frame.codec or frame.wire:
            if frame.codec not in self._unpackers:
                raise malformed(f"a batch must have a codec that the receiver requested, got number {frame.codec}")
            check_claim(frame.wire, size)
        if not self._producer.knows_structure(frame.structure):
            raise malformed(f"a worker must announce a structure before its batches, got structure {frame.structure}")

    def _fill(self) -> bool:
        """Copy the payload from the receive buffer to the ring entry. Return False if it is not complete yet."""
        while self._target is not None:
            if self._target:
                piece = self._inbox.take_bytes(len(self._target))
                self._target[: len(piece)] = piece
                if self._hasher is not None:
                    self._hasher.update(piece)
                self._target = self._target[len(piece) :]
                if self._target:
                    return False
            if self._unpacker is None:
                self._target, self._whole = None, True
            else:
                self._unpack(self._unpacker)
        return True

    def _open_entry(self) -> bool:
        """Get a ring entry, or skip a batch of an abandoned epoch; False: none is free. Entries are as large as in the
        sender's ring, so that both grow in the same way."""
        frame, producer = self._frame, self._producer
        size = frame.nbytes + 8 * frame.size
        if frame.abandons < producer.abandons:
            self._to_skip = (frame.wire if frame.codec else size) + tcp.CHECK_BYTES * tcp.is_checked(frame)
        else:
            reserved = producer.reserve(self._entry_bytes[frame.ring])
            if reserved is None:
                return False
            self._reserved = reserved
            self._hasher = xxh3_64() if tcp.is_checked(frame) else None
            self._target = reserved.view[:size]
            self._limit = AHEAD if size > SMALL else 1 << 20
            if frame.codec:
                self._unpacker = self._unpackers[frame.codec]
                self._target = self._unpacker.begin(self._target, frame.wire)
                self._limit = PACKED_AHEAD
        self._waiting = False
        return True

    def _unpack(self, unpacker: Unpacker) -> None:
        if self._frame.abandons < self._producer.abandons:  # the epoch was abandoned meanwhile: do not unpack
            assert self._reserved is not None
            self._producer.return_unused(self._reserved)
            self._to_skip = unpacker.left + tcp.CHECK_BYTES
            unpacker.drop()
            self._reserved = self._target = self._unpacker = None
            return
        try:
            self._target = unpacker.step()
        except ProtocolError as error:  # the check that would detect the damage comes later
            raise BatchCorruptError(f"the batch was damaged in transit, or was compressed wrongly: {error}") from error
        if self._target is None:
            self._unpacker, self._whole = None, True

    def _publish(self) -> None:
        reserved, self._reserved, self._whole = self._reserved, None, False
        assert reserved is not None
        if self._frame.abandons < self._producer.abandons:
            self._producer.return_unused(reserved)  # the epoch was abandoned meanwhile
        else:
            self._producer.forward(reserved, self._frame, more=True)  # `_settle` flushes

    def _settle(self) -> None:
        """Send pending bytes, end the lane if it is over, and set the events to wait for."""
        if self.over or not self._has_hello:
            return
        sock, out, producer = self._tcp, self._out, self._producer
        producer.flush()
        try:
            while sock is not None and out:
                sent = sock.send(out[0])
                if sent < len(out[0]):
                    out[0] = memoryview(out[0])[sent:]
                else:
                    out.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._silence = self._silence or tcp.silence_error(self._address, error)
            out.clear()  # the code that reads detects the end, after the last frames
        if not producer.attached:
            if sock is None or not out:
                self.end("the consumer left")
                return
            self._ended = True
            self.deadline = min(self.deadline, time.monotonic() + HELLO_S)
            self._loop.watch(self, self._consumer_fd, 0)
        else:
            if self._ended and not producer.blocked:
                if self._silence is not None:
                    self._loop.dialer.fell_silent(host_of(self._address), sock)
                    self._cut_off(self._silence)
                else:
                    self.end("the connection ended")
                return
            self._loop.watch(self, self._consumer_fd, select.EPOLLIN | (select.EPOLLOUT if producer.blocked else 0))
        if sock is not None:
            reading = not (self._ended or self._waiting or producer.crowded)
            missing = 0 if self._target is None else len(self._target)
            # With TLS, arrived bytes are not yet payload, and TLS may have read the last ones already.
            wake_at = min(missing, WAKE_AT) if missing > SMALL and not isinstance(sock, TlsSocket) else 1
            if wake_at != self._wake_at:
                self._wake_at = wake_at
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_at)
            self._loop.watch(self, self._tcp_fd, (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if out else 0))


class ReceiverLoop:
    def __init__(self, name: str, parent: Parent, max_batch_bytes: int, tls: Tls | None = None) -> None:
        self.again: set[ReceiverLane] = set()
        """Lanes with bytes that TLS has read already, which epoll does not report."""
        self.dialer = LaneDialer(tls)
        self.rings = RingBudget()
        self._max_batch_bytes = max_batch_bytes
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, ReceiverLane]] = {}
        self._lanes: set[ReceiverLane] = set()
        self._parent = parent
        self._arrived: deque[tuple[Callable[[Connection], None], Connection]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + name)
        self._listener.listen(64)
        self._epoll.register(self._parent, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)

    def run(self) -> None:
        special = {self._wake: self._take_connections, self._listener.fileno(): self._accept}
        while True:
            soonest = min((lane.deadline for lane in self._lanes), default=NEVER)
            timeout = -1 if soonest == NEVER else max(0.0, soonest - time.monotonic())
            if self.again:
                timeout = 0
            for fd, events in self._epoll.poll(timeout):
                if fd == self._parent.fileno():
                    return
                if fd in special:
                    special[fd]()
                elif fd in self._watched:
                    self._watched[fd][1].on_event(fd, events)
            again, self.again = self.again, set()
            for lane in again & self._lanes:
                lane.on_event(-1, select.EPOLLIN)
            if soonest != NEVER:
                now = time.monotonic()
                for lane in [lane for lane in self._lanes if lane.deadline <= now]:
                    lane.end("a Hello, connection or last ack did not come before the deadline")

    def watch(self, lane: ReceiverLane, fd: int, mask: int) -> None:
        """Report events of `fd` to the lane. `mask`: bits of select.epoll; 0: none, not even a hang-up."""
        before = self._watched.get(fd)
        if before is None:
            if mask:
                self._epoll.register(fd, mask)
                self._watched[fd] = (mask, lane)
        elif not mask:
            del self._watched[fd]
            with contextlib.suppress(OSError):  # the producer closed the descriptor, which removed it from epoll
                self._epoll.unregister(fd)
        elif before[0] != mask:
            self._epoll.modify(fd, mask)
            self._watched[fd] = (mask, lane)

    def forget(self, lane: ReceiverLane, *fds: int) -> None:
        self._lanes.discard(lane)
        for fd in fds:
            self.watch(lane, fd, 0)

    def connect(self, address: str, then: Callable[[Connection], None]) -> None:
        """Connect in a thread: name look-ups block, a handshake may take long. `then` runs in the loop's thread."""

        def work() -> None:
            connection: Connection
            try:
                connection = self.dialer.open(address)
            except (OSError, PenstockError) as error:
                connection = error
            self._arrived.append((then, connection))
            os.eventfd_write(self._wake, 1)

        threading.Thread(target=work, name=f"connect {address}", daemon=True).start()

    def _take_connections(self) -> None:
        os.eventfd_read(self._wake)
        while self._arrived:
            then, connection = self._arrived.popleft()
            then(connection)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the peer closed its socket again, or no descriptor is free
        try:
            check_peer(sock)
        except ProtocolError as error:
            _log.warning("a connection was refused: %s", error)
            sock.close()
            return
        self._lanes.add(ReceiverLane(self, sock, self._max_batch_bytes))


def main() -> None:
    given = json.loads(sys.argv[1])
    ready_fd = given.pop("ready_fd")
    try:
        parent = Parent(given.pop("parent_pid"))
    except ProcessLookupError:
        return
    name_process("penstock-recv")
    log_lines("%(name)s: %(message)s", os.environ.get("PENSTOCK_LOG_LEVEL", "WARNING"))
    # Each lane holds two sockets and two descriptors for each of its rings.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = ReceiverLoop(**{**given, "parent": parent, "tls": load_tls(*given["tls"])})
    os.write(ready_fd, b"\n")
    os.close(ready_fd)
    loop.run()


if __name__ == "__main__":
    main()
