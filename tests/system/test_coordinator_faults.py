"""The coordinator is killed around each kind of call, and while workers die: nothing that it said is forgotten."""

from __future__ import annotations

import os
import re
import select
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import streams
import traps
from census import alive, descendants
from cluster import TOKEN, Cluster, running
from interpreters import Forked
from waiting import until

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
    "PutBlob after",
    "CloseRun before",
]
ROUNDS = 3
TIMEOUT_S = 8.0


class Supervisor(threading.Thread):
    """Starts a coordinator again whenever it dies, as systemd would, and looks at its cluster state in between."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.deaths = 0
        self.generations: list[dict[str, int]] = []
        self.stopping = os.eventfd(0)

    def run(self) -> None:
        while True:
            coordinator = self.cluster.coordinator
            assert isinstance(coordinator, Forked)
            ready, _, _ = select.select([coordinator.fileno(), self.stopping], [], [])
            if self.stopping in ready:
                return
            self.cluster.coordinator.wait()
            self.deaths += 1
            self.generations.append(self._look())
            self.cluster.restart_coordinator()

    def _look(self) -> dict[str, int]:
        with closing(sqlite3.connect(f"file:{self.cluster.state_dir}/journal.db?mode=ro", uri=True)) as db:
            runs = {f"run {run}": highest for run, highest in db.execute("SELECT run, generation FROM runs")}
            slots = db.execute("SELECT run, attempt, box, slot, generation FROM slots")
            return runs | {f"slot {key}": generation for *key, generation in slots}

    def stop(self) -> None:
        os.eventfd_write(self.stopping, 1)
        self.join()
        os.close(self.stopping)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with one worker. All jobs have one seed."""
    with running(tmp_path_factory.mktemp("state")) as cluster:
        cluster.add_worker(4, "--allow", "traps", name="first")
        yield cluster


@contextmanager
def supervised(cluster: Cluster) -> Iterator[Supervisor]:
    supervisor = Supervisor(cluster)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()


def train(cluster: Cluster, job: str) -> tuple[list[int | None], Any]:
    """Two loaders, the second from the first one's state."""
    with cluster.box(job) as appliance:
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
def test_killed_around_each_kind_of_call(tmp_path: Path) -> None:
    folder = tmp_path / "traps"
    folder.mkdir()
    surroundings = {"TRAPS": ",".join(CALLS), "TRAPS_IN": str(folder)}
    with running(tmp_path / "state", "dying_coordinator", **surroundings) as cluster, supervised(cluster) as supervisor:
        cluster.add_worker(4)
        killed = []
        for round in range(ROUNDS):  # which call is next depends on how quick the others are
            killed.append(train(cluster, f"job {round}"))
        reached = sorted(path.name for path in folder.iterdir())
        assert reached == sorted(CALLS)
        whole = train(cluster, "job")  # every trap has snapped, so nothing happens any more
    assert supervisor.deaths == len(CALLS)
    for got in killed:
        assert got[0] == whole[0]
        assert user_state(got[1]) == user_state(whole[1])
    for before, after in zip(supervisor.generations, supervisor.generations[1:], strict=False):
        assert all(after[key] >= generation for key, generation in before.items() if key in after)


def patiently(loader: DataLoader, appliance: Appliance, digests: list[int | None], steps: int) -> None:
    """Take batches up to this step, and try again where the deadline was shorter than it takes."""
    while len(digests) < steps:
        executor = DataExecutor(loader, num_steps=steps - len(digests), appliance=appliance)
        try:
            for _ in executor:
                digests.append(executor.digest)
        except errors.DeadlineError:
            pass


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_a_node_with_coordinator_and_worker_is_lost(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lanes drain, and the loop waits longer than its deadline, which does not run while there is no coordinator.
    After its return the deadline runs again, until another worker has joined."""
    (doomed,) = cluster.workers

    def stream(job: str, kill: bool) -> list[int | None]:
        digests: list[int | None] = []
        with cluster.box(job, timeout_s=TIMEOUT_S) as appliance:
            loader = DataLoader(traps.trapped, "shared", [], str(tmp_path))
            patiently(loader, appliance, digests, 20)
            if kill:
                below = descendants(doomed.pid)
                cluster.coordinator.kill()
                doomed.kill()
                until(lambda: not alive(below))  # or runners go on for as long as that takes
                doomed.wait(10)
                cluster.workers.remove(doomed)
                back = threading.Timer(TIMEOUT_S + 4, cluster.restart_coordinator)
                back.start()
                executor = DataExecutor(loader, num_steps=200, appliance=appliance)
                with pytest.raises(errors.NoWorkersError) as caught:
                    digests.extend(executor.digest for _ in executor)
                assert len(digests) > 20, "what was in the lanes is delivered"
                assert back.finished.is_set(), "it has waited for the coordinator"
                assert "(the coordinator has not answered for " in capfd.readouterr().err
                back.join()
                assert re.search(
                    r"waited \d+ s .* no worker .*; for \d+ s of them the coordinator did", str(caught.value)
                )
                cluster.add_worker(4, "--allow", "traps", name="spare")
            patiently(loader, appliance, digests, 400)
        return digests

    whole = stream("not killed", False)
    assert stream("killed", True) == whole


@pytest.fixture(scope="module")
def left(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a coordinator that was killed."""
    state = tmp_path_factory.mktemp("left") / "state"
    with cluster.box("left") as appliance:
        assert next(iter(DataExecutor(DataLoader(streams.counter), num_steps=2, appliance=appliance)))
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        shutil.copytree(cluster.state_dir, state)
        cluster.restart_coordinator()
    return state


@pytest.mark.parametrize("name", ["journal.db", "snapshots.db"])
def test_damaged_file_stops_the_start(left: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(left, tmp_path / "state")
    path = tmp_path / "state" / name
    for log in (path.with_name(f"{name}-wal"), path.with_name(f"{name}-shm")):
        log.unlink(missing_ok=True)
    damaged = bytearray(path.read_bytes() or bytes(4096))
    damaged[20:100] = bytes(range(80))
    path.write_bytes(damaged)
    done = subprocess.run(
        [sys.executable, "-m", "penstock.appliance", "--state-dir", str(tmp_path / "state")],
        env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
        capture_output=True,
        timeout=30,
        text=True,
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert str(path) in line
    assert "restore a copy of the file, or move the file away" in line
