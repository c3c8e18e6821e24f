"""The coordinator's disk is full, or can only be read: said by name, nothing lost, and training goes on meanwhile."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traps
from cluster import TOKEN, Cluster, running

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of a few megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "penstock-test", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a filesystem of its own needs mount(2): {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def box(cluster: Cluster, job: str, timeout_s: float = 60) -> Appliance:
    return Appliance(
        cluster.address, num_workers_per_box=2, job=job, seed=3, token=TOKEN, timeout_s=timeout_s, box=0, num_boxes=1
    )


def fill(disk: Path) -> Path:
    """Until nothing more goes."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def pause(seconds: float) -> None:
    select.select([], [], [], seconds)


def train(cluster: Cluster, job: str, at: dict[int, Any]) -> list[int]:
    """Do something at some steps."""
    digests = []
    with box(cluster, job) as appliance:
        loader = DataLoader(traps.trapped, "stateful 0", [], "")
        executor = DataExecutor(loader, num_steps=600, appliance=appliance)
        for _ in executor:
            digests.append(executor.digest)
            at.get(executor.step, lambda: None)()
    return digests


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_training_goes_on_and_so_does_the_coordinator_afterwards(small_disk: Path, tmp_path: Path, fault: str) -> None:
    state = small_disk / "state"
    with running(state) as cluster:
        worker = cluster.add_worker(2, allow="traps")
        spare = cluster.add_worker(2, allow="traps")
        whole = train(cluster, "whole", {})

        def break_it() -> None:
            if fault == "full":
                fill(small_disk)
                pause(1.5)  # heartbeats, snapshots and reports meet it
                with (
                    pytest.raises(errors.JournalError, match=f"{state}.* bytes wait"),
                    box(cluster, "another", 5) as another,
                ):
                    next(iter(DataExecutor(DataLoader(traps.parent, 4), appliance=another)))

        def kill_it() -> None:
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            if fault == "read-only":  # what is open for writing cannot be made so
                subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
            command = [sys.executable, "-m", "penstock.appliance", "--state-dir", str(state)]
            done = subprocess.run(command, env=cluster.environment, capture_output=True, timeout=30, text=True)
            assert done.returncode == 2
            assert str(state) in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1

        def mend_it() -> None:
            if fault == "full":
                (small_disk / "ballast").unlink()
            else:
                subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
            cluster.restart_coordinator()

        assert train(cluster, "broken", {100: break_it, 140: kill_it, 180: mend_it, 300: worker.kill}) == whole
        assert cluster.coordinator.poll() is None
        assert spare.poll() is None
