"""Addresses: what they look like, who can reach them, and whether two processes are on one host.

An address is "host:port" or "unix-abstract:name". Abstract names leave no file behind, but belong to a network
namespace (see `host_id`), and any user in it can connect: the token protects a coordinator that listens on one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

from penstock.proto.errors import InvalidArgumentError, UnsafeBindError

__all__ = ["check_address", "host_id", "is_local", "refuse_unsafe"]


def check_address(address: str) -> None:
    """Raises InvalidArgumentError for what is no address."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix-abstract" and rest:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgumentError(f'the address {address!r} is neither "host:port" nor "unix-abstract:name"')


def is_local(address: str) -> bool:
    """True for an address that only this machine can reach."""
    if address.startswith("unix-abstract:"):
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
