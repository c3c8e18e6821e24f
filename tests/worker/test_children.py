"""Children that read nothing, or do not start, are ended all the same."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from census import alive
from coroutines import in_loop
from waiting import until

from penstock.proto.errors import InputFnNotFoundError, WorkerLostError
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.logs import SubjectLogger
from penstock.worker.processes import fork_servers
from penstock.worker.processes.child_processes import Child
from penstock.worker.processes.control_channel import ControlChannel
from penstock.worker.processes.fork_servers import ForkServer, KeptForkServer
from penstock.worker.processes.interpreters import start_fork_server
from penstock.worker.processes.orphans import own_children
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.runner_user import RunnerUser
from penstock.worker.processes.turn_queue import TurnQueue
from penstock.worker.slots.helper_tasks import run_task
from penstock.worker.slots.slot_record import SlotRecord


def test_stopped_child_with_full_socket_is_killed() -> None:
    async def stop() -> float:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        os.close(write)
        with (
            theirs,
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0) as process,
        ):
            child = Child(ControlChannel(ours), read, "a child", lambda message: None, lambda: None)
            child.begun(process.pid, os.pidfd_open(process.pid))
            sending = asyncio.ensure_future(child.send("point", bytes(8 << 20)))
            await asyncio.sleep(0)
            began = time.monotonic()
            await child.stop(0.2)
            took = time.monotonic() - began
            child.gone(await asyncio.to_thread(process.wait))
            theirs.close()
            await sending
        return took

    assert asyncio.run(asyncio.wait_for(stop(), 30)) < 10


FLOODS = """
import fcntl, os, socket, struct, sys
text = b'{"kind": "x", "lists": [' + b"[]," * int(sys.argv[2]) + b"0]}"
head, memory = struct.pack("<I", len(text)), os.memfd_create("x", os.MFD_ALLOW_SEALING)
os.write(memory, head + text)
fcntl.fcntl(memory, fcntl.F_ADD_SEALS, 15)
sock = socket.socket(fileno=int(sys.argv[1]))
while True:
    socket.send_fds(sock, [head + text] if len(text) < 65000 else [bytes(4)], [memory] if len(text) > 65000 else [])
"""


@pytest.mark.parametrize("lists", [21_000, 108_000])
def test_costly_messages_take_a_fifth_of_the_loop(lists: int) -> None:
    """Of all children together, in packets and in memory: each message is decoded without a turn of the loop."""

    def flood() -> tuple[Child, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        os.close(write)
        with theirs:
            command = [sys.executable, "-c", FLOODS, str(theirs.fileno()), str(lists)]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
        child = Child(ControlChannel(ours), read, "a child", lambda message: heard.append(child), lambda: None)
        child.begun(process.pid, os.pidfd_open(process.pid))
        return child, process

    async def body() -> float:
        children = [flood() for _ in range(4)]
        while len(set(heard)) < 4:
            await asyncio.sleep(0.1)
        began, busy = time.monotonic(), time.process_time()
        await asyncio.sleep(3.0)
        busy, took = time.process_time() - busy, time.monotonic() - began
        for child, process in children:
            assert not child.why_killed
            child.kill()
            child.gone(await asyncio.to_thread(process.wait))
        await asyncio.gather(*(child.exited for child, _ in children))
        return busy / took

    heard: list[Child] = []
    assert asyncio.run(asyncio.wait_for(body(), 60)) < 0.5
    assert len(heard) > 8, "slowed, but heard"


STARTED = """
import asyncio
from penstock.worker.processes import fork_servers

async def main():
    ending = asyncio.ensure_future(fork_servers.end_orphans(1.0))
    fork_server = fork_servers.ForkServer()
    await fork_server.start()
    await ending
    print("up", fork_server.dead)
    fork_server.close()
    await fork_server.wait()


