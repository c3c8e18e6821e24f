"""Control channel between a daemon and a child: JSON messages with a payload, over a Unix stream socket. Children run
user code, so nothing is unpickled, sizes are bounded, and a child that breaks the protocol is killed. Descriptors
arrive with a message's first bytes, possibly before the rest."""

from __future__ import annotations

import array
import fcntl
import json
import mmap
import os
import re
import socket
import struct
import sys
import termios
from bdb import BdbQuit
from dataclasses import dataclass, field
from typing import Any

from penstock.proto.errors import LaneLostError, PenstockError, ProtocolError, UnsupportedStateError
from penstock.proto.tracebacks import format_remote, middle_out
from penstock.proto.v1 import records_pb2
from penstock.runtime.process.forks import silence
from penstock.runtime.process.titles import title_process

_CAUGHT_BY_TORCH = re.compile(r"Caught \S+ in (?P<where>[^\n]+)\.\nOriginal Traceback ")
"""Text of an exception from one of torch's worker processes, as torch raises it again."""
_HEAD = struct.Struct("<IQB")  # bytes of JSON, bytes of payload, number of file descriptors
MAX_JSON = 1 << 20
MAX_PAYLOAD = 1 << 30
"""Usually a loader's state, which the coordinator limits to 900,000,000 bytes."""
MAX_FDS = 16
"""Limit for one message, and for descriptors that arrive before theirs."""
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


def encode_head(message: ControlMessage) -> bytes:
    text = json.dumps({"kind": message.kind, **message.fields}).encode()
    return _HEAD.pack(len(text), len(message.payload), len(message.fds)) + text


class MessageInbox:
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: list[int]) -> None:
        """Raise ProtocolError if more than MAX_FDS descriptors wait."""
        self._buffer += data
        self._fds += fds
        if len(self._fds) > MAX_FDS:
            count = len(self._fds)
            self.close()
            raise invalid_message(f"a control message must have at most {MAX_FDS} file descriptors, got {count}")

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def unfinished(self) -> tuple[bytes, list[int]]:
        return bytes(self._buffer), list(self._fds)

    def take(self) -> ControlMessage | None:
        """Return the next complete message, if any. Raise ProtocolError if it is invalid or too large."""
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        text, payload, fds = _HEAD.unpack_from(buffer)
        if text > MAX_JSON or payload > MAX_PAYLOAD or fds > MAX_FDS:
            raise invalid_message(f"a control message is too large: {text} and {payload} bytes, {fds} file descriptors")
        end = _HEAD.size + text + payload
        if len(buffer) < end:
            return None
        try:
            fields = json.loads(bytes(buffer[_HEAD.size : _HEAD.size + text]))
        except (ValueError, RecursionError) as error:
            raise invalid_message(f"a control message cannot be read: {error}") from error
        kind = fields.pop("kind", None) if type(fields) is dict else None
        if type(kind) is not str:
            raise invalid_message(f"a control message must be an object with a text 'kind', got {fields!r:.200}")
        if len(self._fds) < fds:
            raise invalid_message(f"{fds - len(self._fds)} file descriptors did not arrive. Raise ulimit -n")
        message = ControlMessage(kind, fields, bytes(buffer[_HEAD.size + text : end]), self._fds[:fds])
        del self._fds[:fds]
        del buffer[:end]
        return message


class ControlChannel:
    """End of the control socket. `send` blocks; `receive` blocks unless `wait` is False."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.inbox = MessageInbox()
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
        """Block until the kernel has all bytes. Raises UnsupportedStateError (payload too large), LaneLostError (peer
        has ended), DescriptorsClosedError (by user code)."""
        if len(payload) > MAX_PAYLOAD:
            raise UnsupportedStateError(f"a loader's state must have at most {MAX_PAYLOAD} bytes, got {len(payload)}")
        try:
            self._send(ControlMessage(kind, fields, payload, fds or []))
        except OSError as error:
            self._check_own()
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise LaneLostError("the process at the other end of the control socket has ended") from error
            raise

    def _send(self, message: ControlMessage) -> None:
        payload, head = message.payload, encode_head(message)
        if message.fds:
            sent = socket.send_fds(self.sock, [head, payload], message.fds)
        else:
            sent = self.sock.sendmsg([head, payload])
        if sent < len(head):
            self.sock.sendall(head[sent:])
        if sent < len(head) + len(payload):
            self.sock.sendall(memoryview(payload)[max(0, sent - len(head)) :])

    @property
    def unread(self) -> int:
        """Bytes of memory of sent messages that the peer has not read."""
        size = fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(size, sys.byteorder)

    def close(self) -> None:
        self.sock.close()
        self.inbox.close()

    def receive(self, wait: bool = True) -> ControlMessage | None:
        """Return the next message; None if none has arrived and `wait` is False. Raises LaneLostError (peer has ended),
        ProtocolError (invalid), DescriptorsClosedError."""
        while (message := self.inbox.take()) is None:
            try:
                data, fds = _receive(self.sock, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                self._check_own()
                raise LaneLostError(f"the control socket to the other process failed: {error}") from error
            if not data:
                for fd in fds:
                    os.close(fd)
                self._check_own()
                raise LaneLostError("the process at the other end of the control socket has ended")
            self.inbox.feed(data, fds)
        return message

    def peek(self) -> list[ControlMessage]:
        """Return messages that have arrived, up to the first with descriptors, and leave them in the socket. The caller
        closes its copies of the descriptors."""
        inbox, messages = MessageInbox(), []
        try:
            inbox.feed(*_receive(self.sock, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            while (message := inbox.take()) is not None:
                messages.append(message)
        except (OSError, ProtocolError):  # nothing, or the rest of a message that another process has begun to receive
            pass
        inbox.close()
        return messages


def payload_of(message: ControlMessage) -> bytes:
    """Return the payload, also if it is in a memfd that came with the message."""
    if not message.fds:
        return message.payload
    (fd,) = message.fds
    try:
        # Mapped and not read: other processes share the open file, and reading would move the offset for all of them.
        with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as memory:
            return memory[:]
    finally:
        os.close(fd)


def begin_slot(message: ControlMessage, role: str) -> records_pb2.WorkerAssignment:
    """Return the assignment, and name the process. Large arguments are in the memfd that came with it."""
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
    data, ancillary, _, _ = sock.recvmsg(1 << 18, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), flags)
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
