"""What a daemon and its children say to each other: JSON with a payload, over a Unix stream socket.

The children run user code, so nothing that they say is unpickled, sizes are bounded, and a child that talks nonsense
costs only itself its life. File descriptors travel in front of a message that announces them.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from penstock.proto.errors import LaneLostError, PenstockError, ProtocolError, format_remote

__all__ = ["Channel", "Inbox", "Message", "plain_detail"]

_HEAD = struct.Struct("<IQB")  # bytes of JSON, bytes of payload, descriptors that came along
MAX_JSON = 1 << 20
MAX_PAYLOAD = 16 << 30
MAX_FDS = 16


@dataclass
class Message:
    """One thing said. `fields` is plain JSON."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""
    fds: list[int] = field(default_factory=list)


def encode_head(message: Message) -> bytes:
    text = json.dumps({"kind": message.kind, **message.fields}).encode()
    return _HEAD.pack(len(text), len(message.payload), len(message.fds)) + text


class Inbox:
    """Puts messages together from whatever pieces arrive. Feed it bytes and descriptors, take messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: list[int]) -> None:
        self._buffer += data
        self._fds += fds

    def take(self) -> Message | None:
        """The next whole message, if there is one."""
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        text, payload, fds = _HEAD.unpack_from(buffer)
        if text > MAX_JSON or payload > MAX_PAYLOAD:
            raise ProtocolError(f"a control message of {text} + {payload} bytes")
        end = _HEAD.size + text + payload
        if len(buffer) < end:
            return None
        try:
            fields = json.loads(bytes(buffer[_HEAD.size : _HEAD.size + text]))
            kind = fields.pop("kind")
        except (ValueError, AttributeError, KeyError) as error:
            raise ProtocolError(f"a control message that cannot be read: {error}") from error
        message = Message(kind, fields, bytes(buffer[_HEAD.size + text : end]), self._fds[:fds])
        del self._fds[:fds]
        del buffer[:end]
        return message


class Channel:
    """One end of a blocking socket: sends block, receives wait or not as asked."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self._inbox = Inbox()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: str, payload: bytes = b"", fds: list[int] | None = None, **fields: Any) -> None:
        message = Message(kind, fields, payload, fds or [])
        head = encode_head(message)
        if message.fds:
            socket.send_fds(self.sock, [head], message.fds)
        else:
            self.sock.sendall(head)
        if payload:
            self.sock.sendall(payload)

    def receive(self, wait: bool = True) -> Message | None:
        """The next message; None if none is there and `wait` is off. LaneLostError when the other side is gone."""
        while (message := self._inbox.take()) is None:
            try:
                data, fds = _receive(self.sock, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise LaneLostError(f"the other end of the control socket is gone: {error}") from error
            if not data:
                for fd in fds:
                    os.close(fd)
                raise LaneLostError("the other end of the control socket is gone")
            self._inbox.feed(data, fds)
        return message


def _receive(sock: socket.socket, flags: int) -> tuple[bytes, list[int]]:
    """Like socket.recv_fds, which in Python 3.11 drops its flags."""
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(1 << 18, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), flags)
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return data, list(fds)


def plain_detail(error: Exception) -> dict[str, str]:
    """An error as it travels in a message; the fields of ErrorDetail."""
    if isinstance(error, PenstockError):
        return {"name": type(error).__name__, "message": error.message, "remote_traceback": error.remote_traceback}
    text = f"{type(error).__name__}: {error}"
    return {"name": "PenstockError", "message": text, "remote_traceback": format_remote(error)}
