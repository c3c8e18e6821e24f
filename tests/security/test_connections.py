"""Connections that make no call cannot keep others out: they are limited, and end soon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cluster import TOKEN, start_daemon

from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.tls import host_of

FILES = 128
"""Descriptors that the coordinator may have, about 50 of which it needs itself."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Bytes that open an HTTP/2 connection, which then may stay silent for any time."""


@pytest.mark.parametrize("hello", [b"", HTTP2])
def test_silent_connections_stop_nobody(tmp_path: Path, hello: bytes) -> None:
    """Neither the fleet that is there, nor for long those who come: more connections than it may have are closed, and
    all that make no call within 10 s."""
    few = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh"]
    with ExitStack() as held, (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "PENSTOCK_TOKEN": TOKEN}
        listen = ["--listen", "127.0.0.1:0"]
        process, address = start_daemon("penstock.appliance", listen, environment, before=few, stderr=log.fileno())
        held.callback(lambda: (process.kill(), process.wait(20)))
        there, comes = (held.enter_context(CoordinatorClient(address, TOKEN, insecure=True)) for _ in range(2))
        assert there.status().version
        for _ in range(FILES):
            peer = held.enter_context(socket.create_connection(host_of(address), timeout=20))
            with suppress(OSError):  # it may have been ended already
                peer.sendall(hello)
        assert there.status().version
        assert comes.reach(20)
        assert comes.status().version
    assert "Too many open files" not in (tmp_path / "log").read_text()


def test_soft_file_limit_is_raised_to_hard_one() -> None:
    code = (
        "import resource; from penstock.runtime.process.open_files import raise_file_limit; "
        "raise_file_limit(); raise_file_limit(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["sh", "-c", 'ulimit -n 300; ulimit -Sn 200; exec "$@"', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "300 300\n"
