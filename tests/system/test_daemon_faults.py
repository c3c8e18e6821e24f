"""A worker daemon is killed: its slots move to another, or wait for it to come back; no batch is lost or repeated."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import traps
from census import alive, descendants
from cluster import Cluster, running
from waiting import until

from penstock.client import DataExecutor, DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
_numbers = itertools.count()
_names: dict[int, str] = {}
"""Names of daemons, by process."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Return a cluster with one daemon: the one that the test before has left, whose fork server is up."""
    shared.workers = [worker for worker in shared.workers if worker.poll() is None]
    for other in shared.workers[1:]:  # a test has failed
        other.kill()
        other.wait(10)
    del shared.workers[1:]
    if not shared.workers:
        add(shared)
    return shared


def add(cluster: Cluster, name: str = "") -> None:
    name = name or f"daemon {next(_numbers)}"
    _names[cluster.add_worker(13, allow="traps", name=name).pid] = name


def test_killed_without_free_worker_and_restarted(cluster: Cluster) -> None:
    """The daemon alone, and then with its process group."""

    def kill_and_restart(kill: Callable[[int, int], None]) -> None:
        only = cluster.workers[-1]
        below = descendants(only.pid)
        assert len(below) >= 1 + 2 + 2, "a fork server, two runners and their children"
        kill(only.pid, signal.SIGKILL)
        only.wait(10)
        until(lambda: not alive(below), 20, lambda: f"alive: {alive(below)}")
        add(cluster, _names[only.pid])

    def train(job: str, kill: Callable[[int, int], None] | None = None) -> list[int | None]:
        digests = []
        with cluster.box(job) as here:
            executor = DataExecutor(DataLoader(traps.parent, 400), num_steps=80, appliance=here)
            for _ in executor:
                digests.append(executor.digest)
                if kill is not None and executor.step == 30:
                    kill_and_restart(kill)
        return digests

    whole = train("whole of two")
    assert train("the daemon alone", os.kill) == whole
    assert train("its process group", os.killpg) == whole


def test_two_of_three_killed_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Kill two of three daemons under a job on each kind of lane."""
    lanes = ("auto", "tcp")
    with ThreadPoolExecutor(len(lanes)) as pool:
        for _ in range(2):
            add(cluster)

        def kill_two() -> None:
            for worker in cluster.workers[:2]:
                worker.kill()

        def train(job: str, lane: str, meet: Callable[[], object]) -> tuple[list[int | None], int]:
            digests = []
            with cluster.box(job, num_workers_per_box=6, lane=lane) as here:
                loader = DataLoader(traps.trapped, "shared", [], str(tmp_path))
                executor = DataExecutor(loader, num_steps=400, appliance=here)
                for _ in executor:
                    digests.append(executor.digest)
                    if executor.step == 40:
                        meet()
                return digests, executor.stats.recoveries

        whole, _ = train("whole of six", "auto", lambda: None)
        meeting = threading.Barrier(len(lanes), kill_two, timeout=60)
        for got, recoveries in pool.map(lambda lane: train(f"killed {lane}", lane, meeting.wait), lanes):
            assert got == whole
            assert recoveries >= 4  # of six slots; more if one goes to the other before its death is known
