"""Addresses of servers, "host:port" or "unix:/path": who can reach them, and whether two processes share a host.

The path is that of a socket in a private folder of its user: any user of the network namespace could bind an abstract
name first and pose as a coordinator."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from penstock.proto.errors import InvalidArgumentError, TlsError, UnsafeBindError

UNIX = "unix:"


def check_address(address: str) -> None:
    if (path := socket_path(address)) is not None and path.is_absolute():
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(f'the coordinator\'s address must be "host:port" or "unix:/path", got {address!r}')


def socket_path(address: str) -> Path | None:
    return Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None


def grpc_target(address: str) -> str:
    """Return the address for gRPC, which takes a Unix socket's as a URI: unquoted it would leave out what follows a #
    or a question mark, and connect elsewhere."""
    path = socket_path(address)
    return address if path is None else f"{UNIX}{quote(os.fsencode(path))}"


def refuse_strangers(address: str) -> None:
    """Raise InvalidArgumentError for an invalid address, and UnsafeBindError for a Unix socket that another user made
    or could replace, now or later."""
    check_address(address)
    path = socket_path(address)
    if path is None:
        return
    trusted = (os.geteuid(), 0)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.parent.stat()  # a loop of links is an error here
        for above in _way_to(path.parent):
            try:
                status = above.lstat()
            except FileNotFoundError:
                if above.parent.stat().st_mode & 0o022:  # a sticky bit does not help: it keeps what is there
                    raise UnsafeBindError(
                        f"{above} is not there, and other users could make it, and pose as the coordinator: choose "
                        "another folder"
                    ) from None
                return
            is_open = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX and not stat.S_ISLNK(status.st_mode)
            if is_open or status.st_uid not in trusted:
                raise UnsafeBindError(
                    f"other users can replace what is in {above}, and pose as the coordinator: choose another folder"
                )
        folder = path.parent.stat()
        if folder.st_uid not in trusted or stat.S_IMODE(folder.st_mode) & 0o022:
            raise UnsafeBindError(
                f"other users can write to {path.parent}, and could pose as the coordinator: choose your own folder"
            )
        if path.lstat().st_uid not in trusted:
            raise UnsafeBindError(f"{path} belongs to another user, who could pose as the coordinator: choose another")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UnsafeBindError(
            f"{path} cannot be reached: {error.strerror}. Run as the owner of its folder; other users need TLS"
        ) from None


def _way_to(folder: Path) -> Iterator[Path]:
    """Yield the folders and links by which the system comes to an absolute path."""
    left, here = list(folder.parts[1:]), Path(folder.anchor)
    yield here
    while left:
        step = left.pop(0)
        here = here.parent if step == ".." else here / step
        yield here
        if here.is_symlink():
            target = here.readlink()  # a loop was an error before
            left = [*target.parts[1 if target.is_absolute() else 0 :], *left]
            here = Path(target.anchor) if target.is_absolute() else here.parent


def is_local(address: str) -> bool:
    path = socket_path(address)
    if path is not None and path.is_absolute():  # "unix:7071" is a port of a machine that is called unix
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback() -> str:
    """Return this machine's own host for "host:port": 127.0.0.1, or [::1] where there is only IPv6."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        if socket.has_ipv6:
            return "[::1]"
    return "127.0.0.1"


def refuse_unsafe(listen: str, *, encrypted: bool, insecure: bool) -> None:
    """Raise UnsafeBindError if others can reach the address without encryption. `insecure`: the user allows it."""
    if encrypted or insecure or is_local(listen):
        return
    raise UnsafeBindError(
        f"{listen} can be reached from other machines without encryption: listen on 127.0.0.1, or pass --credentials, "
        "or --tls-cert and --tls-key, or --insecure on a network that you trust"
    )


def refuse_clear_token(address: str, *, encrypted: bool, insecure: bool) -> None:
    """Raise TlsError if a token sent to the coordinator could be read or taken by others: in clear text over TCP, also
    on this machine, where another process may listen after the coordinator. `insecure`: the caller allows it."""
    if encrypted or insecure or socket_path(address) is not None:
        return
    raise TlsError(
        f"the token would be sent to {address} in clear text: use a Unix socket (unix:/path, as `penstock up` does) or "
        "TLS (--tls-ca, PENSTOCK_TLS_CA), or allow it by --insecure (PENSTOCK_INSECURE=true) where you trust the "
        "network and its machines"
    )


def host_id() -> str:
    """Return an id that two processes share exactly if each can reach the other's abstract Unix sockets: kernel and
    network namespace. (Containers of one pod may have two hostnames and one network; others the reverse.)"""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return f"{socket.gethostname()}:unknown"
    return f"{boot}:{network}"
