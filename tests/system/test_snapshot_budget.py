"""A coordinator without room for more snapshots: the stream goes on, and goes on from an older one after a fault; a
slot whose very first one cannot be kept does not start, for nothing of it could be recovered. A large state that a run
resumed from is kept once."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import streams
from cluster import TOKEN, Cluster, running
from family import runners
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.worker.slots.durable_snapshots import LARGE

STATE = 300_000
"""Bytes of the loader's state, and a little more on disk."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log of the worker of `cluster`."""
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Cluster]:
    state = tmp_path_factory.mktemp("state")
    with (
        open(log, "wb") as said,
        running(state, "limited_coordinator", LIMITS=f"budget={3 * STATE}") as cluster,
    ):
        cluster.add_worker(1, stderr=said.fileno())
        yield cluster


def test_refused_snapshot_costs_only_replay(cluster: Cluster, log: Path) -> None:
    with cluster.box("refused", num_workers_per_box=1, replay_s=0) as appliance:
        executor = iter(DataExecutor(DataLoader(streams.heavy, 10**6, STATE), appliance=appliance))
        got: list[int] = []

        def refused() -> bool:
            """Take one more batch, because a runner that waits for the loop takes no snapshot; then return True if
            the log reports a refused one."""
            got.append(next(executor)["number"])
            return b"does not keep a snapshot of the loader, so a recovery replays" in log.read_bytes()

        until(refused, 30, "no snapshot was refused")
        os.kill(runners(cluster.workers[0].pid)[0], signal.SIGKILL)
        with pytest.warns(UserWarning, match="was recovered"):
            got += [next(executor)["number"] for _ in range(300)]
        assert got == list(range(1, len(got) + 1))


def test_large_resumed_state_is_kept_once(tmp_path: Path, appliance: Appliance) -> None:
    """Keep a resumed state once for any number of loaders. A runner that replaces a lost one gets there again as the
    first one did."""
    size = 2 * LARGE
    loader = DataLoader(streams.heavy, 10**6, size)
    numbers = [number for first in range(1, 26) for number in (first, 1000 + first)]
    assert [batch["number"] for batch in DataExecutor(loader, num_steps=6, appliance=appliance)] == numbers[:6]
    state = loader.state_dict()
    limits = f"budget={int(2.5 * size)},replay_share=0"
    with running(tmp_path / "state", "limited_coordinator", LIMITS=limits) as cluster:
        worker = cluster.add_worker(4)
        with Appliance(cluster.address, token=TOKEN, job="job", num_workers_per_box=2, timeout_s=60) as remote:
            executors = []
            for _ in range(2):
                again = DataLoader(streams.heavy, 10**6, size)
                again.load_state_dict(state)
                executors.append(iter(DataExecutor(again, appliance=remote)))
            got = [[next(executor)["number"] for _ in range(4)] for executor in executors]
            assert _kept(tmp_path / "state") < 2.2 * size, "the states of two workers, and little besides"
            for pid in runners(worker.pid):
                os.kill(pid, signal.SIGKILL)
            with warnings.catch_warnings():  # none comes if all batches were made before the runners were killed
                warnings.filterwarnings("ignore", ".*was recovered", UserWarning)
                got += [[next(executor)["number"] for _ in range(40)] for executor in executors]
        assert got == [numbers[6:10]] * 2 + [numbers[10:]] * 2


def _kept(state_dir: Path) -> int:
    """Bytes of snapshots and blobs that the coordinator keeps."""
    with contextlib.closing(sqlite3.connect(state_dir / "snapshots.db")) as db:
        return sum(
            db.execute(f"SELECT coalesce(sum(length(data)), 0) FROM {table}").fetchone()[0]
            for table in ("snapshots", "blobs")
        )
