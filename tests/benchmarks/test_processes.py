"""Figures from /proc for real processes, and their roles."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.penstock_path import ROLES
from benchmarks.processes import (
    CONSUMER,
    Process,
    Role,
    cpu_by_role,
    cpu_s,
    kill_tree,
    memory_by_role,
    ring_bytes,
    role_of,
    tree,
)

# Starts a grandchild, says its pid, and waits.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


@contextlib.contextmanager
def family() -> Iterator[tuple[int, int]]:
    """The pids of a child of this process and of a child of that one."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.pid, int(child.stdout.readline())
        finally:
            kill_tree(child.pid, itself=True)


def test_a_tree_holds_exactly_its_descendants() -> None:
    with family() as (child, grandchild):
        found = tree(child)
        assert found.keys() == {child, grandchild}
        assert found[grandchild].parent == child
        assert "time.sleep(60)" in found[grandchild].command


def test_processor_time_includes_reaped_children() -> None:
    before, started = cpu_s(os.getpid()), time.process_time()
    while time.process_time() < started + 0.05:
        pass
    assert 0.04 < cpu_s(os.getpid()) - before < 0.5
    busy = "import time\nwhile time.process_time() < 0.2: pass"
    before = cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert cpu_s(os.getpid()) - before > 0.15


def test_roles_follow_command_lines_and_forks() -> None:
    fork_server = (
        "python -P -c from penstock.worker.processes.interpreters import add_working_directory; "
        "add_working_directory(); from penstock.worker.runner.fork_server import main; main()"
    )
    there = [
        Process(1, 0, "python -m benchmarks.penstock_path tcp"),
        Process(2, 1, "python -P -m penstock.appliance --listen x"),
        Process(3, 1, "python -P -m penstock.worker --coordinator x"),
        Process(4, 3, fork_server),
        Process(5, 4, fork_server),
        Process(6, 1, "python -P /somewhere/penstock/client/stream/receiver.py"),
        Process(7, 5, "ffmpeg"),
        Process(8, 1, "python -P -c import runpy /somewhere/penstock/client/embedded_daemons.py /somewhere {}"),
        Process(9, 8, fork_server),
    ]
    found = {process.pid: process for process in there}
    names = [role_of(process, found, 1, ROLES) for process in there]
    assert names == [
        CONSUMER,
        "coordinator",
        "daemon",
        "fork server",
        "runner",
        "receiver",
        "other",
        "daemons",
        "fork server",
    ]


def test_costs_are_told_by_role() -> None:
    with family() as (child, _):
        roles = [Role("time.sleep(60)", "sleeper")]
        assert cpu_by_role(child, roles).keys() == {CONSUMER, "sleeper"}
        memory = memory_by_role(child, roles)
        assert memory.keys() == {CONSUMER, "sleeper"}
        for entry in memory.values():
            assert entry["processes"] == 1
            assert entry["pss"] > entry["files"] >= 0


def test_a_ring_that_is_mapped_twice_counts_once() -> None:
    size = 24_601 * mmap.PAGESIZE  # like no other ring's: of other tests' some may go at any time
    fd = os.memfd_create("penstock-ring")
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size):
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            try:
                assert ring_bytes(os.getpid()).count(size) == 1
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    finally:
        os.close(fd)
