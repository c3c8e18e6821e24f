"""A server that sends its readers on."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest
from shard_server import Fault, ShardServer

from penstock.data.remote.folders import RemoteFolder
from penstock.data.remote.redirects import RedirectLimit, is_nearer
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
        ("127.0.0.1", "169.254.169.254", True),
        ("10.0.0.7", "100.100.100.200", True),
        ("fd00::1", "fd00:ec2::254", True),
        ("1.1.1.1", "64:ff9b::8.8.8.8", False),
        ("1.1.1.1", "64:ff9b::10.0.0.7", True),
        ("10.0.0.7", "2002:a9fe:a9fe::1", True),
        ("1.1.1.1", "fec0::1", True),
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


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What each name resolves to: one address after the other, and the last one from then on."""
    found: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def resolved(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host not in found:
            return real(host, port, *arguments, **options)
        address = found[host].pop(0) if len(found[host]) > 1 else found[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return found


def test_redirects_that_are_followed(server: ShardServer, names: dict[str, list[str]]) -> None:
    (server.folder / "data").write_bytes(b"data")
    names["hub.test"] = ["127.0.0.1"]
    port = server.url.rpartition(":")[2]
    for location in ("/data", f"http://localhost:{port}/data", f"{server.url}/data"):
        answers(server, location)
        assert read(server.url) == b"data"
        assert read(f"http://hub.test:{port}") == b"data"


@pytest.mark.parametrize("target", ["169.254.169.254", "moved.test", "hub.test", "xn--bcher-kva.test"])
def test_redirect_to_a_nearer_address_is_refused(target: str, server: ShardServer, names: dict[str, list[str]]) -> None:
    """Also to one that the server's own name resolves to when it is resolved again, for another port."""
    port = server.url.rpartition(":")[2]
    names["hub.test"] = ["127.0.0.1", "169.254.169.254"]
    names["moved.test"] = names["xn--bcher-kva.test"] = ["100.100.100.200"]
    answers(server, f"http://{target}:1/data")
    with pytest.raises(
        ShardUnavailableError, match=r"hub\.test must not .* an address where clouds hand out credentials"
    ):
        read(f"http://hub.test:{port}")


def test_the_addresses_that_are_checked_are_those_that_are_connected_to(names: dict[str, list[str]]) -> None:
    limit = RedirectLimit("hub.test")
    limit.check("hub.test", [ipaddress.ip_address("1.1.1.1")])
    with pytest.raises(ShardUnavailableError, match=r"redirect to other\.test, to 10\.0\.0\.7"):
        limit.check("other.test", [ipaddress.ip_address("10.0.0.7")])
    with pytest.raises(
        ShardUnavailableError, match=r"resolve to 10\.0\.0\.7, an address on this machine or its private"
    ):
        limit.check("hub.test", [ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("10.0.0.7")])


def test_a_proxy_decides(server: ShardServer, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be nearer than the server, and no other name is resolved here."""
    (server.folder / "moved").write_bytes(b"data")
    names["proxy.test"] = ["127.0.0.1"]
    monkeypatch.setenv("http_proxy", f"http://proxy.test:{server.url.rpartition(':')[2]}")
    place = RemoteFolder("http://hub.invalid", {"client_kwargs": {"trust_env": True}}, tries=1)
    assert place.read("moved", deadline_s=20) == b"data"
    place.close()
