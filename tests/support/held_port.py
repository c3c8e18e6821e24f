"""A free port of loopback that nobody else is given, while a server that uses it is down."""

from __future__ import annotations

import socket

__all__ = ["HeldPort"]


class HeldPort:
    """Bound and never listening, with SO_REUSEADDR: a server that sets that too, as all do, can listen on it."""

    def __init__(self) -> None:
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind(("127.0.0.1", 0))
        self.number = int(self._sock.getsockname()[1])

    def close(self) -> None:
        self._sock.close()
