"""The coordinator as a process: how it ends, on request and with its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import interpreters
import pytest

from penstock.proto.errors import CoordinatorUnavailableError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

TOKEN = "token"
DEADLINE_S = 60.0


def start(*arguments: str) -> tuple[interpreters.Forked, str]:
    """python -m penstock.appliance: the process, and its address; "" if it has ended at once."""
    reading, writing = os.pipe()
    command = ("--listen", "127.0.0.1:0", *arguments)
    environment = {**os.environ, "PENSTOCK_TOKEN": TOKEN}
    name = "penstock.appliance.__main__"
    process = interpreters.start(name, command, environment, imports=[], torch=False, ready=writing)
    os.close(writing)
    with open(reading) as ready:
        return process, ready.read().strip()


def test_a_signal_ends_it_and_answers_long_polls() -> None:
    process, address = start()
    replies: list[pb.WatchRunReply] = []
    opening = pb.OpenRunRequest(job="job", num_boxes=1, num_workers_per_box=1, client_id="c", host_id="host-a")
    opening.loader.input_fn = "m:f"
    with CoordinatorClient(address, TOKEN, insecure=True) as client:
        client.open_run(opening)
        watch = pb.WatchRunRequest(run="job/0", attempt=1, client_id="c", hold_s=30)
        watch.seen_version = client.watch_run(watch).version
        held = threading.Thread(target=lambda: replies.append(client.watch_run(watch)))
        held.start()
        for _ in range(20):  # calls are taken in order on one connection, so the poll is there by then
            client.status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        held.join(DEADLINE_S)
        with pytest.raises(CoordinatorUnavailableError, match=address):
            client.status()
    assert [reply.version for reply in replies] == [watch.seen_version]


def test_coordinator_ends_with_its_parent() -> None:
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
        with CoordinatorClient(address, TOKEN, insecure=True) as client:
            assert client.status().version
        watch = os.pidfd_open(int(pid))
        process.kill()
        assert select.select([watch], [], [], DEADLINE_S)[0], "the coordinator outlived its parent"
        os.close(watch)


def test_missing_parent_prevents_start() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(DEADLINE_S)
    for pid in (gone.pid, 1):  # ended; alive, but not our parent
        process, address = start("--parent-pid", str(pid))
        assert address == ""
        assert process.wait(DEADLINE_S) == 0
