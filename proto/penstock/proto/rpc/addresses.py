"""Addresses: what they look like, who can reach them, and whether two processes are on one host.

An address is "host:port" or "unix:/path", a socket in a folder that is its user's alone. (An abstract name would leave
no file behind; but any user of the network namespace could take it first, and be taken for a coordinator.)
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

from penstock.proto.errors import InvalidArgumentError, UnsafeBindError

__all__ = ["check_address", "host_id", "is_local", "refuse_strangers", "refuse_unsafe", "socket_path"]

UNIX = "unix:"


def check_address(address: str) -> None:
    """Raises InvalidArgumentError for what is no address."""
    if (path := socket_path(address)) is not None and path.is_absolute():
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(f'the address {address!r} is neither "host:port" nor "unix:/path"')


def socket_path(address: str) -> Path | None:
    """The socket of "unix:/path"; None for another address."""
    return Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None


def refuse_strangers(address: str) -> None:
    """Raises UnsafeBindError for a Unix socket that another user made, or could replace.

    One that is not there yet is not refused; its folder is looked at nevertheless.
    """
    path = socket_path(address)
    if path is None:
        return
    ours = (os.geteuid(), 0)
    try:
        folder = path.parent.stat()
        if folder.st_uid not in ours or stat.S_IMODE(folder.st_mode) & 0o022:
            raise UnsafeBindError(
                f"{path.parent} must be a folder of this user that no other can write to, for who can could answer in "
                f"the coordinator's place: chmod 700 {path.parent}, or choose another"
            )
        if path.lstat().st_uid not in ours:
            raise UnsafeBindError(f"{path} belongs to another user, who could answer in the coordinator's place")
    except FileNotFoundError:
        return


def is_local(address: str) -> bool:
    """True for an address that only this machine can reach."""
    if socket_path(address) is not None:
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_unsafe(listen: str, *, encrypted: bool, insecure: bool) -> None:
    """Raises UnsafeBindError for an address that others can reach, if what is said there could be read by others."""
    if encrypted or insecure or is_local(listen):
        return
    raise UnsafeBindError(
        f"{listen} can be reached from other machines, and without TLS token and data would cross the network in clear "
        "text: listen on 127.0.0.1, give --tls-cert and --tls-key, or say --insecure on a network that you trust"
    )


def host_id() -> str:
    """Equal in two processes exactly when an abstract Unix socket of one can be reached from the other.

    That is the same boot of the same kernel and the same network namespace; hostnames say neither (two containers of
    one pod have one network and may have two names, two containers of one machine the other way round).
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return f"{socket.gethostname()}:unknown"
    return f"{boot}:{network}"
