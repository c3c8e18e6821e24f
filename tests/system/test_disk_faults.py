"""The coordinator's disk is full, or can only be read: said by name, nothing lost, and training goes on meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traps
from cluster import Cluster, running
from family import runners
from small_disk import fill, small_disk_at

from penstock.client import DataExecutor, DataLoader
from penstock.proto import errors


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A filesystem of a few megabytes, of which the journal keeps enough for several commits in its log."""
    with small_disk_at(tmp_path_factory.mktemp("small") / "disk", 12 << 20) as disk:
        yield disk


@pytest.fixture(scope="module")
def cluster(small_disk: Path) -> Iterator[Cluster]:
    """Its state is there; two workers, each with room for all."""
    with running(small_disk / "state") as cluster:
        cluster.add_worker(2, allow="traps")
        cluster.add_worker(2, allow="traps")
        yield cluster


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> list[int | None]:
    """The run without a fault."""
    return train(cluster, "whole", {})


def train(cluster: Cluster, job: str, at: dict[int, Any]) -> list[int | None]:
    """Do something at some steps."""
    digests = []
    with cluster.box(job) as appliance:
        loader = DataLoader(traps.trapped, "stateful 0", [], "")
        executor = DataExecutor(loader, num_steps=600, appliance=appliance)
        for _ in executor:
            digests.append(executor.digest)
            if executor.step == 120:  # while the disk may be full
                loader.state_dict()
            at.get(executor.step, lambda: None)()
    return digests


def test_training_and_coordinator_continue(small_disk: Path, cluster: Cluster, whole: list[int]) -> None:
    """Use what was stored during the fault: at the end the worker that streams is killed, and another continues from
    the stored state."""
    state = small_disk / "state"

    def break_it() -> None:
        fill(small_disk)
        time.sleep(1.5)  # heartbeats, snapshots and reports meet it
        with (
            pytest.raises(errors.JournalError, match=f"{state}/snapshots.db.* must be free on the disk"),
            cluster.box("another", timeout_s=30) as another,
        ):
            next(iter(DataExecutor(DataLoader(traps.parent, 4), appliance=another)))

    def kill_it() -> None:
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        flip_a_bit()
        assert "was made, as" in refused_at_its_start()
        flip_a_bit()
        # What is open for writing cannot be made so.
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        refused_at_its_start()

    def refused_at_its_start() -> str:
        command = [sys.executable, "-m", "penstock.appliance", "--state-dir", str(state)]
        done = subprocess.run(command, env=cluster.environment, capture_output=True, timeout=30, text=True)
        assert done.returncode == 2
        assert str(state) in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        return done.stderr

    def flip_a_bit() -> None:
        """Flip a bit of the first commit in the journal's log, behind the headers of the log and of its first page."""
        with (state / "journal.db-wal").open("r+b") as file:
            file.seek(32 + 24 + 1000)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    def mend_it() -> None:
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        (small_disk / "ballast 0").unlink()
        cluster.restart_coordinator()

    def kill_who_streams() -> None:
        os.kill(next(worker.pid for worker in cluster.workers if runners(worker.pid)), signal.SIGKILL)

    at = {100: break_it, 140: kill_it, 180: mend_it, 300: kill_who_streams}
    with pytest.warns(UserWarning, match="was recovered"):
        assert train(cluster, "broken", at) == whole
    assert cluster.coordinator.poll() is None
