"""The coordinator is killed around each kind of call, and while workers die: nothing that it said is forgotten."""

from __future__ import annotations

import os
import select
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import streams
import traps
from cluster import TOKEN, Cluster, running

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors

CALLS = [
    "RegisterWorker before",
    "RegisterWorker after",
    "OpenRun before",
    "OpenRun after",
    "Heartbeat after",
    "WatchRun after",
    "snapshot_stored before",
    "snapshot_stored after",
    "begin_state after",
    "answer_state before",
    "answer_state after",
    "CloseRun after",
    "blob_stored after",
    "CloseRun before",
]
ROUNDS = 3


def box(address: str, job: str, workers: int = 2, timeout_s: float = 60) -> Appliance:
    return Appliance(
        address, num_workers_per_box=workers, job=job, seed=3, token=TOKEN, timeout_s=timeout_s, box=0, num_boxes=1
    )


class Supervisor(threading.Thread):
    """Starts a coordinator again whenever it dies, as systemd would, and looks at its books in between."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.deaths = 0
        self.generations: list[dict[str, int]] = []
        self.stopping = os.eventfd(0)

    def run(self) -> None:
        while True:
            ended = os.pidfd_open(self.cluster.coordinator.pid)
            ready, _, _ = select.select([ended, self.stopping], [], [])
            os.close(ended)
            if self.stopping in ready:
                return
            self.cluster.coordinator.wait()
            self.deaths += 1
            self.generations.append(self._look())
            self.cluster.restart_coordinator()

    def _look(self) -> dict[str, int]:
        with sqlite3.connect(f"file:{self.cluster.state_dir}/journal.db?mode=ro", uri=True) as db:
            runs = {f"run {run}": highest for run, highest in db.execute("SELECT run, generation FROM runs")}
            slots = db.execute("SELECT run, attempt, box, slot, generation FROM slots")
            return runs | {f"slot {key}": generation for *key, generation in slots}

    def stop(self) -> None:
        os.eventfd_write(self.stopping, 1)
        self.join()
        os.close(self.stopping)


@contextmanager
def supervised(cluster: Cluster) -> Iterator[Supervisor]:
    supervisor = Supervisor(cluster)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()


def train(address: str, job: str) -> tuple[list[int], Any]:
    """Two loaders, the second from the first one's state."""
    with box(address, job) as appliance:
        loader = DataLoader(streams.counter, 400)
        executor = DataExecutor(loader, num_steps=60, checkpoint_steps=30, appliance=appliance)
        digests = [executor.digest for _ in executor]
        state = loader.state_dict()
        loader.close()
        again = DataLoader(streams.counter, 400)
        again.load_state_dict(state)
        executor = DataExecutor(again, num_steps=40, appliance=appliance)
        return [*digests, *(executor.digest for _ in executor)], state


def user_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "__penstock__"}


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_killed_before_and_after_each_kind_of_call(tmp_path: Path) -> None:
    folder = tmp_path / "traps"
    folder.mkdir()
    with running(tmp_path / "whole") as cluster:
        cluster.add_worker(4)
        whole = train(cluster.address, "job")
    surroundings = {"TRAPS": ",".join(CALLS), "TRAPS_IN": str(folder)}
    with running(tmp_path / "state", "dying_coordinator", **surroundings) as cluster, supervised(cluster) as supervisor:
        cluster.add_worker(4)
        for round in range(ROUNDS):  # which call is next depends on how quick the others are
            got = train(cluster.address, f"job {round}")
            assert got[0] == whole[0]
            assert user_state(got[1]) == user_state(whole[1])
        reached = sorted(path.name for path in folder.iterdir())
    assert reached == sorted(CALLS)
    assert supervisor.deaths == len(CALLS)
    for before, after in zip(supervisor.generations, supervisor.generations[1:], strict=False):
        assert all(after[key] >= generation for key, generation in before.items() if key in after)


def patiently(loader: DataLoader, appliance: Appliance, digests: list[int], steps: int) -> None:
    """Take batches up to this step, and try again where the deadline was shorter than it takes."""
    while len(digests) < steps:
        executor = DataExecutor(loader, num_steps=steps - len(digests), appliance=appliance)
        try:
            for _ in executor:
                digests.append(executor.digest)
        except errors.DeadlineError:
            pass


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_a_worker_that_dies_while_the_coordinator_is_away(tmp_path: Path) -> None:
    """The lanes drain; the loop's deadline names both; recovery follows the coordinator's return."""
    with running(tmp_path / "state") as cluster:
        cluster.add_worker(2, allow="traps", name="doomed")

        def stream(job: str, kill: bool) -> list[int]:
            digests: list[int] = []
            with box(cluster.address, job, timeout_s=5) as appliance:
                loader = DataLoader(traps.trapped, "shared", [], str(tmp_path))
                patiently(loader, appliance, digests, 20)
                if kill:
                    cluster.add_worker(2, allow="traps", name="spare")
                    cluster.coordinator.kill()
                    cluster.workers[0].kill()
                    executor = DataExecutor(loader, num_steps=200, appliance=appliance)
                    with pytest.raises(errors.DeadlineError) as caught:
                        digests.extend(executor.digest for _ in executor)
                    assert len(digests) > 20, "what was in the lanes is delivered"
                    assert "worker doomed" in str(caught.value)
                    assert "the coordinator has not answered for" in str(caught.value)
                    cluster.restart_coordinator()
                patiently(loader, appliance, digests, 400)
            return digests

        whole = stream("whole", False)
        assert stream("killed", True) == whole


@pytest.mark.parametrize("name", ["journal.db", "snapshots.db"])
def test_a_damaged_file_stops_the_start_with_one_line(tmp_path: Path, name: str) -> None:
    with running(tmp_path / "state") as cluster:
        cluster.add_worker(2)
        with box(cluster.address, "job") as appliance:
            assert next(iter(DataExecutor(DataLoader(streams.counter), num_steps=2, appliance=appliance)))
            cluster.coordinator.kill()
            cluster.coordinator.wait()
    path = tmp_path / "state" / name
    for log in (path.with_name(f"{name}-wal"), path.with_name(f"{name}-shm")):
        log.unlink(missing_ok=True)
    damaged = bytearray(path.read_bytes() or bytes(4096))
    damaged[20:100] = bytes(range(80))
    path.write_bytes(damaged)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.appliance", "--state-dir", str(tmp_path / "state")],
        env=cluster.environment,
        capture_output=True,
        timeout=30,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert str(path) in line
    assert "restore it from a copy, or move it away" in line
