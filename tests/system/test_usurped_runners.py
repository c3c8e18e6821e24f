"""User code that speaks to its daemon in its runner's name. It is slowed and bounded, and no other job notices it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import streams
import usurpers
from census import runners
from cluster import Cluster, running
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors

MIB = 1 << 20
LIMIT = 200 * MIB
SOON_S = 20.0
"""A job beside a flood has had its batches by then. It took more than 50 s when messages were handled until none was
left; alone it takes one or two."""
_jobs = itertools.count()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def cluster(tmp_path: Path, log: Path) -> Iterator[Cluster]:
    with running(tmp_path / "state") as cluster, log.open("wb") as said:
        cluster.add_worker(8, "--runner-memory", str(LIMIT), allow="*", name="w", stderr=said.fileno())
        yield cluster


def at(cluster: Cluster, **options: Any) -> Appliance:
    return cluster.box(f"job-{next(_jobs)}", num_workers_per_box=1, **options)


@contextmanager
def beside(cluster: Cluster, loader: DataLoader) -> Iterator[None]:
    """A job that waits for its first batch, for as long as the block."""

    def wait() -> None:
        with suppress(errors.PenstockError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            list(DataExecutor(loader, appliance=appliance))

    with at(cluster) as appliance:
        thread = threading.Thread(target=wait)
        thread.start()
        yield
        loader.close()
    thread.join(30)


def held(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def test_a_flood_of_messages_slows_its_author_only(cluster: Cluster, log: Path) -> None:
    daemon = cluster.workers[0].pid
    descriptors = len(os.listdir(f"/proc/{daemon}/fd"))
    with (
        beside(cluster, DataLoader(usurpers.floods, "words")),
        beside(cluster, DataLoader(usurpers.floods, "points")),
    ):
        until(lambda: len(runners(daemon)) == 2, what="both flood")
        flooding = runners(daemon)
        time.sleep(1.0)
        began, memory = time.monotonic(), held(daemon, "VmRSS")
        with at(cluster) as appliance:
            loader = DataLoader(streams.counter, 100)
            executor = DataExecutor(loader, appliance=appliance)
            for step, batch in enumerate(executor, 1):
                assert batch["number"] == step
                loader.state_dict()
            assert executor.stats.recoveries == 0
        assert time.monotonic() - began < SOON_S
        assert set(flooding) <= set(runners(daemon)), "slowed, not killed"
        assert held(daemon, "VmRSS") - memory < 32 * MIB
        assert len(os.listdir(f"/proc/{daemon}/fd")) - descriptors < 40
    assert log.stat().st_size < MIB


def test_what_the_daemon_keeps_for_a_runner_is_bounded(cluster: Cluster, log: Path) -> None:
    """Snapshots take half of what the runner itself may hold, and one of them a quarter."""
    daemon = cluster.workers[0].pid
    before = held(daemon, "VmRSS")
    with beside(cluster, DataLoader(usurpers.hoards, 16)):
        until(lambda: held(daemon, "VmHWM") - before > 3 * LIMIT // 8, what="it keeps some")
        time.sleep(2.0)
    assert held(daemon, "VmHWM") - before < LIMIT
    assert "invalid" not in log.read_text()
    with beside(cluster, DataLoader(usurpers.hoards, 64)):
        limit = f"a control message must have at most {LIMIT // 4} bytes"
        why = f"the runner was killed, because it sent an invalid message: {limit}"
        until(lambda: why in log.read_text(), what="one that is too large is refused")
    assert held(daemon, "VmHWM") - before < LIMIT


def test_a_daemon_that_hangs_loses_its_slots(tmp_path: Path) -> None:
    """Its threads and its runners go on; but it would answer no request for a state."""
    with running(tmp_path) as cluster, at(cluster) as appliance:
        hanging = cluster.add_worker(1, module="hanging_worker")
        executor = DataExecutor(DataLoader(streams.paced, 0.01), appliance=appliance)
        batches = iter(executor)
        next(batches)
        cluster.add_worker(1)
        os.kill(hanging.pid, signal.SIGUSR1)
        with pytest.warns(UserWarning, match="was recovered"):
            until(lambda: next(batches) and executor.stats.recoveries, SOON_S, "another worker has the slot")
        hanging.kill()
