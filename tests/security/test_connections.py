"""Connections that make no call cannot keep others out: they are limited, and end soon."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from cluster import TOKEN
from waiting import until

from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError
from penstock.proto.rpc.calls import CoordinatorClient

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


@pytest.mark.parametrize("hello", [b"", HTTP2])
def test_silent_connections_stop_nobody(tmp_path: Path, hello: bytes) -> None:
    """Neither the fleet that is there, nor for long those who come: more connections than it may have are closed, and
    all that make no call within 10 s."""
    with coordinator(tmp_path) as address, ExitStack() as held:
        host, _, port = address.rpartition(":")
        with (
            CoordinatorClient(address, TOKEN, insecure=True) as there,
            CoordinatorClient(address, TOKEN, insecure=True) as comes,
        ):
            assert there.status().version
            for _ in range(FILES):
                peer = held.enter_context(socket.create_connection((host, int(port)), timeout=20))
                with suppress(OSError):  # it may have been ended already
                    peer.sendall(hello)
            assert there.status().version
            until(lambda: answered(comes), 20)
    assert "Too many open files" not in (tmp_path / "log").read_text()


def test_soft_file_limit_is_raised_to_hard_one() -> None:
    code = (
        "import resource; from penstock.runtime.process.open_files import raise_file_limit; "
        "raise_file_limit(); raise_file_limit(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["sh", "-c", 'ulimit -n 300; ulimit -Sn 200; exec "$@"', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "300 300\n"
