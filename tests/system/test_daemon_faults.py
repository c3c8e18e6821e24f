"""A worker daemon is killed: its slots move to another, or wait for it to come back; no batch is lost or repeated."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import traps
from census import alive, children, descendants, runners, until
from cluster import TOKEN, Cluster, running

from penstock.client import Appliance, DataExecutor, DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")


def appliance(cluster: Cluster, job: str, workers: int = 2, **options: Any) -> Appliance:
    return Appliance(
        cluster.address,
        num_workers_per_box=workers,
        job=job,
        seed=5,
        token=TOKEN,
        timeout_s=60,
        box=0,
        num_boxes=1,
        **options,
    )


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

    def before_it_is_ready(self, job: str) -> list[int]:
        loader = DataLoader(traps.waits_in_input_fn, str(self.folder))
        with appliance(self.cluster, job) as here:
            executor = DataExecutor(loader, num_steps=30, appliance=here)
            return [executor.digest for _ in executor]

    def in_the_middle_of_the_stream(self, job: str) -> list[int]:
        return self._stopping(job, DataLoader(traps.trapped, "stateful 0", [], str(self.folder)), lambda: None)

    def while_a_state_is_asked_for(self, job: str) -> list[int]:
        loader = DataLoader(traps.waits_to_load, str(self.folder))
        states: list[Any] = []
        digests = self._stopping(job, loader, lambda: states.append(loader.state_dict()))
        again = DataLoader(traps.waits_to_load, str(self.folder))
        again.load_state_dict(states[0])
        with appliance(self.cluster, f"{job} again") as here:
            executor = DataExecutor(again, num_steps=12, appliance=here)
            return [*digests, *(executor.digest for _ in executor)]

    def while_a_snapshot_is_sent(self, job: str) -> list[int]:
        return self._stopping(job, DataLoader(traps.heavy, 400), lambda: None)

    def _stopping(self, job: str, loader: DataLoader, at_the_moment: Callable[[], None]) -> list[int]:
        digests = []
        with appliance(self.cluster, job) as here:
            executor = DataExecutor(loader, num_steps=60, appliance=here)
            for _ in executor:
                digests.append(executor.digest)
                if executor.step == 21:
                    self.there.release()
                    at_the_moment()
                    assert self.killed.wait(60)
        return digests


MOMENTS: list[Callable[[Moments, str], list[int]]] = [
    Moments.before_it_is_ready,
    Moments.in_the_middle_of_the_stream,
    Moments.while_a_state_is_asked_for,
    Moments.while_a_snapshot_is_sent,
]


def test_killed_at_four_moments_with_room_elsewhere(tmp_path: Path) -> None:
    with running(tmp_path / "state") as cluster, ThreadPoolExecutor(4) as pool:
        first = cluster.add_worker(8, allow="traps", name="first")
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
            cluster.add_worker(8, allow="traps", name="second")
            below = descendants(first.pid)
            assert len(below) >= 1 + 8, "a zygote and eight runners"
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


@pytest.mark.parametrize("how", ["the daemon alone", "its process group"])
def test_killed_without_room_elsewhere_and_started_again(tmp_path: Path, how: str) -> None:
    with running(tmp_path / "state") as cluster:
        only = cluster.add_worker(2, allow="traps", name="only")

        def kill_and_restart() -> None:
            below = descendants(only.pid)
            assert len(below) >= 1 + 2 + 2, "a zygote, two runners and their children"
            (os.kill if how == "the daemon alone" else os.killpg)(only.pid, signal.SIGKILL)
            only.wait(10)
            until(lambda: not alive(below), 5, lambda: f"alive: {alive(below)}")
            cluster.add_worker(2, allow="traps", name="only")

        def train(job: str, kill: bool) -> list[int]:
            digests = []
            with appliance(cluster, job) as here:
                executor = DataExecutor(DataLoader(traps.parent, 400), num_steps=80, appliance=here)
                for _ in executor:
                    digests.append(executor.digest)
                    if kill and executor.step == 30:
                        kill_and_restart()
            return digests

        assert train("killed", True) == train("whole", False)


@pytest.mark.parametrize("lane", ["auto", "tcp"])
def test_two_of_three_killed_at_once(tmp_path: Path, lane: str) -> None:
    with running(tmp_path / "state") as cluster:
        for name in ("w1", "w2", "w3"):
            cluster.add_worker(7, allow="traps", name=name)

        def train(job: str, kill: bool) -> list[int]:
            digests = []
            with appliance(cluster, job, 6, lane=lane) as here:
                loader = DataLoader(traps.trapped, "shared", [], str(tmp_path))
                executor = DataExecutor(loader, num_steps=400, appliance=here)
                for _ in executor:
                    digests.append(executor.digest)
                    if kill and executor.step == 40:
                        for worker in cluster.workers[:2]:
                            worker.kill()
                if kill:
                    assert executor.stats.recoveries == 4
            return digests

        whole = train("whole", False)
        assert train("killed", True) == whole


def test_a_zygote_killed_under_a_state_query(tmp_path: Path) -> None:
    """The scratch child dies with it, and so does the runner: who takes the slot over is asked, and can be saved."""
    reached, released = (tmp_path / f"load_state_dict {name}" for name in ("reached", "released"))
    with running(tmp_path / "state") as cluster:
        daemon = cluster.add_worker(2, allow="traps")
        with appliance(cluster, "job", 1) as here:
            released.touch()
            loader = DataLoader(traps.waits_to_load, str(tmp_path))
            executor = DataExecutor(loader, num_steps=200, appliance=here)
            numbers, states = [], []
            for batch in executor:
                numbers.append(batch["number"])
                if executor.step == 150:
                    until(lambda: len(runners(daemon.pid)) == 1, 20, "the check of early snapshots does not end")
                    reached.unlink()
                    released.unlink()
                    killer = threading.Thread(target=kill_zygote_once, args=(daemon.pid, reached, released))
                    killer.start()
                    states.append(loader.state_dict())
                    killer.join()
            assert executor.stats.recoveries == 1
            again = DataLoader(traps.waits_to_load, str(tmp_path))
            again.load_state_dict(states[0])
            rest = [batch["number"] for batch in DataExecutor(again, num_steps=50, appliance=here)]
        assert rest == numbers[150:]


def kill_zygote_once(daemon: int, reached: Path, released: Path) -> None:
    until(reached.exists, 20, "no scratch child was needed")
    os.kill(children(daemon, "zygote")[0], signal.SIGKILL)
    released.touch()