asyncio.run(main())
"""


def test_starting_fork_server_is_not_an_orphan(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('a file of the working directory stands in for torch')")
    command = [sys.executable, "-P", "-c", STARTED]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("up False\n", 0), run.stderr


def test_rights_not_given_up_end_that_child_only(caplog: pytest.LogCaptureFixture) -> None:
    """Report the error as the child's own: a child that came out where its parent serves would end its siblings."""
    caplog.set_level(logging.INFO, "penstock.user")
    nobody_can_be = RunnerUser("x", 1, 1, [1 << 40], "/")

    async def body() -> tuple[list[int | None], bool]:
        page = ProgressPage.create()
        fork_server = ForkServer()
        await fork_server.start(user=nobody_can_be)
        ends = []
        for _ in range(2):
            child = await fork_server.fork("helper", "a child", page, lambda message: None)
            ends.append(await child.exited)
        dead = fork_server.dead
        fork_server.close()
        await fork_server.wait()
        page.close()
        return ends, dead

    assert asyncio.run(asyncio.wait_for(body(), 60)) == ([1, 1], False)
    assert caplog.text.count("[a child] OverflowError") == 2


@in_loop
async def test_an_idle_fork_server_ends_and_the_next_child_gets_another() -> None:
    kept = KeptForkServer("", sandboxed=True, idle_s=0.5)
    first, page = await kept.get(), ProgressPage.create()
    child = await first.fork("runner", "a child", page, lambda message: None)
    await asyncio.sleep(1.0)
    assert first.lives  # it has a child
    child.kill()
    await child.exited
    await asyncio.wait_for(first.wait(), 20)
    second = await kept.get()
    assert second.pid != first.pid
    child = await second.fork("runner", "a child", page, lambda message: None)
    child.kill()
    await child.exited
    await asyncio.wait_for(kept.close(), 20)
    page.close()


@in_loop
async def test_a_task_is_done_by_the_next_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last one is given up if it cannot be killed, as a process that hangs in a driver: it is stopped, and
    SIGKILL has no effect."""
    begun = start_fork_server()
    kept = KeptForkServer("", sandboxed=True, started=begun)
    begun.process.kill()
    with pytest.raises(WorkerLostError, match="died while it started"):
        await kept.get()
    fork_server = await kept.get()
    assert await kept.get() is fork_server
    os.kill(fork_server.pid, signal.SIGKILL)
    until(lambda: not alive([fork_server.pid]))  # the event loop, and so the daemon, does not see it meanwhile
    host: Any = SimpleNamespace(helper_turns=TurnQueue(1), fork_server=kept, blobs=None)
    page = ProgressPage.create()
    assignment = records_pb2.WorkerAssignment(run="job/0", num_boxes=1, num_workers_per_box=1)
    assignment.loader.input_fn = "no_such_module:loader"
    slot = SlotRecord(assignment, "slot 0", SubjectLogger(logging.getLogger()), page)
    with pytest.raises(InputFnNotFoundError, match="no_such_module"):  # so a helper process has tried it
        await run_task(host, slot, [], "state", 60.0)
    page.close()
    last = await kept.get()
    assert last is not fork_server
    monkeypatch.setattr(fork_servers, "END_S", 0.1)
    monkeypatch.setattr(fork_servers, "CLOSE_S", 0.3)
    os.kill(last.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(last, "_kill", lambda: None)
        await asyncio.wait_for(kept.close(), 20)
    assert last.lives
    os.kill(last.pid, signal.SIGKILL)
    await last.wait()


@pytest.mark.parametrize("how", ["takes too long", "is not wanted any more"])
@in_loop
async def test_interpreter_that_never_starts_is_killed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand for an interpreter that is imported from a file system that does not answer."""
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr(fork_servers, "START_STILL_S", 0.5)
    fork_server = ForkServer()
    starting = asyncio.ensure_future(fork_server.start())
    if how == "takes too long":
        with pytest.raises(WorkerLostError, match=r"used no processor time for 0\.5 s, and was killed"):
            await starting
    else:
        while not fork_server.pid:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert fork_server.pid
    assert not fork_server.lives
    assert fork_server.pid not in own_children()
