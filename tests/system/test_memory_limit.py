"""A worker that limits its runners' memory: one that leaks is recycled at a snapshot, and the stream does not show it;
one that needs more than the limit is an error that names both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import hazards
import pytest
import torch
from cluster import Cluster, running
from family import memory_of

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors
from penstock.worker.processes.process_use import held_by

MIB = 1 << 20
LIMIT = 150 * MIB
"""A runner that is alone starts with 80 MiB, its share of what it has in common with its fork server."""
room_to_leak = pytest.mark.skipif(
    torch.version.cuda is not None, reason="with a CUDA build of torch a runner starts with the limit"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        cluster.add_worker(4, "--runner-memory", str(LIMIT), allow="*", name="w")
        yield cluster


def at(cluster: Cluster, job: str) -> Appliance:
    return cluster.box(job, num_workers_per_box=1)


@room_to_leak
def test_leaking_runner_is_replaced_exactly(cluster: Cluster) -> None:
    """400 MiB of leaks in all, 100 MiB a second."""
    with at(cluster, "leak") as appliance:
        executor = DataExecutor(DataLoader(hazards.leaks, 4, 0, 100), appliance=appliance)
        with pytest.warns(UserWarning, match=r"was replaced .* above the limit of 150 MiB"):
            got = [batch["number"] for batch in executor]
        assert got == list(range(1, 101))
        assert executor.stats.recoveries >= 2


def test_too_small_memory_limit_is_a_named_error(cluster: Cluster) -> None:
    with (
        at(cluster, "large") as appliance,
        pytest.warns(UserWarning, match="was replaced"),
        pytest.raises(errors.MemoryLimitError, match=r"used \d+ MiB of memory, above the limit of 150 MiB") as caught,
    ):
        list(DataExecutor(DataLoader(hazards.leaks, 0, 180, 10**6), appliance=appliance))
    assert "--runner-memory" in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*was recovered")  # told each time, if the loop hears of it before the error
def test_twice_the_limit_is_the_end_at_once(cluster: Cluster) -> None:
    with (
        at(cluster, "huge") as appliance,
        # Which of them depends on whether its first batch was out when it was looked at.
        pytest.raises((errors.WorkerLostError, errors.MemoryLimitError), match=r"above the limit of 150 MiB"),
    ):
        list(DataExecutor(DataLoader(hazards.leaks, 0, 300, 10**6), appliance=appliance))


FAMILY = """
import os, time
block = bytearray(b"x" * (64 << 20))
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        mine = bytearray(b"y" * (32 << 20))
        os.write(1, b"%d\\n" % os.getpid())  # in one piece: two processes write here
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def test_memory_counts_descendants_once() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, process_group=0) as leader:
        try:
            assert leader.stdout is not None
            members = [leader.pid, *(int(leader.stdout.readline()) for _ in range(2))]
            assert 128 * MIB < held_by(leader.pid) < 160 * MIB
            assert sum(map(memory_of, members)) > 256 * MIB
        finally:
            for pid in members[::-1]:
                os.kill(pid, signal.SIGKILL)
    assert held_by(leader.pid) == 0
