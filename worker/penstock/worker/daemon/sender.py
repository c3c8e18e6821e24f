"""Sender of batches over TCP: one thread for each TCP lane, which the runner treats as any other consumer. It forwards
the runner's frames, and after each BATCH frame the batch's bytes (the payload), straight from the ring, or compressed
on request.

Both sockets are polled, and outgoing data waits in `_out`, in order; the ring bounds the batches there, MAX_OUT the
frames without a payload. The checksum behind a payload is computed a piece at a time, right before the piece is sent,
so that the kernel finds it in the processor's cache.

A ring entry is released when its batch was delivered to the remote loop, not when it was sent: after a broken
connection the next lane sends the batches again, and nothing is computed again. Acks that free entries of the
receiver's own ring are not sent here.

When the runner has ended, the sender sends the rest, closes TCP for sending, and receives acks until the receiver
closes: closing sooner would destroy data on their way. When TCP is lost, it closes its socket to the runner without a
CLOSE message. A CLOSE from either side is passed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache

from xxhash import xxh3_64

from penstock.proto.errors import LaneLostError, PenstockError, ProtocolError
from penstock.proto.lane import tcp
from penstock.proto.lane.compression import Packer, first_of
from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import BATCH, Ack, Frame, read_ack
from penstock.proto.v1 import lane_pb2

_log = logging.getLogger(__name__)

BUFFERS_A_CALL = 128
"""Buffers in one sendmsg call; a batch has two or three, the kernel takes 1,024."""
FRAMES_A_TURN = 64
"""Frames read from the runner before data is sent again. A ring has fewer entries."""
PACKED_A_TURN = 1 << 20
"""Bytes compressed before data is sent again; 1 MiB takes 2 ms."""
MAX_BACKLOG = 1 << 16
"""Acknowledgements that may wait for the runner (`Consumer.backlog`). More breaks the protocol, and the lane is
closed."""
AT_ONCE = 512 << 10
"""Bytes of the pieces in which data is sent and checksummed: the send buffer of a connection to a nearby peer. With
half or twice the size, sending batches of 1 and 8 MiB takes a tenth longer."""
MAX_OUT = 512
"""Buffers waiting to be sent, above which the runner is not read. A full ring needs fewer than 100."""


class _Payload:
    """Bytes of one batch, sent in pieces and followed by their checksum."""

    __slots__ = ("_hasher", "_left")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._left = deque(memoryview(piece) for piece in pieces)
        self._hasher = xxh3_64()

    def next(self) -> tuple[bytes | memoryview, bool]:
        left = self._left
        if not left:
            return tcp.check_of(self._hasher), True
        first = left[0]
        piece, rest = first[:AT_ONCE], first[AT_ONCE:]
        if rest:
            left[0] = rest
        else:
            left.popleft()
        self._hasher.update(piece)
        return piece, False


class Sender(threading.Thread):
    """Thread that forwards one runner's batches to one TCP connection, until either side ends. It closes both sockets.
    local: SEQPACKET socket whose other end the runner has, with the same Hello. name: for messages."""

    def __init__(self, tcp_socket: socket.socket, local: socket.socket, hello: lane_pb2.Hello, name: str) -> None:
        super().__init__(name=f"penstock-sender {name}", daemon=True)
        self.reason = ""
        """Why the sender ended, or will end because the runner has ended."""
        tcp.tune(tcp_socket)
        tcp.fit_send_buffer(tcp_socket)
        tcp_socket.setblocking(False)
        self._tcp = tcp_socket
        self._runner = Consumer(local, f"the runner of {name}")
        self._runner.abandons = hello.abandons
        self._packer = _packer(tuple(hello.codecs))
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # prevents writes to _wake after it is closed
        self._stopped = False
        self._out: deque[bytes | memoryview | _Payload] = deque()
        self._ready: deque[bytes | memoryview] = deque()  # first part of _out, cut for one sendmsg
        self._sent: deque[tuple[int, int, int]] = deque()  # total, ring, entry of batches not delivered yet
        self.sent_bytes = 0
        self._inbox = tcp.SealedInbox()
        self._reading = True  # the runner may still send
        self._shut = False  # nothing more will be sent over TCP

    def stop(self, timeout: float = 5.0) -> bool:
        """Close both connections, and return False if the thread has not ended after `timeout` seconds. Undelivered
        batches stay in the ring. Allowed from any other thread, and more than once."""
        with self._lock:
            self._stopped = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if self.ident is None:  # never started
            self._leave("stopped")
            return True
        self.join(timeout)
        return not self.is_alive()

    def run(self) -> None:
        reason = "an error of its own"
        try:
            reason = self._work()
        except LaneLostError as error:
            reason = str(error)
        except PenstockError as error:  # the peer broke the protocol: only this lane ends
            reason = f"{type(error).__name__}: {error}"
            _log.warning("%s: %s", self.name, reason)
        finally:
            self._leave(reason)

    # ---- inside

    def _work(self) -> str:
        poll = select.poll()
        tcp_fd, runner_fd = self._tcp.fileno(), self._runner.fileno()
        poll.register(self._wake, select.POLLIN)
        poll.register(tcp_fd, select.POLLIN)
        poll.register(runner_fd, select.POLLIN)
        asked_tcp = asked_runner = select.POLLIN
        acks_wait = more = False
        look = True  # bytes that came with the Hello may already be decrypted, and poll does not report those
        while not self._stopped:
            want_tcp = select.POLLIN | (select.POLLOUT if self._out or self._ready else 0)
            if want_tcp != asked_tcp:
                poll.modify(tcp_fd, want_tcp)
                asked_tcp = want_tcp
            want_runner = select.POLLIN | (select.POLLOUT if acks_wait else 0)
            if not self._reading or len(self._out) > MAX_OUT:
                want_runner = 0
            if want_runner != asked_runner:
                if want_runner:
                    poll.register(runner_fd, want_runner)  # also changes an existing registration
                else:
                    poll.unregister(runner_fd)  # even with an empty mask poll would report a hang-up each time
                asked_runner = want_runner
            more = more and want_runner != 0
            # Poll does not report frames that arrived in one read with an earlier frame.
            events = dict(poll.poll(0 if more or look else None))
            if (look or events.get(tcp_fd, 0) & ~select.POLLOUT) and not self._take_acks():
                return "the receiver closed the connection"
            look = False
            if self._runner.closed:
                return "the consumer closed the lane"
            if more or events.get(runner_fd, 0) & ~select.POLLOUT:
                more = self._take_frames()
            self._send()
            acks_wait = not self._runner.flush()
        return "stopped"

    def _take_frames(self) -> bool:
        """Move frames from the runner to `_out`. Return True if more may be there."""
        runner, out = self._runner, self._out
        to_pack = PACKED_A_TURN
        try:
            for _ in range(FRAMES_A_TURN):
                frame = runner.receive_any()
                if frame is None:
                    return False
                if frame.kind == BATCH:
                    to_pack -= self._take_batch(frame)
                    if to_pack <= 0:
                        return True
                else:
                    out.append(tcp.sealed(runner.frame_bytes))
            return True
        except LaneLostError as error:
            self._reading = False
            self.reason = str(error)
            return False

    def _take_batch(self, frame: Frame) -> int:
        """Append a batch to `_out`, and return the bytes compressed, which count towards PACKED_A_TURN."""
        runner, out, packer = self._runner, self._out, self._packer
        ring = runner.rings[frame.ring]
        size = frame.nbytes + 8 * frame.size
        start = frame.entry * ring.entry_bytes
        payload = ring.view[start : start + size]
        self._sent.append((frame.total, frame.ring, frame.entry))
        packed = None if packer is None else packer.pack(payload)
        if packer is None or packed is None:
            out.append(tcp.sealed(runner.frame_bytes))
            if tcp.is_checked(frame):
                out.append(_Payload([payload]))
            elif size:
                out.append(payload)
            return 0
        wire, pieces = packed
        out.append(tcp.sealed(frame._replace(codec=packer.codec.number, wire=wire).encode()))
        out.append(_Payload(pieces))
        return size

    def _make_ready(self) -> None:
        out, ready = self._out, self._ready
        size = sum(map(len, ready))
        while out and size < AT_ONCE and len(ready) < BUFFERS_A_CALL:
            first = out[0]
            if isinstance(first, _Payload):
                first, last = first.next()
                if last:
                    out.popleft()
            else:
                out.popleft()
            ready.append(first)
            size += len(first)

    def _send(self) -> None:
        ready = self._ready
        while True:
            self._make_ready()
            if not ready:
                break
            try:
                sent = self._tcp.send(ready[0]) if len(ready) == 1 else self._tcp.sendmsg(ready)
            except BlockingIOError:
                return
            except OSError:
                # The connection is gone. Acks may have arrived before: `_take_acks` reads them, and then finds the end.
                self._out.clear()
                ready.clear()
                self._shut = True
                return
            self.sent_bytes += sent
            while ready and sent >= len(ready[0]):
                sent -= len(ready.popleft())
            if sent:
                ready[0] = memoryview(ready[0])[sent:]
        if not self._reading and not self._shut:
            self._shut = True
            with contextlib.suppress(OSError):
                self._tcp.shutdown(socket.SHUT_WR)

    def _take_acks(self) -> bool:
        inbox = self._inbox
        try:
            size = self._tcp.recv_into(inbox.room(1 << 16))
        except BlockingIOError:
            return True
        except OSError:
            return False
        inbox.add(size)
        while (message := inbox.take()) is not None:
            self._pass_on(read_ack(message, 0, len(message)))
        return size > 0

    def _pass_on(self, ack: Ack) -> None:
        runner, sent = self._runner, self._sent
        if ack.delivered:
            released: list[int] = []
            while sent and sent[0][0] <= ack.delivered:
                released += sent.popleft()[1:]
            runner.delivered(ack.delivered)
            runner.release(released)
        if ack.labelled:
            runner.label_epoch(ack.labelled - 1, ack.label)
        if ack.open_epochs:
            runner.open_epochs(ack.open_epochs)
        if ack.wanted:
            runner.want(ack.wanted)
        if ack.abandon_epoch:
            # The runner takes back all these entries itself, and continues after the last delivered batch.
            sent.clear()
            runner.abandon(ack.abandon_epoch - 1, ack.delivered)
        if ack.close:
            runner.close()
        if runner.backlog > MAX_BACKLOG:
            raise ProtocolError(f"a job sends acknowledgements faster than the runner reads: {runner.backlog} wait")

    def _leave(self, reason: str) -> None:
        with self._lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
        self.reason = self.reason or reason
        self._runner.close(say_so=False)
        self._tcp.close()
        self._out.clear()
        self._ready.clear()


def _packer(codecs: Sequence[int]) -> Packer | None:
    codec = first_of(codecs)
    if codecs and codec is None:
        _warn_missing_codec(codecs)
    return None if codec is None else Packer(codec)


@cache  # once for each process
def _warn_missing_codec(codecs: Sequence[int]) -> None:
    known = lane_pb2.Codec.DESCRIPTOR.values_by_number
    names = ", ".join(known[number].name.lower() if number in known else str(number) for number in codecs)
    _log.warning("batches are sent uncompressed: pip install penstock[compression] here (%s was requested)", names)
