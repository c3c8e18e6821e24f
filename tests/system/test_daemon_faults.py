"""A worker daemon is killed: its slots move to another, or wait for it to come back; no batch is lost or repeated."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
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


class Moments:
    """Runs that one daemon's death meets at different moments."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir()
        self.killed = threading.Event()
        self.there = threading.Semaphore(0)

    def release(self) -> None:
        (self.folder / "input_fn released").touch()

    def before_it_is_ready(self, job: str) -> list[int | None]:
        loader = DataLoader(traps.waits_in_input_fn, str(self.folder))
        with self.cluster.box(job) as here:
            executor = DataExecutor(loader, num_steps=30, appliance=here)
            return [executor.digest for _ in executor]

    def in_the_middle_of_the_stream(self, job: str) -> list[int | None]:
        return self._stopping(job, DataLoader(traps.trapped, "stateful 0", [], str(self.folder)))

    def while_a_snapshot_is_sent(self, job: str) -> list[int | None]:
        return self._stopping(job, DataLoader(traps.heavy, 400))

    def _stopping(self, job: str, loader: DataLoader) -> list[int | None]:
        digests = []
        with self.cluster.box(job) as here:
            executor = DataExecutor(loader, num_steps=60, appliance=here)
            for _ in executor:
                digests.append(executor.digest)
                if executor.step == 21:
                    self.there.release()
                    assert self.killed.wait(60)
        return digests


MOMENTS: list[Callable[[Moments, str], list[int | None]]] = [
    Moments.before_it_is_ready,
    Moments.in_the_middle_of_the_stream,
    Moments.while_a_snapshot_is_sent,
]


def test_killed_at_three_moments_with_free_workers(cluster: Cluster, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(MOMENTS)) as pool:
        (first,) = cluster.workers
        undisturbed = Moments(cluster, tmp_path / "whole")
        undisturbed.release()
        undisturbed.killed.set()
        whole = list(pool.map(lambda moment: moment(undisturbed, f"whole {moment.__name__}"), MOMENTS))

        moments = Moments(cluster, tmp_path / "markers")
        runs = [pool.submit(moment, moments, moment.__name__) for moment in MOMENTS]
        try:
            for _ in range(2):
                assert moments.there.acquire(timeout=30)
            until((moments.folder / "input_fn reached").exists, 30, "nobody waits in input_fn")
            add(cluster)
            below = descendants(first.pid)
            assert len(below) >= 1 + 6, "a fork server and six runners"
            cluster.coordinator.send_signal(signal.SIGSTOP)
            time.sleep(
                2.5
            )  # two uploads are due within it, and get no answer: nothing else would show that one is under way
            first.kill()
            cluster.coordinator.send_signal(signal.SIGCONT)
        finally:
            moments.release()
            moments.killed.set()
        assert [run.result(60) for run in runs] == whole
        assert not alive(below)


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
