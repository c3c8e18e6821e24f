"""A server that sends its readers on."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest
from shard_server import Fault, ShardServer

from penstock.data.remote.folders import RemoteFolder
from penstock.data.remote.redirects import is_nearer
from penstock.proto.errors import ShardUnavailableError


@pytest.mark.parametrize(
    ("source", "target", "nearer"),
    [
        ("1.1.1.1", "8.8.8.8", False),
        ("1.1.1.1", "10.0.0.7", True),
        ("1.1.1.1", "::ffff:127.0.0.1", True),
        ("10.0.0.7", "169.254.169.254", True),
        ("10.0.0.7", "0.0.0.0", True),
        ("2606:4700::1111", "fd00::1", True),
        ("fe80::1", "127.0.0.1", False),
    ],
)
def test_what_is_nearer(source: str, target: str, nearer: bool) -> None:
    assert is_nearer(ipaddress.ip_address(target), ipaddress.ip_address(source)) == nearer


def answers(server: ShardServer, location: str) -> None:
    """Answer every request for "moved" with a redirect."""
    server.faults["moved"] = [Fault(status=302, headers=(("Location", location),), stays=True)]


def read(url: str) -> bytes:
    place = RemoteFolder(url, tries=1)
    try:
        return place.read("moved", deadline_s=20)
    finally:
        place.close()


def test_redirect_to_a_nearer_host_is_refused(
    server: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.folder / "data").write_bytes(b"data")
    answers(server, "/data")
    assert read(server.url) == b"data"
    port = server.url.rpartition(":")[2].strip("/")
    answers(server, f"http://localhost:{port}/data")
    assert read(server.url) == b"data"  # as near as itself

    real = socket.getaddrinfo

    def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
        """Return an Internet address, used only by the check; no connection to it is made."""
        if host in ("127.0.0.1", b"127.0.0.1"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", 0))]
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    before = server.requests["data"]
    with pytest.raises(
        ShardUnavailableError,
        match=r"127\.0\.0\.1 must not redirect to localhost \((127.0.0.1|::1)\), an address on this machine",
    ):
        read(server.url)
    assert server.requests["data"] == before
