"""Server of a training job's own metrics, and the conditions under which it is not started."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from penstock.client import Appliance, metrics
from penstock.client.metrics import open_web
from penstock.client.stream import open_streams
from penstock.client.stream.open_streams import SaveCounters
from penstock.proto.errors import AuthenticationError, InvalidArgumentError, PortTakenError, UnsafeBindError


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


def test_port_in_use_error_names_rule_for_ranks() -> None:
    port = free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        with pytest.raises(PortTakenError, match=rf"port {port + 1} of 127\.0\.0\.1 is in use.*PORT \+ LOCAL_RANK"):
            open_web(f"127.0.0.1:{port}", 1, "", None)


def test_a_process_has_one_server() -> None:
    url = open_web("127.0.0.1:0", 3, "", None)
    assert open_web("127.0.0.1:0", 3, "", None) == url
    with pytest.raises(InvalidArgumentError, match=r"this process serves its metrics, got .127\.0\.0\.1:9400"):
        open_web("127.0.0.1:9400", 3, "", None)


def test_remote_access_needs_tls_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthenticationError, match="no token for the role admin"):
        Appliance("127.0.0.1:1", job="j", http="0.0.0.0:0", token="client:abc")
    with pytest.raises(UnsafeBindError, match=r"or pass tls_cert and tls_key"):
        Appliance("127.0.0.1:1", job="j", http="0.0.0.0:0", token="admin:abc")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidArgumentError, match="penstock\\[metrics\\]"):
        Appliance("127.0.0.1:1", job="j", http="127.0.0.1:0", token="abc")


def test_saves_are_counted_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_streams, "saves", SaveCounters())
    open_streams.saves.begun()
    open_streams.saves.begun()
    open_streams.saves.stalled(0.25)
    open_streams.saves.ended(10, 2.0, 1000, ok=True)
    open_streams.saves.ended(20, 3.0, 5, ok=False)
    (found,) = [f for f in metrics.collector().collect() if f.name == "penstock_checkpoint_saves"]
    assert {sample.labels["status"]: sample.value for sample in found.samples} == {"ok": 1, "error": 1}
    saves = open_streams.saves
    assert (saves.in_flight, saves.last_step, saves.last_write_s, saves.written_bytes) == (0, 10, 2.0, 1005)
