"""Connecting to a host that may have fallen silent."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from penstock.proto.lane import dialer
from penstock.proto.lane.dialer import LaneDialer
from penstock.proto.lane.tcp import round_trip_s, unreachable_error


@pytest.fixture
def full() -> Iterator[tuple[str, int]]:
    """A listener that takes nobody: its queue is full, and the kernel drops what comes, as a lossy link does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, socket.socket() as first:
        first.connect(listener.getsockname())
        yield listener.getsockname()


def test_silent_host_gets_long_then_short_tries(full: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer, "SILENT_S", 100.0)
    dial = LaneDialer(None)
    with pytest.raises(TimeoutError, match="timed out") as patient:
        dial.connect(full)
    for _ in range(2):  # each of its lanes
        with pytest.raises(TimeoutError, match=r"no answer within 0\.45 s"):
            dial.connect(full)
    assert type(unreachable_error("x:1", patient.value)).__name__ == "DeadlineError"
    monkeypatch.setattr(dialer, "SILENT_S", -1.0)
    dial.fell_silent(full)
    with pytest.raises(TimeoutError, match="timed out"):
        dial.connect(full)


def test_short_try_finds_listening_and_refusing() -> None:
    dial = LaneDialer(None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = listener.getsockname()
        dial.fell_silent(where)
        with dial.connect(where) as found:
            assert found.getpeername() == where
            assert found.gettimeout() is None
            assert 0.0 <= round_trip_s(found) < 10.0
            dial.fell_silent(where, found)
    with pytest.raises(ConnectionRefusedError) as refused:
        dial.connect(where)
    assert type(unreachable_error("x:1", refused.value)).__name__ == "LaneLostError"
