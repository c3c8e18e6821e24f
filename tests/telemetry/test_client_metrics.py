"""Server of a training job's own metrics, and the conditions under which it is not started."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from appliances import made

from penstock.client import metrics
from penstock.client.metrics import open_web
from penstock.proto.errors import AuthenticationError, InvalidArgumentError, UnsafeBindError


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a server, and none left behind."""
    monkeypatch.setattr(metrics, "_servers", {})
    yield
    for server in metrics._servers.values():
        server.close()


def free_ports() -> int:
    """The first of two that are free one after the other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def test_ranks_of_a_host_take_successive_ports() -> None:
    port = free_ports()
    url = open_web(f"127.0.0.1:{port}", 1, "", None)
    assert url == f"http://127.0.0.1:{port + 1}/metrics"
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert b'penstock_build_info{process="client"' in answer.read()


def test_a_process_has_one_server() -> None:
    url = open_web("127.0.0.1:0", 3, "", None)
    assert open_web("127.0.0.1:0", 3, "", None) == url
    with pytest.raises(InvalidArgumentError, match=r"this process serves its metrics, got .127\.0\.0\.1:9400"):
        open_web("127.0.0.1:9400", 3, "", None)


def test_remote_access_needs_tls_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthenticationError, match="no token for the role admin"):
        made("127.0.0.1:1", job="j", http="0.0.0.0:0", token="client:abc")
    with pytest.raises(UnsafeBindError, match=r"or set PENSTOCK_TLS_CERT and PENSTOCK_TLS_KEY"):
        made("127.0.0.1:1", job="j", http="0.0.0.0:0", token="admin:abc")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidArgumentError, match="penstock\\[metrics\\]"):
        made("127.0.0.1:1", job="j", http="127.0.0.1:0", token="abc")
