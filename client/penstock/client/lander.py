"""The lander: TCP -> a ring of this host, for the lanes of a training job whose workers are elsewhere.

A small process of its own, without torch or numpy: a thread of the training process would share the interpreter lock
with the training loop. It runs by its file's path (`landing.Lander` starts it), because `python -m` would import
penstock.client, and with that torch.

A consumer connects to it as it would to a daemon on its own host, and says in its Hello where the daemon is
(`target`). From there on the lander is a producer like any other towards the consumer, except that each batch is
received from TCP straight into a ring slot, and that the consumer's acks travel on to the pump. One lane is one state
machine, one thread serves them all, and nothing in it waits for one socket: a lander that waited for the network deaf
to its consumer would stop the credits, and then all wait for ever.

Flow control is the ring: no free slot, no reading from TCP, until the consumer releases one. A small batch is copied
out of the receive buffer (one receive for many); a large one is received into its slot, with what comes behind it
into the buffer in the same call.

Ends. Connection lost or refused: what has come whole is handed on, then the consumer's socket just ends, and it
knows to come back. Only what the daemon says, or a stream that cannot be what it claims, reaches the consumer as an ERROR
frame. Consumer gone: its last acks go out, then the TCP connection is closed. The process leaves when the process of
`--lifeline-pid` does.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from penstock.proto import tcp
from penstock.proto.errors import BatchTooLargeError, PenstockError, ProtocolError
from penstock.proto.frames import (
    BATCH,
    CLOSE,
    END,
    ERROR,
    MAX_FRAME,
    MAX_RINGS,
    MAX_STRUCTURE,
    RING,
    STRUCTURE,
    check_peer,
)
from penstock.proto.producer import Producer, Slab
from penstock.proto.v1 import lane_pb2, records_pb2

_log = logging.getLogger("penstock.client.lander")

HELLO_S = 10.0
"""Seconds that a consumer has for its Hello, and a closed lane for its last acks."""
CONNECT_S = 10.0
"""Seconds to connect to a daemon."""
SMALL = 16 << 10
"""Bytes of payload up to which a batch is copied out of the receive buffer."""
AHEAD = 4 << 10
"""Bytes received behind a large payload: room for the next frame, and little to be copied."""
READS_A_TURN = 32
"""Receives of one lane before the others get their turn."""


class Lane:
    """One consumer, one TCP connection, one ring between them."""

    def __init__(self, loop: Loop, sock: socket.socket, max_batch_bytes: int) -> None:
        sock.setblocking(False)
        self.deadline = time.monotonic() + HELLO_S
        self.over = False
        self._loop = loop
        self._consumer = sock
        self._tcp: socket.socket | None = None
        self._producer = Producer(max_batch_bytes)
        self._producer.on_ack = self._relay
        self._greeted = False
        self._ended = False  # nothing more will come from TCP
        self._inbox = tcp.Inbox()
        self._out: deque[bytes | memoryview] = deque()  # hello and acks on their way to the pump
        self._frame = lane_pb2.Frame()
        self._pending = False  # `_frame` is a batch that waits for a ring slot
        self._slab: Slab | None = None  # the slot that its payload goes into
        self._target: memoryview | None = None  # what of the payload is still to come; None while there is none
        self._skip = 0  # bytes of a payload that nobody wants any more
        self._slot_bytes: dict[int, int] = {}  # of the sender's rings
        self._pieces: dict[int, bytearray] = {}
        self._look_ahead = 1 << 20
        loop.watch(sock, self._on_consumer, select.EPOLLIN)

    # ---- the consumer

    def _on_consumer(self, events: int) -> None:
        if not self._greeted:
            self._greet()
            return
        producer = self._producer
        if events & ~select.EPOLLOUT:
            self._loop.moved = True
            producer.take_acks()
            if not producer.attached:
                self._consumer_left()
                return
        producer.flush()
        self._advance()

    def _greet(self) -> None:
        hello = lane_pb2.Hello()
        try:
            data = self._consumer.recv(MAX_FRAME + 1)
            hello.ParseFromString(data)
            host, _, port = hello.target.rpartition(":")
            if not data or len(data) > MAX_FRAME or not host or not port.isdecimal():
                raise ProtocolError(f"a hello whose target is {hello.target!r}")
        except BlockingIOError:
            return
        except (OSError, DecodeError, ProtocolError) as error:
            self.end(f"no hello: {error}")
            return
        self._greeted = True
        self.deadline = time.monotonic() + 2 * CONNECT_S
        self._producer.attach(self._consumer, hello)
        # Places in the ring are this end's own business; on the other side there is another ring.
        hello.ClearField("target")
        hello.ClearField("held")
        hello.ack.ClearField("released")
        self._out.append(tcp.framed(hello.SerializeToString()))
        self._loop.connect((host.strip("[]"), int(port)), self._connected)

    def _relay(self, ack: lane_pb2.Ack) -> None:
        ack.ClearField("released")
        message = ack.SerializeToString()
        if message:
            self._out.append(tcp.framed(message))

    def _consumer_left(self) -> None:
        """Its last acks go out, then this lane is over."""
        self._loop.unwatch(self._consumer)
        self._ended = True
        self._send()
        if not self.over:
            self.deadline = time.monotonic() + HELLO_S

    # ---- TCP

    def _connected(self, sock: socket.socket | OSError) -> None:
        if isinstance(sock, OSError):
            self.end(f"no connection: {sock}")
        elif self.over:
            sock.close()
        else:
            self.deadline = float("inf")
            tcp.tune(sock, user_timeout=True)
            sock.setblocking(False)
            self._tcp = sock
            self._loop.watch(sock, self._on_tcp, select.EPOLLIN)
            self._send()

    def _on_tcp(self, events: int) -> None:
        if events & ~select.EPOLLOUT:
            self._advance(True)
        if not self.over:
            self._send()

    def _send(self) -> None:
        """Hello and acks, as far as TCP takes them."""
        sock, out = self._tcp, self._out
        if sock is None:
            return
        while out:
            try:
                sent = sock.send(out[0])
            except BlockingIOError:
                break
            except OSError:
                out.clear()  # the reading side finds the end, behind the last frames
                break
            if sent < len(out[0]):
                out[0] = memoryview(out[0])[sent:]
            else:
                out.popleft()
        if not out and not self._producer.attached:
            self.end("the consumer left")
"""
