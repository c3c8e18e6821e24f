"""TLS over a lane's TCP connection, with the interface of the plain socket that sender and receiver use.

Unlike Python's SSLSocket, `TlsSocket` raises BlockingIOError as sockets do, has `sendmsg` and `recvmsg_into`, and keeps
bytes that OpenSSL has not finished to send first in the next call, as OpenSSL requires, so the caller may pass them in
other pieces. `shutdown` ends only the TCP directions that it names: data can still be read after SHUT_WR.

One receive returns at most a record of 16 KiB. What did not fit stays inside OpenSSL, where poll does not see it;
`pending` returns its size. Small buffers are sent together, because each record costs 22 bytes and a call of the
cipher. A missing closing message of TLS is no error: lanes have frames for their end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

from penstock.proto.errors import BatchCorruptError, TlsError
from penstock.proto.rpc.tls import Tls, WrappedSocket, is_damage


def check_damage(error: OSError, *, heard: bool) -> None:
    """Raise BatchCorruptError for damage in transit: any error once data had arrived (`heard`), except an end."""
    ended = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError)
    if is_damage(error) or (heard and isinstance(error, ssl.SSLError) and not ended):
        raise BatchCorruptError(f"data of a TLS connection was damaged: {error}. Check both machines") from error


JOINED = 16 << 10
"""Bytes up to which small buffers are sent together: one TLS record."""
AT_ONCE = 256 << 10
"""Largest number of bytes for one call of OpenSSL, which makes several records of them."""
PEEKED = 3
"""First bytes that distinguish TLS from a Hello: a handshake begins with 22, 3 and a third byte >= 1. A Hello begins
with its length; if its first two bytes are 22 and 3, the third is 0."""


class TlsSocket(WrappedSocket):
    """TLS socket of a lane. An SSLContext creates it as its `sslsocket_class`."""

    _held: bytes | memoryview | None = None
    """Bytes that OpenSSL has begun to send and has not finished."""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recvmsg_into(  # type: ignore[override]  # Python has left it out
        self, buffers: Iterable[Any], *_: Any
    ) -> tuple[int, list[Any], int, Any]:
        """Receive into the first buffer only. Further bytes stay for the next call."""
        return self.recv_into(next(iter(buffers))), [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:  # type: ignore[override]  # and this one
        chunk = self._held
        if chunk is None:
            chunk = _first_of(buffers)
        try:
            sent = super().send(chunk)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._held = chunk
            raise BlockingIOError from None
        self._held = None
        return sent

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self, how)


def _first_of(buffers: Iterable[Any]) -> bytes | memoryview:
    """Bytes to send next: a part of a large buffer, or several small buffers joined."""
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        if not joined and len(view) > JOINED:
            return view[:AT_ONCE]
        joined += view[: JOINED - len(joined)]
        if len(joined) == JOINED:
            break
    return bytes(joined)


def _wrapped(context: ssl.SSLContext, sock: socket.socket, **options: Any) -> TlsSocket:
    context.sslsocket_class = TlsSocket
    wrapped = context.wrap_socket(sock, do_handshake_on_connect=False, **options)
    assert isinstance(wrapped, TlsSocket)
    return wrapped


def connect_tls(sock: socket.socket, tls: Tls, host: str) -> TlsSocket:
    """Start TLS. The timeout applies to each message. On an OSError (for `tls.explain`) the socket is closed."""
    wrapped = _wrapped(tls.client_context(), sock, server_hostname=tls.expected("worker") or host)
    try:
        wrapped.do_handshake()
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def looks_like_tls(first: bytes) -> bool:
    """True if the first PEEKED bytes of a connection begin a TLS handshake and not a Hello."""
    return first[:2] == b"\x16\x03" and first[2] > 0


async def accept_tls(sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """Start TLS on an accepted non-blocking connection; the caller sets a deadline. Raises TlsError, or OSError if the
    connection is lost in another way, after closing the socket."""
    wrapped = _wrapped(context, sock, server_side=True)
    try:
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                await when_readable(wrapped)
            except ssl.SSLWantWriteError:
                await _when_writable(wrapped)
    except ssl.SSLError as error:
        wrapped.close()
        raise TlsError(
            f"the TLS handshake of a lane failed ({error.reason or error}). Check the TLS files at both ends"
        ) from error
    except BaseException:
        wrapped.close()
        raise


async def when_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _when(sock, loop.add_reader, loop.remove_reader)


async def _when_writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await _when(sock, loop.add_writer, loop.remove_writer)


async def _when(sock: socket.socket, add: Callable[..., None], remove: Callable[..., Any]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fd = sock.fileno()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)
