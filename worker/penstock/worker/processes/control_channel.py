"""Control channel between a daemon and a child: JSON messages with a payload, each a packet of a Unix socket, which
arrives whole or not at all. One larger than a packet comes in a memfd that its sender has sealed, one at a time.
Children run user code, so nothing is unpickled, sizes are bounded, and a child that breaks the protocol is killed."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import struct
import sys
import termios
import threading
import time
from bdb import BdbQuit
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.proto.errors import LaneLostError, PenstockError, ProtocolError, UnsupportedStateError
from penstock.proto.lane.frames import SO_PEEK_OFF
from penstock.proto.tracebacks import format_remote, middle_out
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.forks import silence
from penstock.runtime.process.titles import title_process

_CAUGHT_BY_TORCH = re.compile(r"Caught \S+ in (?P<where>[^\n]+)\.\nOriginal Traceback ")
"""Text of an exception from one of torch's worker processes, as torch raises it again."""
_HEAD = struct.Struct("<I")  # bytes of JSON; the payload follows it. 0: all of this is in the last descriptor
MAX_PACKET = 64 << 10
MAX_JSON = 320 << 10
"""Of a child's message. The largest that is correct has three numbers for each of the 4,096 batches that were replayed
last. That of a daemon has no limit: it has a label for each epoch."""
MAX_PAYLOAD = 1 << 30
"""Usually a loader's state, which the coordinator limits to 900,000,000 bytes."""
MAX_FDS = 16
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of memory that several processes read: nobody can change it any more."""
_LARGE = _HEAD.pack(0)
_LOOK_S = 0.002
"""Seconds between two looks whether the peer has read what comes before a large message."""
DESCRIPTORS_CLOSED = 77
"""Exit status if user code closed the control socket, so that no error can be reported."""


class DescriptorsClosedError(Exception):
    """User code in this process has closed the control socket."""


@dataclass
class ControlMessage:
    """fields: values that JSON can hold."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    fds: list[int] = field(default_factory=list)


def invalid_message(what: str) -> ProtocolError:
    return ProtocolError(
        f"{what}. User code may have written to Penstock's control socket: let it write only to files that it opened"
    )


def decoded(data: bytes, fds: list[int], payload: bytes = b"") -> ControlMessage:
    """Raise ProtocolError if the message is invalid, and close `fds`. `payload`: of a large message, whose `data` end
    with the JSON."""
    try:
        return _decoded(data, fds, payload)
    except ProtocolError:
        close_all(fds)
        raise


def _decoded(data: bytes, fds: list[int], payload: bytes) -> ControlMessage:
    text = _HEAD.unpack_from(data)[0] if len(data) >= _HEAD.size else 0
    if not 0 < text <= len(data) - _HEAD.size:
        raise invalid_message(f"a control message of {len(data)} bytes has {text} bytes of JSON")
    try:
        fields = json.loads(data[_HEAD.size : _HEAD.size + text])
    except (ValueError, RecursionError) as error:
        raise invalid_message(f"a control message cannot be read: {error}") from error
    kind = fields.pop("kind", None) if type(fields) is dict else None
    if type(kind) is not str:
        raise invalid_message(f"a control message must be an object with a text 'kind', got {fields!r:.200}")
    return ControlMessage(kind, fields, payload or data[_HEAD.size + text :], fds)


