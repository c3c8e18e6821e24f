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
from typing import Any

import pytest
import traps
from census import alive, children, descendants, runners
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
    """Four runs that one daemon's death meets at different moments."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir()
        self.killed = threading.Event()
        self.there = threading.Semaphore(0)

    def release(self) -> None:
        for name in ("input_fn", "load_state_dict"):
            (self.folder / f"{name} released").touch()

    def before_it_is_ready(self, job: str) -> list[int | None]:
        loader = DataLoader(traps.waits_in_input_fn, str(self.folder))
        with self.cluster.box(job) as here:
            executor = DataExecutor(loader, num_steps=30, appliance=here)
            return [executor.digest for _ in executor]

    def in_the_middle_of_the_stream(self, job: str) -> list[int | None]:
        return self._stopping(job, DataLoader(traps.trapped, "stateful 0", [], str(self.folder)), lambda: None)

    def while_a_state_is_asked_for(self, job: str) -> list[int | None]:
        loader = DataLoader(traps.waits_to_load, str(self.folder))
        states: list[Any] = []
        digests = self._stopping(job, loader, lambda: states.append(loader.state_dict()))
        again = DataLoader(traps.waits_to_load, str(self.folder))
        again.load_state_dict(states[0])
        with self.cluster.box(f"{job} again") as here:
            executor = DataExecutor(again, num_steps=12, appliance=here)
            return [*digests, *(executor.digest for _ in executor)]

    def while_a_snapshot_is_sent(self, job: str) -> list[int | None]:
        return self._stopping(job, DataLoader(traps.heavy, 400), lambda: None)

    def _stopping(self, job: str, loader: DataLoader, at_the_moment: Callable[[], None]) -> list[int | None]:
        digests = []
        with self.cluster.box(job) as here:
            executor = DataExecutor(loader, num_steps=60, appliance=here)
            for _ in executor:
                digests.append(executor.digest)
                if executor.step == 21:
                    self.there.release()
                    at_the_moment()
                    assert self.killed.wait(60)
        return digests


MOMENTS: list[Callable[[Moments, str], list[int | None]]] = [
    Moments.before_it_is_ready,
    Moments.in_the_middle_of_the_stream,
    Moments.while_a_state_is_asked_for,
    Moments.while_a_snapshot_is_sent,
]


def test_killed_at_four_moments_with_free_workers(cluster: Cluster, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        (first,) = cluster.workers
        undisturbed = Moments(cluster, tmp_path / "whole")
        undisturbed.release()
        undisturbed.killed.set()
        whole = list(pool.map(lambda moment: moment(undisturbed, f"whole {moment.__name__}"), MOMENTS))

        moments = Moments(cluster, tmp_path / "markers")
        runs = [pool.submit(moment, moments, moment.__name__) for moment in MOMENTS]
        try:
            for _ in range(3):
                assert moments.there.acquire(timeout=30)
            for name in ("input_fn", "load_state_dict"):
                until((moments.folder / f"{name} reached").exists, 30, f"nobody waits in {name}")
            add(cluster)
            below = descendants(first.pid)
            assert len(below) >= 1 + 8, "a fork server and eight runners"
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


def test_a_fork_server_killed_under_a_state_query(cluster: Cluster, tmp_path: Path) -> None:
    """The helper process dies with it, and so does the runner: who takes the slot over is asked, and can be saved."""
    reached, released = (tmp_path / f"load_state_dict {name}" for name in ("reached", "released"))
    (daemon,) = cluster.workers
    with cluster.box("fork server", num_workers_per_box=1) as here:
        released.touch()
        loader = DataLoader(traps.waits_to_load, str(tmp_path))
        executor = DataExecutor(loader, num_steps=200, appliance=here)
        numbers, states = [], []
        for batch in executor:
            numbers.append(batch["number"])
            if executor.step == 150:
                until(reached.exists, 20, "the check of early snapshots does not begin")
                until(lambda: len(runners(daemon.pid)) == 1, 20, "the check of early snapshots does not end")
                reached.unlink()
                released.unlink()
                killer = threading.Thread(target=kill_fork_server_once, args=(daemon.pid, reached, released))
                killer.start()
                states.append(loader.state_dict())
                killer.join()
        assert executor.stats.recoveries == 1
        again = DataLoader(traps.waits_to_load, str(tmp_path))
        again.load_state_dict(states[0])
        rest = [batch["number"] for batch in DataExecutor(again, num_steps=50, appliance=here)]
    assert rest == numbers[150:]


def kill_fork_server_once(daemon: int, reached: Path, released: Path) -> None:
    until(reached.exists, 20, "no helper process was needed")
    (fork_server,) = [
        fork_server for fork_server in children(daemon, "fork_server") if len(children(fork_server)) > 1
    ]  # not one that is kept
    family = [fork_server, *descendants(fork_server)]
    os.kill(fork_server, signal.SIGKILL)
    until(lambda: not alive(family), 20, lambda: f"alive: {alive(family)}")
    released.touch()
