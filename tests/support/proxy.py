"""A TCP proxy that does to connections what networks do: cut them, fall silent in one direction or both, be slow, and
damage what passes, with TCP's checksum mended as a bad switch does.

A pair of threads for each connection. Bytes that a silent direction holds back are not lost: when it speaks again they
come, as TCP would send them again after a partition.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

from penstock.client.stream.open_run import OpenRun
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["Proxy", "dial_through", "proxied_lanes"]

PIECE = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class Proxy:
    """Listens on a free port and forwards to `target`, "host:port"."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = {"up": threading.Event(), "down": threading.Event()}
        """Events that are set while bytes pass, by direction; "up" is towards the target."""
        for gate in self._open.values():
            gate.set()
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        """0 = unlimited."""
        self.cut_after = 0
        """Bytes downwards after which a connection is cut, wherever in a frame that may be; 0 = never."""
        self.damage: Callable[[str, int, bytes], bytes] | None = None
        """(direction, bytes passed in it on this connection so far, the next ones) -> what arrives instead, as long."""
        self.connections = 0
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def silence(self, *directions: str) -> None:
        """Pass nothing on in these directions from now on, without closing a connection."""
        for direction in directions or ("up", "down"):
            self._open[direction].clear()

    def heal(self) -> None:
        """All passes again."""
        for gate in self._open.values():
            gate.set()

    def cut(self) -> None:
        """Reset all connections; new ones are taken."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for sock in pair:
                self._reset(sock)

    @staticmethod
    def _reset(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
        sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._open["up"].wait()
        try:
            far = socket.create_connection(self._target, 10)
        except OSError:
            self._reset(near)
            return
        far.settimeout(None)
        with self._lock:
            if self._closed:
                near.close()
                far.close()
                return
            self.connections += 1
            self._pairs.add((near, far))
        up = threading.Thread(target=self._forward, args=(near, far, "up"), daemon=True)
        up.start()
        self._forward(far, near, "down")
        up.join()
        near.close()
        far.close()
        with self._lock:
            self._pairs.discard((near, far))

    def _forward(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        passed = 0
        try:
            while data := source.recv(PIECE):
                self._open[direction].wait()
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.bytes_per_s:
                    time.sleep(len(data) / self.bytes_per_s)
                if self.damage is not None:
                    data = self.damage(direction, passed, data)
                passed += len(data)
                if direction == "down" and self.cut_after and passed >= self.cut_after:
                    sink.sendall(data[: len(data) - (passed - self.cut_after)])
                    raise ConnectionResetError
                sink.sendall(data)
            self._open[direction].wait()
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._reset(source)
            self._reset(sink)

    def close(self) -> None:
        self._closed = True
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(5)
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def dial_through(proxies: dict[str, Proxy]) -> Any:
    """Return what opens TCP lanes in place of OpenRun.dial: through proxies, one for each worker, by its address."""
    dial = OpenRun.dial

    def through(self: OpenRun, view: pb.SlotView, hello: Any) -> Any:
        if view.tcp_address not in proxies:
            proxies[view.tcp_address] = Proxy(view.tcp_address)
        other = pb.SlotView()
        other.CopyFrom(view)
        other.tcp_address = proxies[view.tcp_address].address
        return dial(self, other, hello)

    return through


@contextlib.contextmanager
def proxied_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Proxy]]]:
    """Route TCP lanes that this process opens through proxies, one for each worker. Yields what returns them."""
    proxies: dict[str, Proxy] = {}
    monkeypatch.setattr(OpenRun, "dial", dial_through(proxies))
    yield lambda: list(proxies.values())
    for proxy in proxies.values():
        proxy.close()