def packed(message: ControlMessage) -> tuple[list[bytes], list[int]]:
    """Return a message as the parts of a packet, and the memory that must be sent with it, and closed: [] or one
    descriptor."""
    text = json.dumps({"kind": message.kind, **message.fields}).encode()
    parts = [_HEAD.pack(len(text)) + text, message.payload]
    if sum(map(len, parts)) <= MAX_PACKET:
        return parts, []
    fd = os.memfd_create("penstock-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            write_all(fd, part)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return [_LARGE], [fd]


def write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


@dataclass
class LargeMessage:
    """Message in sealed memory that is still to be read, which takes 0.4 s for a GiB. fds: its own, and the
    memory's."""

    fds: list[int]

    def read(self, most_bytes: int | None = None) -> tuple[bytes, bytes]:
        """Return what `decoded` takes: head with JSON, and payload, from another thread. `most_bytes`: limit of a
        child's payload; None: the daemon's, which is trusted. Raises ProtocolError for other sizes."""
        fd = self.fds.pop()
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:  # first: only memory has seals, and is read at once
                raise invalid_message("the memory of a large control message must be sealed")
            size, text = os.fstat(fd).st_size, _HEAD.size + _HEAD.unpack(os.pread(fd, _HEAD.size, 0))[0]
            if most_bytes is not None and (text > _HEAD.size + MAX_JSON or size > text + most_bytes):
                raise invalid_message(
                    f"a control message must have at most {most_bytes} bytes, and {MAX_JSON} of JSON, got {size}"
                )
            return _read_from(fd, min(text, size)), _read_from(fd, size, text)
        except (OSError, struct.error) as error:
            close_all(self.fds)
            raise invalid_message(f"a large control message cannot be read: {error}") from error
        except ProtocolError:
            close_all(self.fds)
            raise
        finally:
            close_all([fd])


class ControlChannel:
    """End of the control socket. `send` and `receive` block unless `wait` is False."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.most_bytes = MAX_PAYLOAD
        """Of a payload that is sent: the peer's limit."""
        self.received = 0
        """Bytes of all packets so far."""
        self._inode = os.fstat(sock.fileno()).st_ino

    def fileno(self) -> int:
        return self.sock.fileno()

    def forked(self) -> None:
        """Disconnect in a process that user code has forked, which must not send as the runner."""
        if self._is_own(self.sock.fileno()):
            silence(self.sock.fileno())

    def _check_own(self) -> None:
        fd = self.sock.fileno()
        if fd >= 0 and not self._is_own(fd):
            raise DescriptorsClosedError(f"user code closed file descriptor {fd}, which belongs to Penstock")

    def _is_own(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == self._inode
        except OSError:
            return False

    def send(self, kind: str, payload: bytes = b"", fds: list[int] | None = None, **fields: Any) -> None:
        """Send a message. Raises UnsupportedStateError (payload too large), LaneLostError (peer has ended),
        DescriptorsClosedError (by user code)."""
        if len(payload) > self.most_bytes:
            raise UnsupportedStateError(
                f"a loader's state must have at most {self.most_bytes} bytes on this worker, got {len(payload)}. "
                "Make it smaller, or give the worker more memory or fewer slots"
            )
        parts, memory = packed(ControlMessage(kind, fields, payload))
        try:
            self.send_packet(parts, fds or [], memory)
        finally:
            close_all(memory)

    def send_packet(self, parts: list[bytes], fds: list[int], memory: list[int], wait: bool = True) -> bool:
        """Send what `packed` returned. Return False if `wait` is False, and the socket is full, or the peer has not yet
        read what comes before a large message. Raises as `send`."""
        try:
            while memory and self.unread:
                if not wait:
                    return False
                time.sleep(_LOOK_S)
            socket.send_fds(self.sock, parts, fds + memory, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            self._check_own()
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise LaneLostError("the process at the other end of the control socket has ended") from error
            raise
        return True

    @property
    def unread(self) -> int:
        """Bytes of memory of sent messages that the peer has not read."""
        return self._queued(termios.TIOCOUTQ)

    @property
    def arrived(self) -> int:
        """Bytes of the packets that have arrived and were not received."""
        return self._queued(termios.FIONREAD)

    def _queued(self, which: int) -> int:
        return int.from_bytes(fcntl.ioctl(self.sock.fileno(), which, bytes(4)), sys.byteorder)

    def close(self) -> None:
        self.sock.close()

    def receive(self, wait: bool = True) -> ControlMessage | None:
        """Return the next message; None if none has arrived and `wait` is False. Raises LaneLostError (peer has ended),
        ProtocolError (invalid), DescriptorsClosedError."""
        message = self.receive_packet(wait)
        if not isinstance(message, LargeMessage):
            return message
        data, payload = message.read()
        return decoded(data, message.fds, payload)

    def receive_packet(self, wait: bool = True) -> ControlMessage | LargeMessage | None:
        """As `receive`, but do not read a large message."""
        try:
            data, fds = _receive(self.sock, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            self._check_own()
            raise LaneLostError(f"the control socket to the other process failed: {error}") from error
        if not data:
            close_all(fds)
            self._check_own()
            raise LaneLostError("the process at the other end of the control socket has ended")
        self.received += len(data)
        return self._message(data, fds)

    def _message(self, data: bytes, fds: list[int]) -> ControlMessage | LargeMessage:
        return LargeMessage(fds) if data == _LARGE and fds else decoded(data, fds)

    def peek(self) -> list[ControlMessage]:
        """Return messages that have arrived and are not large, and leave them in the socket. The caller closes its
        copies of the descriptors."""
        messages = []
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
            while (packet := _receive(self.sock, socket.MSG_PEEK | socket.MSG_DONTWAIT))[0]:
                message = self._message(*packet)
                if isinstance(message, LargeMessage):
                    close_all(message.fds)
                else:
                    messages.append(message)
        except (OSError, ProtocolError):  # all were looked at, or the connection is lost
            pass
        finally:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, -1)
        return messages


_CLOSING_THREADS = threading.Semaphore(8)
_to_close: deque[int] = deque()


def close_all(fds: list[int]) -> None:
    """Close descriptors, which a child may have made: what can wait as it is closed, such as a socket that lingers or a
    file of FUSE, in one of a few threads, and not in a daemon's loop."""
    while fds:
        fd = fds.pop()
        if _closes_at_once(fd):
            os.close(fd)
        else:
            _to_close.append(fd)
            threading.Thread(target=_close_slowly, name="penstock-close", daemon=True).start()


def _close_slowly() -> None:
    while _to_close and _CLOSING_THREADS.acquire(blocking=False):
        with contextlib.suppress(IndexError, OSError):  # another thread took the last one; EIO: it is closed
            os.close(_to_close.popleft())
        _CLOSING_THREADS.release()


def _closes_at_once(fd: int) -> bool:
    """Return True for memory, events and other descriptors that are no files, and for ends of pipes."""
    mode = os.fstat(fd).st_mode
    return stat.S_IFMT(mode) == 0 or stat.S_ISFIFO(mode) or is_memory(fd)


def is_memory(fd: int) -> bool:
    """Return True for a memfd."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) >= 0
    except OSError:
        return False


def _read_from(fd: int, size: int, at: int = 0) -> bytes:
    """Read up to byte `size` of memory. At an offset: other processes share the open file."""
    parts = []
    while at < size and (part := os.pread(fd, size - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def payload_of(message: ControlMessage) -> bytes:
    """Return the payload, also if it is in a memfd that came with the message."""
    if not message.fds:
        return message.payload
    (fd,) = message.fds
    try:
        return _read_from(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def begin_slot(channel: ControlChannel, role: str) -> records_pb2.WorkerAssignment:
    """Wait for the assignment, and name the process. Large arguments are in the memfd that came with it."""
    message = cast(ControlMessage, channel.receive())
    (channel.most_bytes,) = counts(message, "most_bytes")
    assignment = records_pb2.WorkerAssignment.FromString(message.payload)
    if message.fds:
        assignment.loader.arguments = payload_of(message)
    title_process(f"penstock-{role} {assignment.run} box {assignment.box} slot {assignment.slot}")
    return assignment


def counts(message: ControlMessage, *names: str) -> list[int]:
    """Raise ProtocolError unless each field is an integer from 0 to 2**64 - 1."""
    values = [message.fields.get(name) for name in names]
    if not all(type(value) is int and 0 <= value < 1 << 64 for value in values):
        raise invalid_message(f"{names} of a message {message.kind[:40]!r} must be in [0, 2**64), got {values!r:.200}")
    return values  # type: ignore[return-value]


def _receive(sock: socket.socket, flags: int) -> tuple[bytes, list[int]]:
    """As socket.recv_fds, which ignores its flags in Python 3.11."""
    fds = array.array("i")
    space = socket.CMSG_SPACE((MAX_FDS + 1) * fds.itemsize)  # one more for a large message
    data, ancillary, _, _ = sock.recvmsg(MAX_PACKET, space, flags)
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return data, list(fds)


def plain_detail(error: Exception) -> dict[str, str]:
    if isinstance(error, PenstockError):
        name, message, remote = type(error).__name__, error.message, error.remote_traceback
    else:
        name, message, remote = "PenstockError", describe(error), format_remote(error)
    return {"name": name, "message": middle_out(message, 8 << 10), "remote_traceback": middle_out(remote, 12 << 10)}


def describe(error: BaseException) -> str:
    """Return "Type: text", also if __str__ raises; of an error in torch's worker process its last line and place; of
    one of breakpoint() what to do instead."""
    try:
        text = str(error)
    except Exception:
        text = "<no text: __str__ raised>"
    if isinstance(error, BdbQuit):
        text = (
            "breakpoint() needs a terminal, and workers have none. Set num_workers_per_box=0 "
            "(PENSTOCK_NUM_WORKERS_PER_BOX=0) to run input_fn in the training process"
        )
    if caught := _CAUGHT_BY_TORCH.match(text):
        last = text.rstrip().rpartition("\n")[2]
        return f"{last} (in {caught['where']})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
