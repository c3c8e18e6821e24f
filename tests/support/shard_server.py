"""A web server for a folder, with range requests, that does to them what servers and networks do.

`faults` says for a file what its next answers are; each is used once, unless it is said to stay. Requests are counted
by file. Threads of this process, on a free port.
"""

from __future__ import annotations

import email.utils
import gzip
import hashlib
import http.server
import os
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

__all__ = ["Fault", "ShardServer"]


@dataclass(frozen=True)
class Fault:
    """Fault of an answer."""

    status: int = 0
    """Answer with this status, and nothing else."""
    headers: tuple[tuple[str, str], ...] = ()
    """Sent with it."""
    cut_after: int = -1
    """Close the connection after so many bytes of the body."""
    reset_after: int = -1
    """Reset the connection after so many bytes of the body."""
    more: int = 0
    """So many bytes more are announced than the body has (fewer, if negative)."""
    silent_after: int = -1
    """Send nothing more after so many bytes, until the server closes."""
    flip: bool = False
    """The body's first byte is another."""
    bytes_per_s: int = 0
    """Slowly; 0 = not."""
    no_ranges: bool = False
    """The whole file, whatever was asked."""
    any_version: bool = False
    """What was asked, also of another version of the file than If-Range names."""
    stays: bool = False
    """True if the fault stays for all later requests."""
    then: Callable[[], object] | None = None
    """Called when the fault is done."""


class ShardServer:
    def __init__(self, folder: Path, *, validators: bool = True) -> None:
        self.folder = folder
        self.validators = validators
        """True if answers have an ETag."""
        self.compresses: Callable[[str], bool] = lambda accepted: False
        """Whether an answer is compressed, without length and ranges, as by nginx; by the request's Accept-Encoding."""
        self.requests: Counter[str] = Counter()
        """File -> requests that were answered, or not."""
        self.ranges: list[tuple[str, str]] = []
        """(file, Range header) of those that had one."""
        self.faults: dict[str, list[Fault]] = {}
        self.fault: Callable[[str], Fault | None] = lambda name: None
        """Asked for each request of a file without a fault of its own."""
        self.moving = threading.Semaphore(0)
        """Released when a fault has sent what it sends."""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ShardServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def next_fault(self, name: str, asked: str) -> Fault:
        """Count a request, and say what happens to it."""
        with self._lock:
            self.requests[name] += 1
            if asked:
                self.ranges.append((name, asked))
            waiting = self.faults.get(name)
            if waiting:
                return waiting[0] if waiting[0].stays else waiting.pop(0)
            return self.fault(name) or Fault()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    owner: ShardServer

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes is none of ours."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        owner = self.server.owner
        name = unquote(urlsplit(self.path).path).lstrip("/")
        asked = self.headers.get("Range", "")
        fault = owner.next_fault(name, asked) if body else Fault()
        file = owner.folder / name
        status = fault.status or (200 if file.is_file() else 404)
        if status != 200:
            self._head(status, 0, fault.headers)
            if fault.then:
                fault.then()
            return
        data = file.read_bytes()
        if owner.compresses(self.headers.get("Accept-Encoding", "gzip")):
            self._send_compressed(data if body else b"")
            return
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if fault.flip:
            data = bytes((data[0] ^ 1,)) + data[1:]
        written = email.utils.formatdate(file.stat().st_mtime, usegmt=True)
        headers = [("ETag", tag), ("Last-Modified", written)] if owner.validators else []
        start, end = 0, len(data)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        unchanged = fault.any_version or self.headers.get("If-Range", tag) == tag
        if found and unchanged and not fault.no_ranges:
            start = int(found[1])
            end = min(end, int(found[2]) + 1) if found[2] else end
            if start >= len(data):
                self._head(416, 0, ())
                return
            headers.append(("Content-Range", f"bytes {start}-{end - 1}/{len(data)}"))
            status = 206
        self._head(status, end - start + fault.more, headers)
        if body:
            self._send(data[start:end], fault)

    def _send_compressed(self, data: bytes) -> None:
        self.send_response(200)
        for key, value in (("Content-Encoding", "gzip"), ("ETag", 'W/"1"'), ("Transfer-Encoding", "chunked")):
            self.send_header(key, value)
        self.end_headers()
        if data:
            packed = gzip.compress(data, 1)
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(packed), packed))

    def _head(self, status: int, length: int, headers: Iterable[tuple[str, str]]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for key, value in headers:
            self.send_header(key, value)
        self.end_headers()

    def _send(self, data: bytes, fault: Fault) -> None:
        owner = self.server.owner
        stops = [at for at in (fault.cut_after, fault.silent_after, fault.reset_after) if at >= 0]
        stops += [len(data) + min(0, fault.more)] if fault.more else []
        data = data[: min(stops)] if stops else data
        if fault.bytes_per_s:
            step = max(1, fault.bytes_per_s // 20)
            for at in range(0, len(data), step):
                self.wfile.write(data[at : at + step])
                if owner.closing.wait(step / fault.bytes_per_s):
                    return
        else:
            self.wfile.write(data)
        if fault.then:
            fault.then()
        if stops:
            owner.moving.release()
            if fault.silent_after >= 0:
                owner.closing.wait(60)
            self.close_connection = True
            if fault.reset_after >= 0:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())
            else:
                self.connection.shutdown(2)
