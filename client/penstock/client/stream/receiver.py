"""The receiver: TCP -> a ring of this host, for the lanes of a training job whose workers are elsewhere.

A small process of its own, without torch or numpy: a thread of the training process would share the interpreter lock
with the training loop. It runs by its file's path (`receiver_process.Receiver` starts it), because `python -m` would
import penstock.client, and with that torch.

A consumer connects to it as it would to a daemon on its own host, and says in its Hello where the daemon is
(`target`). From there on the receiver is a producer like any other towards the consumer, except that each batch is
received from TCP straight into a ring entry, and that the consumer's acks travel on to the sender. One lane is one
state machine, one thread serves them all, and nothing in it waits for one socket: a receiver that waited for the
network deaf to its consumer would stop the credits, and then all wait for ever.

Flow control is the ring: no free slot, no reading from TCP, until the consumer releases one. A small batch is copied
out of the receive buffer (one receive for many); a large one is received into its slot, with what comes behind it
into the buffer in the same call. A compressed one comes in pieces: each is received into a buffer that the lane keeps,
and unpacked into the slot while the next is on its way.

What arrives is compared with what was sent: frames by their seals, payloads by the check behind them
(penstock.proto.lane.tcp), each piece right after it came, while it is in the processor's cache. A difference is an
ERROR frame to the consumer, which comes back and gets all of it again.

TLS. Under it a receive brings 16 KiB at most, and what is left inside is nothing that epoll could see: a lane whose
turn is over before all of it was read says so to the loop. A worker whose certificate is not good, or that does not
accept ours, is an error, not a lost connection: trying again would not help.

Ends. Connection lost or refused: what has come whole is handed on, then the consumer's socket just ends, and it
knows to come back. Only what the daemon says, or a stream that cannot be what it claims, reaches the consumer as an
ERROR frame. Consumer gone: its last acks go out, then the TCP connection is closed. The process leaves when the
process of `--parent-pid` does.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError
from xxhash import xxh3_64

from penstock.proto.errors import BatchCorruptError, PenstockError, ProtocolError, format_remote
from penstock.proto.lane import tcp
from penstock.proto.lane.compression import Unpacker, check_claim, load
from penstock.proto.lane.dialer import Dialer
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
from penstock.proto.lane.tls_socket import TlsSocket, check_damage, connect_tls
from penstock.proto.rpc.tls import Renewing, Tls, explain, host_of, load_tls
from penstock.proto.v1 import lane_pb2, records_pb2
from penstock.runtime.process.watch import Process

_log = logging.getLogger("penstock.client.stream.receiver")

HELLO_S = 10.0
"""Seconds that a consumer has for its Hello, and a lane whose consumer has left for its last acks."""
SHAKE_S = 10.0
"""Seconds for each step of TLS; twice that for all that comes before a lane is there, names and addresses too."""
SMALL = 16 << 10
"""Bytes of payload up to which batches are copied out of the receive buffer, many to a receive."""
AHEAD = 4 << 10
"""Bytes received behind a larger payload: room for the next frame, and little to be copied."""
WAKE_AT = 512 << 10
"""Bytes of a large payload that must have come before it is looked at again. Without this a receive takes 160 KiB of
8 MiB, and waking up for it costs sender and receiver a tenth of their time (docs/benchmarks.md)."""
READS_A_TURN = 32
"""Receives of one lane before the others get their turn."""
PACKED_AHEAD = 32 << 10
"""Bytes received behind a piece of a compressed payload: each may stand for many times as much to be unpacked."""
PACKED_READS_A_TURN = 8
"""READS_A_TURN for a lane in the middle of a compressed payload: unpacking a piece takes 0.2 ms."""
NEVER = float("inf")

Connection = socket.socket | OSError | PenstockError
"""Result of a try to connect."""


class ReceiverLane:
    """Lane of the receiver: one consumer, one TCP connection, one ring between them."""

    def __init__(self, loop: ReceiverLoop, sock: socket.socket, max_batch_bytes: int) -> None:
        sock.setblocking(False)
        self.deadline = time.monotonic() + HELLO_S
        self.over = False
        self._loop = loop
        self._consumer = sock
        self._consumer_fd = sock.fileno()
        self._tcp: socket.socket | None = None
        self._tcp_fd = -1
        self._address = ""  # of the daemon
        self._heard = False  # something has come over TCP
        self._silent: PenstockError | None = None  # why it ended: the other host acknowledges nothing
        most = (max_batch_bytes + PAGE - 1) // PAGE * PAGE  # as the sender's slots are rounded
        self._producer = Producer(most, budget=loop.rings)
        self._producer.on_ack = self._relay
        self._greeted = False
        self._ended = False  # nothing more will be read from TCP
        self._inbox = tcp.SealedInbox()
        self._out: deque[bytes | memoryview] = deque()  # hello and acks on their way to the sender
        self._frame = Frame()  # the one read last
        self._waiting = False  # `_frame` is a batch that waits for a ring entry
        self._reserved: FreeEntry | None = None  # where its payload goes
        self._target: memoryview | None = None  # what of the payload is still to come
        self._unpackers: dict[int, Unpacker] = {}  # of the codecs that the consumer asked for
        self._unpacker: Unpacker | None = None  # of the payload that comes in, if it is compressed
        self._hasher: xxh3_64 | None = None  # of the payload that comes in, if a check follows it
        self._whole = False  # the payload is, and only its check may still be on its way
        self._unwanted = 0  # bytes of a payload that nobody wants any more
        self._wake_at = 1  # bytes that must have come before TCP counts as readable
        self._limit = 1 << 20  # bytes of one receive into the buffer
        self._slot_bytes: dict[int, int] = {}  # of the sender's rings
        self._pieces = StructurePieces()
        loop.watch(self, self._consumer_fd, select.EPOLLIN)

    def on_event(self, fd: int, events: int) -> None:
        """Something happened at one of the two sockets."""
        try:
            if fd != self._consumer_fd:
                if events & ~select.EPOLLOUT:
                    self._receive()
            elif self._greeted:
                if events & ~select.EPOLLOUT:
                    self._producer.take_acks()
                if self._waiting:
                    self._receive()
            else:
                self._greet()
            self._settle()
        except Exception as error:  # a fault of one lane, or of this code, is not the other lanes'
            self.fail(error)

    def end(self, why: str) -> None:
        """Over: both sockets just end. What the consumer was sent stays readable to it."""
        if self.over:
            return
        _log.info("a lane has ended: %s", why)
        self.over = True
        self._target = self._reserved = self._unpacker = None
        self._unpackers.clear()
        self._loop.forget(self, self._consumer_fd, self._tcp_fd)
        self._producer.close(say_so=False)
        self._consumer.close()
        if self._tcp is not None:
            self._tcp.close()

    def fail(self, error: BaseException) -> None:
        """Over, and the consumer is told why: the stream cannot be followed any further."""
        _log.warning("a lane has failed: %s: %s", type(error).__name__, error)
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
            if len(data) > MAX_FRAME or not host or not port.isdecimal() or int(port) > 65535:
                raise ProtocolError(f"its target must be HOST:PORT, got {hello.target!r} in {len(data)} bytes")
        except BlockingIOError:
            return
        except (OSError, DecodeError, ProtocolError) as error:
            self.end(f"the consumer sent no valid Hello: {error}")
            return
        self._greeted = True
        self.deadline = time.monotonic() + 2 * SHAKE_S
        self._producer.attach(self._consumer, hello)
        hello_target = hello.target
        # Places in the ring are this end's own business: at the other side there is another ring.
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
            self._cut_off(tcp.unreachable(self._address, sock))
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
        """Over, and the consumer is told that the other host cannot be reached: a CLOSE with the reason in it."""
        detail = records_pb2.ErrorDetail(name=type(error).__name__, message=error.message)
        self._producer.forward_end(Frame(CLOSE, rest=detail.SerializeToString()))
        self.end(error.message)

    def _receive(self) -> None:
        """Read TCP until it has no more, its turn is over, or no ring entry is free."""
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
                    check_damage(error, heard=self._heard)
                    if not self._heard:
                        self._loop.check_refusal(error, self._address)
                    self._silent = self._silent or tcp.silence(self._address, error)
                    size = 0
                if not size:
                    self._ended = True
                    return
                self._heard = True
                inbox.add(behind)
                if not self._work_through() or self._crowded():
                    return
            if isinstance(sock, TlsSocket) and sock.pending():
                self._loop.again.add(self)
        except PenstockError as error:
            self.fail(error)

    def _crowded(self) -> bool:
        """The consumer does not take what the peer says: the rest waits in the network."""
        if self._producer.crowded:
            self._producer.flush()
        return self._producer.crowded

    def _work_through(self) -> bool:
        """Publish and learn what has arrived. False if a batch waits for a ring entry."""
        inbox, producer = self._inbox, self._producer
        while True:
            if self._waiting and not self._open_slot():
                return False
            if self._unwanted:
                self._unwanted -= len(inbox.take_bytes(self._unwanted))
                if self._unwanted:
                    return True
            if self._target is not None:
                if not self._fill():
                    return True
                if self._unwanted:
                    continue
            if self._whole:
                if self._hasher is not None and not inbox.take_check(self._hasher):
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
                self._slot_bytes[frame.ring] = frame.entry_bytes
                producer.ring_bytes = min(
                    frame.entry_bytes * frame.entries, BOX_BYTES
                )  # a ring as large as the sender's
                if len(self._slot_bytes) > MAX_RINGS:
                    del self._slot_bytes[min(self._slot_bytes)]
            elif kind == STRUCTURE:
                whole = self._pieces.add(frame)
                if whole is not None:
                    producer.know_structure(frame.structure, whole)
            elif kind in (END, ERROR, CLOSE):
                producer.forward_end(frame)
            else:
                raise ProtocolError(f"a worker sent a frame of unknown kind {kind}")

    def _check_claims(self, frame: Frame) -> None:
        """Check a batch before memory is taken for it. Raises ProtocolError."""
        size = frame.nbytes + 8 * frame.size
        if size > self._slot_bytes.get(frame.ring, -1):
            raise ProtocolError(f"a worker sent a batch of {frame.nbytes} bytes, which fits no ring that it announced")
        if frame.codec or frame.wire:
            if frame.codec not in self._unpackers:
                raise ProtocolError(f"a worker sent a batch with a compression that was not requested ({frame.codec})")
            check_claim(frame.wire, size)
        if not self._producer.knows_structure(frame.structure):
            raise ProtocolError(f"a worker sent a batch of structure {frame.structure}, which it has not announced")

    def _fill(self) -> bool:
        """Put into `_target` what of the payload lies in the receive buffer. False if more is to come."""
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

    def _open_slot(self) -> bool:
        """A slot for the batch in `_frame`, as large as the sender's, so that the rings grow alike."""
        frame, producer = self._frame, self._producer
        size = frame.nbytes + 8 * frame.size
        if frame.abandons < producer.abandons:
            self._unwanted = (frame.wire if frame.codec else size) + tcp.CHECK_BYTES * tcp.is_checked(frame)
        else:
            reserved = producer.reserve(self._slot_bytes[frame.ring])
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
        """Unpack the part of a compressed payload that `_target` asked for."""
        if self._frame.abandons < self._producer.abandons:  # the epoch was left while it came in: spare the work
            assert self._reserved is not None
            self._producer.return_unused(self._reserved)
            self._unwanted = unpacker.left + tcp.CHECK_BYTES
            unpacker.drop()
            self._reserved = self._target = self._unpacker = None
            return
        try:
            self._target = unpacker.step()
        except ProtocolError as error:  # the check that would tell comes behind it
            raise BatchCorruptError(f"the batch was damaged in transit, or was compressed wrongly: {error}") from error
        if self._target is None:
            self._unpacker, self._whole = None, True

    def _publish(self) -> None:
        """The batch in `_frame` is in its slot."""
        reserved, self._reserved, self._whole = self._reserved, None, False
        assert reserved is not None
        if self._frame.abandons < self._producer.abandons:
            self._producer.return_unused(reserved)  # the epoch was left while it came in
        else:
            self._producer.forward(reserved, self._frame, more=True)  # `_settle` flushes

    def _settle(self) -> None:
        """Send what can be sent to the sender, find out whether this is the end, and say what to wait for next."""
        if self.over or not self._greeted:
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
            self._silent = self._silent or tcp.silence(self._address, error)
            out.clear()  # the reading side finds the end, behind the last frames
        if not producer.attached:
            if sock is None or not out:
                self.end("the consumer left")
                return
            self._ended = True
            self.deadline = min(self.deadline, time.monotonic() + HELLO_S)
            self._loop.watch(self, self._consumer_fd, 0)
        else:
            if self._ended and not producer.blocked:
                if self._silent is not None:
                    self._loop.dialer.fell_silent(host_of(self._address), sock)
                    self._cut_off(self._silent)
                else:
                    self.end("the connection ended")
                return
            self._loop.watch(self, self._consumer_fd, select.EPOLLIN | (select.EPOLLOUT if producer.blocked else 0))
        if sock is not None:
            reading = not (self._ended or self._waiting or producer.crowded)
            missing = 0 if self._target is None else len(self._target)
            # Under TLS bytes are not yet payload, and the last ones that it waits for may be inside already.
            wake_at = min(missing, WAKE_AT) if missing > SMALL and not isinstance(sock, TlsSocket) else 1
            if wake_at != self._wake_at:
                self._wake_at = wake_at
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_at)
            self._loop.watch(self, self._tcp_fd, (select.EPOLLIN if reading else 0) | (select.EPOLLOUT if out else 0))


