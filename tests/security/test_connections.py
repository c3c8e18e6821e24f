"""Connections that show no token cannot keep others out: they end soon, and those of the greediest address first."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from cluster import TOKEN
from served import TOKEN as SERVED_TOKEN
from served import coordinator as served
from waiting import until

from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError
from penstock.proto.rpc import connection_limits
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.connection_limits import Connection, surplus

FILES = 128
"""Descriptors that the coordinator may have, about 50 of which it needs itself."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Bytes that open an HTTP/2 connection, which then may stay silent for any time."""


@contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """A process with few descriptors; its log is `log` in the folder."""
    command = [sys.executable, "-m", "penstock.appliance", "--listen", "127.0.0.1:0"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", *command],
            env={"PENSTOCK_TOKEN": TOKEN, "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as running,
    ):
        assert running.stdout is not None
        try:
            yield running.stdout.readline().strip()
        finally:
            running.terminate()


def answered(client: CoordinatorClient) -> bool:
    try:
        return bool(client.status().version)
    except (CoordinatorUnavailableError, DeadlineError):
        return False


def test_silent_connections_stop_nobody(tmp_path: Path) -> None:
    with coordinator(tmp_path) as address, ExitStack() as held:
        host, _, port = address.rpartition(":")
        for _ in range(FILES):
            peer = held.enter_context(socket.create_connection((host, int(port)), timeout=20))
            with suppress(OSError):  # it may have been ended already
                peer.sendall(HTTP2)
        with CoordinatorClient(address, TOKEN) as client:
            until(lambda: answered(client), 60)
    log = (tmp_path / "log").read_text()
    assert "closed connections without a valid token, silent or too many: " in log
    assert " of 127.0.0.1" in log


def test_silent_peers_are_ended_and_others_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with served() as address, AsyncCoordinatorClient(address, SERVED_TOKEN) as client:
            await client.status()
            host, _, port = address.rpartition(":")
            monkeypatch.setattr(connection_limits, "DEADLINE_S", 0.0)  # only now: the client was new, too
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(HTTP2)
            async with asyncio.timeout(20):
                await reader.read()  # its end
            writer.close()
            await client.status()

    with caplog.at_level(logging.WARNING, "penstock.connections"):
        asyncio.run(run())
    assert [one.getMessage() for one in caplog.records if one.name == "penstock.connections"] == [
        "closed connections without a valid token, silent or too many: 1 of 127.0.0.1"
    ]


def test_soft_file_limit_is_raised_to_hard_one() -> None:
    code = (
        "import resource; from penstock.proto.rpc.connection_limits import raise_file_limit; "
        "raise_file_limit(); raise_file_limit(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["sh", "-c", 'ulimit -n 300; ulimit -Sn 200; exec "$@"', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "300 300\n"


def _from(address: str, count: int, since: float = 0.0) -> list[Connection]:
    return [Connection(f"{address}-{n}", (address, n), since + n / 1000, n) for n in range(count)]


def test_greediest_address_loses_its_oldest_first() -> None:
    many, few = _from("10.0.0.1", 90, since=5.0), _from("10.0.0.2", 20)
    assert surplus([*many, *few], set(), 10.0, 110) == []
    assert surplus([*few, *many], set(), 10.0, 100) == many[:10]
    ended = surplus([*many, *few], set(), 10.0, 30)
    assert sorted(one.peer[0] for one in ended) == ["10.0.0.1"] * 75 + ["10.0.0.2"] * 5
    assert {*ended} == {*many[:75], *few[:5]}
    assert len(surplus([*many, *few], set(), 10.0, 0)) == 110


def test_only_who_made_no_call_has_a_deadline() -> None:
    first, second, third = _from("10.0.0.1", 3)
    silent = {first.peer, second.peer}
    assert surplus([third, second, first], silent, connection_limits.DEADLINE_S, 9) == []
    assert surplus([third, second, first], silent, connection_limits.DEADLINE_S + 0.0005, 9) == [first]
    assert surplus([third, second, first], silent, connection_limits.DEADLINE_S + 9, 9) == [first, second]


def test_peers_are_those_that_the_kernel_names() -> None:
    said = ("ipv6:%5B::ffff:10.0.0.1%5D:5000", "ipv6:%5Bfe80::1%25eth0%5D:5000", "unix:/a/b:5")
    assert [connection_limits._peer_of(one) for one in said] == [("10.0.0.1", 5000), ("fe80::1", 5000), None]
