"""The coordinator as a process: how it starts, how it ends, and what a kill -9 leaves behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreters
import pytest
from cluster import Daemon

from penstock.proto.errors import CoordinatorUnavailableError, SupersededError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

TOKEN = "token"
DEADLINE_S = 60.0


def line_from(fd: int) -> str:
    """Read from the pipe until it is closed."""
    read = b""
    while select.select([fd], [], [], DEADLINE_S)[0]:
        piece = os.read(fd, 4096)
        if not piece:
            return read.decode()
        read += piece
    raise AssertionError(f"nothing more came within {DEADLINE_S} s after {read!r}")


class Coordinator:
    """python -m penstock.appliance."""

    def __init__(self, *arguments: str, token: str = TOKEN, listen: str = "127.0.0.1:0", own: bool = False) -> None:
        """`own`: not forked, but with an interpreter of its own."""
        reading, writing = os.pipe()
        module, arguments = "penstock.appliance", ("--listen", listen, *arguments)
        environment = {**os.environ, "PENSTOCK_TOKEN": token}
        self.process: Daemon
        if own:
            command = [sys.executable, "-m", module, *arguments, "--ready-fd", str(writing)]
            self.process = subprocess.Popen(command, pass_fds=[writing], env=environment, stderr=subprocess.PIPE)
        else:
            name = f"{module}.__main__"
            self.process = interpreters.start(
                name, arguments, environment, imports=[], torch=False, ready=writing, stderr=subprocess.PIPE
            )
        os.close(writing)
        self.address = line_from(reading).strip()
        os.close(reading)

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(self.address, TOKEN)

    def said(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def kill(self, how: int = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def started() -> Iterator[list[Coordinator]]:
    """Coordinators put here are gone after the test."""
    coordinators: list[Coordinator] = []
    yield coordinators
    for coordinator in coordinators:
        coordinator.close()


def start(started: list[Coordinator], *arguments: str, **options: Any) -> Coordinator:
    started.append(Coordinator(*arguments, **options))
    return started[-1]


def opening(**fields: object) -> pb.OpenRunRequest:
    request = pb.OpenRunRequest(job="job", num_boxes=1, num_workers_per_box=1, client_id="c", host_id="host-a")
    request.loader.input_fn = "m:f"
    request.MergeFrom(pb.OpenRunRequest(**fields))  # type: ignore[arg-type]
    return request


def test_start_hides_the_token(started: list[Coordinator]) -> None:
    process = Path(f"/proc/{start(started, token='a-very-secret-token', own=True).process.pid}")
    assert b"a-very-secret" not in (process / "cmdline").read_bytes()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_answers_long_polls(started: list[Coordinator], how: signal.Signals) -> None:
    coordinator = start(started)
    replies: list[pb.WatchRunReply] = []
    with coordinator.client() as client:
        client.open_run(opening())
        watch = pb.WatchRunRequest(run="job/0", attempt=1, client_id="c", hold_s=30)
        watch.seen_version = client.watch_run(watch).version
        held = threading.Thread(target=lambda: replies.append(client.watch_run(watch)))
        held.start()
        for _ in range(20):  # calls are taken in order on one connection, so the poll is there by then
            client.status()
        assert coordinator.kill(how) == 0
        held.join(DEADLINE_S)
        with pytest.raises(CoordinatorUnavailableError, match=coordinator.address):
            client.status()
    assert [reply.version for reply in replies] == [watch.seen_version]


def test_what_was_acknowledged_survives_kill_9(started: list[Coordinator], tmp_path: Path) -> None:
    arguments = ["--state-dir", str(tmp_path / "state")]
    first = start(started, *arguments)
    acknowledged: list[str] = []
    enough = threading.Event()

    def open_runs(client: CoordinatorClient) -> None:
        """Make calls one after the other, until the coordinator dies during one."""
        with contextlib.suppress(CoordinatorUnavailableError):
            while True:
                acknowledged.append(client.open_run(opening(job=f"other-{len(acknowledged)}")).run)
                if len(acknowledged) == 20:
                    enough.set()

    with first.client() as client:
        old = client.open_run(opening())
        blob = client.put_blob(b"b" * 2_000_000, "job/0")
        new = client.open_run(opening(client_id="new"))
        assert (old.attempt, new.attempt, new.seed) == (1, 2, old.seed)
        opener = threading.Thread(target=open_runs, args=(client,))
        opener.start()
        assert enough.wait(DEADLINE_S)
        first.kill()
        opener.join(DEADLINE_S)
    second = start(started, *arguments, listen=first.address)
    assert second.address == first.address
    with second.client() as client:
        assert client.open_run(opening(client_id="new")) == new
        with pytest.raises(SupersededError, match="superseded by attempt 2"):
            client.open_run(opening())
        assert client.get_blob(blob) == b"b" * 2_000_000
        known = {run.run for run in client.status().runs}
        assert {"job/0", *acknowledged} <= known
        assert len(known) <= len(acknowledged) + 2  # the one under way may have been written and not told
        assert client.open_run(opening(client_id="third")).attempt == 3


def test_coordinator_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that starts a coordinator with a parent watch, tells us about it, and is killed."""
    parent = (
        "import os, subprocess, sys, time\n"
        "r, w = os.pipe()\n"
        "command = [sys.executable, '-m', 'penstock.appliance', '--parent-pid', str(os.getpid())]\n"
        "command += ['--ready-fd', str(w)]\n"
        "child = subprocess.Popen(command, pass_fds=[w])\n"
        "address = os.read(r, 1000).decode().strip()\n"
        "os.kill(child.pid, 2)\n"  # Ctrl-C reaches the group: with a parent watch it is the parent's business
        "print(child.pid, address, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PENSTOCK_TOKEN": TOKEN}
    with subprocess.Popen(
        [sys.executable, "-c", parent], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, address = process.stdout.readline().split()
        with CoordinatorClient(address, TOKEN) as client:
            assert client.status().version
        watch = os.pidfd_open(int(pid))
        process.kill()
        assert select.select([watch], [], [], DEADLINE_S)[0], "the coordinator outlived its parent"
        os.close(watch)


def test_missing_parent_prevents_start() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(DEADLINE_S)
    for pid in (gone.pid, 1):  # ended; alive, but not our parent
        coordinator = Coordinator("--parent-pid", str(pid))
        assert coordinator.address == ""
        assert coordinator.process.wait(DEADLINE_S) == 0
        coordinator.close()


@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        (["--listen", "nonsense"], TOKEN, "must be"),
        ([], "", "no token was given: set PENSTOCK_TOKEN"),
        ([], "two words", "one word of 1 to 4096 printable ASCII"),
        (["--state-dir", "/proc/penstock"], TOKEN, "/proc/penstock cannot be used: No such file or directory"),
    ],
)
def test_start_error_is_one_line_and_exit_2(arguments: list[str], token: str, words: str) -> None:
    coordinator = Coordinator(*arguments, token=token)
    assert coordinator.address == ""
    assert coordinator.process.wait(DEADLINE_S) == 2
    said = coordinator.said()
    assert said.startswith("penstock coordinator: ")
    assert words in said
    assert said.count("\n") == 1
    coordinator.close()


def test_taken_port_and_directory_are_named(started: list[Coordinator], tmp_path: Path) -> None:
    first = start(started, "--state-dir", str(tmp_path))
    for second, words in (
        (start(started, listen=first.address), f"{first.address} is in use by another process"),
        (start(started, "--state-dir", str(tmp_path)), f"{tmp_path} is in use by another coordinator (process "),
    ):
        assert second.process.wait(DEADLINE_S) == 2
        said = second.said()
        assert words in said
        assert said.count("\n") == 1


def test_a_coordinator_needs_no_torch() -> None:
    code = (
        "import sys, penstock.appliance.server.server, penstock.appliance.__main__, penstock.proto.rpc.calls; "
        "print([name for name in ('torch', 'numpy', 'typer', 'pydantic') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