class ReceiverLoop:
    """Event loop of all lanes: one thread, one epoll."""

    def __init__(self, name: str, parent_pid: int, max_batch_bytes: int, tls: Tls | None = None) -> None:
        self.again: set[ReceiverLane] = set()
        """Lanes that have something to read which epoll does not know of."""
        self.dialer = Dialer()
        self.rings = RingBudget()
        self._files = None if tls is None else Renewing(tls)
        self._max_batch_bytes = max_batch_bytes
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, ReceiverLane]] = {}
        self._lanes: set[ReceiverLane] = set()
        self._parent_watch = Process(parent_pid)
        self._arrived: deque[tuple[Callable[[Connection], None], Connection]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind("\0" + name)
        self._listener.listen(64)
        self._epoll.register(self._parent_watch, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)

    def run(self) -> None:
        """Serve until the parent watch's process is gone."""
        special = {self._wake: self._take_connections, self._listener.fileno(): self._accept}
        while True:
            soonest = min((lane.deadline for lane in self._lanes), default=NEVER)
            timeout = -1 if soonest == NEVER else max(0.0, soonest - time.monotonic())
            if self.again:
                timeout = 0
            for fd, events in self._epoll.poll(timeout):
                if fd == self._parent_watch.fileno():
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
                    lane.end("its time ran out")

    def close(self) -> None:
        """Once `run` has returned: give up what it holds. The process has no need of this, for it ends."""
        for lane in list(self._lanes):
            lane.end("the receiver ends")
        self._listener.close()
        self._epoll.close()
        self._parent_watch.close()
        os.close(self._wake)

    def watch(self, lane: ReceiverLane, fd: int, mask: int) -> None:
        """Tell the lane of these events from now on; a mask of 0 means of nothing, not even that the peer hung up."""
        before = self._watched.get(fd)
        if before is None:
            if mask:
                self._epoll.register(fd, mask)
                self._watched[fd] = (mask, lane)
        elif not mask:
            del self._watched[fd]
            with contextlib.suppress(OSError):  # the producer closed it, and it left by itself
                self._epoll.unregister(fd)
        elif before[0] != mask:
            self._epoll.modify(fd, mask)
            self._watched[fd] = (mask, lane)

    def forget(self, lane: ReceiverLane, *fds: int) -> None:
        """A lane is over."""
        self._lanes.discard(lane)
        for fd in fds:
            self.watch(lane, fd, 0)

    def connect(self, address: str, then: Callable[[Connection], None]) -> None:
        """Connect beside the loop, for names are looked up with blocking calls only, and a handshake may take its time;
        `then` is called in the loop."""

        def work() -> None:
            found: Connection
            try:
                found = self._connection(address)
            except (OSError, PenstockError) as error:
                found = error
            self._arrived.append((then, found))
            os.eventfd_write(self._wake, 1)

        threading.Thread(target=work, name=f"connect {address}", daemon=True).start()

    def _connection(self, address: str) -> socket.socket:
        where = host_of(address)
        sock = self.dialer.connect(where)
        sock.settimeout(SHAKE_S)
        if self._files is None:
            return sock
        try:
            return connect_tls(sock, self._files.renewed(), where[0])
        except OSError as error:
            check_damage(error, heard=False)
            self.check_refusal(error, address)
            raise

    def check_refusal(self, error: OSError, address: str) -> None:
        """Raises TlsError if that is what the error means."""
        trouble = None if self._files is None else explain(error, f"the worker's lane at {address}", self._files.tls)
        if trouble is not None:
            raise trouble from error

    def _take_connections(self) -> None:
        os.eventfd_read(self._wake)
        while self._arrived:
            then, found = self._arrived.popleft()
            then(found)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left again, or there is no descriptor for it
        try:
            check_peer(sock)
        except ProtocolError as error:
            _log.warning("a connection was refused: %s", error)
            sock.close()
            return
        self._lanes.add(ReceiverLane(self, sock, self._max_batch_bytes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Receives batches from other hosts into rings of this one.")
    parser.add_argument("--parent-pid", type=int, required=True, help="leave when this process is gone")
    parser.add_argument("--ready-fd", type=int, required=True, help="write a byte here once listening")
    parser.add_argument("--name", required=True, help="abstract Unix socket to listen on, without the leading NUL")
    parser.add_argument("--max-batch-bytes", type=int, default=1 << 30, help="refuse larger ring entries")
    for what in ("ca", "cert", "key", "name"):
        parser.add_argument(
            f"--tls-{what}", default="", help="for the connections to workers: see penstock.proto.rpc.tls"
        )
    given = parser.parse_args()
    logging.basicConfig(level=os.environ.get("PENSTOCK_LOG_LEVEL", "WARNING"), format="%(name)s: %(message)s")
    # Each lane holds two sockets and two descriptors for each of its rings.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        tls = load_tls(given.tls_ca, given.tls_cert, given.tls_key, given.tls_name)
        loop = ReceiverLoop(given.name, given.parent_pid, given.max_batch_bytes, tls)
    except ProcessLookupError:
        return  # the parent watch's process is gone already
    os.write(given.ready_fd, b"\n")
    os.close(given.ready_fd)
    loop.run()


if __name__ == "__main__":
    main()
